//! Picks a row from costs: minimum with uniform ties, softmax, weighted random. Pure: all randomness comes
//! from the seed.

use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::slot::{Normalize, Picker};

/// Number of costs that are compared at once.
const LANES: usize = 8;

/// Picks a row index from finite `costs` (lower is better). `None` only when there are no rows.
///
/// `temperature` is the one in force for this request; a picker with its own temperature ignores it.
#[must_use]
pub fn pick(picker: Picker, costs: &[f32], temperature: f32, seed: u64) -> Option<usize> {
    match picker {
        Picker::Min if temperature > 0.0 => softmax(costs, temperature, seed),
        Picker::Min => minimum(costs, seed),
        Picker::Softmax { temperature } => softmax(costs, temperature, seed),
        Picker::WeightedRandom => weighted_random(costs, seed),
    }
}

/// The minimum; ties are broken uniformly.
#[must_use]
pub fn minimum(costs: &[f32], seed: u64) -> Option<usize> {
    let least = extreme(costs, |cost, least| cost < least)?;
    let ties: u32 = costs.iter().map(|cost| u32::from(*cost == least)).sum();
    if ties <= 1 {
        return costs.iter().position(|cost| *cost == least);
    }
    let wanted = SmallRng::seed_from_u64(seed).random_range(0..ties as usize);
    costs.iter().enumerate().filter(|(_, cost)| **cost == least).nth(wanted).map(|(row, _)| row)
}

/// `p_i ~ exp(-(c_i - min) / ((max - min) * T))` (G); all equal: uniform.
#[must_use]
pub fn softmax(costs: &[f32], temperature: f32, seed: u64) -> Option<usize> {
    let (least, most) = bounds(costs)?;
    let scale = f64::from(most - least) * f64::from(temperature);
    let weight = |cost: f32| if scale > 0.0 { (-f64::from(cost - least) / scale).exp() } else { 1.0 };
    draw(costs, weight, seed)
}

/// Probability in proportion to `max - c`; all equal: uniform.
#[must_use]
pub(crate) fn weighted_random(costs: &[f32], seed: u64) -> Option<usize> {
    let (least, most) = bounds(costs)?;
    let weight = |cost: f32| if most > least { f64::from(most - cost) } else { 1.0 };
    draw(costs, weight, seed)
}

/// Normalizes a scorer's costs as its slot is configured.
pub fn normalize(scale: Normalize, costs: &mut [f32]) {
    match scale {
        Normalize::None => {}
        Normalize::MinMax => min_max(costs),
        Normalize::Unit => unit(costs),
    }
}

/// Brings costs to [0, 1] by `(c - min) / (max - min)`; all equal: 0.
fn min_max(costs: &mut [f32]) {
    let Some((least, most)) = bounds(costs) else { return };
    let span = most - least;
    for cost in costs {
        *cost = if span > 0.0 { (*cost - least) / span } else { 0.0 };
    }
}

/// Turns scores in [0, 1], higher better, into costs: clamped, `1 - x`.
fn unit(costs: &mut [f32]) {
    for cost in costs {
        *cost = 1.0 - cost.clamp(0.0, 1.0);
    }
}

/// The least and the greatest cost.
fn bounds(costs: &[f32]) -> Option<(f32, f32)> {
    let least = extreme(costs, |cost, least| cost < least)?;
    Some((least, extreme(costs, |cost, most| cost > most)?))
}

/// Returns the cost that comes first in the order of `before`.
fn extreme(costs: &[f32], before: impl Fn(f32, f32) -> bool) -> Option<f32> {
    let first = *costs.first()?;
    let first_of = |a: f32, b: f32| if before(a, b) { a } else { b };
    // Several at once, which the compiler keeps in vector registers.
    let mut extremes = [first; LANES];
    let (rows, rest) = costs.as_chunks::<LANES>();
    for row in rows {
        extremes.iter_mut().zip(row).for_each(|(extreme, cost)| *extreme = first_of(*cost, *extreme));
    }
    Some(extremes.iter().chain(rest).copied().fold(first, first_of))
}

fn draw(costs: &[f32], weight: impl Fn(f32) -> f64, seed: u64) -> Option<usize> {
    let total: f64 = costs.iter().map(|cost| weight(*cost)).sum();
    let mut left = SmallRng::seed_from_u64(seed).random::<f64>() * total;
    for (row, cost) in costs.iter().enumerate() {
        left -= weight(*cost);
        if left < 0.0 {
            return Some(row);
        }
    }
    // Rounding may leave a sliver: the last row that can be drawn at all.
    costs.iter().rposition(|cost| weight(*cost) > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(draws: u64, rows: usize, mut once: impl FnMut(u64) -> usize) -> Vec<f64> {
        let mut counts = vec![0_u32; rows];
        (0..draws).for_each(|seed| counts[once(seed)] += 1);
        counts.iter().map(|count| f64::from(*count) / draws as f64).collect()
    }

    #[test]
    fn g_temperature_zero_takes_the_minimum_and_breaks_ties_uniformly() {
        let costs = [3.0, 1.0, 1.0, 2.0, 1.0];
        let shares = shares(30_000, 5, |seed| pick(Picker::Min, &costs, 0.0, seed).unwrap());
        // G2.1
        assert_eq!((shares[0], shares[3]), (0.0, 0.0));
        for row in [1, 2, 4] {
            // G2.1
            assert!((shares[row] - 1.0 / 3.0).abs() < 0.015, "row {row}: {shares:?}");
        }
    }

    #[test]
    fn g_softmax_follows_the_formula() {
        let costs = [10.0, 20.0, 30.0];
        // min 10, max 30, T 0.5: exponents 0, -1, -2.
        let weights = [1.0, (-1.0_f64).exp(), (-2.0_f64).exp()];
        let total: f64 = weights.iter().sum();
        let shares = shares(60_000, 3, |seed| softmax(&costs, 0.5, seed).unwrap());
        for row in 0..3 {
            // G2.2
            assert!((shares[row] - weights[row] / total).abs() < 0.01, "row {row}: {shares:?}");
        }
    }

    #[test]
    fn g_softmax_over_equal_costs_is_uniform() {
        let shares = shares(40_000, 4, |seed| softmax(&[7.0; 4], 0.2, seed).unwrap());
        // G2.3
        assert!(shares.iter().all(|share| (share - 0.25).abs() < 0.015), "{shares:?}");
    }

    #[test]
    fn weighted_random_never_draws_the_worst_of_several() {
        let shares = shares(20_000, 3, |seed| weighted_random(&[0.0, 5.0, 10.0], seed).unwrap());
        assert_eq!(shares[2], 0.0);
        assert!((shares[0] - 2.0 / 3.0).abs() < 0.02, "{shares:?}");
    }

    #[test]
    fn the_least_and_the_greatest_cost_are_found_anywhere() {
        for rows in 1..40 {
            for at in 0..rows {
                let mut costs = vec![2.0; rows];
                costs[at] = 1.0;
                assert_eq!(minimum(&costs, 7), Some(at));
                costs[at] = 3.0;
                assert_eq!(bounds(&costs), Some((if rows > 1 { 2.0 } else { 3.0 }, 3.0)));
            }
        }
    }

    #[test]
    fn no_rows_no_pick() {
        for picker in [Picker::Min, Picker::Softmax { temperature: 1.0 }, Picker::WeightedRandom] {
            assert_eq!(pick(picker, &[], 0.0, 1), None);
        }
    }

    #[test]
    fn normalizers_keep_their_ranges() {
        let mut costs = [2.0, 4.0, 3.0];
        min_max(&mut costs);
        assert_eq!(costs, [0.0, 1.0, 0.5]);
        let mut equal = [5.0; 2];
        min_max(&mut equal);
        assert_eq!(equal, [0.0; 2]);
        let mut scores = [-1.0, 0.25, 7.0];
        unit(&mut scores);
        assert_eq!(scores, [1.0, 0.75, 0.0]);
    }
}
