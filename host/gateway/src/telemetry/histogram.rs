//! Buckets of times. Each octave has eight buckets, so a quantile has an error below 5 %.

use tokio::time::Duration;

/// Number of buckets in an octave.
const STEPS: f64 = 8.0;
/// Number of buckets: 20 octaves, from 0.1 ms to 105 s.
pub(crate) const BUCKETS: usize = 160;
/// Lower bound of the first bucket in seconds.
const LEAST: f64 = 1e-4;

/// Returns the bucket of a time.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates, as it should"
)]
pub(crate) fn bucket(time: Duration) -> usize {
    let octaves = (time.as_secs_f64() / LEAST).log2();
    ((octaves * STEPS) as usize).min(BUCKETS - 1)
}

/// Returns the middle of the bucket in which the quantile lies, milliseconds; `None` without values.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a rank needs no 64 bits"
)]
pub(crate) fn quantile_ms(buckets: &[u64; BUCKETS], share: f64) -> Option<f64> {
    let all = buckets.iter().sum::<u64>();
    let rank = ((all as f64 * share).ceil() as u64).max(1);
    let mut sum = 0;
    let found = buckets.iter().position(|count| {
        sum += count;
        sum >= rank
    });
    found.map(middle_ms)
}

/// Returns the middle of a bucket, milliseconds.
#[expect(clippy::cast_precision_loss, reason = "there are 160")]
pub(crate) fn middle_ms(bucket: usize) -> f64 {
    LEAST * 1e3 * ((bucket as f64 + 0.5) / STEPS).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_time_has_a_bucket() {
        let times = [0, 1, 100, 100_000, 3_600_000_000].map(Duration::from_micros);
        assert_eq!(times.map(bucket), [0, 0, 0, 79, BUCKETS - 1]);
    }

    #[test]
    fn quantiles_are_within_five_percent() {
        let mut buckets = [0; BUCKETS];
        assert_eq!(quantile_ms(&buckets, 0.5), None);
        (1..=1_000).for_each(|ms| buckets[bucket(Duration::from_millis(ms))] += 1);
        for (share, expected) in [(0.0, 1.0), (0.5, 500.0), (0.9, 900.0), (0.99, 990.0), (1.0, 1_000.0)] {
            let found = quantile_ms(&buckets, share).unwrap();
            assert!((found / expected - 1.0).abs() < 0.05, "{share}: {found}");
        }
    }
}
