//! Scorer that learns. The cost is the moving average of a worker's time to first token, kept in the host's
//! state, times the number of its requests with this one. A small share of decisions gives a random row the
//! cost 0, so that slow workers are tried again.

use std::{collections::BTreeMap, time::Duration};

use pointsman_policy_sdk::{
    Call, Column, Error, Facts, Moment, Outcome, Policy, Rng, Scorer, Wants, facts, state,
};
use serde::Deserialize;

/// Settings of the operator.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Weight of a new time in the moving average, above 0 and at most 1.
    pub weight: f64,
    /// Share of decisions that explore, 0 to 1.
    pub explore: f64,
    /// Time that a failed leg counts as, milliseconds.
    pub failure_ms: u32,
    /// Time after which a worker without outcomes is unknown again, milliseconds.
    pub forget_ms: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { weight: 0.2, explore: 0.02, failure_ms: 2_000, forget_ms: 600_000 }
    }
}

/// The configured policy.
#[derive(Debug)]
pub struct LearnedTtft {
    settings: Settings,
    worker: Column<u64>,
    rank: Column<u32>,
    requests: Column<u32>,
}

/// A worker's id and data-parallel rank.
type Candidate = (u64, u32);

impl Policy for LearnedTtft {
    const NAME: &'static str = "learned-ttft";
    type Settings = Settings;

    fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
        let Settings { weight, explore, .. } = settings;
        if !(weight > 0.0 && weight <= 1.0) {
            return Err(format!("weight: {weight} is not above 0 and at most 1"));
        }
        if !(0.0..=1.0).contains(&explore) {
            return Err(format!("explore: {explore} is not within 0 to 1"));
        }
        Ok(Self {
            settings,
            worker: wants.worker(facts::WORKER_ID),
            rank: wants.worker(facts::DP_RANK),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
        })
    }

    /// Updates the averages. Only one instance observes at a time, so that reading and writing need no lock.
    fn observe(&self, _: &Moment, outcomes: &[Outcome]) {
        let mut averages: BTreeMap<Candidate, i64> = BTreeMap::new();
        for outcome in outcomes {
            let Some(new) = self.time(outcome) else { continue };
            let candidate = (outcome.worker_id, outcome.dp_rank);
            let old = averages.get(&candidate).copied().or_else(|| learnt(candidate));
            averages.insert(candidate, old.map_or(new, |old| average(old, new, self.settings.weight)));
        }
        let life = Duration::from_millis(u64::from(self.settings.forget_ms));
        for (candidate, average) in averages {
            // When the state is full, the old average stays.
            let _ = state::set(&key(candidate), &average.to_le_bytes(), life);
        }
    }
}

impl LearnedTtft {
    /// Returns the time that an outcome counts as, microseconds. `None`: no first token was seen, because the
    /// client disconnected before it or the answer was not streamed.
    fn time(&self, outcome: &Outcome) -> Option<i64> {
        let failed = outcome.retried || outcome.status >= 500;
        match outcome.ttft_us {
            Some(time) if !failed => Some(i64::from(time)),
            _ => failed.then(|| i64::from(self.settings.failure_ms) * 1_000),
        }
    }
}

impl Scorer for LearnedTtft {
    fn score(&self, call: &Call, facts: &Facts<'_>) -> Result<Vec<f32>, Error> {
        let requests = self.requests.slice(facts);
        let rows = requests.len();
        let times: Vec<Option<i64>> =
            (0..rows).map(|row| learnt((self.worker.at(facts, row), self.rank.at(facts, row)))).collect();
        // An unknown worker counts as fast as the fastest known one.
        let quickest = times.iter().flatten().copied().min().unwrap_or(1);
        #[expect(
            clippy::cast_precision_loss,
            reason = "microseconds and requests are far below 2^24 of what matters"
        )]
        let cost = |(time, requests): (&Option<i64>, &u32)| {
            time.unwrap_or(quickest).max(1) as f32 / 1e3 * (*requests as f32 + 1.0)
        };
        let mut costs: Vec<f32> = times.iter().zip(requests).map(cost).collect();
        let mut rng = Rng::new(call.seed);
        if rows > 1 && rng.unit() < self.settings.explore {
            costs[rng.below(rows)] = 0.0;
        }
        Ok(costs)
    }
}

fn key((worker, rank): Candidate) -> String {
    format!("{worker:x}/{rank}")
}

/// Returns the moving average of a candidate, microseconds.
fn learnt(candidate: Candidate) -> Option<i64> {
    state::number(&key(candidate))
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "microseconds of hours fit a double"
)]
fn average(old: i64, new: i64, weight: f64) -> i64 {
    old + ((new - old) as f64 * weight).round() as i64
}

pointsman_policy_sdk::export!(scorer LearnedTtft, learning);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases() {
        pointsman_policy_sdk::testing::run_scorer::<LearnedTtft>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn the_average_goes_to_where_the_times_are_and_never_beyond() {
        let mut average_now = 100_000;
        for _ in 0..60 {
            let next = average(average_now, 5_000, 0.2);
            assert!((5_000..average_now).contains(&next) || next == average_now, "{next}");
            average_now = next;
        }
        assert!(average_now < 5_005, "{average_now}");
    }
}
