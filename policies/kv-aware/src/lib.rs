//! Scorer: prefix overlap and load in one cost (G).

pub mod cost;

use cost::{Columns, Weights, costs};
use pointsman_policy_sdk::{Call, Column, Error, Facts, NoSettings, Policy, Scorer, Slot, Wants, facts};

/// The configured policy. Its parameters are facts: the router settings of the request.
#[derive(Debug)]
pub struct KvAware {
    prompt_tokens: Slot<u32>,
    block_size: Slot<u32>,
    credit: Slot<f32>,
    host_credit: Slot<f32>,
    disk_credit: Slot<f32>,
    load_scale: Slot<f32>,
    request_weight: Slot<f32>,
    track: Slot<u32>,
    prefill_tokens: Column<u32>,
    decode_blocks: Column<u32>,
    requests: Column<u32>,
    device: Column<u32>,
    host: Column<u32>,
    disk: Column<u32>,
    preference: Column<f32>,
}

impl Policy for KvAware {
    const NAME: &'static str = "kv-aware";
    type Settings = NoSettings;

    fn configure(_: NoSettings, wants: &mut Wants) -> Result<Self, String> {
        Ok(Self {
            prompt_tokens: wants.request(facts::PROMPT_TOKENS),
            block_size: wants.request(facts::BLOCK_SIZE),
            credit: wants.request(facts::OVERLAP_SCORE_CREDIT),
            host_credit: wants.request(facts::HOST_CACHE_CREDIT),
            disk_credit: wants.request(facts::DISK_CACHE_CREDIT),
            load_scale: wants.request(facts::PREFILL_LOAD_SCALE),
            request_weight: wants.request(facts::ACTIVE_REQUEST_WEIGHT),
            track: wants.request(facts::TRACK_PREFILL_TOKENS),
            prefill_tokens: wants.worker(facts::ACTIVE_PREFILL_TOKENS),
            decode_blocks: wants.worker(facts::DECODE_BLOCKS),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
            device: wants.worker(facts::CACHED_BLOCKS_DEVICE),
            host: wants.worker(facts::CACHED_BLOCKS_HOST),
            disk: wants.worker(facts::CACHED_BLOCKS_DISK),
            preference: wants.worker(facts::TAINT_PREFERENCE),
        })
    }
}

impl Scorer for KvAware {
    fn score(&self, _: &Call, facts: &Facts<'_>) -> Result<Vec<f32>, Error> {
        let weights = Weights {
            prompt_tokens: self.prompt_tokens.get(facts),
            block_size: self.block_size.get(facts),
            credit: self.credit.get(facts),
            host_credit: self.host_credit.get(facts),
            disk_credit: self.disk_credit.get(facts),
            load_scale: self.load_scale.get(facts),
            request_weight: self.request_weight.get(facts),
            track_prefill_tokens: self.track.get(facts) == 1,
        };
        let columns = Columns {
            prefill_tokens: self.prefill_tokens.slice(facts),
            decode_blocks: self.decode_blocks.slice(facts),
            requests: self.requests.slice(facts),
            device: self.device.slice(facts),
            host: self.host.slice(facts),
            disk: self.disk.slice(facts),
            preference: self.preference.slice(facts),
        };
        Ok(costs(&weights, &columns))
    }
}

pointsman_policy_sdk::export!(scorer KvAware);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn g_cases() {
        // G1.1, G1.2, G1.3, G1.4: cases.toml has cases of each
        pointsman_policy_sdk::testing::run_scorer::<KvAware>(include_str!("../cases.toml")).unwrap();
    }
}
