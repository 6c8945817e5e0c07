//! Writes a request that ended to the decision log.

use std::sync::Arc;

use pointsman_routing::RoutingRequest;
use pointsman_workers::unix_time;

use super::Account;
use crate::telemetry::{
    decision_log::{DecisionLog, Entry},
    metrics::OTHER,
};

/// The log, and the request's entry, which is completed when the request ends.
#[derive(Debug)]
pub(super) struct LogDraft {
    log: Arc<DecisionLog>,
    entry: Box<Entry>,
}

impl Account {
    /// Makes the record also write the request to the decision log, if there is one.
    pub(crate) fn logging(&mut self, log: Option<&Arc<DecisionLog>>, request: &RoutingRequest) {
        let draft =
            |log: &Arc<DecisionLog>| LogDraft { log: log.clone(), entry: Box::new(Entry::of(request)) };
        self.log = log.map(draft);
    }

    /// Passes the entry to the log, with the decisions and the outcome.
    pub(super) fn log(&mut self) {
        let Some(LogDraft { log, mut entry }) = self.log.take() else { return };
        let duration = self.started.elapsed();
        let arrived_at = unix_time().saturating_sub(duration);
        entry.arrived_at_us = u64::try_from(arrived_at.as_micros()).unwrap_or(u64::MAX);
        entry.endpoint = self.endpoint.label();
        // The name of a model that no worker serves comes from the client, and is not written.
        entry.model = if self.model_is_served { self.model.0.clone() } else { OTHER.clone() };
        entry.output_tokens = self.tokens;
        let origin = self.origin.as_ref();
        entry.choices = origin.map(|request| request.n).filter(|choices| *choices > 1);
        entry.prompts = origin.map(|request| request.prompts).filter(|prompts| *prompts > 1);
        entry.decode_override = self.decode_override.take().and_then(|decided| decided.entry);
        entry.receipts = std::mem::take(&mut self.receipts);
        entry.refusals = std::mem::take(&mut self.refusals);
        (entry.status, entry.code) = (self.outcome.status, self.outcome.code);
        entry.ttft = self.first_token.map(|first| first - self.started);
        entry.itl = self.itl();
        entry.duration = duration;
        entry.cached_predicted = self.predicted.then_some(self.predicted_tokens);
        let reported = self.usage.map(|usage| usage.prompt_tokens);
        entry.prompt_reported = reported.filter(|tokens| *tokens > 0);
        entry.cached_reported = self.usage.and_then(|usage| usage.cached_tokens);
        log.submit(entry);
    }
}
