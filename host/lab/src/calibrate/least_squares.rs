//! Non-negative least squares with few unknowns, robust to outliers.
//!
//! The crate `nnls` has no standard errors and does not say which unknowns the rows determine; `nalgebra`
//! would replace only the elimination (decision record 54).

/// An equation `sum(features[i] * x[i]) = value`, whose residual is divided by `scale`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row<const N: usize> {
    pub(crate) features: [f64; N],
    pub(crate) value: f64,
    pub(crate) scale: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Solution<const N: usize> {
    pub(crate) values: [f64; N],
    /// Standard errors; `None` for an unknown that is 0.
    pub(crate) errors: [Option<f64>; N],
    /// Whether the rows determine each unknown. The others are 0.
    pub(crate) identified: [bool; N],
}

/// Number of standard deviations beyond which residuals count linearly (Huber, 95 % efficiency).
const HUBER: f64 = 1.345;
/// Number of times that the weights of outliers are computed.
const REWEIGHTINGS: usize = 20;
/// Share of a column's length that must be independent of the columns before it for the column to count as
/// determined.
const LEAST_INDEPENDENT: f64 = 0.01;
/// Smallest standard deviation of relative residuals. With a smaller one, all rows without noise would be
/// outliers.
const LEAST_DEVIATION: f64 = 1e-6;

/// Solves the rows for unknowns of 0 or more. Columns that come early in `order` are preferred to columns
/// that are a combination of them.
pub(crate) fn solve<const N: usize>(rows: &[Row<N>], order: &[usize]) -> Solution<N> {
    let scaled: Vec<([f64; N], f64)> = rows
        .iter()
        .filter(|row| row.scale > 0.0 && row.scale.is_finite())
        .map(|row| (row.features.map(|feature| feature / row.scale), row.value / row.scale))
        .collect();
    let identified = identified(&scaled, order);
    let mut weights = vec![1.0; scaled.len()];
    let mut values = [0.0; N];
    for _ in 0..REWEIGHTINGS {
        values = non_negative(&scaled, &weights, identified);
        let residuals: Vec<f64> = scaled.iter().map(|(row, value)| dot(row, &values) - value).collect();
        let deviation = deviation(&residuals);
        for (weight, residual) in weights.iter_mut().zip(&residuals) {
            *weight = (HUBER * deviation / residual.abs().max(f64::MIN_POSITIVE)).min(1.0);
        }
    }
    let errors = standard_errors(&scaled, &weights, &values);
    Solution { values, errors, identified }
}

fn dot<const N: usize>(left: &[f64; N], right: &[f64; N]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

/// Estimates the standard deviation by the median of the absolute residuals.
fn deviation(residuals: &[f64]) -> f64 {
    let mut sizes: Vec<f64> = residuals.iter().map(|residual| residual.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    (1.4826 * crate::stats::quantile(&sizes, 0.5)).max(LEAST_DEVIATION)
}

/// Finds the columns that are not a combination of others, by Gram and Schmidt's method.
fn identified<const N: usize>(rows: &[([f64; N], f64)], order: &[usize]) -> [bool; N] {
    let mut found = [false; N];
    let mut basis: Vec<Vec<f64>> = Vec::new();
    for column in order {
        let mut vector: Vec<f64> =
            rows.iter().map(|(row, _)| row.get(*column).copied().unwrap_or(0.0)).collect();
        let length = norm(&vector);
        // The projection is subtracted twice, against rounding errors.
        for unit in basis.iter().chain(&basis) {
            let along: f64 = vector.iter().zip(unit).map(|(a, b)| a * b).sum();
            vector.iter_mut().zip(unit).for_each(|(value, unit)| *value -= along * unit);
        }
        let left = norm(&vector);
        if length > 0.0 && left > LEAST_INDEPENDENT * length {
            vector.iter_mut().for_each(|value| *value /= left);
            basis.push(vector);
            if let Some(found) = found.get_mut(*column) {
                *found = true;
            }
        }
    }
    found
}

fn norm(vector: &[f64]) -> f64 {
    vector.iter().map(|value| value * value).sum::<f64>().sqrt()
}

/// Solves weighted least squares with values of 0 or more, by trying every set of positive unknowns. With `N`
/// below ten, these are a few hundred small systems. The result is exact.
fn non_negative<const N: usize>(
    rows: &[([f64; N], f64)],
    weights: &[f64],
    identified: [bool; N],
) -> [f64; N] {
    let (normal, right) = normal_equations(rows, weights);
    let mut best = ([0.0; N], 0.0);
    for set in 1_u32..1 << N {
        let free: [bool; N] = std::array::from_fn(|at| (set >> at) & 1 == 1);
        if free.iter().zip(&identified).any(|(free, identified)| *free && !identified) {
            continue;
        }
        let Some(values) = solve_normal(&normal, &right, &free) else { continue };
        if values.iter().any(|value| *value < 0.0 || !value.is_finite()) {
            continue;
        }
        // The squared residual, apart from a constant.
        let quadratic: f64 = normal.iter().zip(&values).map(|(row, value)| dot(row, &values) * value).sum();
        let cost = quadratic - 2.0 * dot(&right, &values);
        if cost < best.1 {
            best = (values, cost);
        }
    }
    best.0
}

fn normal_equations<const N: usize>(rows: &[([f64; N], f64)], weights: &[f64]) -> ([[f64; N]; N], [f64; N]) {
    let (mut normal, mut right) = ([[0.0; N]; N], [0.0; N]);
    for ((row, value), weight) in rows.iter().zip(weights) {
        for ((line, sum), left) in normal.iter_mut().zip(&mut right).zip(row) {
            line.iter_mut().zip(row).for_each(|(cell, other)| *cell += weight * left * other);
            *sum += weight * left * value;
        }
    }
    (normal, right)
}

/// Solves the normal equations of the free unknowns; the others are 0. `None` when they are singular.
fn solve_normal<const N: usize>(
    normal: &[[f64; N]; N],
    right: &[f64; N],
    free: &[bool; N],
) -> Option<[f64; N]> {
    let places: Vec<usize> = (0..N).filter(|at| free.get(*at) == Some(&true)).collect();
    // The system is scaled to a diagonal of ones, because the columns differ by many orders of magnitude.
    let scale = |at: usize| normal.get(at).and_then(|row| row.get(at)).map(|value| value.sqrt());
    let mut system: Vec<Vec<f64>> = Vec::new();
    for row in &places {
        let mut line = Vec::new();
        for column in &places {
            line.push(normal.get(*row)?.get(*column)? / (scale(*row)? * scale(*column)?));
        }
        line.push(right.get(*row)? / scale(*row)?);
        system.push(line);
    }
    let solved = eliminate(system)?;
    let mut values = [0.0; N];
    for (at, value) in places.iter().zip(solved) {
        *values.get_mut(*at)? = value / scale(*at)?;
    }
    Some(values)
}

/// Solves a system by Gauss and Jordan's elimination with pivots. The last element of each row is its right
/// side.
fn eliminate(mut system: Vec<Vec<f64>>) -> Option<Vec<f64>> {
    let size = system.len();
    for at in 0..size {
        let size_of = |line: &Vec<f64>| line.get(at).map_or(0.0, |value| value.abs());
        let pivot = (at..size).max_by(|left, right| {
            let of = |line: &usize| system.get(*line).map_or(0.0, size_of);
            of(left).total_cmp(&of(right))
        })?;
        system.swap(at, pivot);
        let mut line = system.get(at)?.clone();
        let head = *line.get(at)?;
        if head.abs() < 1e-12 {
            return None;
        }
        line.iter_mut().for_each(|value| *value /= head);
        for (_, other) in system.iter_mut().enumerate().filter(|(number, _)| *number != at) {
            let factor = *other.get(at)?;
            other.iter_mut().zip(&line).for_each(|(value, pivot)| *value -= factor * pivot);
        }
        *system.get_mut(at)? = line;
    }
    system.iter().map(|line| line.last().copied()).collect()
}

/// Returns the standard errors of the positive values.
#[expect(clippy::cast_precision_loss, reason = "numbers of rows stay far below 2^53")]
fn standard_errors<const N: usize>(
    rows: &[([f64; N], f64)],
    weights: &[f64],
    values: &[f64; N],
) -> [Option<f64>; N] {
    let free = values.map(|value| value > 0.0);
    let count = free.iter().filter(|free| **free).count();
    let squares: f64 = rows
        .iter()
        .zip(weights)
        .map(|((row, value), weight)| weight * (dot(row, values) - value).powi(2))
        .sum();
    let variance = squares / rows.len().saturating_sub(count).max(1) as f64;
    let (normal, _) = normal_equations(rows, weights);
    std::array::from_fn(|at| {
        let unit: [f64; N] = std::array::from_fn(|other| if other == at { 1.0 } else { 0.0 });
        let is_free = free.get(at) == Some(&true);
        let inverse = solve_normal(&normal, &unit, &free).filter(|_| is_free)?;
        inverse.get(at).map(|value| (value.max(0.0) * variance).sqrt())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(truth: [f64; 3], points: &[[f64; 3]]) -> Vec<Row<3>> {
        let row = |features: &[f64; 3]| {
            let value = dot(features, &truth);
            Row { features: *features, value, scale: value.abs().max(1e-9) }
        };
        points.iter().map(row).collect()
    }

    const POINTS: [[f64; 3]; 6] = [
        [1.0, 10.0, 3.0],
        [1.0, 20.0, 1.0],
        [1.0, 500.0, 7.0],
        [1.0, 30.0, 30.0],
        [1.0, 9.0, 100.0],
        [1.0, 60.0, 2.0],
    ];

    #[test]
    fn exact_rows_give_the_exact_values_and_one_outlier_changes_little() {
        let mut rows = rows([5.0, 0.02, 0.7], &POINTS);
        let exact = solve(&rows, &[0, 1, 2]);
        for (value, truth) in exact.values.iter().zip([5.0, 0.02, 0.7]) {
            assert!((value / truth - 1.0).abs() < 1e-6, "{exact:?}");
        }
        rows.extend(rows.clone());
        rows.extend(rows.clone());
        rows[3].value *= 10.0;
        let robust = solve(&rows, &[0, 1, 2]);
        for (value, truth) in robust.values.iter().zip([5.0, 0.02, 0.7]) {
            assert!((value / truth - 1.0).abs() < 0.02, "{robust:?}");
        }
    }

    #[test]
    fn a_negative_value_becomes_zero_and_the_others_make_up_for_it() {
        let solution = solve(&rows([5.0, 0.5, -0.01], &POINTS), &[0, 1, 2]);
        assert!(solution.values[2].abs() < 1e-12 && solution.errors[2].is_none(), "{solution:?}");
        assert!(solution.identified[2]);
        assert!((solution.values[1] - 0.5).abs() < 0.05, "{solution:?}");
    }

    #[test]
    fn a_column_that_repeats_an_earlier_one_is_not_identified() {
        let points = POINTS.map(|[one, other, _]| [one, other, 2.0 * one]);
        let solution = solve(&rows([5.0, 0.5, 1.0], &points), &[0, 1, 2]);
        assert_eq!(solution.identified, [true, true, false]);
        assert!((solution.values[0] - 7.0).abs() < 1e-6 && solution.values[2].abs() < 1e-12, "{solution:?}");
        let none = solve::<3>(&[], &[0, 1, 2]);
        assert_eq!((none.values, none.identified), ([0.0; 3], [false; 3]));
    }
}
