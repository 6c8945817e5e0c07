//! Filter: keeps the workers with a short engine queue. When no queue is short, keeps the shortest. Keeps
//! workers whose engines do not tell their queues.

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
    known: Column<u32>,
}

impl Policy for LowQueue {
    const NAME: &'static str = "low-queue";
    type Settings = Settings;

    fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
        let (queue, known) = (wants.worker(facts::ENGINE_QUEUE), wants.worker(facts::ENGINE_QUEUE_KNOWN));
        Ok(Self { settings, queue, known })
    }
}

impl Filter for LowQueue {
    fn keep(&self, _: &Call, facts: &Facts<'_>) -> Result<Vec<u32>, Error> {
        let rows = || self.queue.slice(facts).iter().zip(self.known.slice(facts));
        let known = rows().filter(|(_, known)| **known == 1).map(|(queue, _)| *queue);
        let limit = self.settings.threshold.max(known.min().unwrap_or(0));
        let keeps = |(queue, known): (&u32, &u32)| *known == 0 || *queue <= limit;
        Ok((0_u32..).zip(rows()).filter(|(_, figures)| keeps(*figures)).map(|(row, _)| row).collect())
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
