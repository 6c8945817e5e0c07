//! Notices a generation that sends every request to one candidate while others get none.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use pointsman_workers::{DpRank, WorkerId};
use serde::Serialize;

/// Number of decisions in a row for one candidate after which it is reported.
pub const MIN_IN_A_ROW: u64 = 100;

/// The candidate chosen last, and how often in a row it was chosen without a good reason. Threads may mix two
/// choices; the count is for operators and changes no decision.
#[derive(Debug, Default)]
pub struct OneWorker {
    worker: AtomicU64,
    rank: AtomicU32,
    in_a_row: AtomicU64,
}

/// The only candidate that a generation chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OnlyChoice {
    /// Its worker.
    pub worker: WorkerId,
    /// Its data-parallel rank.
    pub dp_rank: DpRank,
    /// Decisions in a row that chose it, among two candidates or more, although it had requests already or
    /// none of the prompt cached.
    pub decisions: u64,
}

impl OneWorker {
    /// Notes a decision among two candidates or more. `counts`: the chosen one had requests already, or none
    /// of the prompt cached, so that another one would have been as good.
    pub fn note(&self, worker: WorkerId, rank: DpRank, counts: bool) {
        let last = (self.worker.load(Ordering::Relaxed), self.rank.load(Ordering::Relaxed));
        if last != (worker.0, rank.0) {
            self.worker.store(worker.0, Ordering::Relaxed);
            self.rank.store(rank.0, Ordering::Relaxed);
            self.in_a_row.store(0, Ordering::Relaxed);
        } else if counts {
            self.in_a_row.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the candidate that got all of the last decisions, when these were [`MIN_IN_A_ROW`] or more.
    #[must_use]
    pub fn only_choice(&self) -> Option<OnlyChoice> {
        let decisions = self.in_a_row.load(Ordering::Relaxed);
        let worker = WorkerId(self.worker.load(Ordering::Relaxed));
        let dp_rank = DpRank(self.rank.load(Ordering::Relaxed));
        (decisions >= MIN_IN_A_ROW).then_some(OnlyChoice { worker, dp_rank, decisions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_gets_everything_although_it_has_work_is_told() {
        let choices = OneWorker::default();
        let note = |worker, counts| choices.note(WorkerId(worker), DpRank(1), counts);
        // A request now and then that finds its prompt cached on an idle worker.
        (0..1_000).for_each(|_| note(7, false));
        assert_eq!(choices.only_choice(), None);
        (0..MIN_IN_A_ROW - 1).for_each(|_| note(7, true));
        assert_eq!(choices.only_choice(), None);
        note(7, true);
        // F10.1
        assert_eq!(
            choices.only_choice(),
            Some(OnlyChoice { worker: WorkerId(7), dp_rank: DpRank(1), decisions: MIN_IN_A_ROW })
        );
        note(8, true);
        // F10.1
        assert_eq!(choices.only_choice(), None);
    }
}
