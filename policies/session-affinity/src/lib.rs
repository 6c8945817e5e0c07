//! Selector: keeps a session on its worker.

mod affinity;

use affinity::{Row, Settings, key};
use pointsman_policy_sdk::{Call, Column, Decision, Error, Facts, Policy, Rng, Selector, Slot, Wants, facts};

/// The configured policy.
#[derive(Debug)]
pub struct SessionAffinity {
    settings: Settings,
    session: Slot<u64>,
    explain: Slot<u32>,
    worker: Column<u64>,
    rank: Column<u32>,
    requests: Column<u32>,
    bound: Column<u32>,
}

impl Policy for SessionAffinity {
    const NAME: &'static str = "session-affinity";
    type Settings = Settings;

    fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
        Ok(Self {
            settings,
            session: wants.request(facts::SESSION_HASH),
            explain: wants.request(facts::EXPLAIN),
            worker: wants.worker(facts::WORKER_ID),
            rank: wants.worker(facts::DP_RANK),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
            bound: wants.worker(facts::SESSION_BOUND),
        })
    }
}

impl SessionAffinity {
    fn rows(&self, facts: &Facts<'_>) -> Vec<Row> {
        let columns =
            self.requests.slice(facts).iter().zip(self.bound.slice(facts)).zip(self.rank.slice(facts));
        let rows = columns.enumerate().map(|(row, ((requests, bound), rank))| Row {
            requests: *requests,
            bound: *bound == 1,
            key: key(self.worker.at(facts, row), *rank),
        });
        rows.collect()
    }
}

impl Selector for SessionAffinity {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let session = self.session.get(facts);
        let rows = self.rows(facts);
        let Some((row, why)) = self.settings.choose(session, &rows, &mut Rng::new(call.seed)) else {
            return Ok(Decision::Abstain);
        };
        if self.explain.get(facts) != 1 {
            return Ok(Decision::row(row));
        }
        let costs = self.settings.costs(session, &rows, row, why);
        let row = u32::try_from(row).unwrap_or(u32::MAX);
        Ok(Decision::Choose { row, costs, reason: Some(why.reason().to_owned()) })
    }
}

pointsman_policy_sdk::export!(selector SessionAffinity);

#[cfg(test)]
mod tests {
    use pointsman_policy_sdk::{configure, testing};

    use super::*;

    #[test]
    fn cases() {
        testing::run_selector::<SessionAffinity>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn asked_why_it_tells_the_costs_and_the_reason() {
        let (policy, wants) = configure::<SessionAffinity>("{}").unwrap();
        let request = testing::Values::from([("explain".into(), 1.0)]);
        let row = |requests: f64| testing::Values::from([("active-requests".into(), requests)]);
        let words = testing::Words::lay_out(&wants, &request, &[row(3.0), row(1.0)]);
        let decision = policy.select(&Call { rows: 2, ..Call::default() }, &words.facts()).unwrap();
        let reason = Some("no session: least loaded".to_owned());
        assert_eq!(decision, Decision::Choose { row: 1, costs: vec![3.0, 1.0], reason });
    }
}
