//! The figures of an engine's metrics that move while it works.

use crate::activity::EngineSigns;

/// What the names of counters end with that rise while an engine works, with or without the engine's prefix.
const PROGRESS: [&str; 7] = [
    "generation_tokens_total",
    "prompt_tokens_total",
    "request_success_total",
    "num_requests_total",
    "realtime_tokens_total",
    "iteration_tokens_total_count",
    "iteration_tokens_total_sum",
];
/// What the names of gauges of the KV cache's use end with. They move during a long prefill.
const USAGE: [&str; 3] = [":kv_cache_usage_perc", ":gpu_cache_usage_perc", ":token_usage"];
/// What the names of gauges of running requests end with.
const RUNNING: [&str; 2] = ["num_requests_running", "num_running_reqs"];

/// Returns the signs in the text of `/metrics`; `None`: there are none.
pub(super) fn of(metrics: &[u8]) -> Option<EngineSigns> {
    let text = std::str::from_utf8(metrics).ok()?;
    let mut signs = EngineSigns { progress: None, usage: 0, is_running: false };
    let mut seen = false;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name_end = line.find(['{', ' ', '\t']).unwrap_or(line.len());
        let (name, rest) = line.split_at(name_end);
        let rest = rest.rsplit_once('}').map_or(rest, |(_, rest)| rest);
        let Some(Ok(value)) = rest.split_ascii_whitespace().next().map(str::parse::<f64>) else { continue };
        let is = |names: &[&str]| names.iter().any(|end| name.ends_with(end));
        if is(&PROGRESS) {
            let known = signs.progress.unwrap_or(0);
            signs.progress = Some(mix(known, value));
        } else if is(&USAGE) {
            signs.usage = mix(signs.usage, value);
        } else if is(&RUNNING) {
            signs.is_running |= value > 0.0;
        } else {
            continue;
        }
        seen = true;
    }
    seen.then_some(signs)
}

/// Adds a figure to a value that changes when any of its figures does.
fn mix(known: u64, value: f64) -> u64 {
    known.rotate_left(7).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(value.to_bits())
}
