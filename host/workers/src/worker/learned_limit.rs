//! Learns from an engine's refusals how many requests at once it takes: no endpoint tells how long a queue it
//! allows.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use tokio::time::{Duration, Instant};

use super::Worker;
use crate::unix_time::millis;

/// How long after the last refusal the limit is known.
const KEPT: Duration = Duration::from_mins(1);
/// How long after a refusal at the limit itself it is not raised.
const RAISED_AFTER: Duration = Duration::from_secs(10);

/// The limit of one worker. Readers take no lock.
#[derive(Debug)]
pub(super) struct LearnedLimit {
    /// Requests in flight from here; 0: no limit is known.
    limit: AtomicU32,
    /// Requests that were served since the limit changed.
    served: AtomicU32,
    /// When the engine last refused a request that was sent after the refusal before, milliseconds after
    /// `epoch`.
    refused_ms: AtomicU64,
    /// Whether the worker then had as many requests as the limit.
    is_confirmed: AtomicBool,
    epoch: Instant,
}

impl LearnedLimit {
    pub(super) fn new() -> Self {
        Self {
            limit: AtomicU32::new(0),
            served: AtomicU32::new(0),
            refused_ms: AtomicU64::new(0),
            is_confirmed: AtomicBool::new(false),
            epoch: Instant::now(),
        }
    }

    /// Returns whether the ranks were told that there is a limit. It may be over and not forgotten yet.
    pub(super) fn is_noted(&self) -> bool {
        self.limit.load(Ordering::Relaxed) != 0
    }

    /// Returns the limit, if one is known.
    fn known(&self) -> Option<u32> {
        let limit = self.limit.load(Ordering::Relaxed);
        (limit != 0 && self.age() < KEPT).then_some(limit)
    }

    /// Notes a refusal, while `others` were in flight, of a request that was sent at `sent`. The refusals of
    /// one burst leave the lowest limit: those in flight at the first one may be refused, too.
    fn refused(&self, others: u32, sent: Instant) {
        let (known, others) = (self.known(), others.max(1));
        let is_of_burst = self.millis(sent) <= self.refused_ms.load(Ordering::Relaxed);
        let limit = match known {
            Some(known) if is_of_burst => known.min(others),
            _ => {
                let is_confirmed = known.is_some_and(|known| others.saturating_add(1) >= known);
                self.is_confirmed.store(is_confirmed, Ordering::Relaxed);
                self.refused_ms.store(self.millis(Instant::now()), Ordering::Relaxed);
                others
            }
        };
        self.limit.store(limit, Ordering::Relaxed);
        self.served.store(0, Ordering::Relaxed);
    }

    /// Notes that a request was served, which may raise the limit by one. Returns whether it was forgotten.
    pub(super) fn served(&self) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        if limit == 0 {
            return false;
        }
        let age = self.age();
        if age >= KEPT {
            return self.forget();
        }
        let served = self.served.fetch_add(1, Ordering::Relaxed) + 1;
        let may_rise = !self.is_confirmed.load(Ordering::Relaxed) || age >= RAISED_AFTER;
        // A refusal, or another process, may have changed the limit meanwhile.
        let raised = || {
            let order = Ordering::Relaxed;
            self.limit.compare_exchange(limit, limit.saturating_add(1), order, order).is_ok()
        };
        if served >= limit && may_rise && raised() {
            self.served.store(0, Ordering::Relaxed);
        }
        false
    }

    /// Forgets the limit. Returns whether there was one.
    fn forget(&self) -> bool {
        self.limit.swap(0, Ordering::Relaxed) != 0
    }

    fn age(&self) -> Duration {
        let refused = Duration::from_millis(self.refused_ms.load(Ordering::Relaxed));
        self.epoch.elapsed().saturating_sub(refused)
    }

    fn millis(&self, at: Instant) -> u64 {
        millis(at.saturating_duration_since(self.epoch))
    }
}

impl Worker {
    /// Returns whether this gateway has as many requests on the worker as its engine takes, by its refusals.
    #[must_use]
    pub fn is_at_learned_limit(&self) -> bool {
        self.state.learned_limit.known().is_some_and(|limit| self.own_requests() >= limit)
    }

    /// Notes that the engine refused a request while `others` were in flight.
    pub(super) fn learn_limit(&self, others: u32, sent: Instant) {
        self.state.learned_limit.refused(others, sent);
    }

    /// Forgets what the refusals of another process told.
    pub(super) fn forget_limit(&self) {
        if self.state.learned_limit.forget() {
            self.tell_ranks();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn pass(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
    }

    fn serve(limit: &LearnedLimit, requests: u32) -> Option<u32> {
        (0..requests).for_each(|_| assert!(!limit.served()));
        limit.known()
    }

    #[tokio::test(start_paused = true)]
    async fn the_refusals_of_a_burst_leave_those_that_the_engine_took() {
        let limit = LearnedLimit::new();
        pass(1).await;
        let sent = Instant::now();
        tokio::time::advance(Duration::from_millis(2)).await;
        for others in (4..12).rev() {
            limit.refused(others, sent);
            // I13.9
            assert_eq!(limit.known(), Some(others));
        }
        limit.refused(7, sent);
        assert_eq!(limit.known(), Some(4), "an early one that was answered late");
        pass(1).await;
        limit.refused(0, Instant::now());
        assert_eq!(limit.known(), Some(1), "one may always try");
    }

    #[tokio::test(start_paused = true)]
    async fn successes_raise_the_limit_slowly_once_it_was_refused_itself() {
        let limit = LearnedLimit::new();
        pass(1).await;
        limit.refused(4, Instant::now());
        // I13.9
        assert_eq!((serve(&limit, 3), serve(&limit, 1)), (Some(4), Some(5)));
        assert_eq!((serve(&limit, 4), serve(&limit, 1)), (Some(5), Some(6)));
        pass(1).await;
        limit.refused(2, Instant::now());
        assert_eq!(serve(&limit, 2), Some(3), "fewer than it took before: something else was the reason");
        pass(1).await;
        limit.refused(2, Instant::now());
        // I13.9: the third of three was refused
        assert_eq!(serve(&limit, 100), Some(2));
        pass(10).await;
        assert_eq!(serve(&limit, 1), Some(3));
    }

    #[tokio::test(start_paused = true)]
    async fn the_limit_is_forgotten_a_minute_after_the_last_refusal() {
        let limit = LearnedLimit::new();
        limit.refused(4, Instant::now());
        pass(59).await;
        assert_eq!(limit.known(), Some(4));
        pass(1).await;
        // I13.9
        assert_eq!(limit.known(), None);
        assert!(limit.is_noted() && limit.served() && !limit.is_noted() && !limit.served());
    }
}
