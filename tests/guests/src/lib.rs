//! Guests for tests of the host: hostile ones, a naive one that imports WASI, and policies that are not embedded.

/// Behaves for a while and then does what its setting `mode` says; an import-free component.
pub const HOSTILE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hostile.wasm"));
/// The same as a core module with embedded WIT metadata.
pub const HOSTILE_CORE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hostile-core.wasm"));
/// A selector that uses std freely; a wasm32-wasip2 component.
pub const CHATTY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/chatty.wasm"));
/// The filter `low-queue`.
pub const LOW_QUEUE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/low-queue.wasm"));
/// The selector `tenant-limit`, which imports `state`.
pub const TENANT_LIMIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tenant-limit.wasm"));
/// The selector `weighted-random`.
pub const WEIGHTED_RANDOM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/weighted-random.wasm"));
