//! `reload`: one policy after the other renamed into place under load; each timed from the rename to the first decision of
//! the new generation.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use pointsman_guest_build::GuestBuild;

use crate::{fleet, fleet::Fleet, http, setup, sh};

pub(crate) mod soak;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Reloads.
    #[arg(long, default_value_t = 100)]
    count: u32,
}

const BODY: &str =
    r#"{"model":"tiny","stream":true,"max_tokens":4,"messages":[{"role":"user","content":"hello there"}]}"#;

/// Runs it; an error when a request failed.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let policies = policies()?;
    let dir = tempfile::Builder::new().prefix("pointsman-reload-").tempdir()?;
    let fleet = start(dir.path(), "")?;
    let (stop, served, failed) =
        (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (stop, served, failed, address) =
                (stop.clone(), served.clone(), failed.clone(), fleet.client());
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let complete = http::stream_chat(&address, BODY).is_ok_and(|outcome| outcome.complete);
                    (if complete { &served } else { &failed }).fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let mut took = Vec::new();
    for (turn, bytes) in (2_u64..).zip(policies.iter().cycle()).take(args.count as usize) {
        let started = Instant::now();
        fleet.drop_policy("aggregated.wasm", bytes)?;
        let wanted = format!("generation=\"{turn}\"");
        loop {
            let metrics = http::get(&fleet.admin(), "/metrics")?;
            if metrics
                .lines()
                .any(|line| line.starts_with("pointsman_decisions_total") && line.contains(&wanted))
            {
                break;
            }
            ensure!(started.elapsed() < Duration::from_secs(20), "generation {turn} never served");
            thread::sleep(Duration::from_millis(1));
        }
        took.push(started.elapsed());
    }
    stop.store(true, Ordering::Relaxed);
    clients.into_iter().for_each(|client| drop(client.join()));
    took.sort_unstable();
    let (served, failed) = (served.load(Ordering::Relaxed), failed.load(Ordering::Relaxed));
    let median = took.get(took.len() / 2).context("no reloads")?;
    let most = took.last().context("no reloads")?;
    sh::print(&format!(
        "{} reloads under load, {served} requests served, {failed} failed; rename to first decision: p50 {:.1} ms, max {:.1} ms",
        took.len(),
        median.as_secs_f64() * 1e3,
        most.as_secs_f64() * 1e3
    ));
    ensure!(failed == 0, "{failed} requests failed");
    Ok(())
}

/// The two policies that take turns.
fn policies() -> anyhow::Result<Vec<Vec<u8>>> {
    let built =
        ["policy-least-loaded", "policy-kv-aware"].map(|name| GuestBuild::new(&sh::root(), name).build());
    Ok(built.into_iter().collect::<Result<_, _>>()?)
}

/// A quick engine, and the gateway in front of it.
fn start(dir: &Path, config: &str) -> anyhow::Result<Fleet> {
    let bin = fleet::build()?;
    let quick = ["--overhead-ms", "1", "--prefill-ms-per-token", "0", "--itl-ms", "1"];
    let engine = fleet::engine(&bin, dir, "engine", &quick)?;
    let worker = format!("id=1,role=aggregated,engine=vllm,url=http://{}", engine.listening());
    fleet::gateway(&bin, dir, vec![engine], config, &[worker])
}
