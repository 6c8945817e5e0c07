//! Scorer for `normalize = "unit"`: the free share of a worker's KV cache, in [0, 1], higher is better. A
//! worker whose engine does not tell it has the mean of the others.

use pointsman_policy_sdk::{Call, Column, Error, Facts, NoSettings, Policy, Scorer, Wants, facts};

/// The configured policy.
#[derive(Debug)]
pub struct KvUtilization {
    usage: Column<f32>,
    known: Column<u32>,
}

impl Policy for KvUtilization {
    const NAME: &'static str = "kv-utilization";
    type Settings = NoSettings;

    fn configure(_: NoSettings, wants: &mut Wants) -> Result<Self, String> {
        Ok(Self { usage: wants.worker(facts::KV_USAGE), known: wants.worker(facts::KV_USAGE_KNOWN) })
    }
}

impl Scorer for KvUtilization {
    fn score(&self, _: &Call, facts: &Facts<'_>) -> Result<Vec<f32>, Error> {
        let free = |usage: f32| 1.0 - usage.clamp(0.0, 1.0);
        let rows = || self.usage.slice(facts).iter().zip(self.known.slice(facts));
        let (sum, count) = rows()
            .filter(|(_, known)| **known == 1)
            .fold((0.0, 0.0), |(sum, count), (usage, _)| (sum + free(*usage), count + 1.0));
        let mean = if count > 0.0 { sum / count } else { 0.5 };
        Ok(rows().map(|(usage, known)| if *known == 1 { free(*usage) } else { mean }).collect())
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
