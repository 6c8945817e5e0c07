//! Decode override: remote prefill only where it pays (D2, D4).

mod rule;

use pointsman_policy_sdk::{Call, Column, DecodeOverride, Error, Facts, Plan, Policy, Slot, Wants, facts};
use rule::{DecodeWorker, Settings, local};

/// The configured policy. Switched off, it asks for no facts, so that the host need not preview the decode
/// worker.
#[derive(Debug)]
pub struct ConditionalDisagg {
    settings: Settings,
    on: Option<Signals>,
}

#[derive(Debug)]
struct Signals {
    prompt_tokens: Slot<u32>,
    block_size: Slot<u32>,
    prefill_tokens: Column<u32>,
    cached: Column<u32>,
    queue: Column<u32>,
    kv_usage: Column<f32>,
    load_age_ms: Column<u32>,
    queue_known: Column<u32>,
    kv_usage_known: Column<u32>,
    local_prefill: Column<u32>,
}

impl Policy for ConditionalDisagg {
    const NAME: &'static str = "conditional-disagg";
    type Settings = Settings;

    fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
        settings.check()?;
        let on = settings.enabled.then(|| Signals {
            prompt_tokens: wants.request(facts::PROMPT_TOKENS),
            block_size: wants.request(facts::BLOCK_SIZE),
            prefill_tokens: wants.worker(facts::ACTIVE_PREFILL_TOKENS),
            cached: wants.worker(facts::CACHED_BLOCKS_DEVICE),
            queue: wants.worker(facts::ENGINE_QUEUE),
            kv_usage: wants.worker(facts::KV_USAGE),
            load_age_ms: wants.worker(facts::LOAD_AGE_MS),
            queue_known: wants.worker(facts::ENGINE_QUEUE_KNOWN),
            kv_usage_known: wants.worker(facts::KV_USAGE_KNOWN),
            local_prefill: wants.worker(facts::LOCAL_PREFILL),
        });
        Ok(Self { settings, on })
    }
}

impl DecodeOverride for ConditionalDisagg {
    fn decide(&self, _: &Call, decode: &Facts<'_>, prefill: &Facts<'_>) -> Result<Plan, Error> {
        let Some(signals) = self.on.as_ref().filter(|_| decode.rows() > 0) else { return Ok(Plan::Remote) };
        let prompt_tokens = signals.prompt_tokens.get(decode);
        let cached = signals.cached.at(decode, 0).saturating_mul(signals.block_size.get(decode));
        let known = signals.queue_known.at(decode, 0) == 1 && signals.kv_usage_known.at(decode, 0) == 1;
        let worker = DecodeWorker {
            can_prefill: signals.local_prefill.at(decode, 0) == 1,
            prefill_tokens: signals.prefill_tokens.at(decode, 0),
            queue: signals.queue.at(decode, 0),
            kv_usage: signals.kv_usage.at(decode, 0),
            // Figures that the engine does not tell are as old as those of an engine that tells none.
            load_age_ms: if known { signals.load_age_ms.at(decode, 0) } else { u32::MAX },
        };
        let least_busy_prefill = signals.prefill_tokens.slice(prefill).iter().copied().min();
        let new_tokens = prompt_tokens.saturating_sub(cached);
        let here = local(&self.settings, prompt_tokens, new_tokens, &worker, least_busy_prefill);
        Ok(if here { Plan::Local } else { Plan::Remote })
    }
}

pointsman_policy_sdk::export!(decode_override ConditionalDisagg);

#[cfg(test)]
mod tests {
    use pointsman_policy_sdk::{configure, testing};

    use super::*;

    #[test]
    fn d4_cases() {
        // D4.2, D4.3, D4.4: cases.toml has cases of each
        testing::run_decode_override::<ConditionalDisagg>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn d2_the_default_override_replaces_three_fields() {
        let (policy, wants) = configure::<ConditionalDisagg>("{}").unwrap();
        let over = policy.decode_config(&Call::default(), &Facts::new(&[], &[], 0)).unwrap();
        assert_eq!((over.overlap_score_credit, over.assume_kv_reuse), (Some(0.0), Some(false)));
        assert_eq!((over.track_prefill_tokens, over.temperature), (Some(false), None));
        assert!(wants.worker_names().is_empty(), "switched off it asks for nothing");
    }
}
