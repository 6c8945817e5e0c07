//! Figures of one router.

use std::time::Duration;

use crate::{
    metrics_text::{sum, sum_with},
    sh,
    table::columns,
};

/// Results of one router.
#[derive(Debug)]
pub(super) struct Figures {
    requests: u64,
    /// Number of conversations that failed.
    pub(super) failed: u64,
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
        let predictions = |reason| sum_with(metrics, "pointsman_predictions_total", &[("reason", reason)]);
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
}

/// Prints one line for each router.
pub(super) fn print(kv_aware: &Figures, round_robin: Option<&Figures>) {
    let head = "router|requests|failed|equal|over|under|equal %|hit rate|seconds";
    let line = |(name, figures): (&str, &Figures)| {
        let (equal, hits) = (figures.equal_share() * 100.0, figures.hit_rate() * 100.0);
        let Figures { requests, failed, equal: right, over, under, took, .. } = figures;
        let took = took.as_secs_f64();
        format!("{name}|{requests}|{failed}|{right}|{over}|{under}|{equal:.2}|{hits:.1} %|{took:.0}")
    };
    let routers = [("kv-aware", Some(kv_aware)), ("round-robin", round_robin)].into_iter();
    let lines = routers.filter_map(|(name, figures)| Some(line((name, figures?))));
    let rows = std::iter::once(head.to_owned()).chain(lines);
    let rows: Vec<_> = rows.map(|row| row.split('|').map(str::to_owned).collect()).collect();
    columns(&rows).iter().for_each(|row| sh::print(row));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Figures;

    #[test]
    fn shares_are_those_of_the_metrics() {
        let metrics = "pointsman_predictions_total{reason=\"equal\"} 99\n\
            pointsman_predictions_total{reason=\"over\"} 1\n\
            pointsman_prompt_tokens_total 200\npointsman_cached_tokens_total 50\n\
            pointsman_not_tokenized_total{reason=\"timeout\"} 2\n";
        let figures = Figures::new(metrics, 100, 0, Duration::ZERO);
        assert_eq!((figures.equal_share(), figures.hit_rate(), figures.not_tokenized), (0.99, 0.25, 2.0));
    }
}
