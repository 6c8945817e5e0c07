//! The cost of a request on each worker, counted in prompt tokens to compute.

use pointsman_policy_sdk::Rng;
use serde::Deserialize;

/// Limit of the weights.
const LARGEST: f32 = 1e6;
/// Limit of the share of a cache.
const LARGEST_SHARE: f32 = 1e3;

/// Settings of the operator.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Weight of the delay of each active request by this prompt.
    pub delayed_weight: f32,
    /// Prompt tokens that take as long as one token of context.
    pub context_weight: f32,
    /// Weight of each token that other programs would lose.
    pub displaced_weight: f32,
    /// Weight of each token of context that does not fit until other requests end.
    pub full_weight: f32,
    /// Tokens of a usual answer.
    pub answer_tokens: f32,
    /// Share of a cache that running programs may fill before new ones are refused; 0: none is refused.
    pub admit_below: f32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            delayed_weight: 0.25,
            context_weight: 0.3,
            displaced_weight: 0.3,
            full_weight: 0.5,
            answer_tokens: 1_000.0,
            admit_below: 0.0,
        }
    }
}

/// The request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: u32,
    /// Tokens in a block.
    pub(crate) block: u32,
}

/// The workers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns<'a> {
    /// Prompt tokens whose prefill has not completed.
    pub(crate) waiting: &'a [u32],
    /// Blocks booked with this request.
    pub(crate) context: &'a [u32],
    pub(crate) requests: &'a [u32],
    /// Blocks of the cache; 0 when unknown.
    pub(crate) capacity: &'a [u32],
    /// Blocks of the prompt on the device, in host memory and on disk.
    pub(crate) cached: [&'a [u32]; 3],
    /// Tokens of running programs.
    pub(crate) running: &'a [u32],
}

impl Settings {
    /// Checks the ranges.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (name, value, most) in [
            ("delayed-weight", self.delayed_weight, LARGEST),
            ("context-weight", self.context_weight, LARGEST),
            ("displaced-weight", self.displaced_weight, LARGEST),
            ("full-weight", self.full_weight, LARGEST),
            ("answer-tokens", self.answer_tokens, LARGEST),
            ("admit-below", self.admit_below, LARGEST_SHARE),
        ] {
            if !(0.0..=most).contains(&value) {
                return Err(format!("{name}: {value} is not within 0 to {most}"));
            }
        }
        Ok(())
    }

    /// Returns the cost of each row.
    pub(crate) fn costs(&self, prompt: &Prompt, columns: &Columns<'_>) -> Vec<f32> {
        let block = single(prompt.block);
        let [device, host, disk] = columns.cached;
        let cached = device.iter().zip(host).zip(disk).map(|((device, host), disk)| {
            device.saturating_add(*host).saturating_add(*disk).saturating_mul(prompt.block)
        });
        let load = columns.waiting.iter().zip(columns.context).zip(columns.requests);
        let room = columns.capacity.iter().zip(columns.running);
        let rows = cached.zip(load).zip(room);
        let costs = rows.map(|((cached, ((waiting, context), requests)), (capacity, running))| {
            let own = single(prompt.tokens.saturating_sub(cached));
            let computed = single(*waiting) + own * (1.0 + self.delayed_weight * single(*requests));
            let (context, capacity) = (single(*context) * block, single(*capacity) * block);
            let spent = computed + self.context_weight * context;
            if capacity <= 0.0 {
                return spent;
            }
            let added = own + self.answer_tokens;
            let displaced = (single(*running) + added - capacity).clamp(0.0, added);
            let unfit = (context + self.answer_tokens - capacity).max(0.0);
            spent + self.displaced_weight * displaced + self.full_weight * unfit
        });
        costs.collect()
    }
}

/// Returns whether running programs leave no worker room for another one. A worker whose capacity is unknown
/// has room.
pub(crate) fn full(settings: &Settings, prompt: &Prompt, columns: &Columns<'_>) -> bool {
    let block = single(prompt.block);
    let mut room = columns.capacity.iter().zip(columns.running);
    settings.admit_below > 0.0
        && room.all(|(capacity, running)| {
            *capacity > 0 && single(*running) >= settings.admit_below * single(*capacity) * block
        })
}

/// Returns the row of the lowest cost. Ties are drawn uniformly.
pub(crate) fn least(costs: &[f32], rng: &mut Rng) -> Option<usize> {
    let least = costs.iter().copied().reduce(f32::min)?;
    let ties = || costs.iter().enumerate().filter(|(_, cost)| **cost <= least);
    ties().nth(rng.below(ties().count())).map(|(row, _)| row)
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^24 where differences matter")]
fn single(count: u32) -> f32 {
    count as f32
}
