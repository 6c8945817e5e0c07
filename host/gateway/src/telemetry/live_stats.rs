//! Requests per second and time to first token of the last minute, for the operators' page. `/metrics` has
//! exact values.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use serde::Serialize;
use tokio::time::{Duration, Instant};

use super::histogram::{BUCKETS, bucket, quantile_ms};

/// Length of the window in seconds.
const WINDOW: u64 = 60;
/// The last minute, second by second. Data threads add to it without locks.
#[derive(Debug)]
pub struct LiveStats {
    begun: Instant,
    /// One more than the window: the current second is still written.
    seconds: Box<[Second]>,
}

#[derive(Debug)]
struct Second {
    number: AtomicU64,
    requests: AtomicU32,
    ttft: [AtomicU32; BUCKETS],
}

/// Summary of the last minute.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LiveSummary {
    /// Requests that ended per second.
    pub requests_per_second: f64,
    /// Median time to first token, milliseconds, within 5 %; `None` without any.
    pub ttft_p50_ms: Option<f64>,
}

impl Default for LiveStats {
    fn default() -> Self {
        let second = |_| Second {
            number: AtomicU64::new(u64::MAX),
            requests: AtomicU32::new(0),
            ttft: [const { AtomicU32::new(0) }; BUCKETS],
        };
        Self { begun: Instant::now(), seconds: (0..=WINDOW).map(second).collect() }
    }
}

impl LiveStats {
    /// Counts a request that ended.
    pub fn note(&self, ttft: Option<Duration>) {
        let number = self.begun.elapsed().as_secs();
        let Some(second) = self.seconds.get(place(number)) else { return };
        // The first thread in a new second empties the slot. An addition of another thread at that moment may
        // be lost.
        if second.number.swap(number, Ordering::Relaxed) != number {
            second.requests.store(0, Ordering::Relaxed);
            second.ttft.iter().for_each(|bucket| bucket.store(0, Ordering::Relaxed));
        }
        second.requests.fetch_add(1, Ordering::Relaxed);
        let bucket = ttft.and_then(|ttft| second.ttft.get(bucket(ttft)));
        if let Some(bucket) = bucket {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Summarizes the complete seconds of the last minute.
    #[must_use]
    pub fn summary(&self) -> LiveSummary {
        let now = self.begun.elapsed().as_secs();
        let first = now.saturating_sub(WINDOW);
        let (mut requests, mut ttft) = (0_u64, [0_u64; BUCKETS]);
        let whole = |second: &&Second| (first..now).contains(&second.number.load(Ordering::Relaxed));
        for second in self.seconds.iter().filter(whole) {
            requests += u64::from(second.requests.load(Ordering::Relaxed));
            for (sum, bucket) in ttft.iter_mut().zip(&second.ttft) {
                *sum += u64::from(bucket.load(Ordering::Relaxed));
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "the summary needs no 64 bits")]
        let requests_per_second = requests as f64 / (now - first).max(1) as f64;
        LiveSummary { requests_per_second, ttft_p50_ms: quantile_ms(&ttft, 0.5) }
    }
}

fn place(number: u64) -> usize {
    usize::try_from(number % (WINDOW + 1)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_summary_covers_the_last_minute_only() {
        let stats = LiveStats::default();
        let nothing = LiveSummary { requests_per_second: 0.0, ttft_p50_ms: None };
        assert_eq!(stats.summary(), nothing);
        for second in 0..120 {
            for request in 0..10 {
                let ttft = if second < 60 { 9_000 } else { 40 + request };
                stats.note((request > 0).then_some(Duration::from_millis(ttft)));
            }
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let summary = stats.summary();
        assert_eq!(summary.requests_per_second, 10.0);
        let median = summary.ttft_p50_ms.unwrap();
        assert!((median / 45.0 - 1.0).abs() < 0.08, "{median}");
        tokio::time::advance(Duration::from_secs(61)).await;
        assert_eq!(stats.summary(), nothing);
    }
}
