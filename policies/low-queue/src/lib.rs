//! Filter: keeps the workers with a short engine queue. When no queue is short, keeps the shortest.

use pointsman_policy_sdk::{Call, Column, Error, Facts, Filter, Policy, Wants, facts};
use serde::Deserialize;

/// Settings of the operator.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Longest queue that counts as short, requests.
    pub threshold: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { threshold: 128 }
    }
}

/// The configured policy.
#[derive(Debug)]
pub struct LowQueue {
    settings: Settings,
    queue: Column<u32>,
}

impl Policy for LowQueue {
    const NAME: &'static str = "low-queue";
    type Settings = Settings;

    fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
        Ok(Self { settings, queue: wants.worker(facts::ENGINE_QUEUE) })
    }
}

impl Filter for LowQueue {
    fn keep(&self, _: &Call, facts: &Facts<'_>) -> Result<Vec<u32>, Error> {
        let queue = self.queue.slice(facts);
        let shortest = queue.iter().copied().min().unwrap_or(0);
        let limit = self.settings.threshold.max(shortest);
        Ok((0_u32..).zip(queue).filter(|(_, waiting)| **waiting <= limit).map(|(row, _)| row).collect())
    }
}

pointsman_policy_sdk::export!(filter LowQueue);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases() {
        pointsman_policy_sdk::testing::run_filter::<LowQueue>(include_str!("../cases.toml")).unwrap();
    }
}
