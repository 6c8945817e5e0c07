//! How fast the queue drains, for the time after which a refused client tries again.

use tokio::time::{Duration, Instant};

/// Time over which the rate is averaged.
const WINDOW: Duration = Duration::from_secs(10);
/// Bounds of the advice.
const MIN_RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY: Duration = Duration::from_secs(60);

/// Admissions from the queue, averaged with exponential decay.
#[derive(Debug, Default)]
pub(super) struct DrainRate {
    /// Admissions, each worth `exp(-age / WINDOW)`.
    recent: f64,
    at: Option<Instant>,
    since: Option<Instant>,
}

impl DrainRate {
    /// Counts an admission.
    pub(super) fn note(&mut self, now: Instant) {
        self.decay(now);
        self.since.get_or_insert(now);
        self.recent += 1.0;
    }

    /// Returns when a client should try again while `waiting` requests are ahead of it.
    pub(super) fn retry_after(&mut self, waiting: usize, now: Instant) -> Duration {
        self.decay(now);
        // Until a whole window has passed, the sum covers only the time since the start.
        let age = self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let covered = WINDOW.as_secs_f64() * (1.0 - (-age.as_secs_f64() / WINDOW.as_secs_f64()).exp());
        if self.recent < 0.01 {
            self.since = None;
            return MIN_RETRY;
        }
        let rate = self.recent / covered.max(0.1);
        #[expect(clippy::cast_precision_loss, reason = "a rough time")]
        let seconds = (waiting + 1) as f64 / rate;
        Duration::try_from_secs_f64(seconds).unwrap_or(MAX_RETRY).clamp(MIN_RETRY, MAX_RETRY)
    }

    fn decay(&mut self, now: Instant) {
        let passed = self.at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.recent *= (-passed.as_secs_f64() / WINDOW.as_secs_f64()).exp();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn l3_the_advice_is_the_queue_s_length_over_its_rate() {
        let mut rate = DrainRate::default();
        let start = Instant::now();
        assert_eq!(rate.retry_after(100, start), MIN_RETRY, "nothing was measured");
        // 20 a second for a minute.
        for step in 0..1_200 {
            rate.note(start + Duration::from_millis(50) * step);
        }
        let now = start + Duration::from_secs(60);
        let advice = rate.retry_after(200, now).as_secs_f64();
        // L3.9
        assert!((9.5..=10.6).contains(&advice), "{advice}");
        assert_eq!(rate.retry_after(100_000, now), MAX_RETRY);
        assert_eq!(rate.retry_after(0, now), MIN_RETRY);
    }
}
