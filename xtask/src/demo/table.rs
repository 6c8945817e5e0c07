//! The table at the end. Every figure comes from the processes' own `/metrics`, or from the clients' own clocks.

use std::time::Duration;

use super::Seen;
use crate::{fleet::Fleet, http, sh};

/// Prints the table.
pub(super) fn print(fleet: &Fleet, seen: &Seen) -> anyhow::Result<()> {
    let metrics = http::get(&fleet.admin(), "/metrics")?;
    let failed = seen.outcomes.iter().filter(|outcome| outcome.problem.is_some()).count();
    let mut ttft: Vec<Duration> = seen.outcomes.iter().filter_map(|outcome| outcome.ttft).collect();
    ttft.sort_unstable();
    let at = |share: f64| {
        let place = ((ttft.len() as f64 - 1.0) * share).round() as usize;
        ttft.get(place).map_or_else(|| "-".to_owned(), |ttft| format!("{:.1} ms", ttft.as_secs_f64() * 1e3))
    };
    row("requests", &seen.outcomes.len().to_string());
    row("failed", &(failed.saturating_sub(seen.lost_with_worker)).to_string());
    row("cut by the killed worker", &seen.lost_with_worker.to_string());
    row("TTFT p50 / p99", &format!("{} / {}", at(0.5), at(0.99)));
    row("prefix cache hits of the prefill engines", &cache(fleet));
    for (labels, value) in series(&metrics, "pointsman_decisions_total") {
        row("decisions", &format!("{value:>5}  {labels}"));
    }
    for (labels, value) in series(&metrics, "pointsman_fallbacks_total") {
        row("fallbacks", &format!("{value:>5}  {labels}"));
    }
    for (labels, value) in series(&metrics, "pointsman_policy_reloads_total") {
        row("reloads", &format!("{value:>5}  {labels}"));
    }
    for kind in ["prefill", "decode"] {
        let slot = fleet.slot(kind)?;
        for refusal in slot["refusals"].as_array().into_iter().flatten() {
            let message = refusal["message"].as_str().unwrap_or_default();
            row(&format!("{kind}: {}", refusal["kind"].as_str().unwrap_or_default()), message);
        }
    }
    for (labels, value) in series(&metrics, "pointsman_retries_total") {
        row("retries", &format!("{value:>5}  {labels}"));
    }
    Ok(())
}

/// Tokens found cached, of those looked up, over all prefill engines.
fn cache(fleet: &Fleet) -> String {
    let (mut hits, mut queries) = (0.0, 0.0);
    for engine in fleet.engines.iter().filter(|engine| engine.name.contains("prefill")) {
        let Ok(state) = http::get(&engine.listening(), "/sim/state") else { continue };
        let state: serde_json::Value = serde_json::from_str(&state).unwrap_or_default();
        hits += state["prefix_hits"].as_f64().unwrap_or(0.0);
        queries += state["prefix_queries"].as_f64().unwrap_or(0.0);
    }
    format!("{:.1} % of {queries} tokens", if queries > 0.0 { 100.0 * hits / queries } else { 0.0 })
}

/// Lines of a family: labels and value.
fn series(metrics: &str, name: &str) -> Vec<(String, String)> {
    let lines = metrics.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('{'));
    lines
        .filter_map(|line| line.split_once("} "))
        .map(|(labels, value)| (labels.replace('"', ""), value.to_owned()))
        .collect()
}

fn row(name: &str, value: &str) {
    sh::print(&format!("{name:<42} {value}"));
}
