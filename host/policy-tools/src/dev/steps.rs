//! The steps of an attempt: build, cases, replay. Each runs the command of that name as a process of its own,
//! so that a newer save, a deadline or the end of this command can end it.

use std::{ffi::OsString, path::PathBuf, pin::Pin, time::Duration};

use pointsman_admin_cli::{Gateway, GatewayError, api::Policies, query};
use pointsman_policy_runtime::digest;
use serde::Deserialize;
use tempfile::TempDir;

use super::{
    child::{Ran, run},
    source::Source,
};
use crate::{
    policy_file::formulas,
    replay::{Difference, FactDifference, Report},
};

/// Largest policy file that is installed, bytes; the gateway's limit.
const MAX_COMPONENT: u64 = 32 << 20;
/// Log lines of the cases that are shown.
const MAX_LOG_LINES: usize = 5;

/// Settings of the steps.
pub(super) struct Steps {
    pub(super) source: Source,
    /// Directory of files that one step leaves for the next. It is removed with this value.
    pub(super) scratch: TempDir,
    pub(super) cases: PathBuf,
    /// Arguments of the build.
    pub(super) tools: Vec<OsString>,
    /// Arguments of cases and replay.
    pub(super) settings: Vec<OsString>,
    /// Longest time of a step.
    pub(super) limit: Duration,
}

/// A policy that was built.
pub(super) struct Component {
    pub(super) bytes: Vec<u8>,
    pub(super) digest: String,
}

/// Result of a step. A text says what to show.
pub(super) enum Outcome {
    Built(Result<Component, String>),
    /// Summary of the cases, and lines that the policy logged.
    Tested(Result<(String, Vec<String>), String>),
    /// Time of the newest refusal that the gateway lists, milliseconds since the Unix epoch.
    Asked(Result<u64, GatewayError>),
    Replayed(String),
}

/// A running step. Dropping it ends its process.
pub(super) type Step = Pin<Box<dyn Future<Output = Outcome>>>;

/// Recorded decisions to replay.
pub(super) struct Recorded {
    pub(super) gateway: Gateway,
    pub(super) slot: String,
    pub(super) model: Option<String>,
    pub(super) last: u32,
}

impl Steps {
    fn output(&self) -> PathBuf {
        self.scratch.path().join(self.source.output())
    }

    /// Arguments of a command of this program; what it logs are lines of JSON.
    fn command(&self, name: &str, more: &[&[OsString]]) -> Vec<OsString> {
        ["--log-json".into(), name.into()].into_iter().chain(more.concat()).collect()
    }

    /// Builds the component. A formula file is copied, so that all steps see the same text, and checked.
    pub(super) fn build(&self) -> Step {
        let (out, limit, words) = (self.output(), self.limit, self.words());
        if let Source::Formula(file) = &self.source {
            let file = file.clone();
            return Box::pin(async move {
                let copied =
                    std::fs::copy(&file, &out).map_err(|error| format!("{}: {error}", file.display()));
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                Outcome::Built(copied.and_then(|_| component(&out)).and_then(|component| {
                    // The salt of the names does not matter to a check.
                    let checked = formulas(&component.bytes, 0).map(|_| component);
                    checked.map_err(|refusal| format!("{name} ({}): {refusal}", refusal.kind()))
                }))
            });
        }
        let dir = self.source.path().as_os_str().to_owned();
        let arguments = self
            .command("build", &[&[dir, "--quiet".into(), "--out".into(), out.clone().into()], &self.tools]);
        Box::pin(async move {
            let built = words.succeeded(run(arguments, limit).await);
            Outcome::Built(built.and_then(|_| component(&out)))
        })
    }

    /// Runs the cases.
    pub(super) fn test(&self) -> Step {
        let files = [self.output().into(), "--cases".into(), self.cases.clone().into()];
        let arguments = self.command("test", &[&files, &self.settings]);
        let (limit, words) = (self.limit, self.words());
        Box::pin(async move {
            let ran = run(arguments, limit).await;
            let failed = ran.as_ref().is_ok_and(|ran| ran.code == Some(1));
            let told = match ran {
                Ok(ran) if failed => Err(without_passed_cases(&ran.out)),
                ran => words.succeeded(ran).map(|ran| (without_passed_cases(&ran.out), logged(&ran.err))),
            };
            Outcome::Tested(told)
        })
    }

    /// Asks the gateway what it refused so far, to tell its next answer from earlier ones.
    pub(super) fn ask(gateway: Gateway) -> Step {
        Box::pin(async move {
            let answer = gateway.get("/policies").await.and_then(|answer| answer.read::<Policies>());
            let newest = |policies: Policies| {
                let refusals = policies.slots.iter().flat_map(|slot| &slot.refusals);
                refusals.map(|refusal| refusal.at_ms).max().unwrap_or(0)
            };
            Outcome::Asked(answer.map(newest))
        })
    }

    /// Replays the last decisions of the gateway.
    pub(super) fn replay(&self, recorded: Recorded) -> Step {
        let (file, receipts) = (self.output(), self.scratch.path().join("decisions.jsonl"));
        let flags = ["--json", "--allow-differences"].map(OsString::from);
        let files = [file.into(), "--receipts".into(), receipts.clone().into()];
        let arguments = self.command("run", &[&files, &flags, &self.settings]);
        let (limit, words) = (self.limit, self.words());
        Box::pin(async move {
            let lines = match recorded.lines().await {
                Ok(lines) => lines,
                Err(error) => return Outcome::Replayed(error.to_string()),
            };
            if let Err(error) = std::fs::write(&receipts, lines) {
                return Outcome::Replayed(format!("{}: {error}", receipts.display()));
            }
            let text = match words.succeeded(run(arguments, limit).await) {
                Err(text) => text,
                Ok(ran) => match serde_json::from_str::<Replayed>(&ran.out) {
                    Ok(Replayed { report }) => would_change(&report),
                    Err(error) => format!("the result of `policy run` cannot be read: {error}"),
                },
            };
            Outcome::Replayed(text)
        })
    }

    fn words(&self) -> Words {
        Words { scratch: format!("{}/", self.scratch.path().display()), limit: self.limit }
    }
}

impl Recorded {
    /// Fetches the decisions, one a line, newest first.
    async fn lines(&self) -> Result<String, GatewayError> {
        let last = self.last.to_string();
        // Without a model, the slot of all models: it is asked for with an empty name.
        let slot_model = Some(self.model.as_deref().unwrap_or_default());
        let pairs = [("limit", Some(&*last)), ("slot", Some(&*self.slot)), ("slot_model", slot_model)];
        let answer = self.gateway.get(&format!("/decisions/export{}", query(&pairs))).await?;
        if !answer.succeeded() {
            answer.read::<serde::de::IgnoredAny>()?;
        }
        Ok(answer.text())
    }
}

/// The answer of `policy run --json`.
#[derive(Deserialize)]
struct Replayed {
    report: Report,
}

/// Words a message that a command failed.
struct Words {
    /// The scratch directory, which no message needs.
    scratch: String,
    limit: Duration,
}

impl Words {
    /// Returns the run if it succeeded, else what to show.
    fn succeeded(&self, ran: std::io::Result<Ran>) -> Result<Ran, String> {
        let ran = ran.map_err(|error| format!("cannot start the process: {error}"))?;
        if ran.code == Some(0) {
            return Ok(ran);
        }
        if ran.late {
            let seconds = self.limit.as_secs();
            return Err(format!("it took more than {seconds} s and was ended; --timeout sets the limit"));
        }
        let own = |line: &&str| !line.starts_with('{');
        let text = ran.err.lines().filter(own).collect::<Vec<_>>().join("\n");
        let text = text.replace(&self.scratch, "").replace("decisions.jsonl: ", "");
        let text = text.strip_prefix("pointsman: ").unwrap_or(&text);
        Err(if text.is_empty() { "a signal ended its process".to_owned() } else { text.to_owned() })
    }
}

fn component(file: &std::path::Path) -> Result<Component, String> {
    let problem = |error: std::io::Error| format!("{}: {error}", file.display());
    let size = std::fs::metadata(file).map_err(problem)?.len();
    if size > MAX_COMPONENT {
        return Err(format!("the component has {size} bytes; a gateway takes at most {MAX_COMPONENT}"));
    }
    let bytes = std::fs::read(file).map_err(problem)?;
    Ok(Component { digest: digest(&bytes).to_string(), bytes })
}

/// Lines of `policy test` other than those of passed cases.
fn without_passed_cases(out: &str) -> String {
    out.lines().filter(|line| !line.starts_with("ok ")).collect::<Vec<_>>().join("\n")
}

/// Lines that the policy logged during its cases.
fn logged(err: &str) -> Vec<String> {
    #[derive(Deserialize)]
    struct Event {
        target: String,
        fields: Fields,
    }
    #[derive(Deserialize)]
    struct Fields {
        message: String,
    }
    let events = err.lines().filter_map(|line| serde_json::from_str::<Event>(line).ok());
    let own = events.filter(|event| event.target == "pointsman::guest").map(|event| event.fields.message);
    let mut lines: Vec<String> = own.collect();
    if lines.len() > MAX_LOG_LINES {
        let more = lines.len() - MAX_LOG_LINES;
        lines.truncate(MAX_LOG_LINES);
        lines.push(format!("and {more} lines more"));
    }
    lines
}

/// Says how many recorded decisions would change, and explains the one that differs most.
fn would_change(report: &Report) -> String {
    let Report { decisions, agree, skipped, differences, .. } = report;
    let mut lines = vec![match decisions {
        0 => "the gateway has no decision that this policy can answer".to_owned(),
        _ => format!("{} of {decisions} would change", decisions - agree),
    }];
    lines.extend(skipped.iter().map(|(why, count)| format!("skipped {count}: {why}")));
    // Between equal workers a policy draws: that explains nothing.
    let of_facts = differences.iter().find(|difference| !difference.facts.is_empty());
    lines.extend(of_facts.or(differences.first()).into_iter().flat_map(explained));
    lines.join("\n")
}

fn explained(difference: &Difference) -> Vec<String> {
    let Difference { id, leg, recorded, new, .. } = difference;
    let mut first = format!("decision {id} ({leg}): {recorded}, and now {new}");
    if let (Some(cost), Some(by)) = (difference.new_cost, difference.by) {
        first.push_str(&format!("; to the new policy {new} costs {cost} and {recorded} {}", cost + by));
    }
    let mut lines = vec![first];
    if !difference.facts.is_empty() {
        let one = |fact: &FactDifference| format!("{} {} and {}", fact.fact, fact.recorded, fact.new);
        let facts: Vec<String> = difference.facts.iter().map(one).collect();
        lines.push(format!("facts of {recorded} and {new}: {}", facts.join(", ")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_decision_that_differs_most_is_explained() {
        let report: Report = serde_json::from_value(serde_json::json!({
            "decisions": 200, "agree": 188, "legs": {}, "skipped": { "decided by pin": 3 },
            "differences": [{
                "id": "6b08722c0000000e", "leg": "prefill", "recorded": "1/0", "recorded_cost": null, "new": "2/0",
                "new_cost": null, "by": null, "new_cost_recorded": null, "by_recorded": null, "facts": [],
            }, {
                "id": "6b08722c0000000d", "leg": "prefill", "recorded": "1/0", "recorded_cost": 2.0, "new": "3/0",
                "new_cost": 1.5, "by": 2.5, "new_cost_recorded": null, "by_recorded": null,
                "facts": [{ "fact": "active-requests", "recorded": "5", "new": "2" },
                          { "fact": "kv-usage", "recorded": "0.25", "new": "0.5" }],
            }],
        }))
        .expect("a report");
        let told = "12 of 200 would change\nskipped 3: decided by pin\n\
                    decision 6b08722c0000000d (prefill): 1/0, and now 3/0; to the new policy 3/0 costs 1.5 and 1/0 4\n\
                    facts of 1/0 and 3/0: active-requests 5 and 2, kv-usage 0.25 and 0.5";
        // O5.3
        assert_eq!(would_change(&report), told);
        let none = Report::default();
        assert_eq!(would_change(&none), "the gateway has no decision that this policy can answer");
    }

    #[test]
    fn lines_of_the_policy_are_told_from_other_events_and_limited() {
        let line = |target: &str, number: usize| {
            format!("{{\"target\":\"{target}\",\"fields\":{{\"message\":\"line {number}\",\"seed\":1}}}}\n")
        };
        let lines: String = (0..9).map(|number| line("pointsman::guest", number)).collect();
        let told = logged(&format!("{}pointsman: an error\n{lines}", line("other", 7)));
        assert_eq!(told.len(), MAX_LOG_LINES + 1);
        assert_eq!((&*told[0], &*told[MAX_LOG_LINES]), ("line 0", "and 4 lines more"));
    }

    #[test]
    fn an_error_is_the_command_s_own_without_the_scratch_directory_and_log_lines() {
        let words = Words { scratch: "/tmp/x/".to_owned(), limit: Duration::from_secs(7) };
        let ran = |code, late, err: &str| Ok(Ran { code, late, out: String::new(), err: err.to_owned() });
        let err = "{\"target\":\"x\"}\npointsman: /tmp/x/policy.wasm: refused\n";
        assert_eq!(words.succeeded(ran(Some(2), false, err)).err().as_deref(), Some("policy.wasm: refused"));
        let late = words.succeeded(ran(None, true, "")).err().unwrap_or_default();
        assert!(late.starts_with("it took more than 7 s and was ended"), "{late}");
        assert!(words.succeeded(ran(Some(0), false, "")).is_ok());
    }
}
