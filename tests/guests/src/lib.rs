//! Guests for tests of the host: hostile ones, a naive one that imports WASI, and policies that are not
//! embedded.

/// Behaves for a while and then does what its setting `mode` says; an import-free component.
pub const HOSTILE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hostile.wasm"));
/// The same as a core module with embedded WIT metadata.
pub const HOSTILE_CORE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hostile-core.wasm"));
/// A selector that uses std freely; a wasm32-wasip2 component.
pub const CHATTY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/chatty.wasm"));
/// A decode override that does what its script says; see [`scripted`].
pub const ROGUE_PLANNER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rogue-planner.wasm"));
/// A selector with `state` that exports `learning` and does what its script says; see [`scripted`].
pub const ROGUE_LEARNER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rogue-learner.wasm"));
/// The same as a wasm32-wasip2 component.
pub const ROGUE_WASI_LEARNER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rogue-wasi-learner.wasm"));
/// A decode override that exports `learning` and imports `state`; `learn-local 0` is remote until three
/// decode legs received.
pub const ROGUE_LEARNING_PLANNER: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/rogue-learning-planner.wasm"));
/// The scorer `learned-ttft`, which exports `learning` and imports `state`.
pub const LEARNED_TTFT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/learned-ttft.wasm"));
/// The filter `low-queue`.
pub const LOW_QUEUE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/low-queue.wasm"));
/// The selector `tenant-limit`, which imports `state`.
pub const TENANT_LIMIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tenant-limit.wasm"));
/// The selector `weighted-random`.
pub const WEIGHTED_RANDOM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/weighted-random.wasm"));

/// A rogue with another script: a deed, and after how many good calls of an instance it is done (`trap 20`).
///
/// # Panics
/// The guest is not a rogue guest, or the script is longer than the place reserved for it.
#[must_use]
#[expect(clippy::expect_used, reason = "a test's own mistake")]
pub fn scripted(rogue: &[u8], script: &str) -> Vec<u8> {
    const MARK: &[u8] = b"pointsman-rogue:";
    let at = rogue.windows(MARK.len()).position(|bytes| bytes == MARK).expect("a rogue") + MARK.len();
    let place = at..at + 64 - MARK.len();
    let mut bytes = rogue.to_vec();
    let text = format!("{script:<width$}", width = place.len());
    bytes.get_mut(place).expect("a place").copy_from_slice(text.as_bytes());
    bytes
}
