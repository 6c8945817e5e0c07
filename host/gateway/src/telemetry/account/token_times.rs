//! Times between the tokens of an answer: of each sequence, since an engine generates the choices of a request
//! and the prompts of its list side by side.

use tokio::time::{Duration, Instant};

use super::Account;

impl Account {
    /// Records that a block of the output begins at `now`. Returns the mean time between tokens since the
    /// previous block began.
    pub(crate) fn block_begins(&mut self, now: Instant) -> Option<Duration> {
        self.count_output();
        let before = self.block_began.replace((now, self.tokens));
        mean(before?, (now, self.tokens), self.sequences())
    }

    /// Returns the mean time between the tokens since the newest block began.
    #[must_use]
    pub(crate) fn rest_itl(&self) -> Option<Duration> {
        mean(self.block_began?, (self.last_token?, self.tokens), self.sequences())
    }

    /// Returns the mean time between tokens, without pauses; `None` if no sequence has two, or if all came in
    /// one read: that says nothing of their engine.
    #[must_use]
    pub(crate) fn itl(&self) -> Option<Duration> {
        let sequences = self.sequences();
        let between = self.last_token?.checked_duration_since(self.first_token?)?;
        let gaps = self.tokens.checked_sub(sequences).filter(|gaps| *gaps > 0)?;
        let between = Some(between.saturating_sub(self.paused)).filter(|between| !between.is_zero());
        Some(between?.saturating_mul(sequences) / gaps)
    }

    fn sequences(&self) -> u32 {
        self.origin.as_ref().map_or(1, |request| request.items().max(1))
    }
}

/// Returns the mean time between the tokens of one sequence from one point in time to another; `None` if none
/// had another token. The first token of each sequence ends no time between tokens.
fn mean((from, before): (Instant, u32), (to, after): (Instant, u32), sequences: u32) -> Option<Duration> {
    let gaps = after.checked_sub(before.max(sequences)).filter(|gaps| *gaps > 0)?;
    Some(to.checked_duration_since(from)?.saturating_mul(sequences) / gaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn m4_the_time_between_tokens_is_that_of_each_sequence() {
        let begun = Instant::now();
        let after = |millis: u64| begun + Duration::from_millis(millis);
        let of = |before: u32, tokens: u32, millis: u64, sequences: u32| {
            mean((begun, before), (after(millis), tokens), sequences).map(|mean| mean.as_millis())
        };
        // M4.21: one token in 50 ms
        assert_eq!(of(1, 17, 800, 1), Some(50));
        assert_eq!(of(4, 68, 800, 4), Some(50));
        // M4.21: the first tokens of four choices
        assert_eq!((of(1, 4, 3, 4), of(1, 8, 50, 4)), (None, Some(50)));
        assert_eq!((of(5, 5, 9, 1), of(1, 2, 7, 1)), (None, Some(7)));
    }
}
