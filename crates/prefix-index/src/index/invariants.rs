//! Rules between parts of the index that its own code keeps, checked while it runs.
//!
//! Where such a rule is broken, the code continues with a length of 0. Nothing would show the defect: the
//! prompt only looks as if no engine had it. So it is counted and logged once, and a build with debug
//! assertions panics.

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A rule of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invariant {
    /// The tree has the segment that another part of the index names.
    SegmentExists,
    /// A segment has the blocks that the writer gave it, and no holder covers more than these.
    SegmentLength,
    /// A segment counts the segments that follow it.
    SegmentChildren,
    /// A run of an engine's blocks exists, and has the hashes of its blocks.
    RunHashes,
}

impl Invariant {
    /// Every rule.
    pub const ALL: [Self; 4] =
        [Self::SegmentExists, Self::SegmentLength, Self::SegmentChildren, Self::RunHashes];

    /// Returns the stable label of this rule in metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SegmentExists => "segment_exists",
            Self::SegmentLength => "segment_length",
            Self::SegmentChildren => "segment_children",
            Self::RunHashes => "run_hashes",
        }
    }
}

/// How often each rule was found broken.
#[derive(Debug, Default)]
pub(super) struct BrokenInvariants([AtomicU64; Invariant::ALL.len()]);

impl BrokenInvariants {
    /// Counts a rule as broken unless it holds.
    #[inline]
    pub(super) fn check(&self, invariant: Invariant, holds: bool) {
        if !holds {
            self.count(invariant);
        }
    }

    #[cold]
    #[inline(never)]
    fn count(&self, invariant: Invariant) {
        let before = self.0.get(invariant as usize).map(|count| count.fetch_add(1, Relaxed));
        // The model checker has no log.
        #[cfg(not(loom))]
        if before == Some(0) {
            tracing::error!(
                place = invariant.as_str(),
                "invariant of the prefix index broken: matches may be too short; report it as a bug (logged once)"
            );
        }
        #[cfg(loom)]
        let _ = before;
        debug_assert!(false, "broken invariant of the prefix index: {invariant:?}");
    }

    /// Returns the counts, in the order of [`Invariant::ALL`].
    pub(super) fn counts(&self) -> [u64; Invariant::ALL.len()] {
        self.0.each_ref().map(|count| count.load(Relaxed))
    }
}

/// Counts log lines in tests.
#[cfg(test)]
pub(super) mod lines {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    };

    use tracing::{Event, Level, Metadata, Subscriber, span};

    /// A subscriber that counts errors.
    #[derive(Clone, Default)]
    pub(in super::super) struct Lines(Arc<AtomicUsize>);

    impl Lines {
        pub(in super::super) fn count(&self) -> usize {
            self.0.load(Relaxed)
        }
    }

    impl Subscriber for Lines {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            *metadata.level() == Level::ERROR
        }

        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }

        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

        fn event(&self, _: &Event<'_>) {
            self.0.fetch_add(1, Relaxed);
        }

        fn enter(&self, _: &span::Id) {}

        fn exit(&self, _: &span::Id) {}
    }
}
