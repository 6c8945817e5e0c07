//! `pointsman status`.

use std::process::ExitCode;

use clap::Args;

use crate::{
    api::{Live, OnlyChoice, Slot, Status, Trial},
    block_on,
    gateway::GatewayArgs,
    print,
    text::{Column, NONE, Table, age, bytes, clean, millis, percent},
};

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
            print(&shown(&status, gateway.url()))?;
        }
        Ok(if status.ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn shown(status: &Status, url: &str) -> String {
    let mut text = format!("pointsman {} at {url}, up {}\n\n", clean(&status.version), age(status.uptime_s));
    for (name, value) in lines(status) {
        text.push_str(&format!("{name:<12} {}\n", clean(&value)));
    }
    text.push('\n');
    text.push_str(&slots(&status.slots).text());
    for line in status.slots.iter().flat_map(one_sided) {
        text.push_str(&format!("\nwarning: {}\n", clean(&line)));
    }
    text
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
        Column::Left("TRIALS"),
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
            slot.digest.as_deref().map_or(NONE.to_owned(), short),
            if slot.breaker_open { "breaker open".to_owned() } else { slot.state.clone() },
            slot.calls.to_string(),
            slot.failures.to_string(),
            trials(slot),
        ]);
    }
    table
}

/// The first characters of a digest.
#[must_use]
pub fn short(digest: &str) -> String {
    digest.chars().take(12).collect()
}

/// The canary and shadow of a slot in short.
#[must_use]
pub fn trials(slot: &Slot) -> String {
    let one = |lane: &str, trial: &Option<Trial>| {
        let trial = trial.as_ref()?;
        Some(format!("{lane} {}@{} {}", trial.policy, trial.generation, percent(Some(trial.share))))
    };
    let trials = [one("canary", &slot.canary), one("shadow", &slot.shadow)];
    let trials: Vec<String> = trials.into_iter().flatten().collect();
    if trials.is_empty() { NONE.to_owned() } else { trials.join(", ") }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_lane_that_sends_everything_to_one_worker_is_a_warning() {
        let only = serde_json::json!({ "worker": 7, "dp_rank": 0, "decisions": 336 });
        let slot = |active, canary| {
            let slot = serde_json::json!({
                "slot": "prefill", "model": null, "state": "active", "generation": 2, "policy": "first",
                "version": null, "digest": null, "calls": 336, "failures": 0, "breaker_open": false,
                "only_choice": active, "shadow": null,
                "canary": { "generation": 3, "share": 0.5, "policy": "trial", "only_choice": canary },
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
