//! The engine's clock: accelerated wall-clock time. The rest of the crate uses it for every reading of the
//! time and for every sleep.

use std::time::Duration;

use tokio::time::Instant;

/// Maps engine time to tokio's time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: Instant,
    speedup: f64,
}

impl Clock {
    pub(crate) fn new(speedup: f64) -> Self {
        Self { start: Instant::now(), speedup }
    }

    /// Returns the engine time since the start.
    pub(crate) fn now(&self) -> Duration {
        self.start.elapsed().mul_f64(self.speedup)
    }

    /// Sleeps until an engine time.
    pub(crate) async fn sleep_until(&self, at: Duration) {
        let real = self.start + at.div_f64(self.speedup);
        // The timer has a resolution of one millisecond, so anything due within it is due now.
        if real > Instant::now() {
            tokio::time::sleep_until(real).await;
        }
    }

    /// Sleeps for a duration of engine time.
    pub(crate) async fn sleep(&self, span: Duration) {
        if !span.is_zero() {
            tokio::time::sleep(span.div_f64(self.speedup)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn speedup_divides_the_waiting() {
        let clock = Clock::new(10.0);
        let before = Instant::now();
        clock.sleep(Duration::from_secs(5)).await;
        assert_eq!(before.elapsed(), Duration::from_millis(500));
        assert_eq!(clock.now(), Duration::from_secs(5));
        clock.sleep_until(Duration::from_secs(20)).await;
        assert_eq!(before.elapsed(), Duration::from_secs(2));
        clock.sleep_until(Duration::from_secs(1)).await;
        assert_eq!(before.elapsed(), Duration::from_secs(2), "the past is not waited for");
    }
}
