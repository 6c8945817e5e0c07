//! Circuit breaker: stops calls to something that fails, and lets calls through again after a pause.
//!
//! Workers and policies use the same breaker with different [`BreakerRules`].

use std::time::Duration;

use crate::sync::{
    Instant,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

/// When a breaker opens, how long it pauses, and what it lets through after the pause.
#[derive(Clone, Copy, Debug)]
pub struct BreakerRules {
    /// Consecutive failures that open the breaker.
    pub consecutive_failures: u32,
    /// Failure rate that opens the breaker even if successes lie between the failures.
    pub failure_rate: Option<FailureRate>,
    /// Pause after the breaker opens for the first time since the last success, or, after an opening by the
    /// failure rate, since the last window with a lower rate.
    pub first_pause: Duration,
    /// The pause doubles with every further opening, at most this many times.
    pub max_doublings: u32,
    /// Calls that are let through between the end of the pause and the next outcome.
    pub after_pause: AfterPause,
}

/// Opens when at least `min_failures` failed and they are at least one in `one_in` of the window's calls. A
/// success does not end the pause then: some calls of such a worker or policy succeed.
#[derive(Clone, Copy, Debug)]
pub struct FailureRate {
    /// Failures below this number never open the breaker by their rate.
    pub min_failures: u64,
    /// One failure in this many calls is too many.
    pub one_in: u64,
    /// Number of calls after which counting starts again.
    pub window: u64,
}

/// Calls that a breaker lets through after its pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterPause {
    /// One call in each pause; the breaker stays open until a call succeeds.
    OneTrial,
    /// All calls; the first failure opens the breaker again.
    Probation,
}

impl BreakerRules {
    /// Passive health of a worker. Pauses last 500 ms to 16 s. Probation lets all requests through because a
    /// request that fails on one worker is retried on another.
    pub const WORKER: Self = Self {
        consecutive_failures: 5,
        failure_rate: Some(FailureRate { min_failures: 10, one_in: 2, window: 20 }),
        first_pause: Duration::from_millis(500),
        max_doublings: 5,
        after_pause: AfterPause::Probation,
    };

    /// Calls of a routing policy. One trial per pause limits the time that a looping policy can cost.
    pub const POLICY: Self = Self {
        consecutive_failures: 5,
        failure_rate: Some(FailureRate { min_failures: 8, one_in: 10, window: 1_000 }),
        first_pause: Duration::from_secs(5),
        max_doublings: 0,
        after_pause: AfterPause::OneTrial,
    };

    fn pause(&self, earlier_openings: u32) -> Duration {
        self.first_pause * 2_u32.pow(earlier_openings.min(self.max_doublings))
    }
}

/// A breaker. Closed until failures open it; a success closes it. After an opening by the failure rate, only
/// a success after the pause does.
///
/// Threads report outcomes without a lock. Racing outcomes may lose a count, which shifts an opening by one
/// failure or changes the length of a pause; they never leave the breaker open after such a later success.
#[derive(Debug)]
pub struct Breaker {
    rules: BreakerRules,
    /// Failures since the last success: a row.
    consecutive: AtomicU32,
    /// Rows that a success ended. The number wraps around.
    rows: AtomicU32,
    /// Times the breaker opened since the last success, or since `rated` was cleared.
    openings: AtomicU32,
    /// Number of calls when the current window began, and failures since then. Only failures touch these,
    /// unless `rated`.
    window_start: AtomicU64,
    window_failures: AtomicU64,
    /// Whether the failure rate opened the breaker, and no window since then had a lower rate.
    rated: AtomicBool,
    /// Until when a success does not close the breaker, in milliseconds after `epoch`.
    held_until_ms: AtomicU64,
    /// End of the pause in milliseconds after `epoch`; 0 if the breaker is closed.
    retry_at_ms: AtomicU64,
    epoch: Instant,
}

impl Breaker {
    /// Returns a closed breaker.
    #[must_use]
    pub fn new(rules: BreakerRules) -> Self {
        Self {
            rules,
            consecutive: AtomicU32::new(0),
            rows: AtomicU32::new(0),
            openings: AtomicU32::new(0),
            window_start: AtomicU64::new(0),
            window_failures: AtomicU64::new(0),
            rated: AtomicBool::new(false),
            held_until_ms: AtomicU64::new(0),
            retry_at_ms: AtomicU64::new(0),
            epoch: Instant::now(),
        }
    }

    /// Returns whether a call may be made now. With [`AfterPause::OneTrial`], exactly one caller gets `true`
    /// after a pause, and the next pause begins.
    #[must_use]
    pub fn try_call(&self) -> bool {
        let retry_at = self.retry_at_ms.load(Ordering::Acquire);
        if retry_at == 0 {
            return true;
        }
        let now = self.now_ms();
        if now < retry_at || self.rules.after_pause == AfterPause::Probation {
            return now >= retry_at;
        }
        let next = now.saturating_add(millis(self.rules.first_pause));
        self.retry_at_ms.compare_exchange(retry_at, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Returns whether the breaker is open and its pause has not ended. Unlike [`Breaker::try_call`] this
    /// claims nothing.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        let retry_at = self.retry_at_ms.load(Ordering::Acquire);
        retry_at != 0 && self.now_ms() < retry_at
    }

    /// Returns whether the breaker opened and no call succeeded since, also after the pause.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.retry_at_ms.load(Ordering::Acquire) != 0
    }

    /// Like [`Breaker::is_open`], but only until so long after the pause.
    #[must_use]
    pub(crate) fn is_open_until(&self, after_pause: Duration) -> bool {
        let retry_at = self.retry_at_ms.load(Ordering::Acquire);
        retry_at != 0 && self.now_ms() < retry_at.saturating_add(millis(after_pause))
    }

    /// Closes the breaker, unless its failure rate opened it and the pause has not ended. Returns whether
    /// that closed it. `calls` is the number of calls so far; only [`BreakerRules::failure_rate`] uses it.
    pub fn record_success(&self, calls: u64) -> bool {
        let mut closed = false;
        let rated = self.rated.load(Ordering::Relaxed);
        // Check both: a success that runs between the two writes of a failure leaves only one of them set.
        if self.consecutive.load(Ordering::Relaxed) != 0 || self.is_open() {
            self.consecutive.store(0, Ordering::Relaxed);
            self.rows.fetch_add(1, Ordering::Relaxed);
            if rated && self.now_ms() < self.held_until_ms.load(Ordering::Relaxed) {
                return false;
            }
            if !rated {
                self.openings.store(0, Ordering::Relaxed);
            } else if self.is_open() {
                // The calls of the pause and of the probation are not part of the rate.
                self.begin_window(calls);
            }
            closed = self.retry_at_ms.swap(0, Ordering::AcqRel) != 0;
        }
        if rated && self.is_window_full(calls) {
            self.begin_window(calls);
            self.end_rated();
        }
        closed
    }

    /// Counts a failure, which opens the breaker if its rules say so. Returns whether the breaker was closed
    /// before and is open now. `calls` is the number of calls so far; only [`BreakerRules::failure_rate`]
    /// uses it.
    pub fn record_failure(&self, calls: u64) -> bool {
        let in_row = self.count_failure() >= self.rules.consecutive_failures;
        let by_rate = !self.is_open() && self.rate_exceeded(calls);
        if by_rate {
            self.rated.store(true, Ordering::Relaxed);
        }
        let too_many = in_row || by_rate;
        match self.rules.after_pause {
            AfterPause::OneTrial if too_many => self.open(),
            AfterPause::Probation if !self.is_paused() && (too_many || self.is_open()) => self.open(),
            AfterPause::OneTrial | AfterPause::Probation => false,
        }
    }

    /// The row that the next failure belongs to, for [`Self::take_back`].
    pub(crate) fn row(&self) -> u32 {
        self.rows.load(Ordering::Relaxed)
    }

    /// Takes back failures of a row that turned out to be none of what the breaker protects from, unless a
    /// success ended the row. A breaker that only they opened by their number closes. They stay in the
    /// failure rate: where nothing succeeds, failures that are all taken back say no less about a worker.
    pub(crate) fn take_back(&self, failures: u32, row: u32) {
        if row != self.row() {
            return;
        }
        let fewer = |counted: u32| Some(counted.saturating_sub(failures));
        let counted = self.consecutive.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
        let [before, now] = counted.map_or([0; 2], |counted| [counted, counted.saturating_sub(failures)]);
        let most = self.rules.consecutive_failures;
        if before >= most && now < most && !self.rated.load(Ordering::Relaxed) {
            self.openings.store(0, Ordering::Relaxed);
            self.retry_at_ms.store(0, Ordering::Release);
        }
    }

    /// Counts a failure that opens the breaker at once. Returns whether it was closed before.
    pub fn trip(&self) -> bool {
        self.count_failure();
        self.open()
    }

    fn count_failure(&self) -> u32 {
        self.consecutive.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Opens the breaker, or begins its next pause. Returns whether it was closed before.
    fn open(&self) -> bool {
        let pause = self.rules.pause(self.openings.fetch_add(1, Ordering::Relaxed));
        let until = self.now_ms().saturating_add(millis(pause)).max(1);
        self.held_until_ms.store(until, Ordering::Relaxed);
        self.retry_at_ms.swap(until, Ordering::AcqRel) == 0
    }

    /// Counts a failure in its window and starts the next window when this one is full or its rate too high.
    fn rate_exceeded(&self, calls: u64) -> bool {
        let Some(rate) = self.rules.failure_rate else { return false };
        let failures = self.window_failures.fetch_add(1, Ordering::Relaxed) + 1;
        let seen = calls.saturating_sub(self.window_start.load(Ordering::Relaxed));
        let exceeded = failures >= rate.min_failures && failures * rate.one_in >= seen;
        let is_full = self.is_window_full(calls);
        if exceeded || is_full {
            self.begin_window(calls);
        }
        if is_full && !exceeded {
            self.end_rated();
        }
        exceeded
    }

    fn is_window_full(&self, calls: u64) -> bool {
        let seen = calls.saturating_sub(self.window_start.load(Ordering::Relaxed));
        self.rules.failure_rate.is_some_and(|rate| seen >= rate.window)
    }

    fn begin_window(&self, calls: u64) {
        self.window_start.store(calls, Ordering::Relaxed);
        self.window_failures.store(0, Ordering::Relaxed);
    }

    fn end_rated(&self) {
        if self.rated.swap(false, Ordering::Relaxed) {
            self.openings.store(0, Ordering::Relaxed);
        }
    }

    fn now_ms(&self) -> u64 {
        millis(self.epoch.elapsed())
    }
}

// As `unix_time::millis`: the model checker compiles this file without that one.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
