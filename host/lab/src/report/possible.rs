//! Compares the mean time to first token of each arm with two bounds.

use serde::Serialize;
use tokio::time::Duration;

use super::{ArmReport, Comparison, Figure, Plan, figures::mean_ttft_ms};
use crate::{
    ceiling::{Relaxation, Scene, Waits, search},
    jobs::run_jobs,
    monitor::Monitor,
    outcome::{Ended, Place},
    prepared::Prepared,
    run::{RunError, RunOptions, RunResult, run_assigned},
};

/// Two bounds of the mean time to first token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Possible {
    /// Mean time to first token that no policy can beat, milliseconds. It covers the requests that some arm
    /// completed.
    pub relaxation_ttft_ms: Figure,
    /// Result of a search that knows the future; absent when the search was off or ended without a result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clairvoyant: Option<Clairvoyant>,
}

/// The result of the clairvoyant search.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Clairvoyant {
    /// Mean time to first token of the assignment that it found, milliseconds.
    pub ttft_ms: Figure,
    /// Limit of the number of steps that it simulated, as a multiple of the steps of one run.
    pub runs: u32,
    /// Best arm, if the search did not beat it. Then there is no percentage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_beaten: Option<String>,
}

/// Bounds of one seed, and the assignments with which a search starts.
#[derive(Clone, Debug)]
pub(super) struct SeedBounds {
    relaxation_ms: f64,
    /// Bound over the requests that each arm completed, percent of the arm's mean; infinite without such a
    /// request.
    percents: Vec<f64>,
    arrivals: Vec<Duration>,
    /// Assignments of the arms that completed every request in one attempt, the fastest first.
    starts: Vec<Vec<Place>>,
}

impl SeedBounds {
    pub(super) fn of(results: &[RunResult], plan: &Plan<'_>, prepared: &[Prepared]) -> Self {
        let waits = Waits::of(plan.trace);
        let outcomes = results.first().map_or(&[][..], |result| &result.outcomes);
        let bounds = Relaxation::of(plan.trace, prepared, plan.fleet, outcomes, &waits);
        let is_complete = |result: &RunResult, number: usize| {
            result.outcomes.get(number).is_some_and(|outcome| outcome.ended == Ended::Complete)
        };
        let percent = |result: &RunResult| {
            let (bound, mean) = (bounds.mean_ms(|number| is_complete(result, number)), mean_ttft_ms(result));
            if mean > 0.0 && mean.is_finite() { bound / mean * 100.0 } else { f64::INFINITY }
        };
        // The outcomes are kept only if a search needs them.
        let searches = plan.clairvoyant > 0;
        let mut starts: Vec<&RunResult> =
            results.iter().filter(|result| searches && is_whole(result)).collect();
        starts.sort_by(|a, b| mean_ttft_ms(a).total_cmp(&mean_ttft_ms(b)));
        let places = |result: &RunResult| result.outcomes.iter().map(Place::of).collect();
        Self {
            relaxation_ms: bounds.mean_ms(|number| results.iter().any(|result| is_complete(result, number))),
            percents: results.iter().map(percent).collect(),
            arrivals: outcomes.iter().filter(|_| searches).map(|outcome| outcome.at).collect(),
            starts: starts.into_iter().map(places).collect(),
        }
    }

    /// Returns the mean time to first token of the best assignment that a search finds. Returns `None` when
    /// no arm completed every request, or when the best assignment does not complete every request.
    fn search(
        &self,
        plan: &Plan<'_>,
        prepared: &[Prepared],
        seed: u64,
        monitor: &Monitor,
    ) -> Result<Option<f64>, RunError> {
        if self.starts.is_empty() {
            return Ok(None);
        }
        let options = RunOptions { seed, ..plan.options };
        let waits = Waits::of(plan.trace);
        let scene = Scene::of(plan.trace, prepared, plan.fleet, options, &self.arrivals, &waits);
        let places = search(&scene, &self.starts, plan.clairvoyant, monitor)?;
        // The figure comes from a run of the gateway's own code, as the figures of the arms do.
        let result = run_assigned(&places, plan.trace, prepared, plan.fleet, options, monitor)?;
        Ok(is_whole(&result).then(|| mean_ttft_ms(&result)))
    }
}

fn is_whole(result: &RunResult) -> bool {
    result.outcomes.iter().all(|outcome| outcome.ended == Ended::Complete && outcome.attempts <= 1)
}

impl Possible {
    pub(super) fn over(seeds: &[&SeedBounds]) -> Self {
        let relaxation = seeds.iter().map(|seed| seed.relaxation_ms).collect();
        Self { relaxation_ttft_ms: Figure::of(relaxation), clairvoyant: None }
    }

    /// Returns the relaxation's mean as a percentage of the mean of the arm at position `place`.
    pub(super) fn percent(seeds: &[&SeedBounds], place: usize) -> Figure {
        Figure::of(seeds.iter().filter_map(|seed| seed.percents.get(place).copied()).collect())
    }
}

/// Searches with every seed. Adds the result or a warning to the comparison.
pub(super) fn add_clairvoyant(
    comparison: &mut Comparison,
    plan: &Plan<'_>,
    prepared: &[Prepared],
    seeds: &[&SeedBounds],
    monitor: &Monitor,
) -> Result<(), RunError> {
    if plan.clairvoyant == 0 {
        return Ok(());
    }
    let mut found = vec![None; seeds.len()];
    let work = |job: usize| match seeds.get(job) {
        Some(bounds) => bounds.search(plan, prepared, plan.options.seed + job as u64, monitor),
        None => Ok(None),
    };
    let done = |job: usize, mean: Option<f64>| found.iter_mut().skip(job).take(1).for_each(|it| *it = mean);
    match run_jobs(seeds.len(), plan.threads, work, done) {
        Err(RunError::Interrupted) => {
            comparison.warnings.push("the clairvoyant search was interrupted: it has no result".to_owned());
            return Ok(());
        }
        result => result?,
    }
    let Some(means) = found.into_iter().collect::<Option<Vec<f64>>>() else {
        comparison.warnings.push(
            "the clairvoyant search has no result: it needs an arm that completes every request at the first attempt"
                .to_owned(),
        );
        return Ok(());
    };
    let ttft_ms = Figure::of(means);
    let not_beaten = fastest(&comparison.arms).filter(|arm| arm.figures.ttft_mean.mean <= ttft_ms.mean);
    let not_beaten = not_beaten.map(|arm| arm.label.clone());
    if let Some(label) = &not_beaten {
        comparison.warnings.push(format!(
            "the clairvoyant search found nothing better than \"{label}\", so there is no percentage of it; raise \
             --clairvoyant"
        ));
    } else {
        comparison.arms.iter_mut().for_each(|arm| {
            let percents = ttft_ms.values.iter().zip(&arm.figures.ttft_mean.values);
            let percents = percents.map(|(bound, mean)| bound / mean * 100.0).collect();
            arm.percent_of_clairvoyant = completes_all(arm).then(|| Figure::of(percents));
        });
    }
    let runs = plan.clairvoyant;
    comparison.possible.clairvoyant = Some(Clairvoyant { ttft_ms, runs, not_beaten });
    Ok(())
}

/// Whether the arm completed every request, so that its mean covers all of them.
fn completes_all(arm: &ArmReport) -> bool {
    let figures = &arm.figures;
    [&figures.shed, &figures.no_worker, &figures.failed, &figures.too_large]
        .iter()
        .all(|count| count.mean <= 0.0)
}

fn fastest(arms: &[ArmReport]) -> Option<&ArmReport> {
    let mean = |arm: &&ArmReport| arm.figures.ttft_mean.mean;
    arms.iter().filter(|arm| completes_all(arm)).min_by(|a, b| mean(a).total_cmp(&mean(b)))
}
