//! The breaker of a generation.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::time::{Duration, Instant};

use crate::policy::Failure;

/// Stops calling a policy that fails: closed, then open for a pause, then one call is let through.
///
/// A timeout opens it at the first; other failures after [`Breaker::TOLERANCE`] in a row, or when they are a tenth of the calls
/// of a window in which there were [`Breaker::OFTEN`] at least.
#[derive(Debug)]
pub struct Breaker {
    in_a_row: AtomicU32,
    /// Calls of the generation when the window began, and failures since. Looked at when a call fails; success pays nothing.
    window_start: AtomicU64,
    window_failures: AtomicU64,
    /// Milliseconds after `epoch` at which the next call may try again; 0 is closed.
    retry_at_ms: AtomicU64,
    epoch: Instant,
}

impl Breaker {
    /// Failures in a row, other than timeouts, that it stands.
    pub const TOLERANCE: u32 = 5;
    /// Failures in a window, other than timeouts, that it stands however few they are among its calls.
    pub const OFTEN: u64 = 8;
    /// Calls after which failures are counted anew.
    pub const WINDOW: u64 = 1_000;
    /// How long it stays open before one call may try.
    pub const PAUSE: Duration = Duration::from_secs(5);

    pub(super) fn new() -> Self {
        Self {
            in_a_row: AtomicU32::new(0),
            window_start: AtomicU64::new(0),
            window_failures: AtomicU64::new(0),
            retry_at_ms: AtomicU64::new(0),
            epoch: Instant::now(),
        }
    }

    /// Whether the policy may be called now. When the pause is over exactly one caller gets `true`.
    #[must_use]
    pub fn allows(&self) -> bool {
        let retry_at = self.retry_at_ms.load(Ordering::Acquire);
        if retry_at == 0 {
            return true;
        }
        let now = self.now_ms();
        let next = now + Self::pause_ms();
        now >= retry_at
            && self.retry_at_ms.compare_exchange(retry_at, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Whether [`Breaker::allows`] would say yes; asking takes nothing.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let retry_at = self.retry_at_ms.load(Ordering::Acquire);
        retry_at == 0 || self.now_ms() >= retry_at
    }

    /// Whether it is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.retry_at_ms.load(Ordering::Acquire) != 0
    }

    pub(super) fn success(&self) {
        // Either alone may be what is left of a failure in another thread, whose halves this came between.
        if self.in_a_row.load(Ordering::Relaxed) != 0 || self.is_open() {
            self.in_a_row.store(0, Ordering::Relaxed);
            self.retry_at_ms.store(0, Ordering::Release);
        }
    }

    /// `calls`: those of the generation so far.
    pub(super) fn failure(&self, failure: &Failure, calls: u64) {
        let in_a_row = self.in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
        if *failure == Failure::Timeout || in_a_row >= Self::TOLERANCE || self.is_often(calls) {
            self.retry_at_ms.store(self.now_ms() + Self::pause_ms(), Ordering::Release);
        }
    }

    /// Counts a failure in its window; whether there are too many now, and then the next window begins.
    fn is_often(&self, calls: u64) -> bool {
        let start = self.window_start.load(Ordering::Relaxed);
        let failures = self.window_failures.fetch_add(1, Ordering::Relaxed) + 1;
        let seen = calls.saturating_sub(start);
        let often = failures >= Self::OFTEN && failures * 10 >= seen;
        if often || seen >= Self::WINDOW {
            self.window_start.store(calls, Ordering::Relaxed);
            self.window_failures.store(0, Ordering::Relaxed);
        }
        often
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn pause_ms() -> u64 {
        u64::try_from(Self::PAUSE.as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of every `each` calls one fails; the calls made before it opens, at most 10,000.
    fn opens_after(each: u64) -> Option<u64> {
        let breaker = Breaker::new();
        (1..=10_000_u64).find(|calls| {
            if calls % each == 0 {
                breaker.failure(&Failure::Trap("x".into()), *calls);
            } else {
                breaker.success();
            }
            breaker.is_open()
        })
    }

    #[test]
    fn a_tenth_of_failures_opens_it_and_fewer_do_not() {
        assert_eq!(opens_after(1), Some(u64::from(Breaker::TOLERANCE)));
        assert_eq!(opens_after(8), Some(64));
        assert_eq!(opens_after(10), Some(80));
        assert_eq!(opens_after(13), None);
    }
}
