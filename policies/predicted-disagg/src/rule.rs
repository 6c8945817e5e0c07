//! Compares the cost of local and of remote prefill. Knows numbers and no facts.

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

/// A prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompt {
    /// Tokens.
    pub(crate) tokens: u32,
    /// Tokens of a block, at least 1.
    pub(crate) block: u32,
}

/// A worker that could prefill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Worker {
    /// Prompt tokens whose prefill has not ended.
    pub(crate) waiting: u32,
    /// Active requests.
    pub(crate) requests: u32,
    /// Cached prefix blocks on the device.
    pub(crate) cached: u32,
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
    /// the margin.
    pub(crate) fn is_local(
        &self,
        prompt: Prompt,
        decode: Worker,
        mut prefill: impl Iterator<Item = Worker>,
    ) -> bool {
        let delayed = single(decode.requests) * self.delayed_weight * decode.own(prompt);
        let local = decode.until_computed(prompt) + delayed + self.margin_tokens;
        prefill.all(|worker| local < worker.until_computed(prompt))
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
        let prompt = Prompt { tokens: u32::MAX, block: u32::MAX };
        let busy = Worker { waiting: u32::MAX, requests: u32::MAX, cached: 0 };
        assert!(!largest.is_local(prompt, busy, std::iter::once(busy)));
        let idle = Worker { waiting: 0, requests: 0, cached: u32::MAX };
        assert!(largest.is_local(prompt, idle, std::iter::once(busy)));
    }
}
