//! How many lines a slot's policies may log: what comes too fast is counted instead of written.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::time::Instant;

/// Lines a second that all policies of a slot together may log.
const LINES_PER_SECOND: u32 = 50;

/// Opens for so many lines a second.
#[derive(Debug)]
pub(crate) struct LogLimit {
    begun: Instant,
    second: AtomicU64,
    lines: AtomicU32,
}

impl Default for LogLimit {
    fn default() -> Self {
        Self { begun: Instant::now(), second: AtomicU64::new(0), lines: AtomicU32::new(0) }
    }
}

impl LogLimit {
    /// Whether one more line may be written now. Says once, in the next second, how many were not.
    pub(crate) fn allows(&self) -> bool {
        self.allows_in(self.begun.elapsed().as_secs())
    }

    fn allows_in(&self, second: u64) -> bool {
        if self.second.swap(second, Ordering::Relaxed) != second {
            let lines = self.lines.swap(0, Ordering::Relaxed);
            let dropped = lines.saturating_sub(LINES_PER_SECOND);
            if dropped > 0 {
                tracing::warn!(target: "pointsman::guest", dropped, "lines of policies were dropped");
            }
        }
        self.lines.fetch_add(1, Ordering::Relaxed) < LINES_PER_SECOND
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_so_many_lines() {
        let limit = LogLimit::default();
        let open = |second| (0..1_000).filter(|_| limit.allows_in(second)).count();
        assert_eq!((open(0), open(0), open(1)), (LINES_PER_SECOND as usize, 0, LINES_PER_SECOND as usize));
    }
}
