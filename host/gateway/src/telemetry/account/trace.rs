//! Reports a request to its trace, if it is recorded. Without a trace, each call costs one branch.

use std::borrow::Cow;

use pointsman_workers::Leg;
use tokio::time::Instant;

use super::Account;
use crate::{
    openai::{request::Request, trace_context::TraceContext},
    telemetry::{
        labels::TraceLabel,
        traces::{Attributes, Ending, RequestTrace},
    },
};

impl Account {
    /// Sets the request's trace; `None` if the exporter does not record it.
    pub(crate) fn traced(&mut self, trace: Option<Box<RequestTrace>>) {
        self.is_untraced = trace.is_none();
        self.trace = trace;
    }

    /// Returns whether the request's trace is recorded.
    pub(crate) fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Returns the trace that the engines' spans belong to. If this gateway exports traces but does not
    /// record this one, it is marked as not sampled.
    pub(crate) fn trace_context<'a>(&'a self, request: &'a Request) -> Cow<'a, TraceContext> {
        match &self.trace {
            Some(trace) => Cow::Borrowed(&trace.context),
            None if self.is_untraced && request.trace.is_sampled() => Cow::Owned(request.trace.unsampled()),
            None => Cow::Borrowed(&request.trace),
        }
    }

    /// Adds a stage that began at `start` and ends now.
    pub(crate) fn stage(&mut self, name: &'static str, start: Instant) {
        if let Some(trace) = &mut self.trace {
            trace.stage(name, start, Attributes::default());
        }
    }

    /// Returns the start of a stage that begins now, if the request has a trace: others read no clock for it.
    pub(crate) fn stage_begins(&self) -> Option<Instant> {
        self.trace.is_some().then(Instant::now)
    }

    /// Adds the planning stage, with the choice of the decode override.
    pub(crate) fn planned(&mut self, start: Option<Instant>) {
        let Some((trace, start)) = self.trace.as_mut().zip(start) else { return };
        let mut attributes = Attributes::default();
        if let Some(entry) = self.decode_override.as_ref().and_then(|decided| decided.entry.as_ref()) {
            attributes.label("pointsman.slot", "decode-override");
            attributes.label("pointsman.verdict", entry.verdict);
            attributes.label("pointsman.lane", entry.lane.as_str());
            attributes.int("pointsman.generation", i64::try_from(entry.generation.0).unwrap_or(i64::MAX));
            if let Some(reason) = entry.fallback {
                attributes.label("pointsman.fallback", reason);
            }
        }
        trace.stage("plan", start, attributes);
    }

    /// Records that a leg found no worker after a decision that began at `start`.
    pub(crate) fn not_routed(&mut self, leg: Leg, start: Option<Instant>, code: &'static str) {
        if let Some((trace, start)) = self.trace.as_mut().zip(start) {
            trace.not_routed(leg, start, code);
        }
    }

    /// Records that a leg waits in the `queue`, or in a `pause`.
    pub(crate) fn waits(&mut self, what: &'static str, leg: Leg) {
        if let Some(trace) = &mut self.trace {
            trace.waits(what, leg);
        }
    }

    /// Records that the client's answer begins.
    pub(crate) fn relay_begins(&mut self) {
        if let Some(trace) = &mut self.trace {
            trace.relay_begins();
        }
    }

    /// Returns the label of the request's exemplars, if its trace is recorded here or by the client.
    pub(super) fn exemplar(&self) -> Option<TraceLabel> {
        let context = match &self.trace {
            Some(trace) => Some(&trace.context),
            None => self.origin.as_deref().map(|request| &request.trace).filter(|trace| trace.is_sampled()),
        };
        context.map(|context| TraceLabel { trace_id: context.id() })
    }

    /// Passes the trace to the exporter.
    pub(super) fn finish_trace(&mut self) {
        let Some(trace) = self.trace.take() else { return };
        trace.finish(&Ending {
            endpoint: self.endpoint,
            model: Some(&self.model.0).filter(|_| self.model_is_served),
            status: self.outcome.status,
            code: self.outcome.code,
            request_id: &self.request_id,
            request: self.origin.as_deref(),
            usage: self.usage,
            output_tokens: self.tokens,
            first_token: self.first_token,
        });
    }
}
