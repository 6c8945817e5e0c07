//! Events during the runs of an arm, besides latencies: imbalance over time, and policies that failed.

use std::collections::BTreeMap;

use pointsman_routing::SlotKind;
use serde::Serialize;

use super::backlog;
use crate::{fleet::Fleet, run::RunResult, stats::mean};

/// Number of points of a curve over time.
const POINTS: u32 = 120;

/// Events of an arm over the seeds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Events {
    /// The busiest engine's requests divided by the mean of all engines: virtual time in seconds, and the
    /// mean over the seeds. 1 is even.
    pub imbalance_over_time: Vec<(f64, f64)>,
    /// Mean number of calls of policies without a usable answer in a run, by reason.
    pub fallbacks: BTreeMap<&'static str, f64>,
    /// Slots whose last decisions all chose the same one of several engines, with the largest number of such
    /// decisions in a run.
    pub one_sided: BTreeMap<SlotKind, u64>,
    /// Number of runs that continued without the policies, because these had exceeded their CPU time too
    /// often.
    pub withdrawn_runs: usize,
    /// Number of runs in which the fleet did not keep up with the arrivals.
    pub overloaded_runs: usize,
}

/// Events of one run.
#[derive(Clone, Debug)]
pub(super) struct RunEvents {
    imbalance: Vec<(f64, f64)>,
    fallbacks: BTreeMap<&'static str, u64>,
    withdrawn: bool,
    one_sided: BTreeMap<SlotKind, u64>,
    overloaded: bool,
}

impl RunEvents {
    pub(super) fn of(result: &RunResult, fleet: &Fleet) -> Self {
        let imbalance = result.imbalance_over_time.iter().map(|(at, value)| (at.as_secs_f64(), *value));
        Self {
            imbalance: imbalance.collect(),
            fallbacks: result.fallbacks.clone(),
            withdrawn: result.withdrawn,
            one_sided: result.one_sided.clone(),
            overloaded: backlog::grows(result, fleet),
        }
    }
}

impl Events {
    pub(super) fn over(runs: &[RunEvents]) -> Self {
        let mut fallbacks = BTreeMap::new();
        for (reason, count) in runs.iter().flat_map(|run| &run.fallbacks) {
            *fallbacks.entry(*reason).or_insert(0.0) += count_per_run(*count, runs.len());
        }
        let mut one_sided: BTreeMap<SlotKind, u64> = BTreeMap::new();
        for (slot, decisions) in runs.iter().flat_map(|run| &run.one_sided) {
            let most = one_sided.entry(*slot).or_default();
            *most = (*most).max(*decisions);
        }
        Self {
            imbalance_over_time: curve(runs),
            fallbacks,
            one_sided,
            withdrawn_runs: runs.iter().filter(|run| run.withdrawn).count(),
            overloaded_runs: runs.iter().filter(|run| run.overloaded).count(),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "numbers of calls and runs stay far below 2^53")]
fn count_per_run(count: u64, runs: usize) -> f64 {
    count as f64 / runs.max(1) as f64
}

/// Returns the means over all runs, in intervals of equal length.
fn curve(runs: &[RunEvents]) -> Vec<(f64, f64)> {
    let all = || runs.iter().flat_map(|run| &run.imbalance);
    let span = all().map(|(at, _)| *at).fold(0.0, f64::max) / f64::from(POINTS);
    if span <= 0.0 {
        return Vec::new();
    }
    let mut values: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for (at, value) in all() {
        let place = (0..POINTS).rev().find(|place| f64::from(*place) * span <= *at).unwrap_or(0);
        values.entry(place).or_default().push(*value);
    }
    values.into_iter().map(|(place, values)| ((f64::from(place) + 0.5) * span, mean(&values))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(imbalance: Vec<(f64, f64)>, count: u64) -> RunEvents {
        RunEvents {
            imbalance,
            fallbacks: BTreeMap::from([("trap", count)]),
            withdrawn: count > 2,
            one_sided: BTreeMap::from([(SlotKind::Prefill, count)]),
            overloaded: count > 2,
        }
    }

    #[test]
    fn curves_and_counts_are_means_over_the_runs_and_one_sided_slots_the_worst() {
        let runs = [run(vec![(0.0, 1.0), (120.0, 3.0)], 1), run(vec![(0.5, 2.0), (1.5, 4.0)], 4)];
        let events = Events::over(&runs);
        assert_eq!(events.imbalance_over_time, [(0.5, 1.5), (1.5, 4.0), (119.5, 3.0)]);
        assert_eq!((events.fallbacks["trap"], events.withdrawn_runs, events.overloaded_runs), (2.5, 1, 1));
        assert_eq!(events.one_sided, BTreeMap::from([(SlotKind::Prefill, 4)]));
        assert!(Events::over(&[]).imbalance_over_time.is_empty());
    }
}
