//! Selector: chooses at random, in proportion to the free capacity of a worker under its concurrency limit.

use pointsman_policy_sdk::{
    Call, Column, Decision, Error, Facts, NoSettings, Policy, Rng, Selector, Wants, facts,
};

/// Free capacity of a worker without a limit, requests.
const UNLIMITED: u32 = 1_024;

/// The configured policy.
#[derive(Debug)]
pub struct WeightedRandom {
    requests: Column<u32>,
    limit: Column<u32>,
}

impl Policy for WeightedRandom {
    const NAME: &'static str = "weighted-random";
    type Settings = NoSettings;

    fn configure(_: NoSettings, wants: &mut Wants) -> Result<Self, String> {
        Ok(Self {
            requests: wants.worker(facts::ACTIVE_REQUESTS),
            limit: wants.worker(facts::MAX_CONCURRENCY),
        })
    }
}

impl Selector for WeightedRandom {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let rows = self.requests.slice(facts).iter().zip(self.limit.slice(facts));
        let room = rows.map(|(requests, limit)| {
            let limit = if *limit == 0 { UNLIMITED } else { *limit };
            u64::from(limit.saturating_sub(*requests))
        });
        let room: Vec<u64> = room.collect();
        let total: u64 = room.iter().sum();
        let Ok(bound) = usize::try_from(total) else { return Ok(Decision::Abstain) };
        if bound == 0 {
            return Ok(Decision::Abstain);
        }
        let mut left = Rng::new(call.seed).below(bound) as u64;
        for (row, room) in room.iter().enumerate() {
            if left < *room {
                return Ok(Decision::row(row));
            }
            left -= room;
        }
        Ok(Decision::Abstain)
    }
}

pointsman_policy_sdk::export!(selector WeightedRandom);

#[cfg(test)]
mod tests {
    use pointsman_policy_sdk::{configure, testing};

    use super::*;

    #[test]
    fn cases() {
        testing::run_selector::<WeightedRandom>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn draws_follow_the_room() {
        let (policy, wants) = configure::<WeightedRandom>("{}").unwrap();
        let row = |requests: f64| {
            testing::Values::from([("active-requests".into(), requests), ("max-concurrency".into(), 10.0)])
        };
        let words = testing::Words::lay_out(&wants, &testing::Values::new(), &[row(9.0), row(1.0)]);
        let second = (0..10_000).filter(|seed| {
            let call = Call { rows: 2, seed: *seed, ..Call::default() };
            policy.select(&call, &words.facts()) == Ok(Decision::row(1))
        });
        let share = second.count();
        assert!((8_850..9_150).contains(&share), "{share} of 10,000, 9,000 expected");
    }
}
