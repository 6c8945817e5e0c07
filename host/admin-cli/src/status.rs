//! `pointsman status`.

use std::process::ExitCode;

use clap::Args;

use crate::{
    api::{LastFailure, Live, OnlyChoice, Part, Slot, Status, Trial, Workers},
    block_on,
    gateway::GatewayArgs,
    print,
    text::{Column, NONE, Table, age, ago, bytes, clean, cut, millis, now_ms, percent, quoted},
    worker_name::{names_hashes, with_addresses},
};

/// Refusals that are shown, the newest.
const REFUSALS: usize = 3;
/// Columns of a refusal.
const REFUSAL_COLUMNS: usize = 110;

/// Arguments of `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Print the JSON of `GET /status` unchanged.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

impl StatusArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let gateway = self.gateway.client()?;
        let answer = block_on(async { Ok(gateway.get("/status").await?) })?;
        let status: Status = answer.read()?;
        if self.json {
            answer.print_json()?;
        } else {
            let mut text = status_text(&status, gateway.url(), now_ms());
            if names_hashes(&text) {
                let workers = block_on(async { Ok(gateway.get("/workers").await?.read::<Workers>()?) });
                // Without them the ids have to do.
                if let Ok(workers) = workers {
                    text = with_addresses(&text, &workers.workers);
                }
            }
            print(&text)?;
        }
        Ok(if status.ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn status_text(status: &Status, url: &str, now_ms: u64) -> String {
    let mut text = format!("pointsman {} at {url}, up {}\n\n", clean(&status.version), age(status.uptime_s));
    for (name, value) in lines(status) {
        text.push_str(&format!("{name:<12} {}\n", clean(&value)));
    }
    text.push('\n');
    text.push_str(&slots(&status.slots).text());
    let files = files(status, now_ms);
    if !files.is_empty() {
        text.push('\n');
    }
    for (name, line) in files {
        text.push_str(&format!("{name:<12} {}\n", cut(&clean(&line), REFUSAL_COLUMNS)));
    }
    for line in status.slots.iter().flat_map(one_sided) {
        text.push_str(&format!("\nwarning: {}\n", clean(&line)));
    }
    text
}

/// Files that are being compiled, the newest refusals in force, and failed calls.
fn files(status: &Status, now_ms: u64) -> Vec<(&'static str, String)> {
    let compiling = status.compiling.iter();
    let mut lines: Vec<_> = compiling
        .map(|one| ("compiling", format!("{}, begun {}", one.file, ago(one.since_ms, now_ms))))
        .collect();
    let mut refusals: Vec<_> = status.slots.iter().flat_map(Slot::current_refusals).collect();
    refusals.sort_by_key(|refusal| std::cmp::Reverse(refusal.at_ms));
    lines.extend(refusals.iter().take(REFUSALS).map(|one| {
        let (file, kind, when) = (&one.file, &one.kind, ago(one.at_ms, now_ms));
        ("refused", format!("{file} ({kind}), {when}: {}", one.message))
    }));
    let more = refusals.len().saturating_sub(REFUSALS);
    if more > 0 {
        lines.push(("", format!("and {more} more; see `pointsman policies`")));
    }
    lines.extend(status.slots.iter().flat_map(|slot| failures(slot, now_ms)).map(|line| ("failed", line)));
    lines
}

/// The last failed call of each lane of a slot.
pub(crate) fn failures(slot: &Slot, now_ms: u64) -> Vec<String> {
    let of = |trial: &Option<Trial>| trial.as_ref().and_then(|trial| trial.last_failure.clone());
    let lanes =
        [("", slot.last_failure.clone()), (" canary", of(&slot.canary)), (" shadow", of(&slot.shadow))];
    let model = slot.model.as_ref().map(|model| format!(" of {model}")).unwrap_or_default();
    let line = |(lane, failure): (&str, Option<LastFailure>)| {
        let LastFailure { policy, kind, message, at_ms, request_id } = failure?;
        let when = ago(at_ms, now_ms);
        let request = request_id.map(|id| format!(", request {}", quoted(&id))).unwrap_or_default();
        Some(format!("{}{lane}{model}, {policy} ({kind}), {when}{request}: {message}", slot.slot))
    };
    lanes.into_iter().filter_map(line).collect()
}

/// Says which lanes of a slot send everything to one worker.
fn one_sided(slot: &Slot) -> Vec<String> {
    let trial = |trial: &Option<Trial>| {
        trial.as_ref().and_then(|trial| Some((trial.policy.clone(), trial.only_choice?)))
    };
    let active = slot.only_choice.map(|only| (slot.policy.clone(), only));
    let lanes = [active, trial(&slot.canary), trial(&slot.shadow)];
    let model = slot.model.as_ref().map(|model| format!(" of {model}")).unwrap_or_default();
    let line = |(policy, only): (String, OnlyChoice)| {
        format!(
            "slot {}{model}: the last {} decisions of {policy} all chose worker {} rank {}, while others got nothing; \
             a policy balances when it reads the load (`active-requests`) and breaks ties by the call's seed",
            slot.slot, only.decisions, only.worker, only.dp_rank
        )
    };
    lanes.into_iter().flatten().map(line).collect()
}

fn lines(status: &Status) -> Vec<(&'static str, String)> {
    let live = &status.live;
    let ready = if status.ready { format!("yes: {}", status.models.join(", ")) } else { "no".to_owned() };
    let mut lines = vec![("ready", ready)];
    lines.extend(status.reasons.iter().map(|reason| ("", reason.clone())));
    lines.extend([
        ("requests", requests(live)),
        ("TTFT", quantiles([live.ttft_p50_ms, live.ttft_p90_ms, live.ttft_p99_ms])),
        ("ITL", quantiles([live.itl_p50_ms, live.itl_p90_ms, live.itl_p99_ms])),
        ("queue", format!("{} waiting, {}", live.queue.waiting, bytes(live.queue.waiting_bytes))),
        ("sessions", format!("{} bindings of sessions to workers", live.session_bindings)),
        ("connections", live.connections.to_string()),
        ("workers", workers(status)),
    ]);
    lines
}

/// Rates of the last minute.
#[must_use]
pub fn requests(live: &Live) -> String {
    let share = (live.requests_per_second > 0.0).then(|| live.errors_per_second / live.requests_per_second);
    format!(
        "{:.1}/s, errors (5xx) {:.1}/s ({}), refusals (4xx) {:.1}/s, {} in flight",
        live.requests_per_second,
        live.errors_per_second,
        percent(share),
        live.refusals_per_second,
        live.inflight
    )
}

/// p50, p90 and p99 of the last minute.
#[must_use]
pub fn quantiles([p50, p90, p99]: [Option<f64>; 3]) -> String {
    format!("p50 {}, p90 {}, p99 {}", millis(p50), millis(p90), millis(p99))
}

fn workers(status: &Status) -> String {
    let counts = &status.workers;
    let others = counts.ineligible.iter().map(|(reason, count)| format!(", {count} {reason}"));
    format!("{} of {} eligible{}", counts.eligible, counts.total, others.collect::<String>())
}

fn slots(slots: &[Slot]) -> Table {
    let mut table = Table::new(&[
        Column::Left("SLOT"),
        Column::Left("MODEL"),
        Column::Left("POLICY"),
        Column::Right("GENERATION"),
        Column::Left("DIGEST"),
        Column::Left("STATE"),
        Column::Right("CALLS"),
        Column::Right("FAILED"),
    ]);
    for slot in slots {
        let policy = match &slot.version {
            Some(version) => format!("{} {version}", slot.policy),
            None => slot.policy.clone(),
        };
        table.row(vec![
            slot.slot.clone(),
            slot.model.clone().unwrap_or_else(|| "all".to_owned()),
            policy,
            slot.generation.to_string(),
            digests(slot.digest.as_deref(), &slot.parts, usize::MAX),
            if slot.breaker_open { "breaker open".to_owned() } else { slot.state.clone() },
            slot.calls.to_string(),
            slot.failures.to_string(),
        ]);
        for (lane, trial, state) in trial_rows(slot) {
            table.row(vec![
                lane,
                String::new(),
                trial.policy.clone(),
                trial.generation.to_string(),
                digests(trial.digest.as_deref(), &trial.parts, usize::MAX),
                state,
                trial.calls.to_string(),
                trial.failures.to_string(),
            ]);
        }
    }
    table
}

/// Shown characters of a digest.
const SHORT: usize = 12;

/// The first characters of a digest.
pub(crate) fn short(digest: &str) -> String {
    digest.chars().take(SHORT).collect()
}

/// The digests of the filters and of the policy that ranks, in short. They share `columns`, and have at least
/// four characters each.
#[must_use]
pub fn digests(ranker: Option<&str>, parts: &[Part], columns: usize) -> String {
    let filters = parts.iter().filter(|part| part.world == "filter").map(|part| &*part.digest);
    let all: Vec<&str> = filters.chain(ranker).collect();
    let each = (columns.saturating_add(1) / all.len().max(1)).saturating_sub(1).clamp(4, SHORT);
    let all: Vec<String> = all.iter().map(|digest| digest.chars().take(each).collect()).collect();
    if all.is_empty() { NONE.to_owned() } else { all.join("+") }
}

/// The canary and shadow of a slot: the lane with its share, and its state or how often a shadow agrees.
#[must_use]
pub fn trial_rows(slot: &Slot) -> Vec<(String, &Trial, String)> {
    let canary = slot.canary.as_ref().map(|trial| ("canary", trial));
    let shadow = slot.shadow.as_ref().map(|trial| ("shadow", trial));
    let trials = canary.into_iter().chain(shadow);
    trials
        .map(|(lane, trial)| (format!("  {lane} {}", percent(Some(trial.share))), trial, state(trial)))
        .collect()
}

fn state(trial: &Trial) -> String {
    let compared = trial.compared();
    if trial.breaker_open {
        return "breaker open".to_owned();
    }
    if compared == 0 {
        return String::new();
    }
    #[expect(clippy::cast_precision_loss, reason = "a share has two digits")]
    let agrees = trial.agree as f64 / compared as f64;
    format!("agrees {}", percent(Some(agrees)))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn refusals_in_force_and_compiles_are_shown_in_short() {
        let refusal = |lane: &str, at_ms: u64, message: &str| {
            serde_json::json!({ "lane": lane, "file": format!("prefill.{lane}.wasm"), "kind": "not_wasm",
                                "message": message, "at_ms": at_ms, "in_force": true })
        };
        let mut ended = refusal("active", 95_000, "of a removed file");
        ended["in_force"] = false.into();
        let long = "x".repeat(300);
        let status = serde_json::json!({
            "version": "0.1.0", "uptime_s": 7, "ready": true, "reasons": [], "models": ["tiny"],
            "live": { "requests_per_second": 0.0, "errors_per_second": 0.0, "refusals_per_second": 0.0, "inflight": 0,
                      "connections": 0, "session_bindings": 0, "queue": { "waiting": 0, "waiting_bytes": 0 } },
            "workers": { "total": 1, "eligible": 1, "ineligible": {} },
            "slots": [{
                "slot": "prefill", "model": null, "state": "active", "generation": 2, "policy": "first",
                "version": null, "digest": null, "calls": 1, "failures": 0, "breaker_open": false,
                "parts": [], "quarantined": [], "canary": null,
                "shadow": { "generation": 3, "share": 1.0, "policy": "pin+first", "parts": [], "calls": 1, "failures": 1,
                    "breaker_open": false, "agree": 0, "disagree": 0, "failed": 1, "last_failure": {
                    "kind": "trap", "message": "trap: it panicked", "at_ms": 97_000, "policy": "pin",
                    "request_id": "1`: all is well" } },
                "refusals": [
                    ended, refusal("canary", 60_000, &long),
                    refusal("shadow", 70_000, "\u{1b}[2J"), refusal("active", 80_000, "newest"),
                    refusal("canary", 90_000, "the newest"),
                ],
            }],
            "compiling": [{ "slot": "decode", "lane": "active", "file": "decode.wasm", "since_ms": 98_000 }],
        });
        let text = status_text(&serde_json::from_value(status).expect("the answer"), "http://a", 100_000);
        for line in [
            "\ncompiling    decode.wasm, begun 2 s ago\n",
            "\nrefused      prefill.canary.wasm (not_wasm), 10 s ago: the newest\n",
            "\nrefused      prefill.active.wasm (not_wasm), 20 s ago: newest\n",
            "\nrefused      prefill.shadow.wasm (not_wasm), 30 s ago: \u{fffd}[2J\n",
            "\n             and 1 more; see `pointsman policies`\n",
            // T6.2
            "\nfailed       prefill shadow, pin (trap), 3 s ago, request `1': all is well`: trap: it panicked\n",
        ] {
            // O1.16
            assert!(text.contains(line), "{line}: {text}");
        }
        for absent in ["of a removed file", "xxx"] {
            assert!(!text.contains(absent), "{text}");
        }
    }

    #[test]
    fn trials_have_rows_of_their_own_with_their_share_and_agreement() {
        let slot = serde_json::json!({
            "slot": "prefill", "model": null, "state": "active", "generation": 2, "policy": "first",
            "version": null, "digest": null, "calls": 336, "failures": 0, "breaker_open": false,
            "canary": { "generation": 3, "share": 0.2, "policy": "trial", "breaker_open": true, "calls": 9 },
            "shadow": { "generation": 4, "share": 1.0, "policy": "other", "agree": 2, "disagree": 1, "failed": 1,
                        "shed": 4 },
        });
        let text = slots(&[serde_json::from_value(slot).expect("a slot")]).text();
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        // O1.2
        assert_eq!(rows[1], ["prefill", "all", "first", "2", "-", "active", "336", "0"], "{text}");
        // O1.2
        assert_eq!(rows[2], ["canary", "20", "%", "trial", "3", "-", "breaker", "open", "9", "0"], "{text}");
        // O1.2
        assert_eq!(
            rows[3],
            ["shadow", "100", "%", "other", "4", "-", "agrees", "25", "%", "0", "0"],
            "{text}"
        );
        let refusing = serde_json::json!({ "generation": 4, "share": 1.0, "policy": "other", "shed": 12 });
        let refusing: Trial = serde_json::from_value(refusing).expect("a trial");
        // O1.2
        assert_eq!((refusing.compared(), state(&refusing)), (12, format!("agrees {}", percent(Some(0.0)))));
    }

    #[test]
    fn a_lane_that_sends_everything_to_one_worker_is_a_warning() {
        let only = serde_json::json!({ "worker": 7, "dp_rank": 0, "decisions": 336 });
        let slot = |active, canary| {
            let slot = serde_json::json!({
                "slot": "prefill", "model": null, "state": "active", "generation": 2, "policy": "first",
                "version": null, "digest": null, "calls": 336, "failures": 0, "breaker_open": false,
                "parts": [], "quarantined": [], "refusals": [], "only_choice": active, "shadow": null,
                "canary": { "generation": 3, "share": 0.5, "policy": "trial", "parts": [], "calls": 336, "failures": 0,
                            "breaker_open": false, "agree": 0, "disagree": 0, "failed": 0, "only_choice": canary },
            });
            one_sided(&serde_json::from_value(slot).expect("a slot"))
        };
        assert_eq!(slot(Value::Null, Value::Null), Vec::<String>::new());
        let [active, canary] = &slot(only.clone(), only)[..] else { panic!("two lanes") };
        // F10.1
        assert!(
            active.contains("slot prefill: the last 336 decisions of first all chose worker 7"),
            "{active}"
        );
        assert!(canary.contains("decisions of trial"), "{canary}");
    }
}
