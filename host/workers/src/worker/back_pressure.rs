//! Back-pressure of an engine: one that refuses requests because it has too much to do is not chosen for a
//! pause.
//!
//! An engine with a full queue answers 503 or 429 in a millisecond. Its load is low for that time, so without
//! a pause it would draw most of the traffic.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::time::{Duration, Instant};

use super::Worker;
use crate::unix_time::millis;

/// Longest pause that an engine may ask for.
const MAX_ASKED: Duration = Duration::from_secs(30);
/// First pause after a refusal without `Retry-After`. It doubles with each further one in a row.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause after a refusal without `Retry-After`.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// Refusals in a row after which the worker counts as failing.
const MAX_IN_ROW: u32 = 5;
/// Refusals further apart than this do not count as consecutive.
const ROW: Duration = Duration::from_secs(30);

/// An engine's refusal to take one more request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// When the engine wants to be asked again.
    pub retry_after: Option<Duration>,
    /// Whether the engine says that the client sent too many requests (429).
    pub is_too_many: bool,
}

/// The rest of a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Time until the worker may be chosen again.
    pub left: Duration,
    /// Whether the engine said that the client sent too many requests (429).
    pub is_too_many: bool,
    /// Whether a request that finds no other worker may try this one: the engine served requests up to this
    /// refusal, and named no time.
    pub may_be_tried: bool,
}

/// The pauses of one worker. Readers take no lock.
#[derive(Debug)]
pub(super) struct BackPressure {
    /// End of the pause in milliseconds after `epoch`; 0: no refusal since the last success.
    until_ms: AtomicU64,
    is_too_many: AtomicBool,
    may_be_tried: AtomicBool,
    /// Whether the engine served a request since the last refusal.
    served: AtomicBool,
    epoch: Instant,
    row: Mutex<Row>,
}

/// Refusals since the last success.
#[derive(Debug, Default)]
struct Row {
    /// Number of pauses that began.
    pauses: u32,
    /// When the pauses without `Retry-After` began, up to [`MAX_IN_ROW`], the last one first.
    began: [Option<Instant>; MAX_IN_ROW as usize],
    /// When the last pause of any kind began. A success leaves it.
    last_began: Option<Instant>,
}

impl BackPressure {
    pub(super) fn new() -> Self {
        Self {
            until_ms: AtomicU64::new(0),
            is_too_many: AtomicBool::new(false),
            may_be_tried: AtomicBool::new(false),
            served: AtomicBool::new(false),
            epoch: Instant::now(),
            row: Mutex::default(),
        }
    }

    /// Returns the rest of the pause, if one runs.
    pub(super) fn pause(&self) -> Option<Pause> {
        let until = self.until_ms.load(Ordering::Acquire);
        if until == 0 {
            return None;
        }
        let left = until.checked_sub(self.now_ms()).filter(|left| *left > 0)?;
        let is_too_many = self.is_too_many.load(Ordering::Relaxed);
        let may_be_tried = self.may_be_tried.load(Ordering::Relaxed);
        Some(Pause { left: Duration::from_millis(left), is_too_many, may_be_tried })
    }

    /// Returns whether the engine refused a request and none succeeded since, apart from those that succeeded
    /// during a pause.
    pub(super) fn is_noted(&self) -> bool {
        self.until_ms.load(Ordering::Acquire) != 0
    }

    /// Begins or extends a pause. Returns whether the refusals are a failure of the worker: several pauses in
    /// a row, and nothing succeeded between them. `sent`: when the refused request was sent. The outcome of a
    /// request that was sent before the last pause began says nothing new.
    pub(super) fn refused(&self, refusal: Refusal, sent: Instant) -> bool {
        let mut row = self.row.lock();
        if row.last_began.is_some_and(|began| sent < began) {
            return false;
        }
        let running = self.pause().map_or(Duration::ZERO, |pause| pause.left);
        let asked = refusal.retry_after.filter(|after| !after.is_zero());
        if asked.is_none() && !running.is_zero() && !self.may_be_tried.load(Ordering::Relaxed) {
            // A probe or a handoff: the pause has the length that it had without it.
            return false;
        }
        let served = self.served.swap(false, Ordering::Relaxed);
        self.may_be_tried.store(served && asked.is_none(), Ordering::Relaxed);
        let pause = match asked {
            Some(asked) => asked.min(MAX_ASKED),
            None => row.pause(),
        };
        let is_failure = asked.is_none() && row.begins();
        if pause > running {
            self.is_too_many.store(refusal.is_too_many, Ordering::Relaxed);
            let until = self.now_ms().saturating_add(millis(pause)).max(1);
            self.until_ms.store(until, Ordering::Release);
            row.last_began = Some(Instant::now());
        }
        is_failure
    }

    /// Notes that the engine served a request. A running pause continues: the request was accepted before it.
    /// Returns whether there was a refusal before.
    pub(super) fn succeeded(&self) -> bool {
        // Read first: the flag is shared between threads and almost never changes.
        if !self.served.load(Ordering::Relaxed) {
            self.served.store(true, Ordering::Relaxed);
        }
        if !self.is_noted() {
            return false;
        }
        let mut row = self.row.lock();
        *row = Row { last_began: row.last_began, ..Row::default() };
        if self.pause().is_none() {
            self.until_ms.store(0, Ordering::Release);
        }
        true
    }

    fn now_ms(&self) -> u64 {
        millis(self.epoch.elapsed())
    }
}

impl Row {
    /// Returns the pause after one more refusal without `Retry-After`.
    fn pause(&self) -> Duration {
        let recent = self.began.first().copied().flatten().is_some_and(|last| last.elapsed() < ROW);
        let doublings = if recent { self.pauses.min(8) } else { 0 };
        (FIRST_PAUSE * 2_u32.pow(doublings)).min(MAX_PAUSE)
    }

    /// Notes a pause without `Retry-After`. Returns whether there are too many in a row.
    fn begins(&mut self) -> bool {
        let recent = self.began.first().copied().flatten().is_some_and(|last| last.elapsed() < ROW);
        self.pauses = if recent { self.pauses.saturating_add(1) } else { 1 };
        self.began.rotate_right(1);
        if let Some(last) = self.began.first_mut() {
            *last = Some(Instant::now());
        }
        self.began.last().copied().flatten().is_some_and(|first| first.elapsed() < ROW)
    }
}

impl Worker {
    /// Reports that the engine refused a request that was sent at `sent`, because it has too much to do. The
    /// worker is not chosen for a pause. `others`: its other requests of this gateway. Returns whether that
    /// is a failure: it refused several times in a row.
    pub fn note_refusal(&self, refusal: Refusal, sent: Instant, others: u32) -> bool {
        self.learn_limit(others, sent);
        let is_failure = self.state.back_pressure.refused(refusal, sent);
        if is_failure && self.state.breaker.is_open() {
            self.state.breaker.record_failure(0);
        } else if is_failure {
            self.state.breaker.trip();
        }
        self.tell_ranks();
        is_failure
    }

    /// Returns the rest of the pause after the engine refused a request, if one runs.
    #[must_use]
    pub fn pause(&self) -> Option<Pause> {
        self.state.back_pressure.pause()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Refusal = Refusal { retry_after: None, is_too_many: false };

    fn left(engine: &BackPressure) -> Duration {
        engine.pause().map_or(Duration::ZERO, |pause| pause.left)
    }

    /// Refuses a request that was sent at this moment.
    fn refused_now(engine: &BackPressure, refusal: Refusal) -> bool {
        engine.refused(refusal, Instant::now())
    }

    async fn pass(seconds: f64) {
        tokio::time::advance(Duration::from_secs_f64(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_double_to_ten_seconds_and_the_fifth_in_a_row_is_a_failure() {
        let engine = BackPressure::new();
        pass(1.0).await;
        for (place, pause) in [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0].into_iter().enumerate() {
            assert_eq!(engine.pause(), None);
            // I13.2, I13.5
            assert_eq!(refused_now(&engine, PLAIN), place >= 4, "refusal {place}");
            assert_eq!(left(&engine), Duration::from_secs_f64(pause));
            assert!(!refused_now(&engine, PLAIN), "a probe during the pause changes nothing");
            assert_eq!(left(&engine), Duration::from_secs_f64(pause));
            pass(pause).await;
        }
        assert!(engine.is_noted());
        engine.succeeded();
        assert!(!engine.is_noted());
        assert!(!refused_now(&engine, PLAIN));
        assert_eq!(left(&engine), Duration::from_millis(500));
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_that_serves_between_its_refusals_does_not_fail() {
        let engine = BackPressure::new();
        for _ in 0..40 {
            // I13.5
            assert!(!refused_now(&engine, PLAIN));
            assert_eq!(left(&engine), Duration::from_millis(500));
            engine.succeeded();
            assert_eq!(
                left(&engine),
                Duration::from_millis(500),
                "what was taken before the pause does not end it"
            );
            pass(0.5).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_that_are_far_apart_are_no_row() {
        let engine = BackPressure::new();
        for _ in 0..10 {
            assert!(!refused_now(&engine, PLAIN));
            assert_eq!(left(&engine), Duration::from_millis(500));
            pass(31.0).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_s_own_time_holds_up_to_half_a_minute_and_is_no_failure() {
        let engine = BackPressure::new();
        let asks = |seconds| Refusal { retry_after: Some(Duration::from_secs(seconds)), is_too_many: true };
        for _ in 0..10 {
            // I13.2, I13.5
            assert!(!refused_now(&engine, asks(3)));
            let left = Duration::from_secs(3);
            let pause = Pause { left, is_too_many: true, may_be_tried: false };
            assert_eq!(engine.pause(), Some(pause));
            pass(3.0).await;
        }
        refused_now(&engine, asks(3_600));
        assert_eq!(left(&engine), Duration::from_secs(30));
        refused_now(&engine, asks(1));
        assert_eq!(left(&engine), Duration::from_secs(30), "a longer pause stands");
        pass(30.0).await;
        refused_now(&engine, asks(0));
        assert_eq!(left(&engine), Duration::from_millis(500), "no time at all is as none");
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_of_what_was_sent_before_the_pause_changes_nothing() {
        let asks = |seconds| Refusal { retry_after: Some(Duration::from_secs(seconds)), is_too_many: true };
        for late in [PLAIN, asks(20)] {
            for first in [PLAIN, asks(2)] {
                let engine = BackPressure::new();
                let sent = Instant::now();
                pass(0.1).await;
                assert!(!engine.refused(first, sent));
                let pause = engine.pause().unwrap();
                // I13.2: the refusal comes during the pause
                assert!(!engine.refused(late, sent));
                assert_eq!(engine.pause(), Some(pause), "{first:?}, then {late:?}");
                pass(pause.left.as_secs_f64()).await;
                // I13.2: it comes after the pause, and after a success
                assert!(!engine.refused(late, sent));
                assert_eq!(engine.pause(), None, "{first:?}, then {late:?}");
                engine.succeeded();
                assert!(!engine.refused(late, sent));
                assert_eq!((engine.pause(), engine.is_noted()), (None, false), "{first:?}, then {late:?}");
                // The outcome of a request that was sent after the pause is new information.
                refused_now(&engine, PLAIN);
                assert_eq!(left(&engine), Duration::from_millis(500));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_may_be_tried_after_its_first_refusal_since_it_served() {
        let may_be_tried = |engine: &BackPressure| engine.pause().is_some_and(|pause| pause.may_be_tried);
        let engine = BackPressure::new();
        refused_now(&engine, PLAIN);
        assert!(!may_be_tried(&engine), "it never served");
        pass(0.5).await;
        for _ in 0..3 {
            engine.succeeded();
            refused_now(&engine, PLAIN);
            // I13.8
            assert!(may_be_tried(&engine));
            pass(0.1).await;
            // It is tried, and refuses again: that counts.
            refused_now(&engine, PLAIN);
            // I13.8
            assert_eq!((may_be_tried(&engine), left(&engine)), (false, Duration::from_secs(1)));
            pass(0.1).await;
            refused_now(&engine, PLAIN);
            assert_eq!(left(&engine), Duration::from_millis(900), "a probe during the pause changes nothing");
            pass(0.9).await;
        }
        engine.succeeded();
        let asks = Refusal { retry_after: Some(Duration::from_secs(3)), is_too_many: false };
        refused_now(&engine, PLAIN);
        refused_now(&engine, asks);
        // I13.8
        assert_eq!(
            (may_be_tried(&engine), left(&engine)),
            (false, Duration::from_secs(3)),
            "it named a time"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn slow_refusals_of_one_burst_are_one_pause() {
        let engine = BackPressure::new();
        let sent = Instant::now();
        for _ in 0..10 {
            pass(1.0).await;
            // I13.2, I13.5
            assert!(!engine.refused(PLAIN, sent));
        }
        assert_eq!(engine.pause(), None);
        refused_now(&engine, PLAIN);
        assert_eq!(left(&engine), Duration::from_secs(1), "it is the second");
    }
}
