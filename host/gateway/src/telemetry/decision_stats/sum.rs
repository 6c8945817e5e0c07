//! Sum over the last minutes of a lane.

use std::sync::atomic::Ordering;

use serde::Serialize;

use super::{COUNTS, Count, Minute, TIMES};
use crate::telemetry::histogram::{BUCKETS, middle_ms, quantile_ms};

/// Sum over the last minutes of a lane.
#[derive(Clone, Debug)]
pub(crate) struct LaneSum {
    counts: [u64; COUNTS],
    times: [[u64; BUCKETS]; TIMES],
    /// Number of decisions in each minute, the current one last.
    pub(crate) minutes: Vec<u64>,
}

/// Quantiles of a time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Times {
    pub(crate) count: u64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    /// Points of the distribution: milliseconds, and the share of requests up to that time.
    pub(crate) cdf: Vec<(f64, f64)>,
}

impl LaneSum {
    pub(super) fn of(cells: &[Minute], now: u64, window: u64) -> Self {
        let length = usize::try_from(window).unwrap_or_default();
        let mut sum = Self { counts: [0; COUNTS], times: [[0; BUCKETS]; TIMES], minutes: vec![0; length] };
        for cell in cells {
            // A cell that was never used contains the largest number.
            let age = now.checked_sub(cell.number.load(Ordering::Relaxed)).filter(|age| *age < window);
            let Some(age) = age.and_then(|age| usize::try_from(age).ok()) else { continue };
            for (sum, count) in sum.counts.iter_mut().zip(&cell.counts) {
                *sum += count.load(Ordering::Relaxed);
            }
            for (sum, count) in sum.times.iter_mut().flatten().zip(cell.times.iter().flatten()) {
                *sum += u64::from(count.load(Ordering::Relaxed));
            }
            let decisions = cell.counts.get(Count::Decisions as usize);
            if let (Some(minute), Some(decisions)) = (sum.minutes.get_mut(length - 1 - age), decisions) {
                *minute = decisions.load(Ordering::Relaxed);
            }
        }
        sum
    }

    /// Returns a count.
    #[must_use]
    pub(crate) fn count(&self, which: Count) -> u64 {
        self.counts.get(which as usize).copied().unwrap_or_default()
    }

    /// Returns one count as a share of another, or `None` when the other is 0.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a share needs no 64 bits")]
    pub(crate) fn share(&self, part: Count, whole: Count) -> Option<f64> {
        let whole = self.count(whole);
        (whole > 0).then(|| self.count(part) as f64 / whole as f64)
    }

    /// Returns TTFT, ITL and E2E, or `None` where nothing was measured.
    #[must_use]
    pub(crate) fn times(&self) -> [Option<Times>; TIMES] {
        self.times.each_ref().map(times)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share needs no 64 bits")]
fn times(buckets: &[u64; BUCKETS]) -> Option<Times> {
    let count = buckets.iter().sum::<u64>();
    let quantile = |share| quantile_ms(buckets, share);
    let (p50, p90, p99) = (quantile(0.5)?, quantile(0.9)?, quantile(0.99)?);
    let mut so_far = 0;
    let filled = buckets.iter().enumerate().filter(|(_, count)| **count > 0);
    let cdf = filled.map(|(bucket, more)| {
        so_far += more;
        (middle_ms(bucket), so_far as f64 / count as f64)
    });
    Some(Times { count, p50, p90, p99, cdf: cdf.collect() })
}
