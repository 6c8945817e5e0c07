//! Outcomes of legs: a worker whose legs fail is not chosen for a pause.
//!
//! A worker that fails at once looks idle. Without the pause it would draw most of the traffic.

use std::{sync::atomic::Ordering, time::Duration};

use super::Worker;

/// How long after the last pause a worker that no request has tried since still counts as failing for
/// operators: without requests, none can show that it was mended.
const UNTRIED: Duration = Duration::from_mins(1);

impl Worker {
    /// Returns whether the last requests failed, so that another failure says nothing about its request.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        self.state.breaker.is_open() || self.state.broken_handoffs.is_open()
    }

    /// Like [`Worker::is_failing`], but no longer than a minute after the pause if no leg failed since.
    #[must_use]
    pub fn failed_lately(&self) -> bool {
        self.state.breaker.is_open_until(UNTRIED) || self.state.broken_handoffs.is_open_until(UNTRIED)
    }

    /// Returns the number of legs that failed since the worker joined, and how many of them failed before the
    /// engine's process began. The numbers wrap around.
    #[must_use]
    pub fn failed_legs(&self) -> [u32; 2] {
        let failed = self.ranks.iter().map(|rank| rank.failed_legs()).fold(0, u32::wrapping_add);
        [failed, self.state.failed_before.load(Ordering::Relaxed)]
    }

    /// Counts the legs that failed as those of an earlier process.
    pub(super) fn forget_failed_legs(&self) {
        let [failed, _] = self.failed_legs();
        self.state.failed_before.store(failed, Ordering::Relaxed);
    }

    /// Reports the outcome of a leg. Several consecutive failures open the worker's breaker, and so do many
    /// among its last legs.
    pub fn note_outcome(&self, ok: bool) {
        let outcomes = self.state.outcomes.fetch_add(1, Ordering::Relaxed) + 1;
        if ok {
            self.note_answered();
            if self.state.breaker.record_success(outcomes) {
                self.forget_failure();
            }
            let is_conditional = self.spec.max_concurrency.is_some() || self.state.learned_limit.is_noted();
            // A concurrent failure may have updated the ranks before the breaker closed.
            if self.state.learned_limit.served() || (!is_conditional && !self.is_surely_eligible()) {
                self.tell_ranks();
            }
        } else {
            self.state.breaker.record_failure(outcomes);
            self.tell_ranks();
        }
    }

    /// The row of failed legs, without a success between them, that the next one belongs to.
    #[must_use]
    pub fn row_of_failures(&self) -> u32 {
        self.state.breaker.row()
    }

    /// Takes back failures of legs whose request turned out to be to blame, unless a leg succeeded since this
    /// row. They stay in the failure rate.
    pub fn take_back_failures(&self, failures: u32, row: u32) {
        self.state.breaker.take_back(failures, row);
        self.forget_failure();
        self.tell_ranks();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Duration, advance};

    use super::*;
    use crate::worker::{Ineligible, healthy};

    /// Reports outcomes of which `failing` of ten fail until the worker is not eligible, at most 1,000.
    /// Returns how many that were.
    fn outcomes_until_paused(worker: &Worker, failing: usize) -> Option<usize> {
        (0..1_000).find(|turn| {
            // Spread evenly, so that few failures are consecutive.
            worker.note_outcome((turn + 1) * failing / 10 == turn * failing / 10);
            worker.ineligible() == Some(Ineligible::Failing)
        })
    }

    #[tokio::test]
    async fn m6_legs_that_failed_in_an_earlier_process_are_told_apart() {
        let worker = healthy();
        let fail = || worker.candidates()[0].load().observe_outcome(false);
        fail();
        fail();
        worker.candidates()[0].load().observe_outcome(true);
        assert_eq!(worker.failed_legs(), [2, 0]);
        worker.note_new_process();
        fail();
        // M6.2
        assert_eq!(worker.failed_legs(), [3, 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn f6_a_worker_that_fails_half_of_its_legs_is_failing_although_the_others_succeed() {
        // F6.13
        assert_eq!(outcomes_until_paused(&healthy(), 7), Some(14));
        assert_eq!(outcomes_until_paused(&healthy(), 5), Some(19));
        assert_eq!(outcomes_until_paused(&healthy(), 4), None);
        assert_eq!(outcomes_until_paused(&healthy(), 10), Some(4), "five in a row");
    }

    #[tokio::test(start_paused = true)]
    async fn f6_the_pauses_of_a_worker_that_fails_half_of_its_legs_grow_until_it_fails_fewer() {
        let worker = healthy();
        for pause in [500, 1_000, 2_000].map(Duration::from_millis) {
            assert!(outcomes_until_paused(&worker, 7).is_some());
            worker.note_outcome(true);
            // F6.14
            assert_eq!(worker.ineligible(), Some(Ineligible::Failing), "this leg began before the pause");
            advance(pause - Duration::from_millis(1)).await;
            assert_eq!(worker.ineligible(), Some(Ineligible::Failing));
            advance(Duration::from_millis(1)).await;
            assert_eq!(worker.ineligible(), None);
            worker.note_outcome(true);
            assert!(!worker.is_failing());
        }
        assert!(outcomes_until_paused(&worker, 7).is_some());
        advance(Duration::from_secs(4)).await;
        (0..21).for_each(|_| worker.note_outcome(true));
        assert!(outcomes_until_paused(&worker, 7).is_some());
        advance(Duration::from_millis(500)).await;
        // F6.14
        assert_eq!(worker.ineligible(), None, "the first pause again");
        worker.note_outcome(false);
        assert_eq!(worker.ineligible(), Some(Ineligible::Failing), "one failure is enough on probation");
    }
}
