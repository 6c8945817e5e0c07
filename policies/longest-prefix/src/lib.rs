//! Selector: the longest cached prefix, else the fewest active requests.

mod rule;

use pointsman_policy_sdk::{
    Call, Column, Decision, Error, Facts, NoSettings, Policy, Selector, Slot, Wants, facts,
};
use rule::Columns;

/// The configured policy.
#[derive(Debug)]
pub struct LongestPrefix {
    explain: Slot<u32>,
    requests: Column<u32>,
    device: Column<u32>,
    host: Column<u32>,
    disk: Column<u32>,
}

impl Policy for LongestPrefix {
    const NAME: &'static str = "longest-prefix";
    type Settings = NoSettings;

    fn configure(_: NoSettings, wants: &mut Wants) -> Result<Self, String> {
        Ok(Self {
            explain: wants.request(facts::EXPLAIN),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
            device: wants.worker(facts::CACHED_BLOCKS_DEVICE),
            host: wants.worker(facts::CACHED_BLOCKS_HOST),
            disk: wants.worker(facts::CACHED_BLOCKS_DISK),
        })
    }
}

impl Selector for LongestPrefix {
    fn select(&self, _: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let columns = Columns {
            requests: self.requests.slice(facts),
            device: self.device.slice(facts),
            host: self.host.slice(facts),
            disk: self.disk.slice(facts),
        };
        let Some(choice) = columns.choose() else { return Ok(Decision::Abstain) };
        if self.explain.get(facts) != 1 {
            return Ok(Decision::row(choice.row()));
        }
        let row = u32::try_from(choice.row()).unwrap_or(u32::MAX);
        let reason = Some(choice.reason().to_owned());
        Ok(Decision::Choose { row, costs: choice.costs(&columns), reason })
    }
}

pointsman_policy_sdk::export!(selector LongestPrefix);

#[cfg(test)]
mod tests {
    use pointsman_policy_sdk::{configure, testing};

    use super::*;

    #[test]
    fn cases() {
        testing::run_selector::<LongestPrefix>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn asked_why_it_tells_the_costs_and_what_decided() {
        let (policy, wants) = configure::<LongestPrefix>("{}").unwrap();
        let request = testing::Values::from([("explain".into(), 1.0)]);
        let row = |cached: f64| testing::Values::from([("cached-blocks-device".into(), cached)]);
        let words = testing::Words::lay_out(&wants, &request, &[row(1.0), row(4.0)]);
        let decision = policy.select(&Call { rows: 2, ..Call::default() }, &words.facts()).unwrap();
        let reason = Some("longest cached prefix".to_owned());
        assert_eq!(decision, Decision::Choose { row: 1, costs: vec![3.0, 0.0], reason });
    }
}
