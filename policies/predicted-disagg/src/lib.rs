//! Decode override: prefills on the decode worker where that is predicted to save more than a step of
//! computation.

mod rule;

use pointsman_policy_sdk::{Call, Column, DecodeOverride, Error, Facts, Plan, Policy, Slot, Wants, facts};
pub use rule::Settings;
use rule::{Prompt, Worker};

/// The configured policy.
#[derive(Debug)]
pub struct PredictedDisagg {
    settings: Settings,
    prompt_tokens: Slot<u32>,
    block_size: Slot<u32>,
    waiting: Column<u32>,
    requests: Column<u32>,
    cached: Column<u32>,
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
            waiting: wants.worker(facts::ACTIVE_PREFILL_TOKENS),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
            cached: wants.worker(facts::CACHED_BLOCKS_DEVICE),
            local_prefill: wants.worker(facts::LOCAL_PREFILL),
        })
    }
}

impl PredictedDisagg {
    fn worker(&self, facts: &Facts<'_>, row: usize) -> Worker {
        Worker {
            waiting: self.waiting.at(facts, row),
            requests: self.requests.at(facts, row),
            cached: self.cached.at(facts, row),
        }
    }
}

impl DecodeOverride for PredictedDisagg {
    fn decide(&self, _: &Call, decode: &Facts<'_>, prefill: &Facts<'_>) -> Result<Plan, Error> {
        // Routing tells why no prefill worker can serve.
        if decode.rows() == 0 || prefill.rows() == 0 || self.local_prefill.at(decode, 0) != 1 {
            return Ok(Plan::Remote);
        }
        let prompt =
            Prompt { tokens: self.prompt_tokens.get(decode), block: self.block_size.get(decode).max(1) };
        let workers = (0..prefill.rows()).map(|row| self.worker(prefill, row));
        let local = self.settings.is_local(prompt, self.worker(decode, 0), workers);
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
