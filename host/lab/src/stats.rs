//! Computes quantiles, and confidence intervals over seeds.

/// Returns the quantile of sorted values by nearest rank; 0 without values.
pub(crate) fn quantile(sorted: &[f64], share: f64) -> f64 {
    at_rank(sorted, sorted.len(), share).unwrap_or_default()
}

/// Returns the quantile of `count` values by nearest rank. Those that are not among the sorted values are
/// infinite.
pub(crate) fn quantile_of_all(sorted: &[f64], count: usize, share: f64) -> f64 {
    at_rank(sorted, count, share).unwrap_or(f64::INFINITY)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a rank among some millions"
)]
fn at_rank(sorted: &[f64], count: usize, share: f64) -> Option<f64> {
    // 0.55 * 100 is a little above 55.
    let rank = (count as f64 * share * (1.0 - 1e-12)).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// Returns the mean; 0 without values.
#[expect(clippy::cast_precision_loss, reason = "numbers of values stay far below 2^53")]
pub(crate) fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// Returns half the width of the 95 % confidence interval of the mean, by Student's t. `None` for fewer than
/// two values, or when a value is infinite.
#[expect(clippy::cast_precision_loss, reason = "a number of seeds")]
pub(crate) fn half_interval(values: &[f64]) -> Option<f64> {
    let count = values.len();
    if count < 2 || values.iter().any(|value| !value.is_finite()) {
        return None;
    }
    // The mean of equal values may differ from them by a rounding error.
    if values.iter().all(|value| Some(value) == values.first()) {
        return Some(0.0);
    }
    let mean = mean(values);
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1) as f64;
    Some(student_t(count - 1) * (variance / count as f64).sqrt())
}

/// Returns the median of sorted values, which is the mean of the two in the middle of an even number; 0
/// without values.
pub(crate) fn median(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    let lower = sorted.len().saturating_sub(1) / 2;
    sorted.get(lower..=half).map_or(0.0, mean)
}

/// Returns the 97.5 % quantile of Student's t distribution, by degrees of freedom: from a table
/// (NIST/SEMATECH e-Handbook, 1.3.6.7.2) up to 30, and beyond from the first terms of the series in
/// Abramowitz and Stegun, 26.7.5.
#[expect(clippy::cast_precision_loss, reason = "a number of seeds")]
fn student_t(freedom: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
        2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
        2.045, 2.042,
    ];
    const NORMAL: f64 = 1.959_964;
    let series = || {
        let (z, n) = (NORMAL, freedom as f64);
        z + (z.powi(3) + z) / (4.0 * n) + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * n * n)
    };
    TABLE.get(freedom.saturating_sub(1)).copied().unwrap_or_else(series)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        let of = |share: f64| quantile(&values, share).round() as u32;
        assert_eq!([of(0.5), of(0.9), of(0.99), of(1.0)], [50, 90, 99, 100]);
        assert!(quantile(&[], 0.5).abs() < 1e-9);
        // The product of a share and a number of values may be a little above a whole number.
        let wrong: Vec<u32> = (1..=100).filter(|rank| of(f64::from(*rank) / 100.0) != *rank).collect();
        assert_eq!(wrong, [0; 0]);
        assert_eq!([&[][..], &[3.0], &[1.0, 3.0], &[1.0, 2.0, 9.0]].map(median), [0.0, 3.0, 2.0, 2.0]);
        // 100 of 105 values are finite.
        let of_all = |share: f64| quantile_of_all(&values, 105, share);
        assert!((of_all(0.9) - 95.0).abs() < 1e-9 && of_all(0.99).is_infinite());
    }

    #[test]
    fn the_interval_follows_student_s_t() {
        // Mean 2, standard deviation 1, three values: 4.303 / sqrt(3).
        let half = half_interval(&[1.0, 2.0, 3.0]).unwrap();
        assert!((half - 4.303 / 3.0_f64.sqrt()).abs() < 1e-9, "{half}");
        // The same handbook has 2.042, 2.040, 2.021, 2.000 and 1.984.
        for (freedom, expected) in [(30, 2.042), (31, 2.040), (40, 2.021), (60, 2.000), (100, 1.984)] {
            assert!((student_t(freedom) - expected).abs() < 6e-4, "{freedom}: {}", student_t(freedom));
        }
        assert_eq!(half_interval(&[1.0]), None);
        assert_eq!(half_interval(&[0.1; 3]), Some(0.0));
        assert_eq!(half_interval(&[1.0, f64::INFINITY]), None);
    }
}
