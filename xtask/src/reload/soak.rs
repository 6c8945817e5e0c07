//! `reload-soak`: two good policies renamed into place in turn, a thousand times, under a steady load. No request may fail, the
//! decisions near a swap may take hardly longer than the rest, and memory may not grow.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::{
    fleet::Fleet,
    http,
    load::{Load, Memory, Seen},
    setup, sh,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Reloads.
    #[arg(long, default_value_t = 1_000)]
    count: u32,
    /// Milliseconds from one to the next.
    #[arg(long, default_value_t = 500)]
    every_ms: u64,
    /// Requests a second.
    #[arg(long, default_value_t = 500)]
    rate: u32,
}

const CLIENTS: u32 = 16;
/// What is near a swap, before or after it, microseconds.
const NEAR_US: u64 = 200_000;
/// p99.9 near a swap over that of the rest.
const RATIO: f64 = 1.2;
/// The growth of memory that is allowed.
const GROWTH: f64 = 0.05;
/// Reloads until memory is measured for the first time.
const WARM: u32 = 100;

/// All that is kept of decisions is there before memory is measured.
const CONFIG: &str = "[decisions]\nkeep = 6000\nbytes = 4194304\n";

/// Decisions by their id: when, how long, and by which generation. Microseconds.
type Decisions = BTreeMap<String, (u64, f64, u64)>;

/// Runs it; an error when a limit is missed.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let policies = super::policies()?;
    let dir = tempfile::Builder::new().prefix("pointsman-soak-").tempdir()?;
    let fleet = super::start(dir.path(), CONFIG)?;
    let load = Load::start(&fleet.client(), args.rate, CLIENTS);
    let (mut decisions, mut memory) = (Decisions::new(), Vec::new());
    let (progress, every) =
        (sh::progress(u64::from(args.count), "reloads"), Duration::from_millis(args.every_ms));
    let mut next = Instant::now();
    for (turn, bytes) in (0..args.count).zip(policies.iter().cycle()) {
        fleet.drop_policy("aggregated.wasm", bytes)?;
        if turn % 8 == 7 {
            take(&fleet, &mut decisions)?;
        }
        if turn >= WARM && turn % 50 == 0 {
            memory.push(Memory::of(fleet.gateway.pid())?);
        }
        progress.inc(1);
        next += every;
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    progress.finish_and_clear();
    thread::sleep(Duration::from_secs(3));
    take(&fleet, &mut decisions)?;
    memory.push(Memory::of(fleet.gateway.pid())?);
    let generation = fleet.slot("aggregated")?["generation"].as_u64().context("no generation")?;
    let seen = load.stop();
    tell(args, seen, &decisions, &memory, generation)
}

/// Prints what was seen; an error when a limit is missed.
fn tell(
    args: &Args,
    seen: Seen,
    decisions: &Decisions,
    memory: &[Memory],
    generation: u64,
) -> anyhow::Result<()> {
    let mut late: Vec<Duration> = seen.answers.iter().map(|(_, took)| *took).collect();
    late.sort_unstable();
    let swaps = swaps(decisions);
    let (near, rest) = times(decisions, &swaps);
    let (near_p, rest_p) = (percentiles(&near), percentiles(&rest));
    sh::print(&format!(
        "reloads, generations installed                    | {}, {}",
        args.count,
        generation - 1
    ));
    sh::print(&format!("requests sent, failed                             | {}, {}", seen.sent, seen.failed));
    sh::print(&format!(
        "request p50 / p99.9, from when it was due         | {:.2} / {:.2} ms",
        at(&late, 0.5),
        at(&late, 0.999)
    ));
    sh::print(&format!("swaps seen in receipts                            | {}", swaps.len()));
    sh::print(&format!("decision p50 / p99 / p99.9 near a swap ({} of them) | {near_p}", near.len()));
    sh::print(&format!("decision p50 / p99 / p99.9 else ({} of them)      | {rest_p}", rest.len()));
    let shown: Vec<String> = memory.iter().map(|look| format!("{:.1}", look.resident)).collect();
    sh::print(&format!("resident from reload {WARM} on, MB                    | {}", shown.join(" ")));
    ensure!(
        seen.failed == 0,
        "{} requests failed, the first: {}",
        seen.failed,
        seen.problem.unwrap_or_default()
    );
    ensure!(generation > u64::from(args.count) * 99 / 100, "only {generation} generations");
    let (first, last) = (memory.first().context("too few reloads")?, memory.last().context("no memory")?);
    ensure!(last.resident <= first.resident * (1.0 + GROWTH), "memory grew");
    let ratio = quantile(&near, 0.999) / quantile(&rest, 0.999);
    let (low, high) = spread(&rest, 0.999);
    sh::print(&format!(
        "p99.9 near a swap over the rest                   | {ratio:.2}; that of the rest is of {} decisions: {low:.1} to {high:.1} µs",
        rest.len() / 1_000,
    ));
    ensure!(ratio <= RATIO, "decisions near a swap take {ratio:.2} times as long");
    Ok(())
}

/// Reads the latest decisions.
fn take(fleet: &Fleet, decisions: &mut Decisions) -> anyhow::Result<()> {
    for line in http::get(&fleet.admin(), "/decisions/export?limit=3500")?.lines() {
        let one: Value = serde_json::from_str(line)?;
        let (id, now) = (one["id"].as_str().context("no id")?, one["call"]["now_us"].as_u64());
        let (took, generation) = (one["took_us"].as_f64(), one["generation"].as_u64());
        let found =
            (now.context("no time")?, took.context("no took_us")?, generation.context("no generation")?);
        if decisions.insert(id.to_owned(), found).is_some() {
            // Newest first: the rest is known.
            break;
        }
    }
    Ok(())
}

/// When each generation decided first.
fn swaps(decisions: &Decisions) -> Vec<u64> {
    let mut first = BTreeMap::new();
    for (now, _, generation) in decisions.values() {
        let since = first.entry(*generation).or_insert(*now);
        *since = (*since).min(*now);
    }
    let mut swaps: Vec<u64> = first.into_values().skip(1).collect();
    swaps.sort_unstable();
    swaps
}

/// How long decisions took near a swap, and the others, sorted.
fn times(decisions: &Decisions, swaps: &[u64]) -> (Vec<f64>, Vec<f64>) {
    let is_near = |now: u64| {
        let place = swaps.partition_point(|swap| *swap <= now);
        let around = [place.checked_sub(1), Some(place)].into_iter().flatten();
        around.filter_map(|place| swaps.get(place)).any(|swap| swap.abs_diff(now) <= NEAR_US)
    };
    let (mut near, mut rest) = (Vec::new(), Vec::new());
    for (now, took, _) in decisions.values() {
        (if is_near(*now) { &mut near } else { &mut rest }).push(*took);
    }
    near.sort_unstable_by(f64::total_cmp);
    rest.sort_unstable_by(f64::total_cmp);
    (near, rest)
}

fn percentiles(sorted: &[f64]) -> String {
    let [half, most, nearly] = [0.5, 0.99, 0.999].map(|share| quantile(sorted, share));
    format!("{half:.1} / {most:.1} / {nearly:.1} µs")
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a place"
)]
fn place(length: usize, share: f64) -> usize {
    ((length as f64 * share) as usize).min(length.saturating_sub(1))
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted.get(place(sorted.len(), share)).copied().unwrap_or(f64::NAN)
}

/// Between which values a quantile lies, two standard deviations to each side: of few decisions above it, it is a rough one.
fn spread(sorted: &[f64], share: f64) -> (f64, f64) {
    let deviation = (sorted.len() as f64 * share * (1.0 - share)).sqrt() / sorted.len() as f64;
    (quantile(sorted, share - 2.0 * deviation), quantile(sorted, (share + 2.0 * deviation).min(1.0)))
}

fn at(sorted: &[Duration], share: f64) -> f64 {
    sorted.get(place(sorted.len(), share)).map_or(f64::NAN, |took| took.as_secs_f64() * 1e3)
}
