//! Rate limit of a slot's log lines: lines beyond it are counted instead of written.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::time::Instant;

/// Lines per second of all policies of a slot together.
const LINES_PER_SECOND: u32 = 50;

/// Allows [`LINES_PER_SECOND`].
#[derive(Debug)]
pub(crate) struct LogLimit {
    started: Instant,
    second: AtomicU64,
    lines: AtomicU32,
}

impl Default for LogLimit {
    fn default() -> Self {
        Self { started: Instant::now(), second: AtomicU64::new(0), lines: AtomicU32::new(0) }
    }
}

impl LogLimit {
    /// Returns whether one more line may be written now. Logs once, in the next second, how many were
    /// dropped.
    pub(crate) fn allows(&self) -> bool {
        self.allows_in(self.started.elapsed().as_secs())
    }

    fn allows_in(&self, second: u64) -> bool {
        if self.second.swap(second, Ordering::Relaxed) != second {
            let lines = self.lines.swap(0, Ordering::Relaxed);
            let dropped = lines.saturating_sub(LINES_PER_SECOND);
            if dropped > 0 {
                tracing::warn!(target: "pointsman::guest", dropped, "policy log lines dropped");
            }
        }
        self.lines.fetch_add(1, Ordering::Relaxed) < LINES_PER_SECOND
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_of_a_second_are_dropped() {
        let limit = LogLimit::default();
        let open = |second| (0..1_000).filter(|_| limit.allows_in(second)).count();
        assert_eq!((open(0), open(0), open(1)), (LINES_PER_SECOND as usize, 0, LINES_PER_SECOND as usize));
    }
}
