//! The default policies, as the same components that an operator would drop into the policy folder.

/// Selector: the fewest active requests.
pub const LEAST_LOADED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/least-loaded.wasm"));
/// Scorer: prefix overlap and load in one cost.
pub const KV_AWARE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kv-aware.wasm"));
/// Decode override: remote prefill only where it is worth it.
pub const CONDITIONAL_DISAGG: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/conditional-disagg.wasm"));

/// The bytes of a default policy by its name.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static [u8]> {
    match name {
        "least-loaded" => Some(LEAST_LOADED),
        "kv-aware" => Some(KV_AWARE),
        "conditional-disagg" => Some(CONDITIONAL_DISAGG),
        _ => None,
    }
}
