//! Scorer for `normalize = "unit"`: the free share of a worker's KV cache, in [0, 1], higher is better.

use pointsman_policy_sdk::{Call, Column, Error, Facts, NoSettings, Policy, Scorer, Wants, facts};

/// The configured policy.
#[derive(Debug)]
pub struct KvUtilization {
    usage: Column<f32>,
}

impl Policy for KvUtilization {
    const NAME: &'static str = "kv-utilization";
    type Settings = NoSettings;

    fn configure(_: NoSettings, wants: &mut Wants) -> Result<Self, String> {
        Ok(Self { usage: wants.worker(facts::KV_USAGE) })
    }
}

impl Scorer for KvUtilization {
    fn score(&self, _: &Call, facts: &Facts<'_>) -> Result<Vec<f32>, Error> {
        Ok(self.usage.slice(facts).iter().map(|usage| 1.0 - usage.clamp(0.0, 1.0)).collect())
    }
}

pointsman_policy_sdk::export!(scorer KvUtilization);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases() {
        pointsman_policy_sdk::testing::run_scorer::<KvUtilization>(include_str!("../cases.toml")).unwrap();
    }
}
