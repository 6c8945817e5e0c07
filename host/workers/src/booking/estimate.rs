//! The estimated progress of an answer that is not streamed. Nothing reports when its prefill ended, and how
//! many tokens it has (F4.10).

use tokio::time::Duration;

use super::Booking;

/// Longest step of an estimate. A shorter one is the time in which the output fills a block.
const MAX_STEP: Duration = Duration::from_secs(1);
/// Shortest step.
const MIN_STEP: Duration = Duration::from_millis(20);

/// The estimate of one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Time to the first token.
    prefill: Duration,
    itl: Duration,
    /// Choices that are generated together.
    sequences: u32,
    /// Maximum number of output tokens, all choices together.
    max_tokens: u32,
    block_size: u32,
}

impl Estimate {
    /// Returns the number of output tokens `elapsed` after the leg was sent; `None`: prefill has not ended.
    #[must_use]
    pub fn tokens(&self, elapsed: Duration) -> Option<u32> {
        let generating = elapsed.checked_sub(self.prefill)?;
        let steps = generating.as_micros() / self.itl.as_micros().max(1) + 1;
        let tokens = u32::try_from(steps).unwrap_or(u32::MAX).saturating_mul(self.sequences);
        Some(tokens.min(self.max_tokens))
    }

    /// Returns how long after the leg was sent the estimate changes next; `None`: not any more.
    #[must_use]
    pub fn next(&self, elapsed: Duration) -> Option<Duration> {
        let Some(tokens) = self.tokens(elapsed) else { return Some(self.prefill) };
        if tokens >= self.max_tokens {
            return None;
        }
        let block = self.itl * (self.block_size / self.sequences.max(1)).max(1);
        Some(elapsed + block.clamp(MIN_STEP, MAX_STEP))
    }

    /// Returns the estimated duration of an answer with this many tokens.
    #[must_use]
    pub fn duration(&self, tokens: u32) -> Duration {
        self.prefill + self.generation(tokens)
    }

    fn generation(&self, tokens: u32) -> Duration {
        self.itl * (tokens / self.sequences.max(1)).saturating_sub(1)
    }
}

impl Booking {
    /// Estimates the progress of an answer that is not streamed, by the speeds of the rank. `sequences`:
    /// choices that are generated together, at most `max_tokens` each; 0: nothing is generated.
    /// `computes_prompt`: whether this worker computes the prompt.
    #[must_use]
    pub fn estimate(&self, computes_prompt: bool, sequences: u32, max_tokens: Option<u32>) -> Estimate {
        let speeds = &self.load().speeds;
        let prefill =
            if computes_prompt { speeds.prefill(self.new_prompt_tokens) } else { speeds.transferred() };
        let max_tokens = max_tokens.unwrap_or(u32::MAX).saturating_mul(sequences);
        let (itl, sequences) = (speeds.itl(), sequences.max(1));
        Estimate { prefill, itl, sequences, max_tokens, block_size: self.block_size }
    }

    /// Brings the booking up to the estimated progress `elapsed` after the leg was sent.
    pub fn advance(&mut self, estimate: &Estimate, elapsed: Duration) {
        if let Some(tokens) = estimate.tokens(elapsed) {
            self.prefill_done();
            self.output_tokens(tokens);
        }
    }

    /// Learns from an answer that ended after `took` with `tokens` output tokens. Returns by which share of
    /// the time the estimate was wrong.
    ///
    /// The error is divided between prefill and generation as the estimate was: over answers of different
    /// lengths both become right.
    pub fn answered(&self, estimate: &Estimate, took: Duration, computed_prompt: bool, tokens: u32) -> f64 {
        let (expected, took) = (estimate.duration(tokens).as_secs_f64(), took.as_secs_f64());
        if expected <= 0.0 || took <= 0.0 {
            return 0.0;
        }
        let ratio = took / expected;
        let new_tokens = self.learned_tokens(computed_prompt);
        let generation = estimate.generation(tokens);
        // A phase that took little of the time says little about the speed.
        if estimate.prefill >= generation / 4 {
            self.load().speeds.observe_first_token(estimate.prefill.mul_f64(ratio), new_tokens);
        }
        if generation >= estimate.prefill / 4 {
            self.load().speeds.observe_itl(estimate.itl.mul_f64(ratio));
        }
        (expected - took).abs() / took
    }
}

#[cfg(test)]
mod tests;
