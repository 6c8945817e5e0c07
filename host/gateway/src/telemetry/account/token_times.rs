//! Times between the tokens of an answer: of each sequence, since an engine generates the choices of a
//! request and the prompts of its list side by side.

use tokio::time::{Duration, Instant};

use super::Account;

/// For how long the sequences of an answer were generated.
#[derive(Debug, Default)]
pub(super) struct TokenTimes {
    /// Time of all sequences together until `since`.
    generated: Duration,
    /// From when those that run are not in `generated` yet; `None` before the first token.
    since: Option<Instant>,
    /// Number of sequences that ended.
    ended: u32,
    /// Time of all sequences together at the start of the newest KV block of the output, and the number of
    /// tokens until then.
    block_began: Option<(Duration, u32)>,
}

impl TokenTimes {
    /// The first token came.
    pub(super) fn begin(&mut self, now: Instant) {
        self.since = Some(now);
    }

    /// The stream was paused for so long.
    pub(super) fn paused(&mut self, pause: Duration) {
        self.since = self.since.map(|since| since + pause);
    }

    /// The newest block has no start any more: its tokens say nothing of the worker.
    pub(super) fn forget_block(&mut self) {
        self.block_began = None;
    }

    /// The answer has no more than `tokens` now.
    pub(super) fn go_back(&mut self, tokens: u32) {
        if let Some((_, before)) = &mut self.block_began {
            *before = tokens.min(*before);
        }
    }

    /// The time of all of `sequences` together until `now`.
    fn until(&self, now: Instant, sequences: u32) -> Duration {
        let running = sequences.saturating_sub(self.ended);
        let more = self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        self.generated.saturating_add(more.saturating_mul(running))
    }

    /// One of the sequences ended with the token that came at `last`.
    fn sequence_ended(&mut self, last: Instant, sequences: u32) {
        self.generated = self.until(last, sequences);
        self.since = self.since.map(|since| since.max(last));
        self.ended = self.ended.saturating_add(1);
    }
}

impl Account {
    /// Records that a block of the output begins at `now`. Returns the mean time between tokens since the
    /// previous block began.
    pub(crate) fn block_begins(&mut self, now: Instant) -> Option<Duration> {
        self.count_output();
        let sequences = self.sequences();
        let begun = (self.token_times.until(now, sequences), self.tokens);
        let before = self.token_times.block_began.replace(begun);
        mean(before?, begun, sequences)
    }

    /// Returns the mean time between the tokens since the newest block began.
    #[must_use]
    pub(crate) fn rest_itl(&self) -> Option<Duration> {
        let sequences = self.sequences();
        let now = (self.token_times.until(self.last_token?, sequences), self.tokens);
        mean(self.token_times.block_began?, now, sequences)
    }

    /// Returns the mean time between tokens, without pauses; `None` if no sequence has two, or if all came in
    /// one read.
    #[must_use]
    pub(crate) fn itl(&self) -> Option<Duration> {
        let sequences = self.sequences();
        let generated = self.token_times.until(self.last_token?, sequences);
        mean((Duration::ZERO, 0), (generated, self.tokens), sequences)
    }

    /// Records that one of the sequences ended.
    pub(crate) fn sequence_ended(&mut self) {
        let sequences = self.sequences();
        if let Some(last) = self.last_token {
            self.token_times.sequence_ended(last, sequences);
        }
    }

    fn sequences(&self) -> u32 {
        self.origin.as_ref().map_or(1, |request| request.items().max(1))
    }
}

/// Returns the mean time between the tokens of one sequence; `None` if none had another token, or if all came
/// in one read. Times are those of all sequences together. The first token of each sequence ends no time
/// between tokens.
fn mean((from, before): (Duration, u32), (to, after): (Duration, u32), sequences: u32) -> Option<Duration> {
    let gaps = after.checked_sub(before.max(sequences)).filter(|gaps| *gaps > 0)?;
    to.checked_sub(from).map(|time| time / gaps).filter(|mean| !mean.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn m4_the_time_between_tokens_is_that_of_each_sequence() {
        let begun = Instant::now();
        let of = |before: u32, tokens: u32, millis: u32, sequences: u32| {
            let mut times = TokenTimes::default();
            times.begin(begun);
            let now = (times.until(begun + millis * MS, sequences), tokens);
            mean((Duration::ZERO, before), now, sequences).map(|mean| mean.as_millis())
        };
        // M4.21: one token in 50 ms
        assert_eq!(of(1, 17, 800, 1), Some(50));
        assert_eq!(of(4, 68, 800, 4), Some(50));
        // M4.21: the first tokens of four choices
        assert_eq!((of(1, 4, 3, 4), of(1, 8, 50, 4)), (None, Some(50)));
        assert_eq!((of(5, 5, 9, 1), of(1, 2, 7, 1)), (None, Some(7)));
    }

    #[test]
    fn m4_sequences_that_ended_take_no_time() {
        let (begun, mut times) = (Instant::now(), TokenTimes::default());
        times.begin(begun);
        // 63 of 64 prompts have 21 tokens in a second, one has 2,001 in 100.
        (0..63).for_each(|_| times.sequence_ended(begun + 1_000 * MS, 64));
        let all = times.until(begun + 100_000 * MS, 64);
        let mean = mean((Duration::ZERO, 0), (all, 63 * 21 + 2_001), 64).unwrap();
        // M4.21
        assert_eq!(mean, 50 * MS);
        times.paused(30_000 * MS);
        assert_eq!(times.until(begun + 130_000 * MS, 64), all);
    }
}
