//! Figures of one router.

use std::time::Duration;

use crate::{
    metrics_text::{sum, sum_with},
    table::Checks,
};

/// Results of one router.
#[derive(Debug)]
pub(super) struct Figures {
    requests: u64,
    /// Number of conversations that failed.
    failed: u64,
    equal: f64,
    over: f64,
    under: f64,
    /// Number of prompts without token ids.
    pub(super) not_tokenized: f64,
    prompt_tokens: f64,
    cached_tokens: f64,
    took: Duration,
}

impl Figures {
    /// Reads the gateway's metrics after a run.
    pub(super) fn new(metrics: &str, requests: u64, failed: u64, took: Duration) -> Self {
        let predictions = |result| sum_with(metrics, "pointsman_predictions_total", &[("result", result)]);
        Self {
            requests,
            failed,
            equal: predictions("equal"),
            over: predictions("over"),
            under: predictions("under"),
            not_tokenized: sum(metrics, "pointsman_not_tokenized_total"),
            prompt_tokens: sum(metrics, "pointsman_prompt_tokens_total"),
            cached_tokens: sum(metrics, "pointsman_cached_tokens_total"),
            took,
        }
    }

    /// Returns the share of the predictions that were equal to the engine's report.
    pub(super) fn equal_share(&self) -> f64 {
        self.equal / (self.equal + self.over + self.under).max(1.0)
    }

    /// Returns the share of prompt tokens that the engines found in their caches.
    pub(super) fn hit_rate(&self) -> f64 {
        self.cached_tokens / self.prompt_tokens.max(1.0)
    }

    /// Prints the figures of a router.
    pub(super) fn report(&self, router: &str, checks: &mut Checks) {
        let Self { requests, equal, over, under, took, .. } = self;
        checks.show(&format!("{router}: requests"), format!("{requests} in {:.0} s", took.as_secs_f64()));
        checks.show(
            &format!("{router}: predictions, equal / over / under"),
            format!("{equal} / {over} / {under}"),
        );
        checks.show(&format!("{router}: hit rate"), format!("{:.1} %", self.hit_rate() * 100.0));
        checks.none(&format!("{router}: conversations that failed"), self.failed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Figures;

    #[test]
    fn shares_are_those_of_the_metrics() {
        let metrics = "pointsman_predictions_total{result=\"equal\"} 99\n\
            pointsman_predictions_total{result=\"over\"} 1\n\
            pointsman_prompt_tokens_total 200\npointsman_cached_tokens_total 50\n\
            pointsman_not_tokenized_total{reason=\"timeout\"} 2\n";
        let figures = Figures::new(metrics, 100, 0, Duration::ZERO);
        assert_eq!((figures.equal_share(), figures.hit_rate(), figures.not_tokenized), (0.99, 0.25, 2.0));
    }
}
