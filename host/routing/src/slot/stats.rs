//! Counters of a slot's lane: calls by result and duration. They outlive generations, so that no call is lost
//! between two scrapes.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Duration;

use crate::policy::Failure;

/// Upper bounds of the buckets of call times, microseconds.
pub const CALL_BUCKETS_US: [u64; 18] =
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 250_000];

/// Calls of one lane of a slot, all generations together.
#[derive(Debug, Default)]
pub struct CallStats {
    ok: AtomicU64,
    failed: [AtomicU64; 6],
    /// One counter per bucket, and one for longer calls.
    buckets: [AtomicU64; CALL_BUCKETS_US.len() + 1],
    nanos: AtomicU64,
}

/// How often a shadow's choice was the one made.
#[derive(Debug, Default)]
pub struct AgreementStats {
    agree: AtomicU64,
    disagree: AtomicU64,
    failed: AtomicU64,
    shed: AtomicU64,
}

/// The result of comparing a shadow's choice with the one made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShadowVerdict {
    /// The shadow made the same choice.
    Agrees,
    /// The shadow made another choice, or abstained.
    Disagrees,
    /// The shadow would have refused the request, which was not refused.
    Refuses,
    /// The shadow gave no usable answer.
    Failed,
}

impl CallStats {
    /// Counts one call.
    pub(crate) fn note(&self, failure: Option<&Failure>, took: Duration) {
        let counter = failure.map_or(Some(&self.ok), |failure| self.failed.get(kind_index(failure)));
        if let Some(counter) = counter {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = CALL_BUCKETS_US.iter().position(|bound| nanos <= bound * 1_000);
        if let Some(bucket) = self.buckets.get(bucket.unwrap_or(CALL_BUCKETS_US.len())) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Calls by result: `ok`, or a failure's kind.
    pub fn outcomes(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let failed = KINDS.into_iter().zip(&self.failed);
        std::iter::once(("ok", &self.ok))
            .chain(failed)
            .map(|(kind, count)| (kind, count.load(Ordering::Relaxed)))
    }

    /// Cumulative counts for the bounds of [`CALL_BUCKETS_US`], then the total.
    #[must_use]
    pub fn cumulative(&self) -> Vec<u64> {
        let mut sum = 0;
        let add = |bucket: &AtomicU64| {
            sum += bucket.load(Ordering::Relaxed);
            sum
        };
        self.buckets.iter().map(add).collect()
    }

    /// Total duration of all calls.
    #[must_use]
    pub fn time(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
    }
}

/// The kinds of failures, in the order of `CallStats::failed`.
const KINDS: [&str; 6] = ["error", "trap", "timeout", "memory", "invalid", "not_ready"];

fn kind_index(failure: &Failure) -> usize {
    match failure {
        Failure::Error(_) => 0,
        Failure::Trap(_) => 1,
        Failure::Timeout { .. } => 2,
        Failure::Memory { .. } => 3,
        Failure::Invalid(_) => 4,
        Failure::NotReady => 5,
    }
}

impl AgreementStats {
    pub(crate) fn note(&self, opinion: ShadowVerdict) {
        let counter = match opinion {
            ShadowVerdict::Agrees => &self.agree,
            ShadowVerdict::Disagrees => &self.disagree,
            ShadowVerdict::Failed => &self.failed,
            ShadowVerdict::Refuses => &self.shed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Numbers of requests in which the shadow agreed, disagreed, failed, and refused one that was not
    /// refused.
    #[must_use]
    pub fn counts(&self) -> [(&'static str, u64); 4] {
        let Self { agree, disagree, failed, shed } = self;
        [("agree", agree), ("disagree", disagree), ("failed", failed), ("shed", shed)]
            .map(|(label, count)| (label, count.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::TIMEOUT;

    #[test]
    fn calls_are_counted_by_outcome_and_time() {
        let stats = CallStats::default();
        stats.note(None, Duration::from_nanos(900));
        stats.note(Some(&TIMEOUT), Duration::from_micros(2_100));
        stats.note(Some(&Failure::NotReady), Duration::from_secs(1));
        let outcomes: Vec<_> = stats.outcomes().filter(|(_, count)| *count > 0).collect();
        assert_eq!(outcomes, [("ok", 1), ("timeout", 1), ("not_ready", 1)]);
        let cumulative = stats.cumulative();
        let all = cumulative[CALL_BUCKETS_US.len()];
        assert_eq!((cumulative[0], cumulative[11], cumulative[12], cumulative[17], all), (1, 1, 2, 2, 3));
    }

    #[test]
    fn every_kind_of_failure_has_its_own_counter() {
        let text = String::new;
        let all = [
            Failure::Error(text()),
            Failure::Trap(text()),
            TIMEOUT,
            Failure::Memory { limit: 1 },
            Failure::Invalid(text()),
            Failure::NotReady,
        ];
        assert_eq!(all.each_ref().map(Failure::kind), KINDS);
        assert_eq!(all.each_ref().map(kind_index), [0, 1, 2, 3, 4, 5]);
    }
}
