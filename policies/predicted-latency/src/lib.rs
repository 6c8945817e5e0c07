//! Scorer: the time that the request would add on each worker, its own and that of the requests it delays,
//! counted in prompt tokens to compute and scaled by the worker's measured speed.

mod cost;

pub use cost::Settings;

use std::time::Duration;

use cost::{Columns, Prompt, agree, prefer, relative, scale, single};
use pointsman_policy_sdk::{
    Call, Column, Error, Facts, Leg, Moment, Outcome, Policy, Rng, Scorer, Slot, Wants, facts, state,
};

/// Key of the mean length of an answer, thousandths of a token.
const ANSWER: &str = "answer";
/// Weight of a new length in the mean.
const NEW_ANSWER: f64 = 0.02;
/// Limit of the relative length of answers, which keeps every cost finite.
const LONGEST: f64 = 1_024.0;

/// The configured policy.
#[derive(Debug)]
pub struct PredictedLatency {
    settings: Settings,
    prompt_tokens: Slot<u32>,
    block_size: Slot<u32>,
    credits: [Slot<f32>; 3],
    load_scale: Slot<f32>,
    request_blocks: Slot<f32>,
    track: Slot<u32>,
    waiting: Column<u32>,
    context_blocks: Column<u32>,
    requests: Column<u32>,
    cached: [Column<u32>; 3],
    prefill_time: Column<u32>,
    ttft: Column<u32>,
    itl: Column<u32>,
    running: Column<u32>,
    queue: Column<u32>,
    age: Column<u32>,
    like: Column<u32>,
    preference: Column<f32>,
}

impl Policy for PredictedLatency {
    const NAME: &'static str = "predicted-latency";
    type Settings = Settings;

    fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
        settings.check()?;
        Ok(Self {
            settings,
            prompt_tokens: wants.request(facts::PROMPT_TOKENS),
            block_size: wants.request(facts::BLOCK_SIZE),
            credits: [
                wants.request(facts::OVERLAP_SCORE_CREDIT),
                wants.request(facts::HOST_CACHE_CREDIT),
                wants.request(facts::DISK_CACHE_CREDIT),
            ],
            load_scale: wants.request(facts::PREFILL_LOAD_SCALE),
            request_blocks: wants.request(facts::ACTIVE_REQUEST_WEIGHT),
            track: wants.request(facts::TRACK_PREFILL_TOKENS),
            waiting: wants.worker(facts::ACTIVE_PREFILL_TOKENS),
            context_blocks: wants.worker(facts::DECODE_BLOCKS),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
            cached: [
                wants.worker(facts::CACHED_BLOCKS_DEVICE),
                wants.worker(facts::CACHED_BLOCKS_HOST),
                wants.worker(facts::CACHED_BLOCKS_DISK),
            ],
            prefill_time: wants.worker(facts::PREFILL_US_PER_KTOKEN),
            ttft: wants.worker(facts::TTFT_EWMA_US),
            itl: wants.worker(facts::ITL_EWMA_US),
            running: wants.worker(facts::ENGINE_RUNNING),
            queue: wants.worker(facts::ENGINE_QUEUE),
            age: wants.worker(facts::LOAD_AGE_MS),
            like: wants.worker(facts::PREFIX_REQUESTS),
            preference: wants.worker(facts::TAINT_PREFERENCE),
        })
    }

    /// Updates the mean length of an answer. Only one instance observes at a time.
    fn observe(&self, _: &Moment, outcomes: &[Outcome]) {
        let lengths =
            outcomes.iter().filter(|one| one.status == 200 && one.output_tokens > 0 && !one.retried);
        let mean = lengths
            .map(|one| f64::from(one.output_tokens))
            .fold(answer(), |mean, new| Some(mean.map_or(new, |mean| mean + NEW_ANSWER * (new - mean))));
        if let Some(mean) = mean {
            // When the state is full, the old mean stays.
            let _ = state::set(ANSWER, &thousandths(mean).to_le_bytes(), Duration::ZERO);
        }
    }
}

/// Returns the mean length of an answer, tokens. `None`: no answer ended yet.
#[expect(clippy::cast_precision_loss, reason = "lengths of answers fit a double")]
fn answer() -> Option<f64> {
    state::number(ANSWER).map(|thousandths| thousandths as f64 / 1e3)
}

#[expect(clippy::cast_possible_truncation, reason = "a mean of u32")]
fn thousandths(tokens: f64) -> i64 {
    (tokens * 1e3).round() as i64
}

impl PredictedLatency {
    /// Returns the mean length of an answer in tokens, and relative to the setting, from 1 to [`LONGEST`].
    #[expect(clippy::cast_possible_truncation, reason = "a ratio of lengths")]
    fn answer_length(&self) -> (f32, f32) {
        let usual = f64::from(self.settings.output_tokens);
        let known = if usual > 0.0 { answer() } else { None };
        let relative = known.map_or(1.0, |tokens| (tokens / usual).clamp(1.0, LONGEST) as f32);
        (known.map_or(self.settings.output_tokens, |tokens| tokens.clamp(0.0, 1e6) as f32), relative)
    }

    fn scale_by_speed(&self, leg: Leg, facts: &Facts<'_>, costs: &mut [f32]) {
        // Load and the length of prompts move each of these times in another way. A prefill worker emits no
        // stream whose tokens could be timed, and a decode worker computes no prompts.
        let (mut times, second) = match leg {
            Leg::Prefill => (relative(self.prefill_time.slice(facts)), Some(self.ttft)),
            Leg::Aggregated => (relative(self.prefill_time.slice(facts)), Some(self.itl)),
            Leg::Decode => (relative(self.itl.slice(facts)), None),
        };
        if let Some(second) = second {
            agree(&mut times, &relative(second.slice(facts)));
        }
        scale(costs, &times, self.settings.speed_trust);
    }
}

impl Scorer for PredictedLatency {
    fn score(&self, call: &Call, facts: &Facts<'_>) -> Result<Vec<f32>, Error> {
        let (answer, length) = self.answer_length();
        let prompt = Prompt {
            tokens: single(self.prompt_tokens.get(facts)),
            block: single(self.block_size.get(facts).max(1)),
            credits: self.credits.map(|credit| credit.get(facts)),
            load_scale: self.load_scale.get(facts),
            request_blocks: self.request_blocks.get(facts),
            // A leg whose prompt is not tracked receives its KV from another worker.
            computes: self.track.get(facts) == 1,
            length,
            grows: call.leg != Leg::Prefill,
            answer,
        };
        let columns = Columns {
            waiting: self.waiting.slice(facts),
            context: self.context_blocks.slice(facts),
            requests: self.requests.slice(facts),
            cached: self.cached.map(|column| column.slice(facts)),
            running: self.running.slice(facts),
            queue: self.queue.slice(facts),
            age: self.age.slice(facts),
            like: self.like.slice(facts),
        };
        let mut costs = self.settings.costs(&prompt, &columns);
        // A worker that was slow once is measured again.
        if Rng::new(call.seed).unit() >= self.settings.explore {
            self.scale_by_speed(call.leg, facts, &mut costs);
        }
        prefer(&mut costs, self.preference.slice(facts));
        Ok(costs)
    }
}

pointsman_policy_sdk::export!(scorer PredictedLatency, learning);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases() {
        pointsman_policy_sdk::testing::run_scorer::<PredictedLatency>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn a_setting_out_of_range_is_refused() {
        for (settings, message) in [
            (Settings { delayed_weight: -1.0, ..Settings::default() }, "delayed-weight: -1 is not"),
            (Settings { context_weight: f32::NAN, ..Settings::default() }, "context-weight: NaN is not"),
            (Settings { growth_tokens: 2e6, ..Settings::default() }, "growth-tokens: 2000000 is not"),
            (Settings { speed_trust: 1.5, ..Settings::default() }, "speed-trust: 1.5 is not within 0 to 1"),
            (Settings { explore: f64::NAN, ..Settings::default() }, "explore: NaN is not within 0 to 1"),
        ] {
            let error = PredictedLatency::configure(settings, &mut Wants::default()).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
