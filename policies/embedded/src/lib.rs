//! The built-in policies, as the same components that an operator would drop into the policy folder.

/// Selector: the fewest active requests.
pub const LEAST_LOADED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/least-loaded.wasm"));
/// Scorer: prefix overlap and load in one cost.
pub const KV_AWARE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kv-aware.wasm"));
/// Scorer: the time that a request adds on each worker.
pub const PREDICTED_LATENCY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/predicted-latency.wasm"));
/// Scorer: llm-d's default profile.
pub const QUEUE_KV_PREFIX: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/queue-kv-prefix.wasm"));
/// Selector: the rule of SGLang's router.
pub const CACHE_AWARE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/cache-aware.wasm"));
/// Selector: the rule of vLLM's router.
pub const LONGEST_PREFIX: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/longest-prefix.wasm"));
/// Decode override: remote prefill, unless a short or cached prompt makes local prefill cheaper.
pub const CONDITIONAL_DISAGG: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/conditional-disagg.wasm"));
/// Decode override: remote or local prefill, by predicted cost.
pub const PREDICTED_DISAGG: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/predicted-disagg.wasm"));
/// Selector: formulas of the operator.
pub const FORMULA: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/formula.wasm"));
/// Filter: the formula `keep` of the operator.
pub const FORMULA_FILTER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/formula-filter.wasm"));

/// Names of the built-in policies, for messages.
pub const NAMES: &str = "kv-aware, predicted-latency, queue-kv-prefix, cache-aware, longest-prefix, \
                         least-loaded, formula, conditional-disagg or predicted-disagg";

/// Name of the policy that a slot runs without any configuration, by the name of the slot.
#[must_use]
pub fn default_of(slot: &str) -> &'static str {
    match slot {
        "decode" | "aggregated" => "predicted-latency",
        "decode-override" => "predicted-disagg",
        _ => "kv-aware",
    }
}

/// The bytes of a built-in policy by its name.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static [u8]> {
    match name {
        "least-loaded" => Some(LEAST_LOADED),
        "kv-aware" => Some(KV_AWARE),
        "predicted-latency" => Some(PREDICTED_LATENCY),
        "queue-kv-prefix" => Some(QUEUE_KV_PREFIX),
        "cache-aware" => Some(CACHE_AWARE),
        "longest-prefix" => Some(LONGEST_PREFIX),
        "formula" => Some(FORMULA),
        "conditional-disagg" => Some(CONDITIONAL_DISAGG),
        "predicted-disagg" => Some(PREDICTED_DISAGG),
        _ => None,
    }
}
