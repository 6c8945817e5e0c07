//! Times between the tokens of an answer.

use tokio::time::{Duration, Instant};

use super::Account;

impl Account {
    /// Records that a block of the output begins at `now`. Returns the mean time between tokens since the
    /// previous block began.
    pub(crate) fn block_begins(&mut self, now: Instant) -> Option<Duration> {
        self.count_output();
        let before = self.block_began.replace((now, self.tokens));
        mean(before?, (now, self.tokens))
    }

    /// Returns the mean time between the tokens since the newest block began.
    #[must_use]
    pub(crate) fn rest_itl(&self) -> Option<Duration> {
        mean(self.block_began?, (self.last_token?, self.tokens))
    }

    /// Returns the mean time between tokens, without pauses; `None` for fewer than two.
    #[must_use]
    pub(crate) fn itl(&self) -> Option<Duration> {
        let between = self.last_token?.checked_duration_since(self.first_token?)?;
        (self.tokens > 1).then(|| between.saturating_sub(self.paused) / (self.tokens - 1))
    }
}

/// Returns the mean time between the tokens from one point in time to another, or `None` if there was no
/// token.
fn mean((from, before): (Instant, u32), (to, after): (Instant, u32)) -> Option<Duration> {
    let tokens = after.checked_sub(before).filter(|tokens| *tokens > 0)?;
    Some(to.checked_duration_since(from)? / tokens)
}
