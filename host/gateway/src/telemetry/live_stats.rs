//! Requests per second and latencies of the last minute, for operators. `/metrics` has exact values.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use serde::Serialize;
use tokio::time::{Duration, Instant};

use super::histogram::{BUCKETS, bucket, quantile_ms};

/// Length of the window in seconds.
const WINDOW: u64 = 60;
/// Longest time to first token of a request that counts for goodput.
const GOOD_TTFT: Duration = Duration::from_secs(2);
/// Longest mean time between tokens of a request that counts for goodput.
const GOOD_ITL: Duration = Duration::from_millis(50);

/// The last minute, second by second. Data threads update it without locks.
#[derive(Debug)]
pub struct LiveStats {
    begun: Instant,
    /// One second more than the window, because the current second is still being written.
    seconds: Box<[Second]>,
}

#[derive(Debug)]
struct Second {
    number: AtomicU64,
    /// Requests that count for goodput.
    good: AtomicU32,
    /// Other requests that did not fail.
    slow: AtomicU32,
    errors: AtomicU32,
    refusals: AtomicU32,
    ttft: [AtomicU32; BUCKETS],
    itl: [AtomicU32; BUCKETS],
}

/// Summary of the last minute. Quantiles are within 5 %, and `None` without values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LiveSummary {
    /// Requests that ended per second.
    pub requests_per_second: f64,
    /// Requests per second that did not fail, with a time to first token of at most 2 s and a mean time
    /// between tokens of at most 50 ms: the default limits of `pointsman compare`. Answers that are not
    /// streamed have no such times, and always count.
    pub goodput_per_second: f64,
    /// Requests that ended with status 500 or above, per second.
    pub errors_per_second: f64,
    /// Requests that ended with a status from 400 to 499, per second.
    pub refusals_per_second: f64,
    /// Median time to first token, milliseconds.
    pub ttft_p50_ms: Option<f64>,
    /// 90th percentile of the time to first token, milliseconds.
    pub ttft_p90_ms: Option<f64>,
    /// 99th percentile of the time to first token, milliseconds.
    pub ttft_p99_ms: Option<f64>,
    /// Median of requests' mean time between tokens, milliseconds.
    pub itl_p50_ms: Option<f64>,
    /// 90th percentile of requests' mean time between tokens, milliseconds.
    pub itl_p90_ms: Option<f64>,
    /// 99th percentile of requests' mean time between tokens, milliseconds.
    pub itl_p99_ms: Option<f64>,
}

impl Default for LiveStats {
    fn default() -> Self {
        Self { begun: Instant::now(), seconds: (0..=WINDOW).map(|_| Second::default()).collect() }
    }
}

impl Default for Second {
    fn default() -> Self {
        Self {
            number: AtomicU64::new(u64::MAX),
            good: AtomicU32::new(0),
            slow: AtomicU32::new(0),
            errors: AtomicU32::new(0),
            refusals: AtomicU32::new(0),
            ttft: [const { AtomicU32::new(0) }; BUCKETS],
            itl: [const { AtomicU32::new(0) }; BUCKETS],
        }
    }
}

impl Second {
    fn clear(&self) {
        let counts = [&self.good, &self.slow, &self.errors, &self.refusals].into_iter();
        counts.chain(&self.ttft).chain(&self.itl).for_each(|count| count.store(0, Ordering::Relaxed));
    }
}

impl LiveStats {
    /// Returns the current second.
    fn second(&self) -> Option<&Second> {
        let number = self.begun.elapsed().as_secs();
        let second = self.seconds.get(slot_of_second(number))?;
        // The first thread in a new second empties the cell. An addition by another thread at that time may
        // be lost.
        if second.number.swap(number, Ordering::Relaxed) != number {
            second.clear();
        }
        Some(second)
    }

    /// Counts the first token of a request.
    pub fn first_token(&self, ttft: Duration) {
        if let Some(count) = self.second().and_then(|second| second.ttft.get(bucket(ttft))) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a request that ended with this status, with its time to first token and mean time between
    /// tokens.
    pub fn note(&self, status: u16, ttft: Option<Duration>, itl: Option<Duration>) {
        let Some(second) = self.second() else { return };
        let within = |time: Option<Duration>, limit| time.is_none_or(|time| time <= limit);
        let count = match status {
            400..500 => &second.refusals,
            500.. => &second.errors,
            _ if within(ttft, GOOD_TTFT) && within(itl, GOOD_ITL) => &second.good,
            _ => &second.slow,
        };
        count.fetch_add(1, Ordering::Relaxed);
        if let Some(count) = itl.and_then(|itl| second.itl.get(bucket(itl))) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the time since the daemon started.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Summarizes the complete seconds of the last minute.
    #[must_use]
    pub fn summary(&self) -> LiveSummary {
        let now = self.begun.elapsed().as_secs();
        let first = now.saturating_sub(WINDOW);
        let (mut good, mut slow, mut errors, mut refusals) = (0_u64, 0_u64, 0_u64, 0_u64);
        let (mut ttft, mut itl) = ([0_u64; BUCKETS], [0_u64; BUCKETS]);
        let whole = |second: &&Second| (first..now).contains(&second.number.load(Ordering::Relaxed));
        let read = |count: &AtomicU32| u64::from(count.load(Ordering::Relaxed));
        for second in self.seconds.iter().filter(whole) {
            good += read(&second.good);
            slow += read(&second.slow);
            errors += read(&second.errors);
            refusals += read(&second.refusals);
            ttft.iter_mut().zip(&second.ttft).for_each(|(sum, count)| *sum += read(count));
            itl.iter_mut().zip(&second.itl).for_each(|(sum, count)| *sum += read(count));
        }
        #[expect(clippy::cast_precision_loss, reason = "the summary needs no 64 bits")]
        let rate = |count: u64| count as f64 / (now - first).max(1) as f64;
        LiveSummary {
            requests_per_second: rate(good + slow + errors + refusals),
            goodput_per_second: rate(good),
            errors_per_second: rate(errors),
            refusals_per_second: rate(refusals),
            ttft_p50_ms: quantile_ms(&ttft, 0.5),
            ttft_p90_ms: quantile_ms(&ttft, 0.9),
            ttft_p99_ms: quantile_ms(&ttft, 0.99),
            itl_p50_ms: quantile_ms(&itl, 0.5),
            itl_p90_ms: quantile_ms(&itl, 0.9),
            itl_p99_ms: quantile_ms(&itl, 0.99),
        }
    }
}

fn slot_of_second(number: u64) -> usize {
    usize::try_from(number % (WINDOW + 1)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_summary_covers_the_last_minute_only() {
        let stats = LiveStats::default();
        let nothing = LiveSummary::default();
        assert_eq!(stats.summary(), nothing);
        for second in 0..120 {
            for request in 0..10 {
                let ttft = if second < 60 { 9_000 } else { 40 + request };
                let status = if request < 2 { 502 } else { 200 + 200 * u16::from(request == 9) };
                let itl = (second >= 60).then_some(Duration::from_millis(7));
                let ttft = (request > 0).then_some(Duration::from_millis(ttft));
                ttft.inspect(|ttft| stats.first_token(*ttft));
                stats.note(status, ttft, itl);
            }
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let summary = stats.summary();
        assert_eq!(summary.requests_per_second, 10.0);
        assert_eq!((summary.errors_per_second, summary.refusals_per_second), (2.0, 1.0));
        assert_eq!(summary.goodput_per_second, 7.0);
        let itl = [summary.itl_p50_ms, summary.itl_p90_ms, summary.itl_p99_ms].map(Option::unwrap);
        assert!(itl.iter().all(|itl| (itl / 7.0 - 1.0).abs() < 0.05), "{itl:?}");
        let slow = LiveStats::default();
        slow.note(200, Some(Duration::from_millis(2_001)), None);
        slow.note(200, Some(GOOD_TTFT), Some(Duration::from_millis(51)));
        slow.note(200, None, None);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!((slow.summary().requests_per_second, slow.summary().goodput_per_second), (3.0, 1.0));
        let median = summary.ttft_p50_ms.unwrap();
        assert!((median / 45.0 - 1.0).abs() < 0.08, "{median}");
        tokio::time::advance(Duration::from_secs(61)).await;
        assert_eq!(stats.summary(), nothing);
    }
}
