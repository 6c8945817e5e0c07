//! Handles the end of a request: adds it to the metrics, and writes its line of the access log.

use std::{cmp::Ordering, sync::Arc};

use tokio::time::Duration;

use super::Account;
use crate::telemetry::{
    labels::Name,
    labels::ResultLabels,
    metrics::{Metrics, OTHER, RequestLabels, seconds},
    prediction_checks::log_turn,
};

/// Counts a request as in flight. A gateway that drains ends when none is, and by then each is counted.
#[derive(Debug)]
pub(super) struct InFlight(Arc<Metrics>);

impl InFlight {
    pub(super) fn begin(metrics: &Arc<Metrics>) -> Self {
        metrics.inflight.inc();
        Self(Arc::clone(metrics))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.inflight.dec();
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.settle();
        self.count_open_legs();
        if self.discarded {
            return;
        }
        let took = self.started.elapsed();
        self.report_decisions(took);
        self.observe_times(took);
        self.observe_lengths();
        self.count_tokens();
        self.count_request();
        self.write_line(took);
        self.finish_trace();
        self.log();
    }
}

impl Account {
    /// Returns the time to first token, if there was a token.
    fn ttft(&self) -> Option<Duration> {
        self.first_token.map(|first| first - self.started)
    }

    /// Observes the time to the first token, when it came.
    pub(super) fn observe_first_token(&self) {
        if let Some(ttft) = self.ttft() {
            self.metrics.ttft.observe(seconds(ttft), self.exemplar(), None);
            self.metrics.live_stats.first_token(ttft);
        }
    }

    fn observe_times(&self, took: Duration) {
        let metrics = &self.metrics;
        metrics.duration.observe(seconds(took), self.exemplar(), None);
        metrics.live_stats.note(self.outcome.status, self.ttft(), self.itl());
        if let Some(itl) = self.rest_itl() {
            metrics.itl.observe(seconds(itl));
        }
    }

    /// Brings the counter of output tokens up to those of this request, which runs.
    pub(super) fn count_output(&mut self) {
        self.count_output_as(self.tokens.min(self.credible_tokens));
    }

    fn count_output_as(&mut self, tokens: u32) {
        self.metrics.output_tokens.replace(self.tokens_in_metrics, tokens);
        self.tokens_in_metrics = tokens;
    }

    fn count_tokens(&mut self) {
        let (prompt, output) = self.used_tokens();
        // Like that of the tenant, it has the estimate of an answer that was given up.
        self.count_output_as(self.tokens.max(u32::try_from(output).unwrap_or(u32::MAX)));
        let (metrics, usage) = (&self.metrics, self.usage.unwrap_or_default());
        metrics.prompt_tokens.inc_by(prompt);
        if self.predicted {
            metrics.cache_predicted_prompt_tokens.inc_by(prompt);
            metrics.predicted_tokens.inc_by(u64::from(self.predicted_tokens).min(prompt));
        }
        if let Some(cached) = usage.cached_tokens {
            metrics.cache_reported_prompt_tokens.inc_by(u64::from(usage.prompt_tokens));
            metrics.cached_tokens.inc_by(u64::from(cached));
        }
        if let (Some(block), Some(cached)) = (self.exact_block, usage.cached_tokens) {
            // Only whole blocks of the gateway's size are predicted.
            let result = match (self.predicted_tokens / block).cmp(&(cached / block)) {
                Ordering::Equal => "equal",
                Ordering::Greater => "over",
                Ordering::Less => "under",
            };
            metrics.predictions.get_or_create(&ResultLabels { result }).inc();
            log_turn(&self.model, metrics.prediction_checks.record_check(&self.model, result != "equal"));
        }
    }

    fn count_request(&self) {
        let labelled = &self.metrics.labelled;
        let model = if self.model_is_served { labelled.of_request(&self.model) } else { Name(OTHER.clone()) };
        let (status, code) = (self.outcome.status, self.outcome.code);
        let labels = RequestLabels { endpoint: self.endpoint.label(), model, status, code };
        self.metrics.requests.get_or_create(&labels).inc();
        if let Some(series) = &self.tenant_series {
            let (input, output) = self.used_tokens();
            self.metrics.tenants.ended(series, code, input, output);
        }
    }

    fn write_line(&self, took: Duration) {
        let (prompt_tokens, prompt_source) = self.prompt_length().unzip();
        let origin = self.origin.as_deref();
        let hints = origin.map(|request| &request.hints);
        let agent = hints.map(|hints| &hints.agent);
        tracing::info!(
            target: "pointsman::access",
            request = self.request_id,
            endpoint = self.endpoint.label(),
            model = self.model.as_str(),
            status = self.outcome.status,
            code = self.outcome.code,
            decisions = self.decisions(),
            prompt_tokens,
            prompt_source,
            output_tokens = self.output_source().map(|_| self.tokens),
            cached_tokens = self.usage.and_then(|usage| usage.cached_tokens),
            ttft_ms = self.ttft().map(millis),
            not_continued = self.not_continued,
            moved = self.receipts.iter().any(|receipt| receipt.moved).then_some(true),
            not_moved = self.not_moved,
            paused_ms = (!self.paused.is_zero()).then_some(millis(self.paused)),
            took_ms = millis(took),
            trace = origin.map(|request| self.trace_context(request).id()),
            agent_session = agent.and_then(|agent| agent.session_id.as_deref()),
            agent_parent = agent.and_then(|agent| agent.parent_session_id.as_deref()),
            agent_final = agent.and_then(|agent| agent.session_final),
            sent_ms = hints.and_then(|hints| hints.request_timestamp_ms),
            mdc_sum = hints.and_then(|hints| hints.mdc_sum.as_deref()),
            "request"
        );
    }
}

/// Milliseconds with three decimals, for log lines.
fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
