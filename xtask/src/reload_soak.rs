//! `reload-soak`: two good policies installed in turn, a thousand times, under a steady load. No request may
//! fail, decisions near a swap may take hardly longer than the others, and memory may not grow.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, ensure};
use pointsman_guest_build::GuestBuild;
use serde_json::Value;
use tokio::time::{Instant, sleep, sleep_until};

use crate::{
    fleet::{self, EngineSpec, Fleet},
    load::{FixedRate, Summary},
    proc::Memory,
    setup, sh,
    stats::{quantile, quantile_bounds, sorted},
    table::Checks,
};

mod decisions;

use decisions::Decisions;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Reloads.
    #[arg(long, default_value_t = 1_000)]
    count: u32,
    /// Milliseconds from one reload to the next.
    #[arg(long, default_value_t = 500)]
    every_ms: u64,
    /// Requests a second.
    #[arg(long, default_value_t = 500)]
    rate: u32,
}

const CLIENTS: u32 = 16;
/// Largest allowed ratio of the p99.9 of decisions near a swap to that of the others.
const RATIO: f64 = 1.2;
/// Largest allowed growth of resident memory, as a share.
const GROWTH: f64 = 0.05;
/// Reloads before memory is read for the first time: allocator caches have filled by then.
const WARM_UP: u32 = 100;
/// Receipts fill their buffer during the warm-up, so they do not count as growth.
const CONFIG: &str = "[decisions]\nkeep = 6000\nbytes = 4194304\n";

/// Everything that a soak recorded.
struct Recorded {
    decisions: Decisions,
    /// When each policy was renamed into place, microseconds of the wall clock.
    renames: Vec<u64>,
    memory: Vec<Memory>,
    generation: u64,
    summary: Summary,
}

/// Runs the soak; returns an error when a limit is exceeded.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let built =
        ["policy-least-loaded", "policy-kv-aware"].map(|name| GuestBuild::new(&sh::root(), name).build());
    let policies = built.into_iter().collect::<Result<Vec<_>, _>>()?;
    let bin = fleet::build("release")?;
    let dir = tempfile::Builder::new().prefix("pointsman-soak-").tempdir()?;
    let engine = EngineSpec::new("vllm", "aggregated", "--overhead-ms 1 --prefill-ms-per-token 0 --itl-ms 1");
    let fleet = fleet::start(&bin, dir.path(), &[engine], CONFIG).await?;
    let recorded = soak(args, &fleet, &policies).await?;
    report(args, recorded)
}

async fn soak(args: &Args, fleet: &Fleet, policies: &[Vec<u8>]) -> anyhow::Result<Recorded> {
    let load = FixedRate::start(&fleet.client, args.rate, CLIENTS);
    let (mut decisions, mut renames, mut memory) = (Decisions::default(), Vec::new(), Vec::new());
    let progress = sh::progress(u64::from(args.count), "reloads");
    let mut next = Instant::now();
    for (turn, bytes) in (0..args.count).zip(policies.iter().cycle()) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        renames.push(u64::try_from(now.as_micros())?);
        fleet.drop_policy("aggregated.wasm", bytes)?;
        if turn % 8 == 7 {
            decisions.read(fleet).await?;
        }
        if turn >= WARM_UP && turn % 50 == 0 {
            memory.push(Memory::of(fleet.gateway.pid())?);
        }
        progress.inc(1);
        next += Duration::from_millis(args.every_ms);
        sleep_until(next).await;
    }
    progress.finish_and_clear();
    sleep(Duration::from_secs(3)).await;
    decisions.read(fleet).await?;
    memory.push(Memory::of(fleet.gateway.pid())?);
    let slot = fleet.slot("aggregated").await?;
    let generation = slot["generation"].as_u64().context("the slot has no generation")?;
    Ok(Recorded { decisions, renames, memory, generation, summary: load.stop().await })
}

fn report(args: &Args, recorded: Recorded) -> anyhow::Result<()> {
    let Recorded { decisions, renames, memory, generation, summary } = recorded;
    let mut checks = Checks::default();
    let installed = generation - 1;
    checks.check(
        "reloads, generations installed (at least 99 %)",
        format!("{}, {installed}", args.count),
        installed * 100 >= u64::from(args.count) * 99,
    );
    checks.check(
        "requests sent, failed",
        format!("{}, {}", summary.sent, summary.failed),
        summary.sent > 0 && summary.failed == 0,
    );
    let latencies = sorted(summary.latencies.iter().map(|took| took.as_secs_f64() * 1e3).collect());
    let [p50, p999] = [0.5, 0.999].map(|share| quantile(&latencies, share));
    checks.show("request latency from its due time, p50 / p99.9", format!("{p50:.2} / {p999:.2} ms"));
    let delays = sorted(decisions.delays(&renames));
    checks.check("swaps seen in receipts", delays.len(), !delays.is_empty());
    let [p50, most] = [0.5, 1.0].map(|share| quantile(&delays, share) / 1e3);
    checks.show("rename to first decision, p50 / max", format!("{p50:.1} / {most:.1} ms"));
    let (near, rest) = decisions.near_a_swap();
    checks.show(&format!("{} decisions near a swap, p50 / p99 / p99.9", near.len()), percentiles(&near));
    checks.show(&format!("{} other decisions, p50 / p99 / p99.9", rest.len()), percentiles(&rest));
    let ratio = quantile(&near, 0.999) / quantile(&rest, 0.999);
    checks.check(
        "p99.9 near a swap over that of the others (limit 1.2)",
        format!("{ratio:.2}"),
        ratio <= RATIO,
    );
    let (low, high) = quantile_bounds(&rest, 0.999);
    checks.show("two standard deviations around the latter", format!("{low:.1} to {high:.1} µs"));
    let (first, last) = (memory.first().context("no memory was read")?, memory.last());
    let growth = last.map_or(f64::NAN, |last| last.resident / first.resident - 1.0);
    checks.check(
        &format!("growth of {:.1} MB resident after reload {WARM_UP} (limit 5 %)", first.resident),
        format!("{:+.1} %", growth * 100.0),
        growth <= GROWTH,
    );
    if let Some(problem) = &summary.problem {
        sh::status(&format!("first failed request: {problem}"));
    }
    checks.finish()
}

fn percentiles(sorted: &[f64]) -> String {
    let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|share| quantile(sorted, share));
    format!("{p50:.1} / {p99:.1} / {p999:.1} µs")
}

/// Parses one line of `/decisions/export` as id, time, duration and generation.
fn parse(line: &str) -> anyhow::Result<(String, decisions::Decision)> {
    let one: Value = serde_json::from_str(line)?;
    let id = one["id"].as_str().context("a receipt has no id")?;
    let decision = decisions::Decision {
        at_us: one["call"]["now_us"].as_u64().context("a receipt has no call.now_us")?,
        took_us: one["took_us"].as_f64().context("a receipt has no took_us")?,
        generation: one["generation"].as_u64().context("a receipt has no generation")?,
    };
    ensure!(decision.took_us >= 0.0, "a receipt has a negative took_us: {line}");
    Ok((id.to_owned(), decision))
}
