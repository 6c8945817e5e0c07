//! Compares the cost of local and of remote prefill. Knows numbers and no facts.

use serde::Deserialize;

/// Age from which an engine's figures do not count, milliseconds: twice the default interval at which they
/// are read.
const OLD_MS: u32 = 10_000;

/// Share of an engine's KV cache in use from which it counts as full: a further prompt may make it preempt
/// requests, which then compute their prompts again.
const FULL: f32 = 0.9;

/// Settings of the operator.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Weight of the delay of each active request of the decode worker by this prompt's computation.
    pub delayed_weight: f32,
    /// Prompt tokens that a local prefill has to save.
    pub margin_tokens: f32,
}

/// A prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompt {
    /// Tokens.
    pub(crate) tokens: u32,
    /// Tokens of a block, at least 1.
    pub(crate) block: u32,
    /// Target for the inter-token latency, microseconds; 0: none.
    pub(crate) itl_target: u32,
}

/// A worker that could prefill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Worker {
    /// Prompt tokens whose prefill has not ended.
    pub(crate) waiting: u32,
    /// Cached prefix blocks on the device.
    pub(crate) cached: u32,
}

/// What the decode worker does beside prefill. A figure that its engine does not tell is 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Requests that are booked.
    pub(crate) booked: u32,
    /// Requests that the engine computes.
    pub(crate) running: u32,
    /// Requests that wait in the engine.
    pub(crate) queue: u32,
    /// Share of the engine's KV cache in use.
    pub(crate) kv_usage: f32,
    /// Age of the engine's figures, milliseconds.
    pub(crate) age: u32,
    /// Measured time of a prefill, microseconds for each 1,000 tokens; 0: not measured.
    pub(crate) prefill_time: u32,
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
    pub(crate) fn check(&self) -> Result<(), String> {
        let all = [("delayed-weight", self.delayed_weight), ("margin-tokens", self.margin_tokens)];
        match all.iter().find(|(_, value)| !(0.0..=1e6).contains(value)) {
            Some((name, value)) => Err(format!("{name}: {value} is not a finite number of 0 to 1000000")),
            None => Ok(()),
        }
    }

    /// Returns whether a prefill on the decode worker costs less than on every prefill worker, by more than
    /// the margin, has room in the engine's cache, and lets the decode worker's streams keep the target.
    pub(crate) fn is_local(
        &self,
        prompt: Prompt,
        decode: Worker,
        load: Load,
        mut prefill: impl Iterator<Item = Worker>,
    ) -> bool {
        let own = decode.own(prompt);
        if load.is_full() || load.misses_target(prompt, own) {
            return false;
        }
        let delayed = single(load.requests()) * self.delayed_weight * own;
        let local = decode.until_computed(prompt) + delayed + self.margin_tokens;
        prefill.all(|worker| local < worker.until_computed(prompt))
    }
}

impl Load {
    /// Returns the requests that a local prefill delays. Only the engine knows those of other gateways.
    fn requests(self) -> u32 {
        let reported = if self.is_old() { 0 } else { self.running.saturating_add(self.queue) };
        self.booked.max(reported)
    }

    fn is_full(self) -> bool {
        !self.is_old() && self.kv_usage >= FULL
    }

    fn is_old(self) -> bool {
        self.age > OLD_MS
    }

    /// Returns whether tokens of the requests may wait for longer than the target while `own` tokens of the
    /// prompt are computed.
    fn misses_target(self, prompt: Prompt, own: f32) -> bool {
        let takes = own * single(self.prefill_time) / 1e3;
        let late = self.prefill_time == 0 || takes > single(prompt.itl_target);
        prompt.itl_target > 0 && self.requests() > 0 && late
    }
}

impl Worker {
    /// Returns the prompt tokens that this worker computes until the prompt's prefill ends.
    fn until_computed(self, prompt: Prompt) -> f32 {
        single(self.waiting) + self.own(prompt)
    }

    /// Returns the tokens of the prompt that this worker computes.
    fn own(self, prompt: Prompt) -> f32 {
        let cached = self.cached.saturating_mul(prompt.block);
        // The last token is always computed.
        single(prompt.tokens.saturating_sub(cached).max(1))
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^24 where differences matter")]
fn single(count: u32) -> f32 {
    count as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_numbers_have_an_order() {
        let largest = Settings { delayed_weight: 1e6, margin_tokens: 1e6 };
        assert_eq!(largest.check(), Ok(()));
        let prompt = Prompt { tokens: u32::MAX, block: u32::MAX, itl_target: 0 };
        let busy = Worker { waiting: u32::MAX, cached: 0 };
        let most = u32::MAX;
        let full =
            Load { booked: most, running: most, queue: most, kv_usage: 0.0, age: 0, prefill_time: most };
        assert!(!largest.is_local(prompt, busy, full, std::iter::once(busy)));
        let targeted = Prompt { itl_target: most, ..prompt };
        assert!(!largest.is_local(targeted, busy, full, std::iter::once(busy)));
        let idle = Worker { waiting: 0, cached: most };
        let none = Load { booked: 0, running: 0, queue: 0, ..full };
        assert!(largest.is_local(targeted, idle, none, std::iter::once(busy)));
    }

    #[test]
    fn a_usage_that_is_no_number_is_not_full() {
        let load = Load { booked: 0, running: 0, queue: 0, kv_usage: f32::NAN, age: 0, prefill_time: 0 };
        assert!(!load.is_full());
    }
}
