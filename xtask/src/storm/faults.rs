//! Requests while a share of all legs meets a fault, of every kind that the engine model has.

use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use serde_json::json;

use super::{Outcome, booked, by_reason, engines, turns};
use crate::{fleet, fleet::Fleet, http, sh};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Requests.
    #[arg(long, default_value_t = 10_000)]
    requests: u64,
    /// Share of legs that meet some fault.
    #[arg(long, default_value_t = 0.05)]
    share: f64,
    /// Clients at once.
    #[arg(long, default_value_t = 48)]
    clients: usize,
}

/// Longest a request may take before it counts as hanging.
const HANG: Duration = Duration::from_secs(20);

const CONFIG: &str = r#"
[timeouts]
request = "4s"
[probe]
interval = "300ms"
"#;

/// How requests ended for their clients.
#[derive(Default)]
struct Tally {
    whole: AtomicU64,
    streamed: AtomicU64,
    told: AtomicU64,
    lost: AtomicU64,
    slowest_ms: AtomicU64,
}

impl Tally {
    fn ask(&self, address: &str, turn: u64) {
        let begun = Instant::now();
        let stream = turn.is_multiple_of(2);
        let body = json!({
            "model": "tiny", "stream": stream, "max_tokens": 6, "ignore_eos": true,
            "messages": [{ "role": "user", "content": format!("storm {} ", turn % 97).repeat(12) }],
        });
        let counter = match http::outcome(address, "/v1/chat/completions", &body.to_string(), stream) {
            http::Outcome::Whole => &self.whole,
            http::Outcome::Streamed => &self.streamed,
            http::Outcome::OneError => &self.told,
            http::Outcome::Neither(problem) => {
                sh::tell(&format!("request {turn}: {problem}"));
                &self.lost
            }
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let took = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.slowest_ms.fetch_max(took, Ordering::Relaxed);
    }
}

pub(super) fn run(args: &Args, bin: &Path) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("pointsman-storm-").tempdir()?;
    let fleet = start(bin, dir.path())?;
    for engine in &fleet.engines {
        http::post(&engine.listening(), "/sim/faults", &faults(args.share))?;
    }
    let (progress, tally, started) =
        (sh::progress(args.requests, "requests"), Tally::default(), Instant::now());
    turns(args.requests, args.clients, |turn| {
        tally.ask(&fleet.client(), turn);
        progress.inc(1);
    });
    progress.finish_and_clear();
    let took = started.elapsed().as_secs_f64();
    let left = booked(&fleet, Duration::from_secs(10))?;
    // Leases end; what nobody pulled is counted as stranded then.
    std::thread::sleep(Duration::from_secs(8));
    let mut outcome = Outcome::default();
    outcome.row("requests", format!("{} in {took:.0} s", args.requests), true);
    clients_saw(&tally, args.requests, &mut outcome);
    outcome.row("bookings left", left, left == 0);
    outcome.row("retries by leg", format!("{:?}", by_reason(&fleet, "pointsman_retries_total")?), true);
    let dropped = by_reason(&fleet, "pointsman_handoffs_total")?.get("stranded").copied().unwrap_or(0);
    outcome.row("committed handoffs that the gateway dropped", dropped, dropped == 0);
    for (what, pointer) in [
        ("handoffs used twice", "/handoffs/reused"),
        ("rooms used twice", "/duplicate_rooms"),
        ("engines killed by a handoff", "/dead"),
        ("sequences still running", "/running"),
        ("sequences still waiting", "/waiting"),
    ] {
        let count = engines(&fleet, pointer);
        outcome.row(what, count, count == 0);
    }
    // A decode engine that fails before it pulls leaves the blocks to their lease: a handoff is dispatched once (E5).
    outcome.row("leases that ended, after faults of decode engines", engines(&fleet, "/stranded"), true);
    outcome.end()
}

fn clients_saw(tally: &Tally, requests: u64, outcome: &mut Outcome) {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (whole, streamed, told) = (get(&tally.whole), get(&tally.streamed), get(&tally.told));
    outcome.row("whole answers, streams to their end", format!("{whole}, {streamed}"), true);
    outcome.row("ended in one valid error", told, told * 5 < requests);
    outcome.row("ended in anything else", get(&tally.lost), get(&tally.lost) == 0);
    let slowest = Duration::from_millis(get(&tally.slowest_ms));
    let shown = format!("{:.1} s", slowest.as_secs_f64());
    outcome.row("slowest request (deadline 4 s)", shown, slowest < HANG);
}

/// Two engines of each dialect and role, and the gateway.
fn start(bin: &Path, dir: &Path) -> anyhow::Result<Fleet> {
    let (mut processes, mut workers) = (Vec::new(), Vec::new());
    for (engine, role) in
        [("vllm", "prefill"), ("vllm", "decode"), ("sglang", "prefill"), ("sglang", "decode")]
    {
        for place in 0..2 {
            let name = format!("{engine}-{role}-{place}");
            let flags = ["--engine", engine, "--role", role, "--bootstrap-port", "0", "--room-wait-s", "300"];
            let quick =
                ["--overhead-ms", "1", "--prefill-ms-per-token", "0.01", "--itl-ms", "1", "--lease-s", "6"];
            let flags: Vec<&str> = flags.into_iter().chain(quick).collect();
            let process = fleet::engine(bin, dir, &name, &flags)?;
            let mut worker = format!("role={role},engine={engine},url=http://{}", process.listening());
            if engine == "sglang" && role == "prefill" {
                worker.push_str(&format!(",bootstrap_port={}", process.told["bootstrap_port"]));
            }
            workers.push(worker);
            processes.push(process);
        }
    }
    fleet::gateway(bin, dir, processes, CONFIG, &workers)
}

/// Every kind of fault, with an equal part of `share`.
fn faults(share: f64) -> String {
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
    json!(kinds).to_string()
}
