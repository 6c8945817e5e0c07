//! Selector: the least loaded worker. Ties are drawn uniformly.

mod load;

use load::Weights;
use pointsman_policy_sdk::{
    Call, Column, Decision, Error, Facts, Policy, Rng, Selector, Slot, Wants, facts, least,
};

/// The configured policy.
#[derive(Debug)]
pub struct LeastLoaded {
    weights: Weights,
    explain: Slot<u32>,
    requests: Column<u32>,
    prefill_tokens: Column<u32>,
    queue: Column<u32>,
    queue_known: Column<u32>,
}

impl Policy for LeastLoaded {
    const NAME: &'static str = "least-loaded";
    type Settings = Weights;

    fn configure(weights: Weights, wants: &mut Wants) -> Result<Self, String> {
        weights.check()?;
        Ok(Self {
            weights,
            explain: wants.request(facts::EXPLAIN),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
            prefill_tokens: wants.worker(facts::ACTIVE_PREFILL_TOKENS),
            queue: wants.worker(facts::ENGINE_QUEUE),
            queue_known: wants.worker(facts::ENGINE_QUEUE_KNOWN),
        })
    }
}

impl Selector for LeastLoaded {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let costs = self.weights.costs(
            self.requests.slice(facts),
            self.prefill_tokens.slice(facts),
            self.queue.slice(facts),
            self.queue_known.slice(facts),
        );
        let Some(row) = least(&costs, &mut Rng::new(call.seed)) else { return Ok(Decision::Abstain) };
        let explain = self.explain.get(facts) == 1;
        let row = u32::try_from(row).unwrap_or(u32::MAX);
        Ok(Decision::Choose { row, costs: if explain { costs } else { Vec::new() }, reason: None })
    }
}

pointsman_policy_sdk::export!(selector LeastLoaded);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases() {
        pointsman_policy_sdk::testing::run_selector::<LeastLoaded>(include_str!("../cases.toml")).unwrap();
    }
}
