//! Requests while a share of all legs meets a fault of every kind that the simulated engine has.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::LEAKS;
use crate::{
    client::{CHAT, Outcome},
    fleet::{self, EngineSpec, Fleet},
    load::closed_loop,
    metrics_text, sh,
    table::Checks,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Requests to send.
    #[arg(long, default_value_t = 10_000)]
    requests: u64,
    /// Share of legs that meet a fault.
    #[arg(long, default_value_t = 0.05)]
    share: f64,
    /// Requests at once.
    #[arg(long, default_value_t = 48)]
    clients: usize,
}

/// A request that takes longer counts as hanging. The gateway's own deadline is 4 s a leg.
const HANG: Duration = Duration::from_secs(20);

/// A prefill that hangs is left to end when its request is over (E1.2): the deadlines of engines bound it.
const CONFIG: &str = "[timeouts]\nrequest = \"4s\"\nprefill_head = \"4s\"\nevent_idle = \"4s\"\n\
    event_idle_max = \"4s\"\n[probe]\ninterval = \"300ms\"\n";

/// How requests ended for their clients.
#[derive(Default)]
struct Tally {
    whole: AtomicU64,
    streamed: AtomicU64,
    errors: AtomicU64,
    lost: AtomicU64,
    slowest_ms: AtomicU64,
}

impl Tally {
    async fn send(&self, fleet: &Fleet, turn: u64) {
        let started = Instant::now();
        let stream = turn.is_multiple_of(2);
        let body = json!({
            "model": "tiny", "stream": stream, "max_tokens": 6, "ignore_eos": true,
            "messages": [{ "role": "user", "content": format!("storm {} ", turn % 97).repeat(12) }],
        });
        let counter = match fleet.client.outcome(CHAT, body.to_string(), stream).await {
            Outcome::Whole => &self.whole,
            Outcome::Streamed => &self.streamed,
            Outcome::OneError => &self.errors,
            Outcome::Neither(problem) => {
                sh::status(&format!("request {turn}: {problem}"));
                &self.lost
            }
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let took = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.slowest_ms.fetch_max(took, Ordering::Relaxed);
    }

    fn report(&self, requests: u64, checks: &mut Checks) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let errors = get(&self.errors);
        checks.show(
            "whole answers, complete streams",
            format!("{}, {}", get(&self.whole), get(&self.streamed)),
        );
        checks.check("requests that ended in one valid error (limit 20 %)", errors, errors * 5 < requests);
        checks.none("requests that ended in anything else", get(&self.lost));
        let slowest = Duration::from_millis(get(&self.slowest_ms));
        let shown = format!("{:.1} s", slowest.as_secs_f64());
        checks.check("slowest request (deadline 4 s)", shown, slowest < HANG);
    }
}

pub(super) async fn run(args: &Args, bin: &Path) -> anyhow::Result<()> {
    ensure!(args.share > 0.0, "--share {}: pass a share above 0, or no fault is injected", args.share);
    let dir = tempfile::Builder::new().prefix("pointsman-storm-").tempdir()?;
    let flags = "--room-wait-s 300 --overhead-ms 1 --prefill-ms-per-token 0.01 --itl-ms 1 --lease-s 6";
    let roles = [("vllm", "prefill"), ("vllm", "decode"), ("sglang", "prefill"), ("sglang", "decode")];
    let engine = |(dialect, role)| EngineSpec::new(dialect, role, flags).worker("handoff_lease_s=6");
    let engines = roles.map(|kind| vec![engine(kind); 2]).concat();
    let fleet = fleet::start(bin, dir.path(), &engines, CONFIG).await?;
    for engine in &fleet.engines {
        engine.client().post("/sim/faults", json!(faults(args.share)).to_string()).await?;
    }
    let (progress, tally, started) =
        (sh::progress(args.requests, "requests"), Tally::default(), Instant::now());
    closed_loop(args.requests, args.clients, |turn| {
        let (tally, fleet, progress) = (&tally, &fleet, &progress);
        async move {
            tally.send(fleet, turn).await;
            progress.inc(1);
        }
    })
    .await;
    progress.finish_and_clear();
    let took = started.elapsed().as_secs_f64();
    let fired = fired(&fleet).await?;
    for engine in &fleet.engines {
        engine.client().post("/sim/faults", "[]").await?;
    }
    // The prefill of the last request that ended, and its lease (E4.3).
    let booked = fleet.booked(Duration::from_secs(4 + 6 + 2)).await?;
    // Leases end after 6 s; blocks that were not pulled by then are counted as stranded.
    tokio::time::sleep(Duration::from_secs(8)).await;
    let mut checks = Checks::default();
    checks.show("requests", format!("{} in {took:.0} s", args.requests));
    for kind in faults(args.share).iter().map(label) {
        let count = fired.get(&kind).copied().unwrap_or(0);
        checks.check(&format!("faults injected: {kind}"), count, count > 0);
    }
    tally.report(args.requests, &mut checks);
    checks.none("bookings left", booked);
    let metrics = fleet.metrics().await?;
    for (leg, count) in metrics_text::by_label(&metrics, "pointsman_retries_total", "reason") {
        checks.show(&format!("retries of {leg} legs"), count);
    }
    for reason in ["lost_no_decode_worker", "lost_prefill_died"] {
        let lost = metrics_text::sum_with(&metrics, "pointsman_handoffs_total", &[("reason", reason)]);
        checks.check(&format!("committed handoffs: {reason}"), lost, lost == 0.0);
    }
    for (what, pointer) in LEAKS {
        checks.none(what, fleet.engines_sum(pointer).await);
    }
    checks.none("engines that a bad handoff killed", fleet.engines_sum("/dead").await);
    // A decode engine that fails before it pulls leaves the blocks to their lease: a handoff is dispatched
    // once.
    checks.show("leases that ended after faults of decode engines", fleet.engines_sum("/stranded").await);
    checks.finish()
}

/// How often each kind of fault fired, summed over the engines.
async fn fired(fleet: &Fleet) -> anyhow::Result<BTreeMap<String, u64>> {
    let mut fired = BTreeMap::new();
    for engine in &fleet.engines {
        let state = engine.client().json("/sim/state").await?;
        let counts = state["faults_fired"].as_object().context("/sim/state has no field `faults_fired`")?;
        for (kind, count) in counts {
            *fired.entry(kind.clone()).or_default() += count.as_u64().unwrap_or(0);
        }
    }
    Ok(fired)
}

/// Name under which an engine counts a fault.
fn label(fault: &Value) -> String {
    let kind = fault["kind"].as_str().unwrap_or_default();
    fault["status"].as_u64().map_or_else(|| kind.to_owned(), |status| format!("{kind}-{status}"))
}

/// Every kind of fault, each with an equal part of `share`.
fn faults(share: f64) -> Vec<Value> {
    let mut kinds = vec![
        json!({ "kind": "refuse" }),
        json!({ "kind": "status", "status": 500 }),
        json!({ "kind": "status", "status": 503 }),
        json!({ "kind": "status", "status": 429 }),
        json!({ "kind": "hang-before-headers" }),
        json!({ "kind": "hang-after-headers" }),
        json!({ "kind": "stall", "after_tokens": 2 }),
        json!({ "kind": "cut", "after_tokens": 2 }),
        json!({ "kind": "garbage", "after_tokens": 1 }),
        json!({ "kind": "wrong-content-type" }),
        json!({ "kind": "first-token-eos" }),
        json!({ "kind": "partial-params" }),
        json!({ "kind": "transfer-fail" }),
    ];
    #[expect(clippy::cast_precision_loss, reason = "a dozen")]
    let each = share / kinds.len() as f64;
    kinds.iter_mut().for_each(|kind| kind["share"] = json!(each));
    kinds.push(json!({ "kind": "slow-health", "ms": 400, "share": share, "leg": "health" }));
    kinds
}

#[cfg(test)]
mod tests {
    use super::{faults, label};

    #[test]
    fn the_share_is_divided_among_the_faults_of_requests() {
        let faults = faults(0.13);
        let requests = faults.iter().filter(|fault| fault["leg"].is_null());
        let total: f64 = requests.filter_map(|fault| fault["share"].as_f64()).sum();
        assert!((total - 0.13).abs() < 1e-9, "{total}");
        let labels: Vec<String> = faults.iter().map(label).collect();
        assert_eq!(labels[..2], ["refuse", "status-500"]);
    }
}
