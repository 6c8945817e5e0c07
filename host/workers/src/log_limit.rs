//! Limits how often a source may write a log line.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Allows one line in an interval and counts the others.
#[derive(Debug)]
pub struct LogLimit {
    interval: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    written: Option<Instant>,
    suppressed: u64,
}

impl LogLimit {
    /// Returns a limit of one line in `interval`.
    #[must_use]
    pub const fn new(interval: Duration) -> Self {
        Self { interval, state: Mutex::new(State { written: None, suppressed: 0 }) }
    }

    /// Returns how many lines were left out since the last one, if a line may be written now.
    #[must_use]
    pub fn due(&self) -> Option<u64> {
        let mut state = self.state.lock();
        if state.written.is_some_and(|written| written.elapsed() < self.interval) {
            state.suppressed += 1;
            return None;
        }
        state.written = Some(Instant::now());
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_line_in_an_interval_counts_those_it_left_out() {
        let limit = LogLimit::new(Duration::from_secs(1));
        assert_eq!((0..50).filter_map(|_| limit.due()).collect::<Vec<_>>(), [0]);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!((limit.due(), limit.due()), (Some(49), None));
    }
}
