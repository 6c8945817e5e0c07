//! Events of the demo, and the expected effect of each.

use std::time::Duration;

use anyhow::ensure;
use pointsman_rig::fleet::Fleet;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::clients::Seen;

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Swap,
    Garbage,
    Loop,
    SwapAgain,
    Kill,
}

/// The events. Each happens after this percentage of the requests was answered.
pub(super) const STORY: [(usize, Step); 5] =
    [(15, Step::Swap), (25, Step::Garbage), (35, Step::Loop), (70, Step::SwapAgain), (85, Step::Kill)];
/// Longest wait for the effect of an event. A busy machine takes seconds to compile a policy.
const EFFECT: Duration = Duration::from_secs(60);
/// Name of the worker that is killed.
pub(super) const VICTIM: &str = "vllm-decode-4";

/// An event, as a row of the final table.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) done: &'static str,
    pub(super) happened: String,
    pub(super) proves: &'static str,
    pub(super) passed: bool,
}

impl Step {
    /// Returns the text beside the progress bar.
    pub(super) fn message(self) -> &'static str {
        match self {
            Self::Swap => "installed policy least-loaded for prefill",
            Self::Garbage => "installed a file that is not a policy",
            Self::Loop => "installed a policy that will loop for decode",
            Self::SwapAgain => "installed policy kv-aware for prefill",
            Self::Kill => "killed a decode worker",
        }
    }
}

/// Waits until an event has had its effect, or for 60 s. The final table shows whether it had the effect.
pub(super) async fn settle(step: Step, fleet: &Fleet) -> anyhow::Result<()> {
    let started = Instant::now();
    while !happened(step, &fleet.slot("prefill").await?, &fleet.slot("decode").await?) {
        if started.elapsed() > EFFECT {
            break;
        }
        sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

fn happened(step: Step, prefill: &Value, decode: &Value) -> bool {
    match step {
        Step::Swap => prefill["policy"] == "least-loaded",
        Step::Garbage => refusal(prefill, "not_wasm").is_some(),
        Step::Loop => refusal(decode, "rolled_back").is_some(),
        Step::SwapAgain => prefill["policy"] == "kv-aware",
        Step::Kill => true,
    }
}

/// Collects the results of the events from the gateway and the clients.
pub(super) async fn rows(fleet: &Fleet, seen: &Seen) -> anyhow::Result<Vec<Row>> {
    Ok(judge(&fleet.slot("prefill").await?, &fleet.slot("decode").await?, seen))
}

fn judge(prefill: &Value, decode: &Value, seen: &Seen) -> Vec<Row> {
    let generation = prefill["generation"].as_u64().unwrap_or(0);
    let (name, failed) = (prefill["policy"].as_str().unwrap_or("none"), failed(seen));
    let refused = refusal(prefill, "not_wasm");
    let rolled_back = refusal(decode, "rolled_back");
    vec![
        Row {
            done: "hot swap: two policies replaced under load",
            happened: format!("`{name}` serves as generation {generation}; {failed} requests failed"),
            proves: "policies change without a restart or a lost request",
            passed: generation >= 3 && name == "kv-aware" && failed == 0,
        },
        Row {
            done: "refused file: garbage in place of a policy",
            happened: refused.clone().unwrap_or_else(|| "it was not refused".to_owned()),
            proves: "a bad file is refused and the running policy stays",
            passed: refused.is_some(),
        },
        Row {
            done: "looping policy: endless loop while it serves",
            happened: rolled_back.clone().unwrap_or_else(|| "it was not rolled back".to_owned()),
            proves: "a policy's failure is contained and rolled back",
            passed: rolled_back.is_some(),
        },
        Row {
            done: "killed worker: one of three decode engines",
            happened: format!("{} streams lost, {failed} other requests failed", seen.cut),
            proves: "running streams and later requests go to the workers that are left",
            passed: failed == 0,
        },
    ]
}

/// Returns the number of requests that failed although they could have been served.
fn failed(seen: &Seen) -> usize {
    seen.outcomes.iter().filter(|outcome| outcome.problem.is_some()).count().saturating_sub(seen.cut)
}

/// Returns the message of a slot's first refusal of this kind.
fn refusal(slot: &Value, kind: &str) -> Option<String> {
    let all = slot["refusals"].as_array()?;
    let found = all.iter().find(|refusal| refusal["kind"] == kind)?;
    Some(found["message"].as_str().unwrap_or_default().to_owned())
}

/// Returns an error that lists the events which did not end as expected.
pub(super) fn verdict(rows: &[Row], seen: &Seen) -> anyhow::Result<()> {
    let failed: Vec<&str> = rows.iter().filter(|row| !row.passed).map(|row| row.done).collect();
    let problem = seen.outcomes.iter().find_map(|outcome| outcome.problem.as_deref()).unwrap_or("none");
    ensure!(failed.is_empty(), "failed: {}; first problem of a client: {problem}", failed.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use pointsman_rig::client::Streamed;
    use serde_json::{Value, json};

    use super::{super::clients::Seen, Step, happened, judge, verdict};

    fn slots() -> (Value, Value) {
        let refusals = |kind: &str| json!([{ "kind": kind, "message": "why" }]);
        (
            json!({ "generation": 3, "policy": "kv-aware", "refusals": refusals("not_wasm") }),
            json!({ "generation": 1, "policy": "least-loaded", "refusals": refusals("rolled_back") }),
        )
    }

    fn seen(problems: usize, cut: usize) -> Seen {
        let broken = Streamed { problem: Some("cut".into()), ..Streamed::default() };
        Seen { outcomes: vec![broken; problems], cut }
    }

    #[test]
    fn only_streams_cut_by_the_killed_worker_may_fail() {
        let (prefill, decode) = slots();
        for (problems, cut, passes) in [(0, 0, true), (2, 2, true), (3, 2, false)] {
            let seen = seen(problems, cut);
            assert_eq!(verdict(&judge(&prefill, &decode, &seen), &seen).is_ok(), passes, "{problems} {cut}");
        }
    }

    #[test]
    fn an_event_is_awaited_until_it_shows() {
        let (prefill, decode) = slots();
        for step in [Step::Garbage, Step::Loop, Step::SwapAgain, Step::Kill] {
            assert!(happened(step, &prefill, &decode), "{step:?}");
        }
        assert!(!happened(Step::Swap, &prefill, &decode), "kv-aware replaced it");
        for step in [Step::Garbage, Step::Loop, Step::SwapAgain] {
            assert!(!happened(step, &json!({}), &json!({})), "{step:?}");
        }
    }

    #[test]
    fn each_event_has_to_happen() {
        let (mut prefill, decode) = slots();
        let seen = seen(0, 0);
        let failed = |prefill: &Value, decode: &Value| {
            verdict(&judge(prefill, decode, &seen), &seen).unwrap_err().to_string()
        };
        assert!(failed(&prefill, &json!({})).contains("looping policy"));
        prefill["refusals"] = json!([]);
        assert!(failed(&prefill, &decode).contains("refused file"));
        prefill["generation"] = json!(1);
        assert!(failed(&prefill, &decode).contains("hot swap"));
    }
}
