//! Rules between parts of the gateway that its own code keeps, checked while it runs.
//!
//! Code that needs a value takes 0 or an empty list where such a rule is broken, and serves
//! the request. The defect would look like an idle worker or a prompt without blocks. So it is counted and
//! logged once, and a build with debug assertions panics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A rule. Each has one place that checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invariant {
    /// The columns of load have a cell for each rank of a pool.
    LoadColumns,
    /// A prompt that is booked counts at least once.
    BookedPrompts,
    /// A booking of another gateway counts as a request of its rank.
    RemoteRequests,
    /// Facts of workers have a value for each row that is asked for.
    FactRows,
    /// Facts are as many words as a policy reads.
    FactWords,
    /// A request that is pinned to a worker has a row.
    PinnedRow,
    /// A request that leaves the admission queue was counted as waiting.
    WaitingRequests,
}

static BROKEN: [AtomicU64; Invariant::ALL.len()] = [const { AtomicU64::new(0) }; Invariant::ALL.len()];

impl Invariant {
    /// Every rule.
    pub const ALL: [Self; 7] = [
        Self::LoadColumns,
        Self::BookedPrompts,
        Self::RemoteRequests,
        Self::FactRows,
        Self::FactWords,
        Self::PinnedRow,
        Self::WaitingRequests,
    ];

    /// Returns the stable label of this rule in metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::LoadColumns => "load_columns",
            Self::BookedPrompts => "booked_prompts",
            Self::RemoteRequests => "remote_requests",
            Self::FactRows => "fact_rows",
            Self::FactWords => "fact_words",
            Self::PinnedRow => "pinned_row",
            Self::WaitingRequests => "waiting_requests",
        }
    }

    /// Counts the rule as broken unless it holds.
    ///
    /// # Panics
    /// The rule is broken, in builds with debug assertions.
    #[inline]
    pub fn check(self, holds: bool) {
        if !holds {
            self.count();
        }
    }

    #[cold]
    #[inline(never)]
    fn count(self) {
        let before = BROKEN.get(self as usize).map(|count| count.fetch_add(1, Relaxed));
        if before == Some(0) {
            tracing::error!(
                place = self.as_str(),
                "invariant broken: decisions may be wrong; report it as a bug (logged once)"
            );
        }
        debug_assert!(false, "broken invariant: {self:?}");
    }

    /// Returns how often this rule was found broken since the program started.
    #[must_use]
    pub fn times_broken(self) -> u64 {
        BROKEN.get(self as usize).map_or(0, |count| count.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        panic::catch_unwind,
        sync::{Arc, atomic::AtomicUsize},
    };

    use tracing::{Event, Metadata, Subscriber, span};

    use super::*;

    /// Counts log lines.
    #[derive(Clone, Default)]
    struct Lines(Arc<AtomicUsize>);

    impl Subscriber for Lines {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }

        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

        fn event(&self, event: &Event<'_>) {
            assert_eq!(*event.metadata().level(), tracing::Level::ERROR);
            self.0.fetch_add(1, Relaxed);
        }

        fn enter(&self, _: &span::Id) {}

        fn exit(&self, _: &span::Id) {}
    }

    #[test]
    fn a_broken_rule_is_counted_each_time_and_logged_once() {
        let lines = Lines::default();
        tracing::subscriber::with_default(lines.clone(), || {
            Invariant::PinnedRow.check(true);
            for _ in 0..3 {
                let ended = catch_unwind(|| Invariant::PinnedRow.check(false)).is_err();
                assert_eq!(ended, cfg!(debug_assertions));
            }
        });
        assert_eq!((Invariant::PinnedRow.times_broken(), lines.0.load(Relaxed)), (3, 1));
        assert_eq!(Invariant::FactRows.times_broken(), 0);
    }

    #[test]
    fn every_rule_has_a_counter_and_a_name_of_its_own() {
        for (number, rule) in Invariant::ALL.into_iter().enumerate() {
            assert_eq!(rule as usize, number);
            assert!(Invariant::ALL.iter().all(|other| *other == rule || other.as_str() != rule.as_str()));
        }
    }
}
