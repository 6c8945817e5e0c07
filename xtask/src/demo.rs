//! `demo`: the main job on real processes. Engines, the gateway, clients replaying a real trace; policies are swapped,
//! refused and rolled back meanwhile, and a worker dies.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use pointsman_guest_build::GuestBuild;
use serde_json::Value;

use crate::{
    fleet::{self, Fleet, Process},
    http::{self, Streamed},
    setup, sh,
};

mod table;
pub(crate) mod trace;

/// Clients at once.
const CLIENTS: usize = 12;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Leave engines and gateway running and print what to try.
    #[arg(long)]
    keep: bool,
    /// Requests to send, from the beginning of the trace.
    #[arg(long, default_value_t = 400)]
    requests: usize,
    /// Another trace in the Mooncake format (JSON lines).
    #[arg(long)]
    trace: Option<std::path::PathBuf>,
}

/// What clients saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) outcomes: Vec<Streamed>,
    /// Streams that were cut by the worker we killed: they had begun, and nothing can be retried then.
    pub(crate) lost_with_worker: usize,
}

/// Runs the demo; an error when anything that could be served was not.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let bin = fleet::build()?;
    let looping = GuestBuild::new(&sh::root(), "guest-hostile").build()?;
    let swapped = GuestBuild::new(&sh::root(), "policy-least-loaded").build()?;
    let next = GuestBuild::new(&sh::root(), "policy-weighted-random").build()?;
    let dir = tempfile::Builder::new().prefix("pointsman-demo-").tempdir()?;
    let mut fleet = start(&bin, dir.path())?;
    let trace = args
        .trace
        .clone()
        .unwrap_or_else(|| sh::root().join("tests/fixtures/mooncake_conversation_400.jsonl"));
    let bodies = Arc::new(trace::bodies(&trace, args.requests)?);
    let bar = ProgressBar::new(bodies.len() as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} requests  {msg}")?);
    let clients = Clients::start(&fleet.client(), bodies.clone(), bar.clone());
    let total = bodies.len();
    let story: [(usize, &str); 5] = [(15, "swap"), (25, "garbage"), (35, "loop"), (70, "next"), (85, "kill")];
    for (percent, what) in story {
        clients.wait_for(total * percent / 100);
        match what {
            "swap" => fleet.drop_policy("prefill.wasm", &swapped)?,
            "garbage" => fleet.drop_policy("prefill.wasm", b"this is no policy")?,
            "loop" => fleet.drop_policy("decode.wasm", &looping)?,
            "next" => fleet.drop_policy("prefill.wasm", &next)?,
            _ => kill_decode(&mut fleet, &clients)?,
        }
        bar.set_message(match what {
            "swap" => "prefill policy swapped: least-loaded",
            "garbage" => "garbage dropped into the prefill slot",
            "loop" => "a policy that will loop dropped into the decode slot",
            "next" => "prefill policy swapped: weighted-random",
            _ => "one decode worker killed",
        });
    }
    let seen = clients.finish()?;
    bar.finish_and_clear();
    table::print(&fleet, &seen)?;
    let verdict = judge(&fleet, &seen);
    if args.keep && verdict.is_ok() {
        keep(fleet, dir);
        return Ok(());
    }
    verdict
}

fn start(bin: &Path, dir: &Path) -> anyhow::Result<Fleet> {
    let pace = [
        "--overhead-ms",
        "8",
        "--prefill-ms-per-token",
        "0.05",
        "--itl-ms",
        "4",
        "--kv-transfer-us-per-token",
        "2",
    ];
    let plan = [
        ("prefill", "vllm"),
        ("prefill", "vllm"),
        ("decode", "vllm"),
        ("decode", "vllm"),
        ("prefill", "sglang"),
        ("decode", "sglang"),
    ];
    let (mut engines, mut workers): (Vec<Process>, Vec<String>) = (Vec::new(), Vec::new());
    for (place, (role, engine)) in plan.into_iter().enumerate() {
        let mut args =
            vec!["--role", role, "--engine", engine, "--natural-len", "4096", "--bootstrap-port", "0"];
        args.extend(pace);
        let process = fleet::engine(bin, dir, &format!("{engine}-{role}-{}", place + 1), &args)?;
        let mut worker =
            format!("id={},role={role},engine={engine},url=http://{}", place + 1, process.listening());
        if let Some(port) = process.told["bootstrap_port"].as_u64() {
            worker.push_str(&format!(",bootstrap_port={port}"));
        }
        engines.push(process);
        workers.push(worker);
    }
    // The policy that will be dropped into the decode slot behaves for 50 live calls of an instance, and then loops.
    let config = "[policies]\nrescan = \"1s\"\n[policies.slots.decode.settings]\nmode = \"spin\"\nafter = 50\n\
                  [probe]\ninterval = \"200ms\"\nload_interval = \"1s\"\n";
    fleet::gateway(bin, dir, engines, config, &workers)
}

fn kill_decode(fleet: &mut Fleet, clients: &Clients) -> anyhow::Result<()> {
    let victim = fleet.engines.iter_mut().find(|engine| engine.name == "vllm-decode-4");
    clients.killed.store(true, Ordering::SeqCst);
    victim.context("no decode worker")?.kill();
    Ok(())
}

fn judge(fleet: &Fleet, seen: &Seen) -> anyhow::Result<()> {
    let failed: Vec<&str> = seen.outcomes.iter().filter_map(|outcome| outcome.problem.as_deref()).collect();
    let failed: Vec<&&str> = failed.iter().take(3).collect();
    ensure!(failed.len() <= seen.lost_with_worker, "requests failed that could have been served: {failed:?}");
    let (prefill, decode) = (fleet.slot("prefill")?, fleet.slot("decode")?);
    ensure!(prefill["generation"].as_u64() >= Some(2), "the prefill policy was not swapped: {prefill}");
    ensure!(has_refusal(&prefill, "not_wasm"), "the garbage was not refused: {prefill}");
    ensure!(has_refusal(&decode, "rolled_back"), "the looping policy was not rolled back: {decode}");
    if prefill["policy"] != "weighted-random" {
        bail!("the last policy does not serve: {prefill}");
    }
    Ok(())
}

fn has_refusal(slot: &Value, kind: &str) -> bool {
    slot["refusals"].as_array().is_some_and(|all| all.iter().any(|refusal| refusal["kind"] == kind))
}

fn keep(fleet: Fleet, dir: tempfile::TempDir) {
    let (client, admin, policies) = (fleet.client(), fleet.admin(), fleet.policies.display().to_string());
    sh::print(&format!(
        "\nEverything goes on running. Try:\n  curl -N http://{client}/v1/chat/completions -H 'content-type: application/json' \
         -H 'x-pointsman-decision: 1' -D /dev/stderr -d '{{\"model\":\"tiny\",\"stream\":true,\"max_tokens\":8,\"messages\":[{{\"role\":\"user\",\"content\":\"hello\"}}]}}'\n  \
         curl http://{admin}/policies\n  curl http://{admin}/workers\n  curl http://{admin}/metrics\n  \
         cargo xtask policies && cp target/policies/kv-aware.wasm {policies}/prefill.wasm"
    ));
    let Fleet { gateway, engines, .. } = fleet;
    let pids: Vec<String> =
        std::iter::once(&gateway).chain(&engines).map(|process| process.pid().to_string()).collect();
    sh::print(&format!("  kill {}    # to end it", pids.join(" ")));
    gateway.leave();
    engines.into_iter().for_each(Process::leave);
    let _ = dir.keep();
}

/// Clients on threads of their own, each sending the next request of the trace.
struct Clients {
    sent: Arc<AtomicUsize>,
    killed: Arc<AtomicBool>,
    outcomes: mpsc::Receiver<(Streamed, bool)>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Clients {
    fn start(address: &str, bodies: Arc<Vec<String>>, bar: ProgressBar) -> Self {
        let (next, sent) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let killed = Arc::new(AtomicBool::new(false));
        let (sender, outcomes) = mpsc::channel();
        let threads = (0..CLIENTS)
            .map(|_| {
                let (address, bodies, bar) = (address.to_owned(), bodies.clone(), bar.clone());
                let (next, sent, killed, sender) =
                    (next.clone(), sent.clone(), killed.clone(), sender.clone());
                thread::spawn(move || {
                    while let Some(body) = bodies.get(next.fetch_add(1, Ordering::SeqCst)) {
                        let before = killed.load(Ordering::SeqCst);
                        let outcome = http::stream_chat(&address, body).unwrap_or_else(|error| Streamed {
                            ttft: None,
                            events: 0,
                            complete: false,
                            problem: Some(format!("{error:#}")),
                        });
                        // Under way when the worker was killed, and past its first event.
                        let lost = !before
                            && killed.load(Ordering::SeqCst)
                            && outcome.problem.is_some()
                            && outcome.events > 1;
                        let _ = sender.send((outcome, lost));
                        sent.fetch_add(1, Ordering::SeqCst);
                        bar.inc(1);
                    }
                })
            })
            .collect();
        Self { sent, killed, outcomes, threads }
    }

    fn wait_for(&self, requests: usize) {
        let started = Instant::now();
        while self.sent.load(Ordering::SeqCst) < requests && started.elapsed() < Duration::from_secs(50) {
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn finish(self) -> anyhow::Result<Seen> {
        for thread in self.threads {
            if thread.join().is_err() {
                bail!("a client panicked");
            }
        }
        let mut seen = Seen::default();
        for (outcome, lost) in self.outcomes.try_iter() {
            seen.lost_with_worker += usize::from(lost);
            seen.outcomes.push(outcome);
        }
        Ok(seen)
    }
}
