//! Scorer: engine queue, KV usage and cached prefix, weighted as llm-d does by default.

mod scores;

use pointsman_policy_sdk::{Call, Column, Error, Facts, Policy, Scorer, Slot, Wants, facts};
use scores::{Columns, Settings};

/// The configured policy.
#[derive(Debug)]
pub struct QueueKvPrefix {
    settings: Settings,
    request_blocks: Slot<u32>,
    queue: Column<u32>,
    kv_usage: Column<f32>,
    load_age_ms: Column<u32>,
    device: Column<u32>,
    host: Column<u32>,
    disk: Column<u32>,
}

impl Policy for QueueKvPrefix {
    const NAME: &'static str = "queue-kv-prefix";
    type Settings = Settings;

    fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
        settings.check()?;
        Ok(Self {
            settings,
            request_blocks: wants.request(facts::REQUEST_BLOCKS),
            queue: wants.worker(facts::ENGINE_QUEUE),
            kv_usage: wants.worker(facts::KV_USAGE),
            load_age_ms: wants.worker(facts::LOAD_AGE_MS),
            device: wants.worker(facts::CACHED_BLOCKS_DEVICE),
            host: wants.worker(facts::CACHED_BLOCKS_HOST),
            disk: wants.worker(facts::CACHED_BLOCKS_DISK),
        })
    }
}

impl Scorer for QueueKvPrefix {
    fn score(&self, _: &Call, facts: &Facts<'_>) -> Result<Vec<f32>, Error> {
        let columns = Columns {
            queue: self.queue.slice(facts),
            kv_usage: self.kv_usage.slice(facts),
            load_age_ms: self.load_age_ms.slice(facts),
            device: self.device.slice(facts),
            host: self.host.slice(facts),
            disk: self.disk.slice(facts),
        };
        Ok(self.settings.costs(self.request_blocks.get(facts), &columns))
    }
}

pointsman_policy_sdk::export!(scorer QueueKvPrefix);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases() {
        pointsman_policy_sdk::testing::run_scorer::<QueueKvPrefix>(include_str!("../cases.toml")).unwrap();
    }
}
