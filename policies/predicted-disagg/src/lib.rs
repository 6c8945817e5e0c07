//! Decode override: prefills on the decode worker where that is predicted to save more than a step of
//! computation.

mod rule;

use pointsman_policy_sdk::{Call, Column, DecodeOverride, Error, Facts, Plan, Policy, Slot, Wants, facts};
use rule::{Load, Prompt, Worker, best};
use serde::Deserialize;

/// Settings of the operator.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Weight of the delay of each active request of the decode worker by this prompt's computation.
    pub delayed_weight: f32,
    /// Prompt tokens that a local prefill has to save.
    pub margin_tokens: f32,
}

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

impl Default for Settings {
    fn default() -> Self {
        Self { delayed_weight: 1.0, margin_tokens: 1_000.0 }
    }
}

impl Settings {
    /// Checks ranges.
    ///
    /// # Errors
    /// Names the first setting that is out of range.
    fn check(&self) -> Result<(), String> {
        let all = [("delayed-weight", self.delayed_weight), ("margin-tokens", self.margin_tokens)];
        match all.iter().find(|(_, value)| !(0.0..=1e6).contains(value)) {
            Some((name, value)) => Err(format!("{name}: {value} is not a finite number of 0 to 1000000")),
            None => Ok(()),
        }
    }

    /// Returns whether nothing forbids a prefill on the decode worker, and it costs less than on every
    /// prefill worker, by more than the margin.
    #[expect(clippy::cast_precision_loss, reason = "requests are far below 2^24")]
    fn is_local(
        &self,
        prompt: Prompt,
        decode: Worker,
        load: Load,
        prefill: impl Iterator<Item = Worker>,
    ) -> bool {
        let own = decode.own(prompt);
        if load.obstacle(prompt, own).is_some() {
            return false;
        }
        let delayed = load.requests() as f32 * self.delayed_weight * own;
        let local = decode.until_computed(prompt) + delayed + self.margin_tokens;
        best(prompt, prefill).is_some_and(|(_, remote)| local < remote)
    }
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
            can_prefill: self.local_prefill.at(decode, 0) == 1,
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
        if decode.rows() == 0 || prefill.rows() == 0 {
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

    /// The load of a worker that does nothing else.
    const IDLE: Load = Load {
        can_prefill: true,
        booked: 0,
        running: 0,
        queue: 0,
        kv_usage: 0.0,
        age: 0,
        prefill_time: u32::MAX,
    };

    #[test]
    fn the_largest_numbers_have_an_order() {
        let largest = Settings { delayed_weight: 1e6, margin_tokens: 1e6 };
        assert_eq!(largest.check(), Ok(()));
        let most = u32::MAX;
        let prompt = Prompt { tokens: most, block: most, itl_target: 0 };
        let busy = Worker { waiting: most, cached: 0 };
        let full = Load { booked: most, running: most, queue: most, ..IDLE };
        assert!(!largest.is_local(prompt, busy, full, std::iter::once(busy)));
        let targeted = Prompt { itl_target: most, ..prompt };
        assert!(!largest.is_local(targeted, busy, full, std::iter::once(busy)));
        let idle = Worker { waiting: 0, cached: most };
        assert!(largest.is_local(targeted, idle, IDLE, std::iter::once(busy)));
    }

    #[test]
    fn a_usage_that_is_no_number_is_not_full() {
        let prompt = Prompt { tokens: 1, block: 1, itl_target: 0 };
        assert_eq!(Load { kv_usage: f32::NAN, ..IDLE }.obstacle(prompt, 1.0), None);
    }

    #[test]
    fn a_setting_out_of_range_is_refused() {
        let settings = Settings { margin_tokens: -1.0, ..Settings::default() };
        let error = PredictedDisagg::configure(settings, &mut Wants::default()).unwrap_err();
        assert_eq!(error, "margin-tokens: -1 is not a finite number of 0 to 1000000");
    }
}
