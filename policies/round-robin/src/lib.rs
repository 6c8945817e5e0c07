//! Selector: each worker in turn. The host's state counts the decisions of each leg, so that all instances
//! and threads take part in one order.

use std::time::Duration;

use pointsman_policy_sdk::{Call, Decision, Error, Facts, Leg, NoSettings, Policy, Selector, Wants, state};

/// The configured policy. It reads no facts.
#[derive(Debug)]
pub struct RoundRobin;

impl Policy for RoundRobin {
    const NAME: &'static str = "round-robin";
    type Settings = NoSettings;

    fn configure(_: NoSettings, _: &mut Wants) -> Result<Self, String> {
        Ok(Self)
    }
}

/// Returns the key of a leg's count of decisions.
fn key(leg: Leg) -> &'static str {
    match leg {
        Leg::Aggregated => "aggregated",
        Leg::Prefill => "prefill",
        Leg::Decode => "decode",
    }
}

impl Selector for RoundRobin {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let rows = facts.rows() as u64;
        // Without a count the gateway's own selector decides.
        let Ok(count) = state::increment(key(call.leg), 1, Duration::ZERO) else {
            return Ok(Decision::Abstain);
        };
        let before = count.wrapping_sub(1).cast_unsigned();
        let row = before.checked_rem(rows).and_then(|row| usize::try_from(row).ok());
        Ok(row.map_or(Decision::Abstain, Decision::row))
    }
}

pointsman_policy_sdk::export!(selector RoundRobin);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases() {
        pointsman_policy_sdk::testing::run_selector::<RoundRobin>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn rows_follow_each_other_on_each_leg_by_itself() {
        let ask = |leg: Leg, rows: usize| {
            let call = Call { leg, rows: rows as u32, ..Call::default() };
            RoundRobin.select(&call, &Facts::new(&[], &[], rows)).unwrap()
        };
        let prefill: Vec<_> = (0..5)
            .map(|_| {
                ask(Leg::Decode, 2);
                ask(Leg::Prefill, 3)
            })
            .collect();
        let expected: Vec<_> = [0, 1, 2, 0, 1].map(Decision::row).into();
        assert_eq!(prefill, expected);
        assert_eq!(ask(Leg::Decode, 2), Decision::row(1));
    }
}
