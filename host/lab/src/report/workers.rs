//! How an arm spreads requests over workers.

use pointsman_routing::SlotKind;
use pointsman_workers::Role;
use serde::Serialize;

use super::figures::Figure;
use crate::{
    fleet::{EngineGroup, Fleet},
    outcome::{Ended, Outcome},
    run::RunResult,
    stats::{mean, median},
};

/// Number of requests that a role must have served before its shares are judged.
const LEAST_REQUESTS: f64 = 10.0;

/// How the requests of a role are distributed over its workers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoleShares {
    /// The role.
    pub role: Role,
    /// Number of complete requests that its workers served; mean over the seeds.
    pub requests: f64,
    /// Workers of the role, by their position in the fleet, from 0.
    pub workers: Vec<u32>,
    /// Share of these requests that each worker served, 0 to 1; means over the seeds.
    pub shares: Vec<f64>,
    /// Share of the worker that was busiest in each seed, 0 to 1.
    pub busiest: Figure,
}

/// Returns the role of each worker, by its position in the fleet.
pub(super) fn roles(fleet: &Fleet) -> Vec<Role> {
    let group = |group: &EngineGroup| std::iter::repeat_n(group.role, group.count as usize);
    fleet.engines.iter().flat_map(group).collect()
}

/// Number of requests that each worker served in one run, by its position in the fleet.
#[derive(Clone, Debug)]
pub(super) struct RunCounts(Vec<u64>);

impl RunCounts {
    /// Counts each request once at each worker that it ran on.
    pub(super) fn of(result: &RunResult, workers: usize) -> Self {
        let mut counts = vec![0; workers];
        let mut count = |worker: u32| {
            if let Some(count) = counts.get_mut(worker as usize) {
                *count += 1;
            }
        };
        let complete = |outcome: &&Outcome| outcome.ended == Ended::Complete;
        for Outcome { prefill_engine, decode_engine, .. } in result.outcomes.iter().filter(complete) {
            count(*prefill_engine);
            if decode_engine != prefill_engine {
                count(*decode_engine);
            }
        }
        Self(counts)
    }
}

impl RoleShares {
    /// Returns the shares by role. A role without requests has none.
    pub(super) fn over(roles: &[Role], runs: &[RunCounts]) -> Vec<Self> {
        let of = |role: Role| {
            let workers: Vec<u32> =
                (0_u32..).zip(roles).filter(|(_, other)| **other == role).map(|(place, _)| place).collect();
            let shares = |run: &RunCounts| Self::of_run(&workers, run);
            let (requests, runs): (Vec<f64>, Vec<Vec<f64>>) = runs.iter().map(shares).unzip();
            let at = |place: usize| -> Vec<f64> {
                runs.iter().filter_map(|run| run.get(place).copied()).collect()
            };
            let most = |run: &Vec<f64>| run.iter().copied().fold(0.0, f64::max);
            let busiest = Figure::of(runs.iter().map(most).collect());
            let shares = (0..workers.len()).map(|place| mean(&at(place))).collect();
            let requests = mean(&requests);
            (requests > 0.0).then_some(Self { role, requests, workers, shares, busiest })
        };
        [Role::Aggregated, Role::Prefill, Role::Decode].into_iter().filter_map(of).collect()
    }

    /// Returns the number of requests of a run, and the share of each of the workers.
    #[expect(clippy::cast_precision_loss, reason = "numbers of requests stay far below 2^53")]
    fn of_run(workers: &[u32], RunCounts(counts): &RunCounts) -> (f64, Vec<f64>) {
        let of = |worker: &u32| counts.get(*worker as usize).copied().unwrap_or_default() as f64;
        let all: f64 = workers.iter().map(of).sum();
        (all, workers.iter().map(|worker| of(worker) / all.max(1.0)).collect())
    }

    /// Returns the share of each worker if all served the same number of requests.
    #[must_use]
    pub fn even(&self) -> f64 {
        1.0 / f64::from(u32::try_from(self.workers.len().max(1)).unwrap_or(u32::MAX))
    }

    /// Returns the share above which the busiest worker counts as getting most of the requests: halfway
    /// between an even share and all of them, `(1 + 1/n) / 2` for `n` workers.
    #[must_use]
    pub fn most(&self) -> f64 {
        f64::midpoint(1.0, self.even())
    }

    /// Whether one worker gets most of the requests although there are other workers.
    #[must_use]
    pub(crate) fn one_gets_most(&self) -> bool {
        self.workers.len() > 1 && self.requests >= LEAST_REQUESTS && self.busiest.mean > self.most()
    }

    /// Returns the slot that chooses among its workers.
    pub(super) fn slot(&self) -> SlotKind {
        match self.role {
            Role::Prefill => SlotKind::Prefill,
            Role::Decode => SlotKind::Decode,
            Role::Aggregated => SlotKind::Aggregated,
        }
    }

    /// Returns the median of the shares.
    pub(crate) fn median(&self) -> f64 {
        median(&self.sorted().iter().map(|(_, share)| *share).collect::<Vec<_>>())
    }

    /// Returns the workers by their position, with their shares, the largest share first.
    pub(crate) fn sorted(&self) -> Vec<(u32, f64)> {
        let mut sorted: Vec<(u32, f64)> =
            self.workers.iter().copied().zip(self.shares.iter().copied()).collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(counts: &[&[u64]]) -> RoleShares {
        let roles = vec![Role::Aggregated; counts[0].len()];
        let runs: Vec<RunCounts> = counts.iter().map(|run| RunCounts(run.to_vec())).collect();
        RoleShares::over(&roles, &runs).remove(0)
    }

    #[test]
    fn one_gets_most_halfway_between_an_even_share_and_everything() {
        // The threshold is 75 % with two workers and 62.5 % with four.
        assert!(!shares(&[&[75, 25]]).one_gets_most() && shares(&[&[76, 24]]).one_gets_most());
        assert!(
            !shares(&[&[62, 13, 13, 12]]).one_gets_most() && shares(&[&[63, 13, 12, 12]]).one_gets_most()
        );
        // One worker is never judged, and neither are nine requests.
        assert!(!shares(&[&[100]]).one_gets_most() && !shares(&[&[9, 0]]).one_gets_most());
        // In each seed another worker is the busiest.
        let turns = shares(&[&[90, 10], &[10, 90]]);
        assert!(turns.one_gets_most() && turns.shares == [0.5, 0.5] && turns.requests > 99.0, "{turns:?}");
    }

    #[test]
    fn roles_have_shares_of_their_own_and_a_role_without_requests_none() {
        let roles = [Role::Prefill, Role::Decode, Role::Prefill, Role::Aggregated];
        let found = RoleShares::over(&roles, &[RunCounts(vec![30, 40, 10, 0])]);
        assert_eq!(found.iter().map(|one| one.role).collect::<Vec<_>>(), [Role::Prefill, Role::Decode]);
        assert_eq!((found[0].sorted(), found[0].median()), (vec![(0, 0.75), (2, 0.25)], 0.5));
    }
}
