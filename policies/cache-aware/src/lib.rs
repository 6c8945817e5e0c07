//! Selector: the worker with the best cached prefix while the load is balanced, else the least loaded one.

mod rule;

use pointsman_policy_sdk::{
    Call, Column, Decision, Error, Facts, Policy, Rng, Selector, Slot, Wants, facts, least,
};
use rule::{Columns, Thresholds};

/// The policy, configured.
#[derive(Debug)]
pub struct CacheAware {
    thresholds: Thresholds,
    request_blocks: Slot<u32>,
    explain: Slot<u32>,
    requests: Column<u32>,
    decode_blocks: Column<u32>,
    total_blocks: Column<u32>,
    device: Column<u32>,
    host: Column<u32>,
    disk: Column<u32>,
}

impl Policy for CacheAware {
    const NAME: &'static str = "cache-aware";
    type Settings = Thresholds;

    fn configure(thresholds: Thresholds, wants: &mut Wants) -> Result<Self, String> {
        thresholds.check()?;
        Ok(Self {
            thresholds,
            request_blocks: wants.request(facts::REQUEST_BLOCKS),
            explain: wants.request(facts::EXPLAIN),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
            decode_blocks: wants.worker(facts::DECODE_BLOCKS),
            total_blocks: wants.worker(facts::TOTAL_BLOCKS),
            device: wants.worker(facts::CACHED_BLOCKS_DEVICE),
            host: wants.worker(facts::CACHED_BLOCKS_HOST),
            disk: wants.worker(facts::CACHED_BLOCKS_DISK),
        })
    }
}

impl Selector for CacheAware {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let columns = Columns {
            requests: self.requests.slice(facts),
            decode_blocks: self.decode_blocks.slice(facts),
            total_blocks: self.total_blocks.slice(facts),
            device: self.device.slice(facts),
            host: self.host.slice(facts),
            disk: self.disk.slice(facts),
        };
        let (branch, costs) = self.thresholds.costs(self.request_blocks.get(facts), &columns);
        let Some(row) = least(&costs, &mut Rng::new(call.seed)) else { return Ok(Decision::Abstain) };
        if self.explain.get(facts) != 1 {
            return Ok(Decision::row(row));
        }
        let row = u32::try_from(row).unwrap_or(u32::MAX);
        Ok(Decision::Choose { row, costs, reason: Some(branch.reason().to_owned()) })
    }
}

pointsman_policy_sdk::export!(selector CacheAware);

#[cfg(test)]
mod tests {
    use pointsman_policy_sdk::{configure, testing};

    use super::*;

    #[test]
    fn cases() {
        testing::run_selector::<CacheAware>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn asked_why_it_tells_the_costs_and_the_branch() {
        let (policy, wants) = configure::<CacheAware>("{}").unwrap();
        let request = testing::Values::from([("explain".into(), 1.0), ("request-blocks".into(), 4.0)]);
        let row = |cached: f64| testing::Values::from([("cached-blocks-device".into(), cached)]);
        let words = testing::Words::lay_out(&wants, &request, &[row(1.0), row(4.0)]);
        let decision = policy.select(&Call { rows: 2, ..Call::default() }, &words.facts()).unwrap();
        let reason = Some("best match".to_owned());
        assert_eq!(decision, Decision::Choose { row: 1, costs: vec![0.75, 0.0], reason });
    }
}
