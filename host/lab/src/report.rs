//! Comparison of arms: every arm with every seed, what clients would have seen, and what a reader has to know
//! before believing it.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    arm::Arm,
    fleet::Fleet,
    jobs::run_jobs,
    monitor::Monitor,
    prepared::{Prepared, prepare},
    run::{RunError, RunOptions, RunResult, run_prepared},
    trace::Trace,
};

mod ceiling;
mod events;
mod figures;
mod pairs;
mod ranking;
mod warnings;
mod workers;

pub use events::Events;
use events::RunEvents;
use figures::RunFigures;
pub(crate) use figures::slo_share;
pub use figures::{Figure, Figures, Quantiles};
use pairs::PairSeed;
pub use pairs::{DecisionCost, PairDifference};
pub use ranking::{RankBy, Ranked};
pub(crate) use ranking::{tied, worse_percent};
pub use workers::RoleShares;
use workers::{RunCounts, roles};

/// Limits of latency that a request has to keep to count for goodput.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Slo {
    /// Time to first token, milliseconds.
    pub ttft_ms: f64,
    /// Mean inter-token latency of the request, milliseconds.
    pub itl_ms: f64,
}

impl Default for Slo {
    fn default() -> Self {
        Self { ttft_ms: 2_000.0, itl_ms: 50.0 }
    }
}

/// Subject of a comparison: one trace on one fleet at one speed.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// The arms.
    pub arms: &'a [Arm],
    /// The trace.
    pub trace: &'a Trace,
    /// The fleet.
    pub fleet: &'a Fleet,
    /// Name of the fleet in reports.
    pub fleet_name: &'a str,
    /// Number of seeds. Each arm runs once with each.
    pub seeds: u64,
    /// How the trace is run; the seed is the first one.
    pub options: RunOptions,
    /// Limits for goodput.
    pub slo: Slo,
    /// Figure that ranks the arms.
    pub rank_by: RankBy,
    /// Threads.
    pub threads: usize,
}

/// The report of a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Name of the trace.
    pub trace: String,
    /// Requests of the trace.
    pub requests: usize,
    /// Lines of the trace that were left out.
    pub skipped_lines: u64,
    /// Name of the fleet.
    pub fleet: String,
    /// Formula of the step time: a preset's name or `linear`; several for a mixed fleet.
    pub step_time: String,
    /// Number of engines.
    pub engines: u32,
    /// Factor on the rate of arrivals.
    pub speed: f64,
    /// Mean arrivals, requests a second.
    pub offered_per_s: f64,
    /// Number of seeds that every arm ran with.
    pub seeds: u64,
    /// Limits for goodput.
    pub slo: Slo,
    /// Share of prompt tokens that one endless cache for all engines would have: the ceiling, 0 to 1.
    pub endless_cache_hit_rate: f64,
    /// One report for each arm, in the order of the command line.
    pub arms: Vec<ArmReport>,
    /// The arms from best to worst.
    pub ranking: Vec<Ranked>,
    /// Decisions that differ, for each pair of arms.
    pub pairs: Vec<PairDifference>,
    /// Warnings for the reader.
    pub warnings: Vec<String>,
}

/// The figures of one arm.
#[derive(Clone, Debug, Serialize)]
pub struct ArmReport {
    /// Name of the arm.
    pub label: String,
    /// Its policies with their settings, as on the command line.
    pub parts: String,
    /// Means over the seeds, with confidence intervals.
    pub figures: Figures,
    /// Quantiles, for plots.
    pub quantiles: Quantiles,
    /// Imbalance over time, and failures of its policies.
    pub events: Events,
    /// How its requests are spread over the workers, by role.
    pub workers: Vec<RoleShares>,
}

/// One arm with one seed.
struct ArmSeed {
    figures: RunFigures,
    quantiles: Quantiles,
    events: RunEvents,
    counts: RunCounts,
}

/// All arms with one seed.
struct Seed {
    arms: Vec<ArmSeed>,
    /// Comparisons by the pair's place in [`pairs_of`].
    pairs: Vec<PairSeed>,
}

/// Positions of all pairs of arms.
fn pairs_of(arms: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..arms).flat_map(move |first| (first + 1..arms).map(move |second| (first, second)))
}

/// Runs every arm with every seed. When it is stopped, it reports the seeds that every arm ran with.
///
/// # Errors [`RunError`] when an arm or the fleet is not valid, or it was stopped before the first seed was
/// over.
pub fn compare(plan: &Plan<'_>, monitor: &Monitor) -> Result<Comparison, RunError> {
    let prepared = prepare(plan.trace, plan.fleet.block_tokens);
    let seeds = run_all(plan, &prepared, monitor)?;
    let roles = roles(plan.fleet);
    let arms = plan.arms.iter().enumerate().map(|(place, arm)| {
        let of = || seeds.iter().filter_map(|seed| seed.arms.get(place));
        ArmReport {
            label: arm.label.clone(),
            parts: arm.parts.clone(),
            figures: Figures::over(&of().map(|arm| arm.figures).collect::<Vec<_>>()),
            quantiles: Quantiles::over(&of().map(|arm| arm.quantiles.clone()).collect::<Vec<_>>()),
            events: Events::over(&of().map(|arm| arm.events.clone()).collect::<Vec<_>>()),
            workers: RoleShares::over(&roles, &of().map(|arm| arm.counts.clone()).collect::<Vec<_>>()),
        }
    });
    let label = |place: usize| plan.arms.get(place).map_or("", |arm| arm.label.as_str());
    let pairs = pairs_of(plan.arms.len()).enumerate().map(|(place, (first, second))| {
        let of: Vec<PairSeed> = seeds.iter().filter_map(|seed| seed.pairs.get(place).cloned()).collect();
        PairDifference::over(label(first), label(second), &of)
    });
    let arms: Vec<ArmReport> = arms.collect();
    let RunOptions { speed, fixed_schedule, .. } = plan.options;
    let mut comparison = Comparison {
        trace: plan.trace.name.clone(),
        requests: plan.trace.requests.len(),
        skipped_lines: plan.trace.skipped,
        fleet: plan.fleet_name.to_owned(),
        step_time: plan.fleet.step_times(),
        engines: plan.fleet.count(),
        speed,
        offered_per_s: rate(plan.trace.requests.len(), plan.trace.arrivals_s(fixed_schedule)) * speed,
        seeds: seeds.len() as u64,
        slo: plan.slo,
        endless_cache_hit_rate: ceiling::endless_cache_hit_rate(
            plan.trace,
            &prepared,
            plan.fleet.block_tokens,
        ),
        ranking: ranking::rank(&arms, plan.rank_by),
        arms,
        pairs: pairs.collect(),
        warnings: Vec::new(),
    };
    comparison.warnings = warnings::of(&comparison, plan, plan.trace.expected_end_s(speed, fixed_schedule));
    Ok(comparison)
}

/// Mean rate of `requests` that arrive within `seconds`.
#[expect(clippy::cast_precision_loss, reason = "numbers of requests stay far below 2^53")]
pub(crate) fn rate(requests: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { requests as f64 / seconds } else { 0.0 }
}

/// Results by seed. Jobs run seed by seed, and a seed's outcomes are dropped when all its arms are over, so
/// that memory does not grow with the number of seeds.
fn run_all(plan: &Plan<'_>, prepared: &[Prepared], monitor: &Monitor) -> Result<Vec<Seed>, RunError> {
    let arms = plan.arms.len();
    let seeds = usize::try_from(plan.seeds.max(1)).unwrap_or(usize::MAX);
    let mut open: BTreeMap<usize, Vec<Option<RunResult>>> = BTreeMap::new();
    let mut over: BTreeMap<usize, Seed> = BTreeMap::new();
    let work = |job: usize| {
        let Some(arm) = plan.arms.get(job % arms) else { return Err(RunError::Interrupted) };
        let options = RunOptions { seed: plan.options.seed + (job / arms) as u64, ..plan.options };
        run_prepared(arm, plan.trace, prepared, plan.fleet, options, monitor)
    };
    let done = |job: usize, result: RunResult| {
        let seed = job / arms;
        let results = open.entry(seed).or_insert_with(|| vec![None; arms]);
        if let Some(place) = results.get_mut(job % arms) {
            *place = Some(result);
        }
        if results.iter().all(Option::is_some) {
            let results: Vec<RunResult> = open.remove(&seed).into_iter().flatten().flatten().collect();
            over.insert(seed, Seed::of(&results, plan, seed == 0));
        }
    };
    match run_jobs(arms.saturating_mul(seeds), plan.threads, work, done) {
        Err(RunError::Interrupted) if !over.is_empty() => {}
        result => result?,
    }
    Ok(over.into_values().collect())
}

impl Seed {
    fn of(results: &[RunResult], plan: &Plan<'_>, with_examples: bool) -> Self {
        let arm = |result| ArmSeed {
            figures: RunFigures::of(result, plan.slo),
            quantiles: Quantiles::of(result),
            events: RunEvents::of(result),
            counts: RunCounts::of(result, plan.fleet.count() as usize),
        };
        let pair = |(first, second): (usize, usize)| {
            let (first, second) = (results.get(first)?, results.get(second)?);
            Some(PairSeed::of(first, second, with_examples))
        };
        Self {
            arms: results.iter().map(arm).collect(),
            pairs: pairs_of(results.len()).filter_map(pair).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
