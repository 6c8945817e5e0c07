//! How often workers are asked: less often the more there are, and not all at the same moment.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::watch;

use super::ProbeConfig;

/// Requests of the check of a worker that failed: its health, and its facts when it answers.
const REQUESTS_OF_FAILING: f64 = 2.0;

/// Times between two questions to one worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pace {
    /// Time between health checks.
    pub(super) interval: Duration,
    /// Time between readings of load figures; 0: never.
    pub(super) load_interval: Duration,
}

impl ProbeConfig {
    /// Returns the pace for a number of workers. Both times grow alike, so that all questions together keep
    /// `max_per_second`.
    pub(super) fn pace(&self, workers: usize) -> Pace {
        let each_second = |interval: Duration| {
            if interval.is_zero() { 0.0 } else { 1.0 / interval.as_secs_f64() }
        };
        let of_one = each_second(self.interval) + each_second(self.load_interval);
        #[expect(clippy::cast_precision_loss, reason = "a count")]
        let all = of_one * workers as f64;
        let longer = (all / f64::from(self.max_per_second.max(1))).max(1.0);
        let stretch = |interval: Duration| {
            Duration::try_from_secs_f64(interval.as_secs_f64() * longer).unwrap_or(Duration::MAX)
        };
        Pace { interval: stretch(self.interval), load_interval: stretch(self.load_interval) }
    }

    /// Returns the time until the next check of a worker. `failing`: how many workers' last checks failed, if
    /// this one's did. It is then checked as soon as in a small fleet, unless many fail.
    pub(super) fn next_interval(&self, failing: Option<usize>, usual: Duration) -> Duration {
        failing.map_or_else(|| spread(usual), |failing| self.interval_of_failing(self.interval, failing))
    }

    /// Returns the time between two checks of a worker whose last one failed: `shortest`, or longer when many
    /// fail. Their checks take at most half of `max_per_second`.
    pub(super) fn interval_of_failing(&self, shortest: Duration, failing: usize) -> Duration {
        #[expect(clippy::cast_precision_loss, reason = "a count")]
        let requests = REQUESTS_OF_FAILING * failing as f64;
        let least = requests / (f64::from(self.max_per_second.max(1)) / 2.0);
        shortest.max(Duration::try_from_secs_f64(least).unwrap_or(Duration::MAX))
    }
}

/// Whether the last check of a worker failed; counts those of all workers.
#[derive(Debug, Default)]
pub(super) struct Failing {
    all: Arc<AtomicUsize>,
    counted: bool,
}

impl Failing {
    /// Returns the same for another worker.
    pub(super) fn of_another(&self) -> Self {
        Self { all: self.all.clone(), counted: false }
    }

    /// Notes whether the last check failed. Returns the number of all workers whose last one did.
    pub(super) fn set(&mut self, failing: bool) -> usize {
        match (self.counted, failing) {
            (false, true) => self.all.fetch_add(1, Ordering::Relaxed),
            (true, false) => self.all.fetch_sub(1, Ordering::Relaxed),
            _ => 0,
        };
        self.counted = failing;
        self.all.load(Ordering::Relaxed)
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// Returns a time that differs by up to a tenth: workers that join together are not asked together for ever.
pub(super) fn spread(time: Duration) -> Duration {
    time.mul_f64(rand::random_range(0.9..1.1))
}

/// Waits for a changed configuration; forever when none can come any more.
pub(super) async fn changed(config: &mut watch::Receiver<ProbeConfig>) {
    if config.changed().await.is_err() {
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::probes, *};

    #[test]
    fn b5_many_workers_are_asked_less_often() {
        let config = ProbeConfig {
            load_interval: Duration::from_secs(5),
            ..probes(Duration::from_secs(2), Duration::from_secs(1))
        };
        let both = |interval: u64, load_interval: u64| Pace {
            interval: Duration::from_secs(interval),
            load_interval: Duration::from_secs(load_interval),
        };
        assert_eq!(config.pace(2_000), both(2, 5), "1,400 a second");
        // B5.8
        let pace = config.pace(30_000);
        let rate = 30_000.0 * (1.0 / pace.interval.as_secs_f64() + 1.0 / pace.load_interval.as_secs_f64());
        assert!((rate - 1_500.0).abs() < 0.1 && pace == both(28, 70), "{pace:?}");
        let never = ProbeConfig { load_interval: Duration::ZERO, ..config };
        assert_eq!(never.pace(6_000), both(4, 0));
        assert!(
            ProbeConfig { max_per_second: 0, ..config }.pace(usize::MAX).interval
                > Duration::from_secs(1_000)
        );
    }

    #[test]
    fn b5_workers_that_fail_are_asked_less_often_only_when_many_do() {
        let config =
            ProbeConfig { max_per_second: 1_000, ..probes(Duration::from_secs(2), Duration::from_secs(1)) };
        // B5.10
        let interval = |failing| config.interval_of_failing(Duration::from_millis(500), failing);
        assert_eq!(interval(100), Duration::from_millis(500));
        assert_eq!(interval(10_000), Duration::from_secs(40), "2 * 10,000 / 40 = 500 a second");
        let (mut one, mut two) = (Failing::default(), Failing::default());
        assert_eq!((one.set(true), one.set(true), two.set(true)), (1, 1, 1), "not of one fleet");
        let mut other = one.of_another();
        assert_eq!((other.set(true), other.set(false), other.set(true)), (2, 1, 2));
        drop(other);
        assert_eq!((one.set(true), one.set(false)), (1, 0));
    }

    #[test]
    fn times_differ_by_a_tenth() {
        let times: Vec<Duration> = (0..100).map(|_| spread(Duration::from_secs(10))).collect();
        assert!(times.iter().all(|time| (9_000..11_000).contains(&time.as_millis())));
        assert!(times.iter().any(|time| *time != times[0]));
    }
}
