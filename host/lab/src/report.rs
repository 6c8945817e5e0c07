//! Comparison of arms: runs every arm with every seed, and reports the latencies that clients would have
//! seen, with warnings about the limits of the result.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    arm::Arm,
    arrivals::ArrivalUnit,
    fleet::Fleet,
    jobs::run_jobs,
    monitor::Monitor,
    outcome::Ended,
    prepared::{Prepared, prepare},
    run::{RunError, RunOptions, RunResult, run_prepared},
    trace::{Trace, endless_cache_hit_rate},
};

mod absent_facts;
mod backlog;
mod events;
mod figures;
mod pairs;
mod possible;
mod ranking;
mod warnings;
mod workers;

pub use events::Events;
use events::RunEvents;
pub use figures::{Figure, Figures, Quantiles};
use figures::{RunFigures, is_burst};
pub(crate) use figures::{requests_per_s, slo_share};
use pairs::PairSeed;
pub use pairs::{DecisionCost, PairDifference};
pub use possible::{Clairvoyant, Possible};
use possible::{SeedBounds, add_clairvoyant};
pub use ranking::{RankBy, Ranked};
pub(crate) use ranking::{tied, too_few_seeds, worse_percent};
pub(crate) use warnings::vary_runs;
pub use workers::RoleShares;
use workers::{RunCounts, roles};

/// Latency limits that a request must keep to count as goodput.
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
    /// How to run the trace, with the first seed.
    pub options: RunOptions,
    /// Limits for goodput.
    pub slo: Slo,
    /// Figure that ranks the arms.
    pub rank_by: RankBy,
    /// Maximum number of steps that the clairvoyant search simulates, as a multiple of the steps of one run;
    /// 0 means no search.
    pub clairvoyant: u32,
    /// Number of threads.
    pub threads: usize,
}

/// The report of a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Name of the trace.
    pub trace: String,
    /// Number of requests in the trace.
    pub requests: usize,
    /// Number of lines of the trace that were skipped.
    pub skipped_lines: u64,
    /// Name of the fleet.
    pub fleet: String,
    /// Formula of the step time: the name of a preset, or `linear`. A mixed fleet has several.
    pub step_time: String,
    /// Number of engines.
    pub engines: u32,
    /// Factor by which arrivals follow each other faster than in the trace.
    pub speed: f64,
    /// Mean rate of the arrivals that do not depend on answers, a second.
    pub offered_per_s: f64,
    /// What `offered_per_s` counts.
    pub offered_unit: ArrivalUnit,
    /// Number of seeds that every arm ran with.
    pub seeds: u64,
    /// Arrivals were moved at random by less than this, milliseconds.
    pub jitter_ms: f64,
    /// Limits for goodput.
    pub slo: Slo,
    /// Share of the prompt tokens that one unlimited cache for all engines would hold, 0 to 1, without
    /// requests that fit into no engine: an upper bound of the hit rate of an arm that completes all others.
    pub endless_cache_hit_rate: f64,
    /// Two bounds of the mean time to first token.
    pub possible: Possible,
    /// One report for each arm, in the order of the command line.
    pub arms: Vec<ArmReport>,
    /// The arms from best to worst.
    pub ranking: Vec<Ranked>,
    /// Differences between the decisions of each pair of arms.
    pub pairs: Vec<PairDifference>,
    /// Warnings for the reader.
    pub warnings: Vec<String>,
}

/// The figures of one arm.
#[derive(Clone, Debug, Serialize)]
pub struct ArmReport {
    /// Name of the arm.
    pub label: String,
    /// Policies with their settings, as on the command line.
    pub parts: String,
    /// Means over the seeds, with confidence intervals.
    pub figures: Figures,
    /// Mean time to first token of the relaxation, percent of the arm's; 100 is the best possible value.
    pub percent_of_relaxation: Figure,
    /// Mean time to first token of the clairvoyant search, percent of the arm's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percent_of_clairvoyant: Option<Figure>,
    /// Quantiles, for plots.
    pub quantiles: Quantiles,
    /// Imbalance over time, and failures of the arm's policies.
    pub events: Events,
    /// Shares of the requests that each worker served, by role.
    pub workers: Vec<RoleShares>,
}

/// Results of one arm with one seed.
struct ArmSeed {
    figures: RunFigures,
    quantiles: Quantiles,
    events: RunEvents,
    counts: RunCounts,
}

/// Results of all arms with one seed.
struct Seed {
    arms: Vec<ArmSeed>,
    /// Comparisons of pairs of arms, in the order of [`pairs_of`].
    pairs: Vec<PairSeed>,
    bounds: SeedBounds,
    /// For each request, whether it fits into no engine, whatever an arm does.
    too_large: Vec<bool>,
}

/// Positions of all pairs of arms.
fn pairs_of(arms: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..arms).flat_map(move |first| (first + 1..arms).map(move |second| (first, second)))
}

impl Comparison {
    /// Whether some arm answered a request.
    pub(crate) fn has_answers(&self) -> bool {
        self.arms.iter().any(|arm| arm.figures.served_share.mean > 0.0)
    }
}

/// Runs every arm with every seed. When the monitor stops it, it reports the seeds that every arm has
/// completed.
///
/// # Errors
/// [`RunError`] when an arm or the fleet is not valid, or when the monitor stopped it before every arm had
/// completed the first seed.
pub fn compare(plan: &Plan<'_>, monitor: &Monitor) -> Result<Comparison, RunError> {
    let prepared = prepare(plan.trace, plan.fleet.block_tokens);
    let seeds = run_all(plan, &prepared, monitor)?;
    let roles = roles(plan.fleet);
    let bounds: Vec<&SeedBounds> = seeds.iter().map(|seed| &seed.bounds).collect();
    let arms = plan.arms.iter().enumerate().map(|(place, arm)| {
        let of = || seeds.iter().filter_map(|seed| seed.arms.get(place));
        ArmReport {
            label: arm.label.clone(),
            parts: arm.parts.clone(),
            figures: Figures::over(&of().map(|arm| arm.figures).collect::<Vec<_>>()),
            percent_of_relaxation: Possible::percent(&bounds, place),
            percent_of_clairvoyant: None,
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
    let RunOptions { speed, fixed_schedule, jitter, .. } = plan.options;
    let arrivals = plan.trace.arrivals(fixed_schedule);
    // Arms have no hit rate of requests that fit into no engine.
    let mut too_large = seeds.first().into_iter().flat_map(|seed| seed.too_large.iter().copied());
    let prompts = plan.trace.requests.iter().zip(&prepared);
    let prompts = prompts.filter(|_| !too_large.next().unwrap_or_default());
    let prompts = prompts.map(|(request, prepared)| (request.input_tokens, prepared.chain.iter().copied()));
    let mut comparison = Comparison {
        trace: plan.trace.name.clone(),
        requests: plan.trace.requests.len(),
        skipped_lines: plan.trace.skipped,
        fleet: plan.fleet_name.to_owned(),
        step_time: plan.fleet.step_times(),
        engines: plan.fleet.count(),
        speed,
        offered_per_s: arrivals.per_s(speed),
        offered_unit: arrivals.unit,
        seeds: seeds.len() as u64,
        jitter_ms: jitter.as_secs_f64() * 1e3,
        slo: plan.slo,
        endless_cache_hit_rate: endless_cache_hit_rate(prompts, plan.fleet.block_tokens),
        possible: Possible::over(&bounds),
        ranking: ranking::rank(&arms, plan.rank_by),
        arms,
        pairs: pairs.collect(),
        warnings: Vec::new(),
    };
    comparison.warnings = warnings::of(&comparison, plan);
    add_clairvoyant(&mut comparison, plan, &prepared, &bounds, monitor)?;
    Ok(comparison)
}

/// Returns the results by seed. Jobs run seed by seed. The outcomes of a seed are dropped when all its arms
/// have ended, so memory does not grow with the number of seeds.
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
            over.insert(seed, Seed::of(&results, plan, prepared, seed == 0));
        }
    };
    match run_jobs(arms.saturating_mul(seeds), plan.threads, work, done) {
        Err(RunError::Interrupted) if !over.is_empty() => {}
        result => result?,
    }
    Ok(over.into_values().collect())
}

impl Seed {
    fn of(results: &[RunResult], plan: &Plan<'_>, prepared: &[Prepared], with_examples: bool) -> Self {
        let arm = |result| ArmSeed {
            figures: RunFigures::of(result, plan.slo, is_burst(plan.trace, plan.options.speed)),
            quantiles: Quantiles::of(result),
            events: RunEvents::of(result, plan.fleet),
            counts: RunCounts::of(result, plan.fleet.count() as usize),
        };
        let pair = |(first, second): (usize, usize)| {
            let (first, second) = (results.get(first)?, results.get(second)?);
            Some(PairSeed::of(first, second, with_examples))
        };
        Self {
            arms: results.iter().map(arm).collect(),
            pairs: pairs_of(results.len()).filter_map(pair).collect(),
            bounds: SeedBounds::of(results, plan, prepared),
            too_large: results.first().map_or_else(Vec::new, too_large),
        }
    }
}

fn too_large(result: &RunResult) -> Vec<bool> {
    result.outcomes.iter().map(|outcome| outcome.ended == Ended::TooLarge).collect()
}

#[cfg(test)]
mod tests;
