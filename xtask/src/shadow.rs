//! `shadow`: kv-aware serves a trace on pairs of engines while another policy only looks on; afterwards its receipts are decided
//! again by that policy, and both accounts of how often the two agree have to be the same.

use std::{
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use pointsman_guest_build::GuestBuild;
use serde_json::Value;

use crate::{
    demo::trace,
    fleet::{self, Fleet},
    http, setup, sh,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The policy of this tree that looks on.
    #[arg(long, default_value = "least-loaded")]
    policy: String,
    /// Requests to send, from the beginning of the trace and from there again.
    #[arg(long, default_value_t = 2_000)]
    requests: usize,
    /// A trace in the Mooncake format (JSON lines) [default: the 400 lines of tests/fixtures].
    #[arg(long)]
    trace: Option<std::path::PathBuf>,
    /// Keep the receipts here.
    #[arg(long, value_name = "FILE")]
    keep: Option<std::path::PathBuf>,
}

/// Clients at once.
const CLIENTS: usize = 12;
const LEGS: [&str; 2] = ["prefill", "decode"];

/// What kv-aware does not ask for and a shadow may, so that it can be asked again.
const CONFIG: &str = r#"
[decisions]
keep = 20000
bytes = 134217728
facts = ["request-blocks", "engine-queue", "kv-usage", "load-age-ms", "max-concurrency", "session-hash", "session-bound"]
[probe]
load_interval = "200ms"
"#;

/// Runs it; an error when a request failed, or the two accounts differ.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let bin = fleet::build()?;
    let policy = |name: &str| GuestBuild::new(&sh::root(), &format!("policy-{name}")).build();
    let (active, shadow) = (policy("kv-aware")?, policy(&args.policy)?);
    let fixture = || sh::root().join("tests/fixtures/mooncake_conversation_400.jsonl");
    let bodies = trace::bodies(&args.trace.clone().unwrap_or_else(fixture), args.requests)?;
    let dir = tempfile::Builder::new().prefix("pointsman-shadow-").tempdir()?;
    let fleet = start(&bin, dir.path())?;
    for leg in LEGS {
        fleet.drop_policy(&format!("{leg}.wasm"), &active)?;
        fleet.drop_policy(&format!("{leg}.shadow.wasm"), &shadow)?;
    }
    for leg in LEGS {
        wait(&fleet, leg)?;
    }
    let failed = send(&fleet, bodies, args.requests);
    ensure!(failed == 0, "{failed} requests failed");
    let receipts = args.keep.clone().unwrap_or_else(|| dir.path().join("receipts.jsonl"));
    let export = http::get(&fleet.admin(), "/decisions/export")?;
    std::fs::write(&receipts, export.lines().filter(|line| served(line)).collect::<Vec<_>>().join("\n"))?;
    let file = dir.path().join("shadow.wasm");
    std::fs::write(&file, shadow)?;
    let run = |more: &[&str]| {
        let mut command = Command::new(bin.join("pointsman"));
        command.args(["policy", "run"]).arg(&file).arg("--receipts").arg(&receipts);
        command.args(["--as-recorded", "--allow-differences"]).args(more);
        command
    };
    sh::run(&mut run(&[]))?;
    let report: Value = serde_json::from_slice(&run(&["--json"]).output()?.stdout)?;
    let metrics = http::get(&fleet.admin(), "/metrics")?;
    for leg in LEGS {
        let told = |result: &str| told(&metrics, leg, result);
        let (agree, disagree) = (told("agree")?, told("disagree")?);
        let share = &report["report"]["legs"][leg];
        sh::print(&format!("{leg}: the shadow agreed {agree}, disagreed {disagree}; again: {share}"));
        let same = share["agree"].as_u64() == Some(agree)
            && share["decisions"].as_u64() == Some(agree + disagree)
            && told("failed")? == 0;
        ensure!(same, "{leg}: the receipts say otherwise than the shadow did");
    }
    Ok(())
}

/// A decision of kv-aware: the first few may have been made before it was there.
fn served(line: &str) -> bool {
    serde_json::from_str(line).is_ok_and(|line: Value| line["policy"] == "kv-aware")
}

/// Three pairs of engines, with a cache small enough that prefixes are forgotten.
fn start(bin: &Path, dir: &Path) -> anyhow::Result<Fleet> {
    let (mut engines, mut workers) = (Vec::new(), Vec::new());
    for place in 1..=6 {
        let role = if place <= 3 { "prefill" } else { "decode" };
        let flags = ["--role", role, "--overhead-ms", "4", "--prefill-ms-per-token", "0.05", "--itl-ms", "2"];
        let engine = fleet::engine(bin, dir, &format!("{role}-{place}"), &flags)?;
        workers.push(format!("id={place},role={role},engine=vllm,url=http://{}", engine.listening()));
        engines.push(engine);
    }
    fleet::gateway(bin, dir, engines, CONFIG, &workers)
}

fn wait(fleet: &Fleet, leg: &str) -> anyhow::Result<()> {
    for _ in 0..1_000 {
        let slot = fleet.slot(leg)?;
        if slot["policy"] == "kv-aware" && !slot["shadow"].is_null() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    anyhow::bail!("{leg}: the policies do not serve: {}", fleet.slot(leg)?)
}

/// Sends the requests, a few at once; how many failed.
fn send(fleet: &Fleet, bodies: Vec<String>, count: usize) -> usize {
    let (bodies, next, failed) =
        (Arc::new(bodies), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let client = |_| {
        let (address, bodies, next, failed) = (fleet.client(), bodies.clone(), next.clone(), failed.clone());
        thread::spawn(move || {
            loop {
                let place = next.fetch_add(1, Ordering::SeqCst);
                let Some(body) = bodies.iter().cycle().nth(place).filter(|_| place < count) else { return };
                if !http::stream_chat(&address, body).is_ok_and(|outcome| outcome.complete) {
                    failed.fetch_add(1, Ordering::SeqCst);
                }
            }
        })
    };
    let clients: Vec<_> = (0..CLIENTS).map(client).collect();
    clients.into_iter().for_each(|client| drop(client.join()));
    failed.load(Ordering::SeqCst)
}

/// How often the shadow of a leg's slot did so.
fn told(metrics: &str, leg: &str, result: &str) -> anyhow::Result<u64> {
    let fits = |line: &&str| {
        line.starts_with("pointsman_policy_shadow_total")
            && line.contains(&format!("slot=\"{leg}\""))
            && line.contains(&format!("result=\"{result}\""))
    };
    let line = metrics.lines().find(fits).with_context(|| format!("no metric of {leg}, {result}"))?;
    Ok(line.rsplit_once(' ').context("no value")?.1.parse()?)
}
