//! Decode override: prefills on the decode worker where that is predicted to save more than a step of
//! computation.

mod rule;

use pointsman_policy_sdk::{Call, Column, DecodeOverride, Error, Facts, Plan, Policy, Slot, Wants, facts};
pub use rule::Settings;
use rule::{Load, Prompt, Worker};

/// The configured policy.
#[derive(Debug)]
pub struct PredictedDisagg {
    settings: Settings,
    prompt_tokens: Slot<u32>,
    block_size: Slot<u32>,
    itl_target: Slot<u32>,
    waiting: Column<u32>,
    cached: Column<u32>,
    requests: Column<u32>,
    running: Column<u32>,
    queue: Column<u32>,
    kv_usage: Column<f32>,
    load_age: Column<u32>,
    prefill_time: Column<u32>,
    local_prefill: Column<u32>,
}

impl Policy for PredictedDisagg {
    const NAME: &'static str = "predicted-disagg";
    type Settings = Settings;

    fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
        settings.check()?;
        Ok(Self {
            settings,
            prompt_tokens: wants.request(facts::PROMPT_TOKENS),
            block_size: wants.request(facts::BLOCK_SIZE),
            itl_target: wants.request(facts::ITL_TARGET_US),
            waiting: wants.worker(facts::ACTIVE_PREFILL_TOKENS),
            cached: wants.worker(facts::CACHED_BLOCKS_DEVICE),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
            running: wants.worker(facts::ENGINE_RUNNING),
            queue: wants.worker(facts::ENGINE_QUEUE),
            kv_usage: wants.worker(facts::KV_USAGE),
            load_age: wants.worker(facts::LOAD_AGE_MS),
            prefill_time: wants.worker(facts::PREFILL_US_PER_KTOKEN),
            local_prefill: wants.worker(facts::LOCAL_PREFILL),
        })
    }
}

impl PredictedDisagg {
    fn worker(&self, facts: &Facts<'_>, row: usize) -> Worker {
        Worker { waiting: self.waiting.at(facts, row), cached: self.cached.at(facts, row) }
    }

    fn load(&self, decode: &Facts<'_>) -> Load {
        Load {
            booked: self.requests.at(decode, 0),
            running: self.running.at(decode, 0),
            queue: self.queue.at(decode, 0),
            kv_usage: self.kv_usage.at(decode, 0),
            age: self.load_age.at(decode, 0),
            prefill_time: self.prefill_time.at(decode, 0),
        }
    }
}

impl DecodeOverride for PredictedDisagg {
    fn decide(&self, _: &Call, decode: &Facts<'_>, prefill: &Facts<'_>) -> Result<Plan, Error> {
        // Routing tells why no prefill worker can serve.
        if decode.rows() == 0 || prefill.rows() == 0 || self.local_prefill.at(decode, 0) != 1 {
            return Ok(Plan::Remote);
        }
        let prompt = Prompt {
            tokens: self.prompt_tokens.get(decode),
            block: self.block_size.get(decode).max(1),
            itl_target: self.itl_target.get(decode),
        };
        let workers = (0..prefill.rows()).map(|row| self.worker(prefill, row));
        let local = self.settings.is_local(prompt, self.worker(decode, 0), self.load(decode), workers);
        Ok(if local { Plan::Local } else { Plan::Remote })
    }
}

pointsman_policy_sdk::export!(decode_override PredictedDisagg);

#[cfg(test)]
mod tests {
    use pointsman_policy_sdk::testing;

    use super::*;

    #[test]
    fn cases() {
        testing::run_decode_override::<PredictedDisagg>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn a_setting_out_of_range_is_refused() {
        let settings = Settings { margin_tokens: -1.0, ..Settings::default() };
        let error = PredictedDisagg::configure(settings, &mut Wants::default()).unwrap_err();
        assert_eq!(error, "margin-tokens: -1 is not a finite number of 0 to 1000000");
    }
}
