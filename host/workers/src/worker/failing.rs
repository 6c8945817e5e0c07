//! What operators see of a worker whose legs fail: why the last one failed, and when the gateway ejects
//! the worker and takes it back.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;

use super::Worker;
use crate::{log_limit::LogLimit, spec::url_without_secrets};

/// Why the last leg of a failing worker failed.
#[derive(Debug)]
pub(super) struct LastFailure {
    reason: ArcSwapOption<String>,
    /// Whether a line of the log said that the worker is failing.
    is_logged: AtomicBool,
    lines: LogLimit,
}

impl LastFailure {
    pub(super) fn new() -> Self {
        Self {
            reason: ArcSwapOption::empty(),
            is_logged: AtomicBool::new(false),
            lines: LogLimit::new(Duration::from_mins(1)),
        }
    }
}

impl Worker {
    /// Keeps why a leg failed, if the worker is failing. Call this after the failure was reported.
    pub fn explain_failure(&self, reason: impl FnOnce() -> String) {
        if !self.is_failing() {
            return;
        }
        let LastFailure { reason: kept, is_logged, lines } = &self.state.last_failure;
        let reason = Arc::new(reason());
        kept.store(Some(reason.clone()));
        if !is_logged.load(Ordering::Acquire)
            && let Some(suppressed) = lines.due()
        {
            is_logged.store(true, Ordering::Release);
            let (worker, url) = (self.id(), url_without_secrets(&self.spec.url));
            tracing::warn!(%worker, url, %reason, suppressed, "worker failing: its last legs failed");
        }
        // A success may have closed the breaker before the reason was kept.
        self.forget_failure();
    }

    /// Forgets why legs failed, unless the worker is still failing. Call this after a breaker was closed.
    pub(super) fn forget_failure(&self) {
        if self.is_failing() {
            return;
        }
        self.state.last_failure.reason.store(None);
        if self.state.last_failure.is_logged.swap(false, Ordering::AcqRel) {
            tracing::info!(worker = %self.id(), "worker gets requests again: a leg succeeded, or its failures were the fault of a request");
        }
    }

    /// Returns why the last leg failed, while the worker is failing and did so lately.
    #[must_use]
    pub fn failure_reason(&self) -> Option<Arc<String>> {
        self.state.last_failure.reason.load_full().filter(|_| self.failed_lately())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::{Health, healthy};

    fn fails(worker: &Worker, why: &str) {
        worker.note_outcome(false);
        worker.explain_failure(|| why.to_owned());
    }

    fn reason(worker: &Worker) -> Option<String> {
        worker.failure_reason().map(|reason| reason.to_string())
    }

    #[tokio::test(start_paused = true)]
    async fn f6_the_reason_of_the_last_failure_is_kept_while_the_worker_is_failing() {
        let worker = healthy();
        (0..4).for_each(|_| fails(&worker, "one"));
        // F6.16
        assert_eq!(reason(&worker), None);
        fails(&worker, "two");
        assert_eq!(reason(&worker).as_deref(), Some("two"));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!((worker.ineligible(), reason(&worker).as_deref()), (None, Some("two")), "after the pause");
        fails(&worker, "three");
        assert_eq!(reason(&worker).as_deref(), Some("three"));
        worker.note_outcome(true);
        assert_eq!(reason(&worker), None);
        assert!(worker.state.last_failure.reason.load().is_none());
        worker.note_timeout();
        worker.explain_failure(|| "silent".to_owned());
        assert_eq!(reason(&worker).as_deref(), Some("silent"));
        worker.charge_broken_handoff();
        worker.note_outcome(true);
        assert_eq!(reason(&worker), None);
    }

    #[tokio::test(start_paused = true)]
    async fn f6_a_worker_that_begins_to_fail_again_and_again_has_one_line_a_minute() {
        let worker = healthy();
        let mut lines = 0;
        for _ in 0..119 {
            worker.note_timeout();
            worker.explain_failure(|| "silent".to_owned());
            // F6.17
            lines += u32::from(worker.state.last_failure.is_logged.load(Ordering::Relaxed));
            worker.note_outcome(true);
            assert!(!worker.state.last_failure.is_logged.load(Ordering::Relaxed));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(lines, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn f6_an_idle_worker_is_called_failing_for_a_minute_after_its_pause() {
        let worker = healthy();
        (0..5).for_each(|_| fails(&worker, "one"));
        tokio::time::advance(Duration::from_millis(60_499)).await;
        // F6.19
        assert_eq!((worker.is_faulty(), reason(&worker).as_deref()), (true, Some("one")));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!((worker.is_faulty(), reason(&worker)), (false, None));
        assert!(worker.is_failing(), "its next failure is enough");
        fails(&worker, "two");
        assert_eq!((worker.is_faulty(), reason(&worker).as_deref()), (true, Some("two")));
        tokio::time::advance(Duration::from_secs(61)).await;
        worker.charge_broken_handoff();
        assert!(!worker.is_faulty(), "one broken handoff");
        (0..4).for_each(|_| worker.charge_broken_handoff());
        assert!(worker.is_faulty());
        worker.set_health(Health::Unhealthy);
        tokio::time::advance(Duration::from_secs(61)).await;
        assert!(worker.is_faulty(), "it does not pass its health checks");
    }

    #[test]
    fn outcomes_of_several_threads_leave_no_reason_behind() {
        let worker = healthy();
        for _ in 0..200 {
            std::thread::scope(|scope| {
                scope.spawn(|| (0..6).for_each(|_| fails(&worker, "one")));
                scope.spawn(|| (0..6).for_each(|_| worker.note_outcome(true)));
            });
            let kept = worker.state.last_failure.reason.load_full();
            assert_eq!(kept.is_some(), worker.is_failing());
            worker.note_outcome(true);
        }
    }
}
