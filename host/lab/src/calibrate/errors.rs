//! Errors of the predicted times, compared with the measured ones.

use serde::Serialize;

use super::{Predicted, Sample};
use crate::stats::{mean, median, quantile};

/// Bias above which the report warns, percent.
const LARGE_BIAS: f64 = 20.0;

/// Errors of one figure over the requests that were not fitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Errors {
    /// Number of requests.
    pub requests: usize,
    /// Median of the measured values, ms.
    pub measured_p50_ms: f64,
    /// Median of the predicted values, ms.
    pub predicted_p50_ms: f64,
    /// Median absolute percentage error.
    pub median_percent: f64,
    /// 90th percentile of the absolute percentage errors.
    pub p90_percent: f64,
    /// Mean of the predicted minus the measured values, percent of the measured mean.
    pub bias_percent: f64,
    /// Pearson's correlation of predicted and measured values; `None` when either does not vary.
    pub pearson_r: Option<f64>,
}

/// Errors of the model on requests that were not fitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct HeldOut {
    /// Time to first token.
    pub ttft: Errors,
    /// Mean inter-token latency of a request.
    pub itl: Errors,
    /// Time to last token.
    pub e2e: Errors,
    /// Number of requests that the model could not serve.
    pub not_served: usize,
}

/// Returns the measured and the predicted value of a figure.
type Figures = dyn Fn(&Sample, &Predicted) -> Option<(f64, f64)>;

impl HeldOut {
    /// Returns a warning for each figure with a large bias: the model is wrong by as much in one direction.
    pub(super) fn bias_warnings(&self) -> impl Iterator<Item = String> {
        let figures = [("TTFT", self.ttft), ("ITL", self.itl), ("E2E", self.e2e)];
        figures.into_iter().filter(|(_, errors)| errors.bias_percent.abs() > LARGE_BIAS).map(|(name, errors)| {
            format!(
                "the model's {name} is off by {:+.0} % on average: measure again on an idle engine, with the lengths of \
                 your traffic",
                errors.bias_percent
            )
        })
    }

    pub(super) fn of(samples: &[Sample], predicted: &[Option<Predicted>]) -> Self {
        let pairs: Vec<(&Sample, &Predicted)> = samples
            .iter()
            .zip(predicted)
            .filter_map(|(sample, predicted)| predicted.as_ref().map(|predicted| (sample, predicted)))
            .collect();
        let errors = |figures: &Figures| {
            Errors::of(&pairs.iter().filter_map(|(a, b)| figures(a, b)).collect::<Vec<_>>())
        };
        Self {
            ttft: errors(&|sample, predicted| Some((sample.ttft_ms, predicted.ttft_ms))),
            itl: errors(&|sample, predicted| sample.itl_ms().zip(predicted.itl_ms)),
            e2e: errors(&|sample, predicted| Some((sample.e2e_ms, predicted.e2e_ms))),
            not_served: samples.len() - pairs.len(),
        }
    }
}

impl Errors {
    /// Computes the errors of pairs of a measured and a predicted value.
    fn of(pairs: &[(f64, f64)]) -> Self {
        let sorted = |value: &dyn Fn(&(f64, f64)) -> f64| {
            let mut values: Vec<f64> = pairs.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let percent = sorted(&|(measured, predicted)| {
            100.0 * (predicted - measured).abs() / measured.max(f64::MIN_POSITIVE)
        });
        let (measured, predicted) = (sorted(&|pair| pair.0), sorted(&|pair| pair.1));
        let bias = (mean(&predicted) - mean(&measured)) / mean(&measured).max(f64::MIN_POSITIVE);
        Self {
            requests: pairs.len(),
            measured_p50_ms: quantile(&measured, 0.5),
            predicted_p50_ms: quantile(&predicted, 0.5),
            median_percent: median(&percent),
            p90_percent: quantile(&percent, 0.9),
            bias_percent: 100.0 * bias,
            pearson_r: pearson(pairs, mean(&measured), mean(&predicted)),
        }
    }
}

fn pearson(pairs: &[(f64, f64)], measured_mean: f64, predicted_mean: f64) -> Option<f64> {
    let (mut both, mut measured, mut predicted) = (0.0, 0.0, 0.0);
    for (left, right) in pairs {
        let (left, right) = (left - measured_mean, right - predicted_mean);
        both += left * right;
        measured += left * left;
        predicted += right * right;
    }
    let length = (measured * predicted).sqrt();
    (length > 0.0).then(|| both / length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_those_of_the_definition() {
        let errors = Errors::of(&[(100.0, 110.0), (200.0, 190.0), (400.0, 480.0), (50.0, 50.0)]);
        assert_eq!(errors.requests, 4);
        assert!((errors.median_percent - 7.5).abs() < 1e-9, "{errors:?}");
        assert!((errors.p90_percent - 20.0).abs() < 1e-9, "{errors:?}");
        assert!((errors.bias_percent - 100.0 * 80.0 / 750.0).abs() < 1e-9, "{errors:?}");
        assert!(errors.pearson_r.is_some_and(|r| r > 0.98 && r < 1.0), "{errors:?}");
        assert_eq!(Errors::of(&[(1.0, 2.0), (1.0, 3.0)]).pearson_r, None);
        assert_eq!(Errors::of(&[]).requests, 0);
    }
}
