//! Selector: the less loaded of two candidates drawn at random.

mod draw;

use draw::Pair;
use pointsman_policy_sdk::{
    Call, Column, Decision, Error, Facts, NoSettings, Policy, Rng, Selector, Slot, Wants, facts,
};

/// The configured policy.
#[derive(Debug)]
pub struct PowerOfTwo {
    explain: Slot<u32>,
    requests: Column<u32>,
    prefill_tokens: Column<u32>,
}

impl Policy for PowerOfTwo {
    const NAME: &'static str = "power-of-two";
    type Settings = NoSettings;

    fn configure(_: NoSettings, wants: &mut Wants) -> Result<Self, String> {
        Ok(Self {
            explain: wants.request(facts::EXPLAIN),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
            prefill_tokens: wants.worker(facts::ACTIVE_PREFILL_TOKENS),
        })
    }
}

impl Selector for PowerOfTwo {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let requests = self.requests.slice(facts);
        let Some(pair) = Pair::draw(requests.len(), &mut Rng::new(call.seed)) else {
            return Ok(Decision::Abstain);
        };
        let row = pair.less_loaded(requests, self.prefill_tokens.slice(facts));
        if self.explain.get(facts) != 1 {
            return Ok(Decision::row(row));
        }
        let row = u32::try_from(row).unwrap_or(u32::MAX);
        let reason = Some(format!("drew rows {} and {}", pair.first, pair.second));
        Ok(Decision::Choose { row, costs: costs(requests), reason })
    }
}

/// Returns the costs for an explanation: the active requests of every row.
#[expect(clippy::cast_precision_loss, reason = "loads are far below 2^24")]
fn costs(requests: &[u32]) -> Vec<f32> {
    requests.iter().map(|requests| *requests as f32).collect()
}

pointsman_policy_sdk::export!(selector PowerOfTwo);

#[cfg(test)]
mod tests {
    use pointsman_policy_sdk::{configure, testing};

    use super::*;

    #[test]
    fn cases() {
        testing::run_selector::<PowerOfTwo>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn asked_why_it_tells_the_loads_and_whom_it_drew() {
        let (policy, wants) = configure::<PowerOfTwo>("{}").unwrap();
        let request = testing::Values::from([("explain".into(), 1.0)]);
        let row = |requests: f64| testing::Values::from([("active-requests".into(), requests)]);
        let words = testing::Words::lay_out(&wants, &request, &[row(3.0), row(1.0)]);
        let call = Call { rows: 2, seed: 7, ..Call::default() };
        match policy.select(&call, &words.facts()).unwrap() {
            Decision::Choose { row: 1, costs, reason: Some(reason) } => {
                assert_eq!(costs, [3.0, 1.0]);
                assert!(reason == "drew rows 0 and 1" || reason == "drew rows 1 and 0", "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
}
