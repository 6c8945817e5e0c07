//! Refusals of requests that other workers take. An engine without a chat template, or of another build,
//! answers an error at once. It looks idle for that reason, and would draw most of the traffic.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;

use super::Worker;
use crate::log_limit::LogLimit;

/// Refusals in a row from which on another worker is asked, too.
const MAX_IN_ROW: u32 = 5;

/// Requests that the engine refused as the client's error since it last answered one.
#[derive(Debug)]
pub(super) struct Refusing {
    in_row: AtomicU32,
    /// Number of these about which another worker is asked now.
    doubts: AtomicU32,
    /// What the engine answered to a request that another worker took.
    reason: ArcSwapOption<String>,
    /// Whether the engine did not allow an abort.
    aborts: AtomicBool,
    /// Whether the last refusal was one of the gateway's key.
    key: AtomicBool,
    key_lines: LogLimit,
}

impl Refusing {
    pub(super) fn new() -> Self {
        Self {
            in_row: AtomicU32::new(0),
            doubts: AtomicU32::new(0),
            reason: ArcSwapOption::empty(),
            aborts: AtomicBool::new(false),
            key: AtomicBool::new(false),
            key_lines: LogLimit::new(Duration::from_mins(1)),
        }
    }

    pub(super) fn is_doubted(&self) -> bool {
        self.doubts.load(Ordering::Acquire) > 0
    }
}

/// A refusal about which another worker is asked. Until this is dropped, the worker that refused is chosen
/// only if no other is left.
#[derive(Debug)]
pub struct Doubt(Arc<Worker>);

impl Worker {
    /// Reports that the engine refused a request as the client's error. Returns whether it refused so many in
    /// a row that another worker should be asked.
    pub fn note_refused_request(&self) -> bool {
        self.state.refusing.in_row.fetch_add(1, Ordering::Relaxed) >= MAX_IN_ROW - 1
    }

    /// Returns whether the engine refused a request as the client's error since it last answered one.
    #[must_use]
    pub fn refuses_requests(&self) -> bool {
        self.state.refusing.in_row.load(Ordering::Relaxed) > 0
    }

    /// Returns what the engine answered to a request that another worker took, until it answers one.
    #[must_use]
    pub fn refusal_reason(&self) -> Option<Arc<String>> {
        self.state.refusing.reason.load_full()
    }

    /// Reports that the engine did not allow an abort. Returns whether that is the first time.
    pub fn note_abort_not_allowed(&self) -> bool {
        !self.state.refusing.aborts.swap(true, Ordering::Relaxed)
    }

    /// Waits until the engine may get one more call that aborts a request, or an item of a list. The turn
    /// ends when this is dropped.
    pub async fn abort_turn(&self, is_list: bool) -> impl Sized + Send {
        let share = if is_list { self.state.list_abort_turns.acquire().await.ok() } else { None };
        (self.state.abort_turns.acquire().await.ok(), share)
    }

    /// Begins to ask another worker about a request that this one refused.
    #[must_use]
    pub fn doubt(self: &Arc<Self>) -> Doubt {
        self.state.refusing.doubts.fetch_add(1, Ordering::AcqRel);
        self.tell_ranks();
        Doubt(self.clone())
    }

    /// Reports that the engine refused the key that the gateway sent. Returns how many such reports had no
    /// line in the log since the last one, if a line is due.
    pub fn note_refused_key(&self) -> Option<u64> {
        self.state.refusing.key.store(true, Ordering::Relaxed);
        self.state.refusing.key_lines.due()
    }

    /// Returns whether the engine refused the gateway's key since it last answered a request.
    #[must_use]
    pub fn refuses_key_of_requests(&self) -> bool {
        self.state.refusing.key.load(Ordering::Relaxed)
    }

    /// Forgets the refusals: the engine answered a request.
    pub(super) fn takes_requests(&self) {
        if self.refuses_key_of_requests() {
            self.state.refusing.key.store(false, Ordering::Relaxed);
        }
        if self.refuses_requests() {
            self.state.refusing.in_row.store(0, Ordering::Relaxed);
            if self.state.refusing.reason.swap(None).is_some() {
                tracing::info!(worker = %self.id(), "worker answers requests again");
            }
        }
    }
}

impl Doubt {
    /// The other worker took the request: this one fails, unless it answered another request meanwhile.
    /// Returns whether it did not fail for this reason before.
    pub fn confirm(self, reason: String) -> bool {
        let Self(worker) = &self;
        if !worker.refuses_requests() {
            return false;
        }
        let is_new = worker.state.refusing.reason.swap(Some(Arc::new(reason))).is_none();
        // A success in between must not leave the reason behind.
        worker.state.refusing.in_row.fetch_max(MAX_IN_ROW, Ordering::Relaxed);
        if !worker.state.breaker.is_paused() {
            worker.state.breaker.trip();
        }
        is_new
    }

    /// The other worker refused the request, too: it was wrong. A worker that is known to refuse what others
    /// take stays so until it answers a request.
    pub fn refute(self) {
        let refusing = &self.0.state.refusing;
        if refusing.reason.load().is_none() {
            refusing.in_row.store(0, Ordering::Relaxed);
        }
    }
}

impl Drop for Doubt {
    fn drop(&mut self) {
        self.0.state.refusing.doubts.fetch_sub(1, Ordering::AcqRel);
        self.0.tell_ranks();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Duration;

    use super::*;
    use crate::worker::{Ineligible, healthy};

    fn refuses_in_row(worker: &Worker) -> u32 {
        (1..).find(|_| worker.note_refused_request()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn i17_a_worker_fails_whose_refusal_another_one_does_not_share_until_it_answers() {
        let worker = healthy();
        assert_eq!(refuses_in_row(&worker), MAX_IN_ROW);
        let doubt = worker.doubt();
        assert_eq!(worker.ineligible(), Some(Ineligible::Failing), "while the other one is asked");
        // I17.3
        assert!(doubt.confirm("no template".to_owned()));
        assert_eq!(worker.ineligible(), Some(Ineligible::Failing));
        assert_eq!(worker.refusal_reason().unwrap().as_str(), "no template");
        tokio::time::advance(Duration::from_millis(500)).await;
        assert_eq!(worker.ineligible(), None);
        // I17.4
        assert!(worker.note_refused_request(), "the next refusal is enough");
        worker.doubt().refute();
        assert!(worker.note_refused_request(), "a wrong request acquits a worker that nothing else did");
        assert!(!worker.doubt().confirm("no template".to_owned()), "it is known");
        tokio::time::advance(Duration::from_millis(999)).await;
        assert_eq!(worker.ineligible(), Some(Ineligible::Failing), "the pause is longer");
        worker.note_outcome(true);
        assert_eq!((worker.refusal_reason(), worker.ineligible()), (None, None));
        assert_eq!(refuses_in_row(&worker), MAX_IN_ROW);
    }

    #[tokio::test(start_paused = true)]
    async fn i17_a_worker_is_acquitted_by_another_refusal_and_by_an_answer() {
        let worker = healthy();
        refuses_in_row(&worker);
        let doubt = worker.doubt();
        doubt.refute();
        // I17.2
        assert_eq!((worker.ineligible(), worker.refuses_requests()), (None, false));
        refuses_in_row(&worker);
        let doubt = worker.doubt();
        worker.note_answered();
        assert!(!doubt.confirm("no template".to_owned()), "it answered another request meanwhile");
        assert_eq!((worker.ineligible(), worker.refusal_reason()), (None, None));
        refuses_in_row(&worker);
        drop(worker.doubt());
        assert_eq!(worker.ineligible(), None, "the other one gave no answer");
    }
}
