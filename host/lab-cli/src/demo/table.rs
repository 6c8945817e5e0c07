//! The tables at the end. Every figure comes from the `/metrics` of a process or from the clock of a client.

use std::path::Path;

use pointsman_rig::{
    fleet::Fleet,
    metrics_text::samples,
    stats::{quantile, sorted},
    table::columns,
    terminal,
};
use serde_json::Value;

use super::{clients::Seen, story::Row};

/// Prints the events, then the figures.
pub(super) async fn print(fleet: &Fleet, seen: &Seen, events: &[Row]) -> anyhow::Result<()> {
    terminal::print("");
    event_lines(events).iter().for_each(|line| terminal::print(line));
    terminal::print("");
    let metrics = fleet.metrics().await?;
    let mut rows = figures(seen);
    rows.push(vec!["prefix cache hits of the prefill engines".to_owned(), cache_hits(fleet).await]);
    for (what, name) in [
        ("routing decisions", "pointsman_decisions_total"),
        ("fallbacks after a policy failed", "pointsman_fallbacks_total"),
        ("policy reloads", "pointsman_policy_reloads_total"),
        ("requests sent again", "pointsman_retries_total"),
    ] {
        for sample in samples(&metrics, name) {
            rows.push(vec![what.to_owned(), format!("{:>5}  {}", sample.value, sample.shown())]);
        }
    }
    columns(&rows).iter().for_each(|line| terminal::print(line));
    Ok(())
}

fn event_lines(events: &[Row]) -> Vec<String> {
    let header = ["what was done", "what happened", "what it proves", ""].map(str::to_owned).to_vec();
    let short = |text: &str| match text.char_indices().nth(58) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    };
    let row = |row: &Row| {
        let mark = if row.passed { "ok" } else { "FAILED" };
        vec![row.done.to_owned(), short(&row.happened), row.proves.to_owned(), mark.to_owned()]
    };
    columns(&std::iter::once(header).chain(events.iter().map(row)).collect::<Vec<_>>())
}

fn figures(seen: &Seen) -> Vec<Vec<String>> {
    let times = seen.outcomes.iter().filter_map(|outcome| outcome.ttft);
    let ttft = sorted(times.map(|ttft| ttft.as_secs_f64() * 1e3).collect());
    let [p50, p99] = [0.5, 0.99].map(|share| quantile(&ttft, share));
    let complete = seen.outcomes.iter().filter(|outcome| outcome.complete).count();
    [
        ("requests sent", seen.outcomes.len().to_string()),
        ("requests answered completely", complete.to_string()),
        ("time to the first token, p50 / p99", format!("{p50:.1} / {p99:.1} ms")),
    ]
    .map(|(what, value)| vec![what.to_owned(), value])
    .to_vec()
}

/// Returns the share of prompt tokens that the prefill engines found in their caches.
async fn cache_hits(fleet: &Fleet) -> String {
    let (mut hits, mut queries) = (0.0, 0.0);
    for engine in fleet.engines.iter().filter(|engine| engine.name.contains("prefill")) {
        let state = engine.client().json("/sim/state").await.unwrap_or_default();
        let count = |name: &str| state.get(name).and_then(Value::as_f64).unwrap_or(0.0);
        hits += count("prefix_hits");
        queries += count("prefix_queries");
    }
    format!("{:.1} % of {queries} tokens", if queries > 0.0 { 100.0 * hits / queries } else { 0.0 })
}

/// Prints commands for next steps.
pub(super) fn next_steps() {
    terminal::print("\nTry next:");
    let steps = [
        ("pointsman demo --keep", "the same, and everything keeps running: curl it, open its page"),
        ("pointsman policy new my-policy --world selector", "a routing policy of your own, with its tests"),
        ("pointsman config example", "a configuration with every key, to put in front of your engines"),
    ];
    let rows: Vec<Vec<String>> =
        steps.iter().map(|(command, what)| vec![format!("  {command}"), (*what).to_owned()]).collect();
    columns(&rows).iter().for_each(|line| terminal::print(line));
}

/// Returns commands to try on a running fleet. `swap` is a policy file, and the directory to copy it to.
pub(super) fn commands(client: &str, admin: &str, swap: (&Path, &Path)) -> Vec<String> {
    let body =
        r#"{"model":"tiny","stream":true,"max_tokens":8,"messages":[{"role":"user","content":"hello"}]}"#;
    vec![
        format!(
            "curl -N http://{client}/v1/chat/completions -H 'content-type: application/json' \
             -H 'x-pointsman-decision: 1' -D /dev/stderr -d '{body}'"
        ),
        format!("cp {} {}/prefill.wasm", swap.0.display(), swap.1.display()),
        format!("pointsman status --gateway http://{admin}"),
        format!("pointsman top --gateway http://{admin}"),
    ]
}

#[cfg(test)]
mod tests {
    use super::{Row, event_lines, figures};
    use pointsman_rig::client::Streamed;

    use super::super::clients::Seen;

    #[test]
    fn long_messages_are_cut_to_one_line() {
        let event =
            |happened: &str, passed| Row { done: "a", happened: happened.to_owned(), proves: "b", passed };
        let lines = event_lines(&[event(&"é".repeat(90), true), event("short", false)]);
        assert!(lines[0].starts_with("what was done  what happened"));
        assert!(lines[1].ends_with(&format!("{}…  b               ok", "é".repeat(58))), "{}", lines[1]);
        assert!(lines[2].ends_with("FAILED"));
    }

    #[test]
    fn requests_without_an_answer_are_not_complete() {
        let complete = Streamed { complete: true, ..Streamed::default() };
        let seen = Seen { outcomes: vec![complete, Streamed::default()], cut: 1 };
        assert_eq!(figures(&seen)[1], ["requests answered completely", "1"]);
    }
}
