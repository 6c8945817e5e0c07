//! Medians, quantiles and their uncertainty.

/// Middle value, the upper one of two; NaN of nothing.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The quantile of sorted values by nearest rank, as `pointsman compare` computes it; NaN of nothing.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank among some millions"
    )]
    let rank = (sorted.len() as f64 * share.clamp(0.0, 1.0)).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

/// Values in ascending order.
pub fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// Bounds of a quantile, two standard deviations of its rank to either side. Few values above it make them
/// wide.
pub fn quantile_bounds(sorted: &[f64], share: f64) -> (f64, f64) {
    #[expect(clippy::cast_precision_loss, reason = "a count")]
    let count = sorted.len().max(1) as f64;
    let deviation = (count * share * (1.0 - share)).sqrt() / count;
    (quantile(sorted, share - 2.0 * deviation), quantile(sorted, share + 2.0 * deviation))
}

#[cfg(test)]
mod tests {
    use super::{median, quantile, quantile_bounds, sorted};

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 3.0);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn quantiles() {
        let values = sorted((0..1_000).rev().map(f64::from).collect());
        let expected = [(0.0, 0.0), (0.5, 499.0), (0.99, 989.0), (0.999, 998.0), (1.0, 999.0)];
        for (share, value) in expected {
            assert_eq!(quantile(&values, share), value, "{share}");
        }
        assert!(quantile(&[], 0.5).is_nan());
        assert_eq!(quantile(&[7.0], 0.999), 7.0);
    }

    #[test]
    fn bounds_enclose_the_quantile_and_narrow_with_more_values() {
        let width = |count: u32| {
            let values: Vec<f64> = (0..count).map(|value| f64::from(value) / f64::from(count)).collect();
            let (low, high) = quantile_bounds(&values, 0.9);
            assert!(low <= quantile(&values, 0.9) && quantile(&values, 0.9) <= high);
            high - low
        };
        assert!(width(10_000) < width(100));
    }
}
