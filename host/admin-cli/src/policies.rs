//! `pointsman policies`.

use std::process::ExitCode;

use clap::Args;

use crate::{
    api::{Policies, Refusal, Slot},
    block_on,
    gateway::GatewayArgs,
    print,
    status::{digests, failures, short},
    text::{Column, NONE, Table, ago, clean, now_ms, percent},
};

/// Changes that are shown, the newest.
const CHANGES: usize = 5;

/// Arguments of `policies`.
#[derive(Debug, Args)]
pub struct PoliciesArgs {
    /// Print the JSON of `GET /policies` unchanged.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

impl PoliciesArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let gateway = self.gateway.client()?;
        let answer = block_on(async { Ok(gateway.get("/policies").await?) })?;
        if self.json {
            return answer.print_json();
        }
        print(&policies_text(&answer.read::<Policies>()?, now_ms()))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn policies_text(policies: &Policies, now_ms: u64) -> String {
    let ago = |at_ms: u64| ago(at_ms, now_ms);
    let mut text = lanes(&policies.slots).text();
    let mut section = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            text.push_str(&format!("\n{title}\n"));
            lines.iter().for_each(|line| text.push_str(&format!("  {}\n", clean(line))));
        }
    };
    let compiling = policies.compiling.iter();
    let compiling = compiling.map(|one| format!("{}, begun {}", one.file, ago(one.since_ms)));
    section("being compiled", compiling.collect());
    section("refused", refused(&policies.slots, &ago));
    section("last failed calls", policies.slots.iter().flat_map(|slot| failures(slot, now_ms)).collect());
    let problems = policies.stray_problems.iter().map(Some).chain(std::iter::repeat(None));
    let strays = policies.strays.iter().zip(problems);
    let strays = strays.map(|(file, problem)| match problem {
        Some(problem) => format!("{file}: {problem}"),
        None => file.clone(),
    });
    let more = (policies.more_strays > 0).then(|| format!("and {} more", policies.more_strays));
    section("files of no slot", strays.chain(more).collect());
    section("rolled back", policies.slots.iter().flat_map(rolled_back).collect());
    let changes = policies.history.iter().rev().take(CHANGES).map(|change| {
        let policy = change.policy.as_deref().unwrap_or(NONE);
        let (slot, lane, result) =
            (place(&change.slot, change.model.as_deref()), &change.lane, &change.result);
        format!("{slot} {lane}: {result} ({}), now {policy}, {}", change.reason, ago(change.at_ms))
    });
    section("last changes", changes.collect());
    text
}

/// Says how what the slot rolled back can run again.
fn rolled_back(slot: &Slot) -> Option<String> {
    let Some(undo) = &slot.undo else {
        let digest = slot.quarantined.last()?;
        let digest = short(digest);
        return Some(format!(
            "{}{} {digest}: no usable file or setting asks for it now; an undo needs its file or settings again",
            slot.slot,
            model(slot)
        ));
    };
    let (name, digest, model) = (&slot.slot, short(&undo.digest), model(slot));
    let policy = &undo.policy;
    Some(format!(
        "{name} {policy} {digest}; to let it run again: pointsman policy rollback {name} --undo{model}"
    ))
}

fn model(slot: &Slot) -> String {
    slot.model.as_ref().map(|model| format!(" --model {model}")).unwrap_or_default()
}

fn refused(slots: &[Slot], ago: &impl Fn(u64) -> String) -> Vec<String> {
    let refusals = slots.iter().flat_map(|slot| slot.current_refusals().map(move |one| (slot, one)));
    let line = |(slot, one): (&Slot, &Refusal)| {
        let (slot, file) = (place(&slot.slot, slot.model.as_deref()), &one.file);
        format!("{slot} {}: {file} ({}), {}: {}", one.lane, one.kind, ago(one.at_ms), one.message)
    };
    refusals.map(line).collect()
}

/// The name of a slot: `prefill`, or `model/prefill`.
fn place(slot: &str, model: Option<&str>) -> String {
    model.map_or(slot.to_owned(), |model| format!("{model}/{slot}"))
}

/// One row for each lane.
fn lanes(slots: &[Slot]) -> Table {
    let mut table = Table::new(&[
        Column::Left("SLOT"),
        Column::Left("MODEL"),
        Column::Left("LANE"),
        Column::Left("POLICY"),
        Column::Right("GENERATION"),
        Column::Left("DIGEST"),
        Column::Right("SHARE"),
        Column::Right("CALLS"),
        Column::Right("FAILED"),
        Column::Left("STATE"),
    ]);
    for slot in slots {
        let (name, model) = (slot.slot.clone(), slot.model.clone().unwrap_or_else(|| "all".to_owned()));
        let canary = slot.canary.as_ref().map_or(0.0, |canary| canary.share);
        table.row(vec![
            name.clone(),
            model.clone(),
            "active".to_owned(),
            slot.policy.clone(),
            slot.generation.to_string(),
            digests(slot.digest.as_deref(), &slot.parts, usize::MAX),
            percent(Some(1.0 - canary)),
            slot.calls.to_string(),
            slot.failures.to_string(),
            if slot.breaker_open { "breaker open".to_owned() } else { slot.state.clone() },
        ]);
        for (lane, trial) in [("canary", &slot.canary), ("shadow", &slot.shadow)] {
            let Some(trial) = trial else { continue };
            table.row(vec![
                name.clone(),
                model.clone(),
                lane.to_owned(),
                trial.policy.clone(),
                trial.generation.to_string(),
                digests(trial.digest.as_deref(), &trial.parts, usize::MAX),
                percent(Some(trial.share)),
                trial.calls.to_string(),
                trial.failures.to_string(),
                if trial.breaker_open { "breaker open".to_owned() } else { "trial".to_owned() },
            ]);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn t6_lanes_refusals_compiles_and_changes_are_shown_and_old_refusals_are_not() {
        let refusal = |at_ms: u64, in_force: bool, message: &str| {
            json!({ "lane": "active", "file": "prefill.wasm", "kind": "not_wasm", "message": message,
                    "at_ms": at_ms, "in_force": in_force })
        };
        let policies = serde_json::from_value(json!({
            "slots": [{
                "slot": "prefill", "model": "tiny", "state": "active", "generation": 4, "policy": "least-loaded",
                "version": null, "digest": "sha256:0123456789abcdef", "calls": 9, "failures": 1,
                "breaker_open": false, "parts": [], "quarantined": ["sha256:77"],
                "last_failure": { "kind": "invalid", "message": "invalid answer: cost 1 is NaN", "at_ms": 98_000,
                                  "policy": "least-loaded", "request_id": "r-1" },
                "refusals": [refusal(40_000, false, "of a removed file"), refusal(60_000, true, "the newest \u{1b}[2J")],
                "undo": { "policy": "least-loaded", "digest": "sha256:77" },
                "shadow": null,
                "canary": { "generation": 5, "share": 0.2, "policy": "trial", "parts": [], "calls": 0, "failures": 0,
                            "breaker_open": false, "agree": 0, "disagree": 0, "failed": 0, "shed": 0 },
            }, {
                "slot": "decode", "model": null, "state": "rolled-back", "generation": 4, "policy": "kv-aware",
                "version": null, "digest": null, "calls": 9, "failures": 1, "breaker_open": false,
                "parts": [], "quarantined": ["sha256:88"], "refusals": [], "undo": null, "canary": null, "shadow": null,
            }],
            "compiling": [{ "slot": "decode", "lane": "active", "file": "decode.wasm", "since_ms": 99_000 }],
            "strays": ["old.wasm", "older.wasm"],
            "stray_problems": ["the file name selects no slot; did you mean `cold.wasm`?"], "more_strays": 7,
            "history": [{ "at_ms": 50_000, "slot": "prefill", "model": "org/b", "lane": "active", "result": "installed",
                          "reason": "changed", "policy": "least-loaded" }],
        }));
        let text = policies_text(&policies.expect("the answer"), 100_000);
        let canary = text.lines().nth(2).unwrap_or_default();
        // O1.10
        assert!(canary.starts_with("prefill  tiny   canary  trial"), "{text}");
        assert!(text.contains("80 %") && canary.contains("20 %"), "{text}");
        for line in [
            "  decode.wasm, begun 1 s ago\n",
            // T6.4
            "  tiny/prefill active: prefill.wasm (not_wasm), 40 s ago: the newest \u{fffd}[2J\n",
            "  old.wasm: the file name selects no slot; did you mean `cold.wasm`?\n  older.wasm\n  and 7 more\n",
            "  prefill least-loaded sha256:77; to let it run again: pointsman policy rollback prefill --undo --model tiny\n",
            "  decode sha256:88: no usable file or setting asks for it now; an undo needs its file or settings again\n",
            // T6.2
            "last failed calls\n  prefill of tiny, least-loaded (invalid), 2 s ago, request `r-1`: invalid answer: cost 1 is NaN\n",
            // T6.4
            "  org/b/prefill active: installed (changed), now least-loaded, 50 s ago\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("of a removed file"), "{text}");
    }
}
