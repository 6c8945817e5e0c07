//! A token bucket whose withdrawals can be corrected afterwards.

use tokio::time::{Duration, Instant};

/// Amount that was withdrawn and has not flowed back yet. A limit of `per_minute` flows back evenly over a
/// minute. A changed limit needs no conversion.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    used: f64,
    at: Instant,
}

impl Bucket {
    pub(super) fn new(now: Instant) -> Self {
        Self { used: 0.0, at: now }
    }

    /// Drains the bucket for the time that passed. A clock that jumps ahead empties the bucket at most. A
    /// clock that stands still or goes back changes nothing.
    fn flow(&mut self, per_minute: f64, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.used = (self.used - passed * per_minute / 60.0).max(0.0);
    }

    /// Returns how long it takes until `amount` fits; zero: it fits now.
    pub(super) fn wait(&mut self, amount: f64, per_minute: f64, now: Instant) -> Duration {
        self.flow(per_minute, now);
        let over = self.used + amount.min(per_minute) - per_minute;
        // A rounding error must not refuse an amount that fits exactly.
        if over <= per_minute * 1e-9 { Duration::ZERO } else { seconds(over * 60.0 / per_minute) }
    }

    /// Withdraws `amount`.
    pub(super) fn withdraw(&mut self, amount: f64) {
        self.used += amount;
    }

    /// Corrects an earlier withdrawal by `difference`. The debt stays below two limits: a wrong number of an
    /// engine shuts a tenant out for a minute at most.
    pub(super) fn correct(&mut self, difference: f64, per_minute: f64) {
        self.used = (self.used + difference).clamp(0.0, 2.0 * per_minute);
    }

    /// Returns the rest of the limit, and how long it takes until the bucket is empty.
    pub(super) fn left(&mut self, per_minute: f64, now: Instant) -> (u64, Duration) {
        self.flow(per_minute, now);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative")]
        let left = (per_minute - self.used).max(0.0) as u64;
        (left, seconds(self.used * 60.0 / per_minute))
    }

    /// Returns whether the bucket is empty.
    pub(super) fn is_idle(&mut self, per_minute: f64, now: Instant) -> bool {
        self.flow(per_minute, now);
        self.used <= 0.0
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(3_600))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn l1_a_bucket_fills_evenly_and_is_corrected() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        assert_eq!(bucket.wait(60.0, 60.0, start), Duration::ZERO);
        bucket.withdraw(60.0);
        assert_eq!(bucket.wait(1.0, 60.0, start), Duration::from_secs(1));
        bucket.correct(-30.0, 60.0);
        assert_eq!(bucket.left(60.0, start), (30, Duration::from_secs(30)));
        // The clock goes back, stands still, and jumps a year ahead.
        let later = start + Duration::from_secs(10);
        assert_eq!(bucket.left(60.0, later), (40, Duration::from_secs(20)));
        assert_eq!(bucket.left(60.0, start), (40, Duration::from_secs(20)));
        assert_eq!(bucket.left(60.0, start + Duration::from_secs(31_536_000)).0, 60);
        // An engine reports four thousand million tokens.
        bucket.correct(f64::from(u32::MAX), 60.0);
        let end = start + Duration::from_secs(31_536_000);
        assert_eq!(bucket.wait(1.0, 60.0, end), Duration::from_secs(61));
        // A larger limit applies to what was used already.
        assert_eq!(bucket.left(240.0, end).0, 120);
    }
}
