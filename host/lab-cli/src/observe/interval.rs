//! How sure the difference of two simulations of the same requests is.

use pointsman_lab::{Ended, RunResult};

/// Number of batches. Between 10 and 30 are usual: fewer make the interval wide, more make neighbouring
/// batches depend on each other.
const BATCHES: usize = 20;
/// 99.5 % quantile of Student's t distribution with one degree of freedom fewer than there are batches
/// (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
const STUDENT_T: f64 = 2.861;

/// Returns half the width of the 99 % confidence interval of the mean difference in TTFT, milliseconds. It
/// covers the requests that both runs completed; `None` when these are too few.
///
/// Requests that follow each other wait for each other, so that their differences are not independent. The
/// interval is that of batch means (Law, Simulation Modeling and Analysis): it comes from the means of
/// batches of consecutive requests. A difference that a few requests make, such as the first ones of cold
/// caches, is in one batch and gives a wide interval.
pub(super) fn of_ttft(run: &RunResult, other: &RunResult) -> Option<f64> {
    let pairs = run.outcomes.iter().zip(&other.outcomes);
    let complete = pairs.filter(|(a, b)| a.ended == Ended::Complete && b.ended == Ended::Complete);
    let differences = complete.map(|(a, b)| 1e3 * (a.ttft.as_secs_f64() - b.ttft.as_secs_f64()));
    half_interval(&differences.collect::<Vec<_>>())
}

fn half_interval(differences: &[f64]) -> Option<f64> {
    let of = |batch: usize| {
        let bound = |batch: usize| batch * differences.len() / BATCHES;
        differences.get(bound(batch)..bound(batch + 1)).filter(|batch| !batch.is_empty()).map(mean)
    };
    let means: Vec<f64> = (0..BATCHES).map(of).collect::<Option<_>>()?;
    let middle = mean(&means);
    let squares: Vec<f64> = means.iter().map(|mean| (mean - middle).powi(2)).collect();
    // The variance of the mean of n values is their sum of squares by n * (n - 1).
    Some(STUDENT_T * (mean(&squares) / (BATCHES - 1) as f64).sqrt())
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_of_a_few_requests_is_within_the_interval_and_one_of_all_is_not() {
        // S5.21: four cold prompts of 100 ms in 311 requests.
        let few: Vec<f64> = (0..311).map(|number| if number < 4 { 100.0 } else { 0.0 }).collect();
        assert!(half_interval(&few).unwrap() > mean(&few));
        let all: Vec<f64> = (0..311).map(|number| 5.0 + f64::from(number % 7)).collect();
        let half = half_interval(&all).unwrap();
        assert!(half > 0.0 && half < 1.0 && mean(&all) > 7.0, "{half}");
        assert_eq!(half_interval(&[0.0; 20]), Some(0.0));
        assert_eq!(half_interval(&[0.0; 19]), None);
    }
}
