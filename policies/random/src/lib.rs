//! Selector: one of the workers, uniformly at random.

use pointsman_policy_sdk::{Call, Decision, Error, Facts, NoSettings, Policy, Rng, Selector, Wants};

/// The configured policy. It reads no facts.
#[derive(Debug)]
pub struct Random;

impl Policy for Random {
    const NAME: &'static str = "random";
    type Settings = NoSettings;

    fn configure(_: NoSettings, _: &mut Wants) -> Result<Self, String> {
        Ok(Self)
    }
}

impl Selector for Random {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let rows = facts.rows();
        if rows == 0 {
            return Ok(Decision::Abstain);
        }
        Ok(Decision::row(Rng::new(call.seed).below(rows)))
    }
}

pointsman_policy_sdk::export!(selector Random);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases() {
        pointsman_policy_sdk::testing::run_selector::<Random>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn every_row_is_as_likely() {
        let mut counts = [0_u32; 4];
        for seed in 0..8_000 {
            let call = Call { rows: 4, seed, ..Call::default() };
            match Random.select(&call, &Facts::new(&[], &[], 4)).unwrap() {
                Decision::Choose { row, .. } => counts[row as usize] += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(counts.iter().all(|count| (1_850..2_150).contains(count)), "{counts:?}");
    }
}
