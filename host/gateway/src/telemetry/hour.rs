//! The last hour, minute by minute, for operators: the load of the gateway and of each worker.
//!
//! A timer takes one sample a minute, at no cost for requests. Memory is bounded: 60 samples of about 150
//! bytes, and 60 of 24 bytes for each of at most 10,000 workers (14 MB).

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use parking_lot::Mutex;
use pointsman_workers::{Snapshot, Worker, WorkerId};
use serde::Serialize;

use super::{live_stats::LiveSummary, metrics::Metrics};

/// Number of samples that are kept.
const MINUTES: usize = 60;
/// Maximum number of workers whose samples are kept.
const MAX_WORKERS: usize = 10_000;
/// Number of the last samples over which the legs of a worker are counted.
const LEG_MINUTES: usize = 5;
/// Number of the last samples after which a worker that fails no more is taken for mended.
const MENDED_MINUTES: usize = 2;
/// Value of the KV usage if the engine does not report it.
const UNKNOWN: u16 = u16::MAX;

/// Samples of the last hour.
#[derive(Debug, Default)]
pub(crate) struct Hour {
    gateway: Mutex<VecDeque<Minute>>,
    workers: Mutex<HashMap<WorkerId, VecDeque<WorkerMinute>>>,
}

/// One minute of the gateway.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Minute {
    /// End of the minute, milliseconds since the Unix epoch.
    at_ms: u64,
    #[serde(flatten)]
    load: LiveSummary,
    #[serde(flatten)]
    tokens: TokenRates,
    inflight: i64,
    /// Requests in the admission queue.
    waiting: usize,
    #[serde(skip)]
    counts: TokenCounts,
}

/// Numbers of tokens since the start.
#[derive(Clone, Copy, Debug, Default)]
struct TokenCounts {
    /// Prompt tokens of requests for which routing predicted the cached ones.
    predictable: u64,
    /// Prompt tokens of requests whose engine reported the cached ones.
    reported: u64,
    cached: u64,
    predicted: u64,
    output: u64,
    at_ms: u64,
}

/// Rates of tokens between two points in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct TokenRates {
    /// Share of cached prompt tokens of the requests whose engine reported them; `None` without such
    /// requests.
    cached_share: Option<f64>,
    /// Share of prompt tokens that routing expected to be cached, of the requests for which it predicted
    /// that; `None` without such requests.
    predicted_share: Option<f64>,
    /// Output tokens per second.
    output_tokens_per_second: f64,
}

/// Legs of a worker in the last four to five minutes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RecentLegs {
    /// Number of legs.
    pub legs: u32,
    /// Number of legs that failed since the engine's process began. 0 if the last one to two minutes have no
    /// such leg: the worker is mended, or idle.
    pub failed: u32,
}

/// One minute of a worker, over all its ranks.
#[derive(Clone, Copy, Debug)]
struct WorkerMinute {
    /// Number of legs since the worker joined.
    legs: u32,
    /// Number of them that failed.
    failed: u32,
    in_flight: u32,
    /// Largest moving average of the time to first token over the worker's ranks, microseconds.
    ttft_us: u32,
    /// The same of the time between two tokens.
    itl_us: u32,
    /// Thousandths of the KV cache in use, or [`UNKNOWN`].
    kv: u16,
}

/// The samples of a worker, oldest first.
#[derive(Debug, Default, Serialize)]
pub(crate) struct WorkerHour {
    /// Number of legs in the minute before each sample.
    legs: Vec<u32>,
    in_flight: Vec<u32>,
    kv_usage: Vec<Option<f64>>,
    ttft_ms: Vec<f64>,
    itl_ms: Vec<f64>,
    /// Share of these legs that failed.
    error_ppm: Vec<u32>,
}

impl Hour {
    /// Takes a sample. `waiting` is the number of requests in the admission queue.
    pub(crate) fn sample(&self, at_ms: u64, metrics: &Metrics, waiting: usize, snapshot: &Snapshot) {
        let counts = TokenCounts::of(metrics, at_ms);
        let mut gateway = self.gateway.lock();
        let before = gateway.back().map(|minute| minute.counts);
        let before = before.unwrap_or_else(|| TokenCounts::at_start(metrics, at_ms));
        let minute = Minute {
            at_ms,
            load: metrics.live_stats.summary(),
            tokens: counts.since(before),
            inflight: metrics.inflight.get(),
            waiting,
            counts,
        };
        push(&mut gateway, minute);
        drop(gateway);
        let mut workers = self.workers.lock();
        workers.retain(|id, _| snapshot.get(*id).is_some());
        for worker in snapshot.workers().iter().take(MAX_WORKERS) {
            push(workers.entry(worker.id()).or_default(), WorkerMinute::of(worker));
        }
    }

    /// Returns the samples of the gateway, oldest first.
    pub(crate) fn minutes(&self) -> Vec<Minute> {
        self.gateway.lock().iter().copied().collect()
    }

    /// Returns the samples of a worker.
    pub(crate) fn of_worker(&self, id: WorkerId) -> WorkerHour {
        let workers = self.workers.lock();
        let mut hour = WorkerHour::default();
        let mut before = None;
        for minute in workers.get(&id).into_iter().flatten() {
            let (legs_before, failed_before) = before.unwrap_or((minute.legs, minute.failed));
            let legs = legs_between(legs_before, minute.legs);
            hour.legs.push(legs);
            hour.error_ppm.push(share_ppm(legs_between(failed_before, minute.failed), legs));
            before = Some((minute.legs, minute.failed));
            hour.in_flight.push(minute.in_flight);
            hour.kv_usage.push((minute.kv != UNKNOWN).then(|| f64::from(minute.kv) / 1e3));
            hour.ttft_ms.push(f64::from(minute.ttft_us) / 1e3);
            hour.itl_ms.push(f64::from(minute.itl_us) / 1e3);
        }
        hour
    }

    /// Returns the rates of tokens since the sample before the last one, which is one to two minutes ago, or
    /// since the start.
    pub(crate) fn token_rates(&self, metrics: &Metrics, at_ms: u64) -> TokenRates {
        let gateway = self.gateway.lock();
        let before = gateway.iter().rev().nth(1).map(|minute| minute.counts);
        let before = before.unwrap_or_else(|| TokenCounts::at_start(metrics, at_ms));
        TokenCounts::of(metrics, at_ms).since(before)
    }

    /// Returns a function that returns the legs of a worker in the last four to five minutes.
    pub(crate) fn recent_legs(&self) -> impl Fn(&Arc<Worker>) -> RecentLegs {
        let workers = self.workers.lock();
        let before = |minutes: &VecDeque<WorkerMinute>| {
            let counts = |ago: usize| {
                let minute = minutes.iter().rev().nth(ago - 1);
                minute.map_or((0, 0), |minute| (minute.legs, minute.failed))
            };
            let ((legs, failed), (_, failed_lately)) = (counts(LEG_MINUTES), counts(MENDED_MINUTES));
            (legs, failed, failed_lately)
        };
        let before: HashMap<WorkerId, (u32, u32, u32)> =
            workers.iter().map(|(id, minutes)| (*id, before(minutes))).collect();
        move |worker| {
            let (legs_before, failed_before, failed_lately) =
                before.get(&worker.id()).copied().unwrap_or_default();
            let [failed, of_earlier_process] = worker.failed_legs();
            let is_mended = legs_between(failed_lately, failed) == 0;
            let since = legs_between(failed_before, failed).min(failed.wrapping_sub(of_earlier_process));
            let legs = legs_between(legs_before, legs(worker));
            RecentLegs { legs, failed: if is_mended { 0 } else { since } }
        }
    }
}

/// Returns a share in parts per million.
fn share_ppm(part: u32, all: u32) -> u32 {
    let ppm = u64::from(part) * 1_000_000 / u64::from(all.max(1));
    u32::try_from(ppm.min(1_000_000)).unwrap_or(1_000_000)
}

/// Returns the number of legs between two counts, which wrap around. A worker that was replaced under its id
/// counts from 0 again.
fn legs_between(before: u32, now: u32) -> u32 {
    let legs = now.wrapping_sub(before);
    if legs > u32::MAX / 2 { now } else { legs }
}

impl TokenCounts {
    fn of(metrics: &Metrics, at_ms: u64) -> Self {
        Self {
            predictable: metrics.cache_predicted_prompt_tokens.get(),
            reported: metrics.cache_reported_prompt_tokens.get(),
            cached: metrics.cached_tokens.get(),
            predicted: metrics.predicted_tokens.get(),
            output: metrics.output_tokens.get(),
            at_ms,
        }
    }

    /// Returns the counts when the gateway started.
    fn at_start(metrics: &Metrics, now_ms: u64) -> Self {
        let age = u64::try_from(metrics.live_stats.age().as_millis()).unwrap_or(u64::MAX);
        Self { at_ms: now_ms.saturating_sub(age), ..Self::default() }
    }

    #[expect(clippy::cast_precision_loss, reason = "a share needs no 64 bits")]
    fn since(self, before: Self) -> TokenRates {
        let share = |count: u64, of: u64| (of > 0).then(|| (count as f64 / of as f64).min(1.0));
        let since_ms = self.at_ms.saturating_sub(before.at_ms).max(1);
        let predictable = self.predictable.saturating_sub(before.predictable);
        let reported = self.reported.saturating_sub(before.reported);
        TokenRates {
            cached_share: share(self.cached.saturating_sub(before.cached), reported),
            predicted_share: share(self.predicted.saturating_sub(before.predicted), predictable),
            output_tokens_per_second: self.output.saturating_sub(before.output) as f64 * 1e3
                / since_ms as f64,
        }
    }
}

impl WorkerMinute {
    fn of(worker: &Arc<Worker>) -> Self {
        let ranks = worker.candidates();
        let views = || ranks.iter().map(|candidate| candidate.load().view());
        let kv = worker.engine_load().and_then(|load| load.kv_usage);
        let kv = kv.map_or(UNKNOWN, |usage| (f64::from(usage) * 1e3).clamp(0.0, 1e3) as u16);
        Self {
            legs: legs(worker),
            failed: worker.failed_legs()[0],
            in_flight: worker.active_requests(),
            ttft_us: views().map(|rank| rank.ttft_ewma_us()).max().unwrap_or_default(),
            itl_us: views().map(|rank| rank.itl_ewma_us()).max().unwrap_or_default(),
            kv,
        }
    }
}

/// Returns the number of legs of a worker since it joined. The number wraps around.
fn legs(worker: &Arc<Worker>) -> u32 {
    let ranks = worker.candidates();
    ranks.iter().map(|candidate| candidate.load().booked_requests() as u32).fold(0, u32::wrapping_add)
}

fn push<T>(samples: &mut VecDeque<T>, sample: T) {
    if samples.len() == MINUTES {
        samples.pop_front();
    }
    samples.push_back(sample);
}

#[cfg(test)]
mod tests {
    use pointsman_workers::{BookingRequest, Leg, Registry, WorkerSpec};
    use prefix_index::Prefix;
    use tokio::time::Duration;

    use super::*;

    fn book(snapshot: &Snapshot, count: u32) {
        for _ in 0..count {
            let request = BookingRequest::new(Leg::Aggregated, Prefix::default(), 1, 16);
            let worker = &snapshot.workers()[0];
            drop(worker.candidates()[0].book(&request));
        }
    }

    #[test]
    fn counts_wrap_and_a_replaced_worker_counts_from_zero() {
        assert_eq!(legs_between(5, 9), 4);
        assert_eq!(legs_between(u32::MAX - 1, 3), 5);
        assert_eq!(legs_between(10_000, 5), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn m4_rates_of_the_first_minutes_are_those_since_the_start() {
        const START: u64 = 1_000_000;
        let (hour, metrics, registry) = (Hour::default(), Metrics::default(), Registry::default());
        for second in 1..=170 {
            tokio::time::advance(Duration::from_secs(1)).await;
            metrics.output_tokens.replace(0, 10);
            let now = START + second * 1_000;
            let rate = hour.token_rates(&metrics, now).output_tokens_per_second;
            // M4.19
            assert!((rate - 10.0).abs() < 0.01, "{rate} after {second} s");
            if second % 60 == 0 {
                hour.sample(now, &metrics, 0, &registry.snapshot());
            }
        }
        let minutes = hour.minutes();
        let rates: Vec<_> = minutes.iter().map(|minute| minute.tokens.output_tokens_per_second).collect();
        // M4.19
        assert_eq!(rates, [10.0, 10.0]);
    }

    fn fleet_of_one() -> Registry {
        let registry = Registry::default();
        let pairs = [("role", "aggregated"), ("engine", "vllm"), ("url", "http://a"), ("model", "tiny")];
        registry.upsert(WorkerSpec::from_pairs(pairs).unwrap());
        registry
    }

    #[tokio::test(start_paused = true)]
    async fn m6_failed_legs_are_told_while_the_worker_fails_and_not_when_it_is_mended_or_idle() {
        let (hour, metrics, registry) = (Hour::default(), Metrics::default(), fleet_of_one());
        let snapshot = registry.snapshot();
        let worker = &snapshot.workers()[0];
        let fail = |count: u32| (0..count).for_each(|_| worker.candidates()[0].load().observe_outcome(false));
        let counts = || {
            let recent = hour.recent_legs()(worker);
            (recent.legs, recent.failed)
        };
        book(&snapshot, 40);
        fail(4);
        assert_eq!(counts(), (40, 4));
        let mut minute = 0;
        let mut pass = || {
            minute += 1;
            hour.sample(minute * 60_000, &metrics, 0, &snapshot);
        };
        pass();
        fail(1);
        assert_eq!(counts(), (40, 5), "it still fails");
        pass();
        assert_eq!(counts(), (40, 5), "it failed a minute ago");
        pass();
        // M6.2
        assert_eq!(counts(), (40, 0), "no leg failed in the last minute and more");
        fail(1);
        assert_eq!(counts(), (40, 6), "it fails again");
        let ppm = hour.of_worker(worker.id()).error_ppm;
        assert_eq!((ppm.len(), ppm[0]), (3, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn an_hour_is_kept_minute_by_minute_and_five_minutes_of_legs_are_counted() {
        let (hour, metrics, registry) = (Hour::default(), Metrics::default(), fleet_of_one());
        let snapshot = registry.snapshot();
        let worker = &snapshot.workers()[0];
        assert_eq!(hour.recent_legs()(worker), RecentLegs::default());
        for minute in 1..=90 {
            metrics.prompt_tokens.inc_by(150);
            metrics.cache_predicted_prompt_tokens.inc_by(50);
            metrics.predicted_tokens.inc_by(20);
            metrics.cache_reported_prompt_tokens.inc_by(100);
            metrics.cached_tokens.inc_by(if minute > 60 { 80 } else { 20 });
            metrics.output_tokens.replace(0, 600);
            book(&snapshot, 3);
            hour.sample(minute * 60_000, &metrics, 4, &snapshot);
        }
        book(&snapshot, 2);
        let minutes = hour.minutes();
        assert_eq!((minutes.len(), minutes[0].at_ms, minutes[59].at_ms), (60, 31 * 60_000, 90 * 60_000));
        assert_eq!((minutes[0].tokens.cached_share, minutes[59].tokens.cached_share), (Some(0.2), Some(0.8)));
        // M4.12
        assert_eq!(minutes[59].tokens.predicted_share, Some(0.4), "of the prompts with a prediction");
        assert_eq!((minutes[59].tokens.output_tokens_per_second, minutes[59].waiting), (10.0, 4));
        assert_eq!(hour.token_rates(&metrics, 90 * 60_000).cached_share, Some(0.8));
        assert_eq!(hour.recent_legs()(worker), RecentLegs { legs: 4 * 3 + 2, failed: 0 });
        let own = hour.of_worker(worker.id());
        assert_eq!((own.legs.len(), own.legs[1], own.kv_usage[0]), (60, 3, None));
        assert_eq!((own.ttft_ms.len(), own.itl_ms.len()), (60, 60));
        registry.remove(worker.id());
        hour.sample(91 * 60_000, &metrics, 0, &registry.snapshot());
        assert!(hour.workers.lock().is_empty(), "a worker that left takes no memory");
    }
}
