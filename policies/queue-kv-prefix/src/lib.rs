//! Scorer: engine queue, KV usage, cached prefix and further scores of llm-d, weighted as it does by default.

mod scores;

use std::borrow::Cow;

use pointsman_policy_sdk::{Call, Column, Error, Facts, Policy, Scorer, Slot, Wants, facts};
use scores::{Columns, NO_FIGURES, Prompt, Settings};

/// The configured policy.
#[derive(Debug)]
pub struct QueueKvPrefix {
    settings: Settings,
    request_blocks: Slot<u32>,
    queue: Column<u32>,
    kv_usage: Column<f32>,
    load_age_ms: Column<u32>,
    /// Whether each of the figures with a weight is known.
    known: Vec<Column<u32>>,
    device: Column<u32>,
    host: Column<u32>,
    disk: Column<u32>,
    extra: Extra,
}

/// Facts of the scores that have no weight by default.
#[derive(Debug)]
struct Extra {
    block_size: Option<Slot<u32>>,
    running: Option<Column<u32>>,
    active: Option<Column<u32>>,
    prefill_tokens: Option<Column<u32>>,
    lora_loaded: Option<Column<u32>>,
}

impl Policy for QueueKvPrefix {
    const NAME: &'static str = "queue-kv-prefix";
    type Settings = Settings;

    fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
        settings.check()?;
        let figures = [
            (settings.queue + settings.load, facts::ENGINE_QUEUE_KNOWN),
            (settings.kv, facts::KV_USAGE_KNOWN),
            (settings.running, facts::ENGINE_RUNNING_KNOWN),
        ];
        let known = figures.into_iter().filter(|(weight, _)| *weight > 0.0);
        let known = known.map(|(_, fact)| wants.worker(fact)).collect();
        let mut column = |weight: f32, fact| (weight > 0.0).then(|| wants.worker(fact));
        let extra = Extra {
            running: column(settings.running, facts::ENGINE_RUNNING),
            active: column(settings.active, facts::ACTIVE_REQUESTS),
            prefill_tokens: column(settings.tokens, facts::ACTIVE_PREFILL_TOKENS),
            lora_loaded: column(settings.lora, facts::LORA_LOADED),
            block_size: (settings.tokens > 0.0).then(|| wants.request(facts::BLOCK_SIZE)),
        };
        Ok(Self {
            settings,
            extra,
            known,
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
        let known = self.known.iter().map(|column| column.slice(facts));
        let load_age_ms = ages(self.load_age_ms.slice(facts), known);
        let columns = Columns {
            queue: self.queue.slice(facts),
            kv_usage: self.kv_usage.slice(facts),
            load_age_ms: &load_age_ms,
            device: self.device.slice(facts),
            host: self.host.slice(facts),
            disk: self.disk.slice(facts),
            running: self.extra.running.map_or(&[], |column| column.slice(facts)),
            active: self.extra.active.map_or(&[], |column| column.slice(facts)),
            prefill_tokens: self.extra.prefill_tokens.map_or(&[], |column| column.slice(facts)),
            lora_loaded: self.extra.lora_loaded.map_or(&[], |column| column.slice(facts)),
        };
        let block_size = self.extra.block_size.map_or(0, |slot| slot.get(facts));
        let prompt = Prompt { blocks: self.request_blocks.get(facts), block_size };
        Ok(self.settings.costs(prompt, &columns))
    }
}

/// Returns the age of the figures of each row: none where one of them is not known.
fn ages<'a>(ages: &'a [u32], known: impl Iterator<Item = &'a [u32]> + Clone) -> Cow<'a, [u32]> {
    if known.clone().flatten().all(|known| *known == 1) {
        return Cow::Borrowed(ages);
    }
    let mut ages = ages.to_vec();
    for column in known {
        for (age, _) in ages.iter_mut().zip(column).filter(|(_, known)| **known == 0) {
            *age = NO_FIGURES;
        }
    }
    Cow::Owned(ages)
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
