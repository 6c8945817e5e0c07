//! Decides whether workers that a source does not list any more are removed now or wait for a second
//! confirmation.
//!
//! A source may lose its entries for reasons that have nothing to do with the workers: a wrong selector, an
//! empty file, leases that expire while the source is overloaded. A removal of many workers within a short
//! time therefore waits until the source was read once more, and still does not list them.

use std::{
    collections::{HashSet, VecDeque},
    time::Duration,
};

use pointsman_workers::WorkerId;
use tokio::time::Instant;

use crate::found::Read;

/// When a removal waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuardRules {
    /// Share of a source's workers, 0 to 1. The removal of more within `confirm_after` waits.
    pub share: f64,
    /// Removals of fewer workers do not wait.
    pub min_workers: usize,
    /// Time until the second confirmation.
    pub confirm_after: Duration,
}

impl GuardRules {
    /// Returns whether the removal of `gone` of `all` workers waits.
    #[must_use]
    pub fn is_many(&self, gone: usize, all: usize) -> bool {
        gone >= self.min_workers && gone as f64 > self.share * all as f64
    }
}

/// Maximum number of removals that are remembered for each source.
const MAX_REMEMBERED: usize = 10_000;

/// The removals of one source.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    /// The workers that were removed within the last `confirm_after` and have not come back, and when.
    removed: VecDeque<(WorkerId, Instant)>,
    held: Option<Held>,
}

/// A removal that waits.
#[derive(Clone, Copy, Debug)]
struct Held {
    since: Instant,
    /// When the source is asked to read everything again.
    ask_at: Instant,
    /// Whether the source may have lost its data.
    lost: bool,
}

/// Verdict on missing workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The workers are removed.
    Remove,
    /// The workers stay until the source was read again.
    Hold,
}

impl Guard {
    /// Judges a snapshot that lists `listed`, and in which `missing` of `present` workers are not listed.
    pub(crate) fn judge(
        &mut self,
        rules: &GuardRules,
        (listed, present): (&HashSet<WorkerId>, usize),
        missing: &[WorkerId],
        read: Read,
        now: Instant,
    ) -> Verdict {
        self.removed.retain(|(worker, at)| {
            now.duration_since(*at) <= rules.confirm_after && !listed.contains(worker)
        });
        if missing.is_empty() {
            self.held = None;
            return Verdict::Remove;
        }
        // Workers that leave one by one count together.
        let (gone, all) = (missing.len() + self.removed.len(), present + self.removed.len());
        let lost = read == Read::Replaced || self.held.is_some_and(|held| held.lost);
        let waits = lost || rules.is_many(gone, all);
        let was_held = self.held.is_some_and(|held| now >= held.since + rules.confirm_after);
        let confirmed = read != Read::Changes && was_held;
        if waits && !confirmed {
            let ask_at = now + rules.confirm_after;
            self.held.get_or_insert(Held { since: now, ask_at, lost }).lost = lost;
            return Verdict::Hold;
        }
        self.held = None;
        if waits {
            self.removed.clear();
        } else {
            self.removed.extend(missing.iter().map(|worker| (*worker, now)));
            self.removed.drain(..self.removed.len().saturating_sub(MAX_REMEMBERED));
        }
        Verdict::Remove
    }

    /// When the removal began to wait.
    pub(crate) fn held_since(&self) -> Option<Instant> {
        self.held.map(|held| held.since)
    }

    /// When the source has to be read again.
    pub(crate) fn ask_at(&self) -> Option<Instant> {
        self.held.map(|held| held.ask_at)
    }

    /// The source was asked; it is asked again if it does not answer.
    pub(crate) fn asked(&mut self, rules: &GuardRules, now: Instant) {
        if let Some(held) = &mut self.held {
            held.ask_at = now + rules.confirm_after;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: GuardRules =
        GuardRules { share: 0.5, min_workers: 3, confirm_after: Duration::from_secs(10) };

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[tokio::test(start_paused = true)]
    async fn a_removal_of_more_than_the_share_waits_for_a_whole_reading_after_the_interval() {
        let (mut guard, start) = (Guard::default(), Instant::now());
        let mut judge =
            |missing, whole, seconds| judge(&mut guard, &ids(missing..8), missing, whole, at(start, seconds));
        // P4.1
        assert_eq!(judge(5, true, 0), Verdict::Hold);
        // P4.2: too early, then not a whole reading, then both
        assert_eq!(judge(5, true, 9), Verdict::Hold);
        assert_eq!(judge(5, false, 11), Verdict::Hold);
        assert_eq!(judge(5, true, 11), Verdict::Remove);
        assert_eq!(judge(5, true, 12), Verdict::Hold, "the next one waits again");
    }

    #[tokio::test(start_paused = true)]
    async fn workers_that_come_back_end_the_wait() {
        let (mut guard, start) = (Guard::default(), Instant::now());
        assert_eq!(judge(&mut guard, &ids(8..8), 8, true, start), Verdict::Hold);
        assert!(guard.held_since().is_some());
        assert_eq!(judge(&mut guard, &ids(0..8), 0, true, at(start, 1)), Verdict::Remove);
        // P4.3
        assert!(guard.held_since().is_none());
        assert_eq!(judge(&mut guard, &ids(8..8), 8, true, at(start, 11)), Verdict::Hold);
    }

    #[tokio::test(start_paused = true)]
    async fn few_removals_do_not_wait_and_many_one_by_one_do() {
        let (mut guard, start) = (Guard::default(), Instant::now());
        // P4.4
        assert_eq!(judge(&mut guard, &ids(2..2), 2, true, start), Verdict::Remove, "fewer than the minimum");
        let mut guard = Guard::default();
        let mut left: Vec<WorkerId> = ids(0..8);
        let verdicts = (0..8).map(|_| {
            let gone = left.pop().unwrap();
            let listed = left.iter().copied().collect();
            let verdict = guard.judge(&RULES, (&listed, left.len() + 1), &[gone], Read::Changes, start);
            if verdict == Verdict::Hold {
                left.push(gone);
            }
            verdict
        });
        let removed = verdicts.filter(|verdict| *verdict == Verdict::Remove).count();
        // P4.5
        assert_eq!(removed, 4);
        let late = guard.judge(
            &RULES,
            (&ids(1..4).into_iter().collect(), 4),
            &ids(0..1),
            Read::Changes,
            at(start, 30),
        );
        assert_eq!(late, Verdict::Remove, "long after the others");
    }

    #[tokio::test(start_paused = true)]
    async fn p8_any_removal_of_a_source_that_may_have_lost_its_data_waits() {
        let (mut guard, start) = (Guard::default(), Instant::now());
        let mut judge = |read, seconds| judge_read(&mut guard, &ids(1..8), 1, read, at(start, seconds));
        // P8.9
        assert_eq!(judge(Read::Replaced, 0), Verdict::Hold);
        assert_eq!(judge(Read::Whole, 1), Verdict::Hold, "too early");
        assert_eq!(judge(Read::Changes, 11), Verdict::Hold);
        assert_eq!(judge(Read::Whole, 11), Verdict::Remove);
        assert_eq!(judge(Read::Whole, 12), Verdict::Remove, "its data is as it was");
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_leaves_and_comes_back_again_and_again_counts_once() {
        let (mut guard, start) = (Guard::default(), Instant::now());
        for _ in 0..20 {
            // P4.5
            assert_eq!(judge(&mut guard, &ids(1..3), 1, false, start), Verdict::Remove);
            assert_eq!(judge(&mut guard, &ids(0..3), 0, false, start), Verdict::Remove);
        }
        assert!(guard.removed.is_empty());
    }

    fn ids(numbers: std::ops::Range<u64>) -> Vec<WorkerId> {
        numbers.map(WorkerId).collect()
    }

    /// Judges a snapshot in which the first `missing` workers are not listed.
    fn judge(guard: &mut Guard, listed: &[WorkerId], missing: u64, whole: bool, now: Instant) -> Verdict {
        let read = if whole { Read::Whole } else { Read::Changes };
        judge_read(guard, listed, missing, read, now)
    }

    fn judge_read(guard: &mut Guard, listed: &[WorkerId], missing: u64, read: Read, now: Instant) -> Verdict {
        let (present, missing) = (listed.len() + missing as usize, ids(0..missing));
        guard.judge(&RULES, (&listed.iter().copied().collect(), present), &missing, read, now)
    }
}
