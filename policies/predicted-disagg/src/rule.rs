//! Predicts the cost of local and of remote prefill. Knows numbers and no facts.

use serde::Deserialize;

/// Settings of the operator.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Prompt tokens that take as long to compute as the fixed part of a step.
    pub step_tokens: f32,
    /// Weight of the delay of each active request of the decode worker by this prompt's computation.
    pub delayed_weight: f32,
    /// Prompt tokens that take as long to compute as the transfer of one token.
    pub transfer_tokens: f32,
    /// Prompt tokens that take as long to compute as the fixed part of a handoff.
    pub handoff_tokens: f32,
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
        Self { step_tokens: 1_000.0, delayed_weight: 3.0, transfer_tokens: 0.2, handoff_tokens: 500.0 }
    }
}

impl Settings {
    /// Checks ranges.
    ///
    /// # Errors
    /// Names the first setting that is out of range.
    pub(crate) fn check(&self) -> Result<(), String> {
        let all = [
            ("step-tokens", self.step_tokens),
            ("delayed-weight", self.delayed_weight),
            ("transfer-tokens", self.transfer_tokens),
            ("handoff-tokens", self.handoff_tokens),
        ];
        match all.iter().find(|(_, value)| !(0.0..=1e6).contains(value)) {
            Some((name, value)) => Err(format!("{name}: {value} is not a finite number of 0 to 1000000")),
            None => Ok(()),
        }
    }

    /// Returns the cost of a prefill on the decode worker: its time, and the delay of those who decode there.
    pub(crate) fn local(&self, prompt: Prompt, decode: Worker) -> f32 {
        let (queue, own) = self.prefill(prompt, decode);
        queue + own + single(decode.requests) * self.delayed_weight * own
    }

    /// Returns the time until the KV of a remote prefill has arrived; `None` without prefill workers.
    pub(crate) fn remote(&self, prompt: Prompt, workers: impl Iterator<Item = Worker>) -> Option<f32> {
        let times = workers.map(|worker| {
            let (queue, own) = self.prefill(prompt, worker);
            queue + own
        });
        let transfer = self.transfer_tokens * single(prompt.tokens) + self.handoff_tokens;
        times.reduce(f32::min).map(|time| time + transfer)
    }

    /// Returns the time until a prompt's computation begins on a worker, and its duration.
    fn prefill(&self, prompt: Prompt, worker: Worker) -> (f32, f32) {
        let step = if worker.waiting > 0 { self.step_tokens } else { 0.0 };
        let cached = worker.cached.saturating_mul(prompt.block);
        // The last token is always computed.
        (single(worker.waiting) + step, single(prompt.tokens.saturating_sub(cached).max(1)))
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
    fn costs_at_the_limits_are_finite() {
        let worker = Worker { waiting: u32::MAX, requests: u32::MAX, cached: u32::MAX };
        let largest =
            Settings { step_tokens: 1e6, delayed_weight: 1e6, transfer_tokens: 1e6, handoff_tokens: 1e6 };
        assert_eq!(largest.check(), Ok(()));
        let prompt = Prompt { tokens: u32::MAX, block: u32::MAX };
        assert!(largest.local(prompt, Worker { cached: 0, ..worker }).is_finite());
        assert!(largest.remote(prompt, std::iter::once(worker)).is_some_and(f32::is_finite));
        assert_eq!(largest.remote(prompt, std::iter::empty()), None);
    }
}
