//! The trace of one request: spans of its stages and legs below one root span.
//!
//! ```text
//! POST /v1/chat/completions                        server
//!   receive · tokenize · plan                      internal
//!   route prefill · queue prefill · pause prefill  internal
//!   prefill                                        client, parent of the engine's span
//!   decode ---link---> prefill                     client, parent of the engine's span
//!   a retry ---link---> the leg that failed
//!   relay                                          internal
//! ```
//! Spans hold labels, ids, names and numbers, and never text of a prompt or an answer.

use std::{borrow::Cow, sync::Arc, time::SystemTime};

use pointsman_routing::Receipt;
use pointsman_workers::{Leg, PerLeg};
use tokio::time::Instant;

use super::{
    DropReason, Traces,
    span::{Attributes, LegTarget, SpanKind, SpanRecord},
};
use crate::{
    config::SemconvVersion,
    openai::{
        request::{Endpoint, Request},
        sse::Usage,
        trace_context::{Links, Span, TraceContext},
    },
    telemetry::metrics::CANCELLED,
};

/// Maximum number of spans of one request. Retries and waits add some for each attempt.
const MAX_SPANS: usize = 64;

/// The trace of a recorded request.
#[derive(Debug)]
pub(crate) struct RequestTrace {
    traces: Arc<Traces>,
    pub(crate) context: TraceContext,
    root: Span,
    started: Instant,
    /// Wall-clock time at `started`.
    pub(super) started_at: SystemTime,
    pub(super) spans: Vec<SpanRecord>,
    /// Spans of the legs that are running.
    open: PerLeg<Option<SpanRecord>>,
    /// Kind and leg of the current wait, and its start.
    wait: Option<(&'static str, Leg, Instant)>,
    relay: Option<Instant>,
    /// Dialect of the last engine.
    engine: Option<&'static str>,
    /// Number of spans beyond the limit.
    lost: usize,
}

/// How a request ended.
#[derive(Debug)]
pub(crate) struct Ending<'a> {
    pub(crate) endpoint: Endpoint,
    /// The model, if a worker serves it. Other names come from the client and are not recorded.
    pub(crate) model: Option<&'a Arc<str>>,
    pub(crate) status: u16,
    /// `ok`, or the code of an error.
    pub(crate) code: &'static str,
    pub(crate) request_id: &'a str,
    /// The request, if it could be read.
    pub(crate) request: Option<&'a Request>,
    pub(crate) usage: Option<Usage>,
    pub(crate) output_tokens: u32,
    pub(crate) first_token: Option<Instant>,
}

impl RequestTrace {
    pub(super) fn new(traces: Arc<Traces>, context: TraceContext, started: Instant) -> Self {
        let now = SystemTime::now();
        Self {
            traces,
            context,
            root: Span::fresh(),
            started,
            started_at: now.checked_sub(started.elapsed()).unwrap_or(now),
            spans: Vec::with_capacity(8),
            open: PerLeg::default(),
            wait: None,
            relay: None,
            engine: None,
            lost: 0,
        }
    }

    /// Returns the number of spans.
    pub(super) fn len(&self) -> usize {
        self.spans.len()
    }

    /// Returns the wall-clock time at a point in time of the request, in nanoseconds since the Unix epoch.
    #[cfg_attr(not(feature = "otel"), expect(dead_code, reason = "there is no exporter"))]
    pub(super) fn unix_nanos(&self, moment: Instant) -> u64 {
        let at = self.started_at + moment.saturating_duration_since(self.started);
        let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    fn child(
        &self,
        name: impl Into<Cow<'static, str>>,
        start: Instant,
        attributes: Attributes,
    ) -> SpanRecord {
        SpanRecord {
            id: Span::fresh(),
            parent: Some(self.root),
            name: name.into(),
            kind: SpanKind::Internal,
            start,
            end: Instant::now(),
            attributes,
            links: Links::default(),
            events: Vec::new(),
            failed: false,
        }
    }

    fn push(&mut self, span: SpanRecord) {
        // The root span is added last and must fit.
        if self.spans.len() + 1 < MAX_SPANS { self.spans.push(span) } else { self.lost += 1 }
    }

    /// Adds a stage that began at `start` and ends now.
    pub(crate) fn stage(&mut self, name: &'static str, start: Instant, attributes: Attributes) {
        let span = self.child(name, start, attributes);
        self.push(span);
    }

    /// Adds the decision of a leg, which was made just now.
    pub(crate) fn add_decision(&mut self, receipt: &Receipt) {
        self.waited();
        let now = Instant::now();
        let start = now.checked_sub(receipt.took).unwrap_or(now);
        let span = self.child(named("route", receipt.leg), start, decision(receipt));
        self.push(span);
    }

    /// Adds a decision without a worker.
    pub(crate) fn not_routed(&mut self, leg: Leg, start: Instant, code: &'static str) {
        self.waited();
        let mut attributes = Attributes::default();
        attributes.label("pointsman.leg", leg.as_str());
        attributes.label("error.type", code);
        let span = self.child(named("route", leg), start, attributes);
        self.push(SpanRecord { failed: true, ..span });
    }

    /// Records that a leg waits: in the `queue`, or in a `pause` before a retry.
    pub(crate) fn waits(&mut self, what: &'static str, leg: Leg) {
        if self.wait.is_some_and(|(waits, waiting, _)| waits == what && waiting == leg) {
            return;
        }
        self.waited();
        self.wait = Some((what, leg, Instant::now()));
    }

    fn waited(&mut self) {
        if let Some((what, leg, since)) = self.wait.take() {
            let mut attributes = Attributes::default();
            attributes.label("pointsman.leg", leg.as_str());
            let span = self.child(named(what, leg), since, attributes);
            self.push(span);
        }
    }

    /// Records that a leg was sent with `id` as the parent of the engine's spans.
    pub(crate) fn leg_sent(&mut self, id: Span, target: LegTarget<'_>) {
        self.waited();
        self.leg_ended(target.leg, Err(CANCELLED));
        let mut attributes = Attributes::default();
        target.describe(&mut attributes);
        let engine = target.candidate.worker.spec().engine.as_str();
        self.engine = Some(engine);
        attributes.label(self.provider_key(), engine);
        let span = self.child(target.leg.as_str(), Instant::now(), attributes);
        let span = SpanRecord { id, kind: SpanKind::Client, links: target.links, ..span };
        self.open[target.leg] = Some(span);
    }

    /// Records that a leg ended, or why it failed. Does nothing if the leg is not running.
    pub(crate) fn leg_ended(&mut self, leg: Leg, outcome: Result<(), &'static str>) {
        let Some(mut span) = self.open[leg].take() else { return };
        span.end = Instant::now();
        if let Err(kind) = outcome {
            span.attributes.label("error.type", kind);
            span.failed = kind != CANCELLED;
        }
        self.push(span);
    }

    /// Records that the gateway ended a leg itself.
    pub(crate) fn leg_cancelled(&mut self, leg: Leg) {
        self.leg_ended(leg, Err(CANCELLED));
    }

    /// Records that the client's answer begins.
    pub(crate) fn relay_begins(&mut self) {
        self.relay.get_or_insert_with(Instant::now);
    }

    /// Ends the trace and passes it to the exporter.
    pub(crate) fn finish(mut self: Box<Self>, ending: &Ending<'_>) {
        self.waited();
        for leg in [Leg::Prefill, Leg::Aggregated] {
            self.leg_cancelled(leg);
        }
        if let Some(since) = self.relay.take() {
            let mut span = self.child("relay", since, Attributes::default());
            span.attributes.int("pointsman.output_tokens", ending.output_tokens);
            span.events.extend(ending.first_token.map(|first| ("first_token", first)));
            self.push(span);
        }
        if self.lost > 0 {
            self.traces.queue.metrics.spans_dropped(DropReason::Request, self.lost);
        }
        let root = self.root(ending);
        self.spans.push(root);
        let traces = self.traces.clone();
        traces.submit(self);
    }

    fn root(&self, ending: &Ending<'_>) -> SpanRecord {
        let mut attributes = Attributes::default();
        let method = if ending.endpoint == Endpoint::Realtime { "GET" } else { "POST" };
        attributes.label("http.request.method", method);
        attributes.label("http.route", ending.endpoint.path());
        attributes.label("url.path", ending.endpoint.path());
        attributes.int("http.response.status_code", ending.status);
        if ending.code != "ok" {
            attributes.label("error.type", ending.code);
        }
        attributes.text("pointsman.request_id", ending.request_id);
        if self.lost > 0 {
            attributes.int("pointsman.spans_lost", i64::try_from(self.lost).unwrap_or(i64::MAX));
        }
        self.gen_ai(ending, &mut attributes);
        let name = format!("{method} {}", ending.endpoint.path());
        SpanRecord {
            id: self.root,
            parent: self.context.parent(),
            kind: SpanKind::Server,
            failed: ending.status >= 500,
            ..self.child(name, self.started, attributes)
        }
    }

    /// Adds the attributes of the semantic conventions for generative AI. They are on the root span only:
    /// sums over spans would count the tokens of a pair twice.
    fn gen_ai(&self, ending: &Ending<'_>, attributes: &mut Attributes) {
        let Some(operation) = operation(ending.endpoint) else { return };
        attributes.label("gen_ai.operation.name", operation);
        if let Some(engine) = self.engine {
            attributes.label(self.provider_key(), engine);
        }
        if let Some(model) = ending.model {
            attributes.shared("gen_ai.request.model", model);
        }
        let version = self.traces.semconv;
        if let Some(request) = ending.request {
            if let Some(limit) = request.max_tokens {
                attributes.int("gen_ai.request.max_tokens", limit);
            }
            if request.n != 1 {
                attributes.int("gen_ai.request.choice.count", request.n);
            }
            if version >= SemconvVersion::V1_41 {
                attributes.bool("gen_ai.request.stream", request.stream);
            }
        }
        if let Some(usage) = ending.usage {
            attributes.int("gen_ai.usage.input_tokens", usage.prompt_tokens);
            if let Some(cached) = usage.cached_tokens.filter(|_| version >= SemconvVersion::V1_41) {
                attributes.int("gen_ai.usage.cache_read.input_tokens", cached);
            }
        }
        if ending.usage.is_some() || ending.output_tokens > 0 {
            attributes.int("gen_ai.usage.output_tokens", ending.output_tokens);
        }
        let streamed = ending.request.is_some_and(|request| request.stream);
        if let Some(first) = ending.first_token.filter(|_| streamed && version >= SemconvVersion::V1_41) {
            let waited = first.saturating_duration_since(self.started).as_secs_f64();
            attributes.float("gen_ai.response.time_to_first_chunk", waited);
        }
    }

    fn provider_key(&self) -> &'static str {
        if self.traces.semconv < SemconvVersion::V1_37 { "gen_ai.system" } else { "gen_ai.provider.name" }
    }
}

/// Returns `WHAT LEG`.
fn named(what: &'static str, leg: Leg) -> Cow<'static, str> {
    Cow::Owned(format!("{what} {}", leg.as_str()))
}

/// Returns the name of an operation in the semantic conventions; Returns `None` if they do not name it.
fn operation(endpoint: Endpoint) -> Option<&'static str> {
    match endpoint {
        Endpoint::ChatCompletions | Endpoint::Responses | Endpoint::Messages => Some("chat"),
        Endpoint::Completions | Endpoint::Generate | Endpoint::GenerateTokens => Some("text_completion"),
        Endpoint::Embeddings | Endpoint::CohereEmbed => Some("embeddings"),
        _ => None,
    }
}

/// Describes a decision.
fn decision(receipt: &Receipt) -> Attributes {
    let mut attributes = Attributes::default();
    attributes.label("pointsman.leg", receipt.leg.as_str());
    attributes.label("pointsman.slot", receipt.slot.as_str());
    attributes.label("pointsman.lane", receipt.lane.as_str());
    attributes.label("pointsman.decider", receipt.decider.label());
    if let Some(reason) = receipt.decider.fallback() {
        attributes.label("pointsman.fallback", reason);
    }
    if receipt.policy.is_some() {
        attributes.shared("pointsman.policy", &receipt.program.name);
    }
    if let Some(digest) = receipt.digest {
        attributes.id("pointsman.digest", digest);
    }
    if let Some(id) = receipt.id {
        attributes.id("pointsman.decision", id);
    }
    attributes.int("pointsman.generation", i64::try_from(receipt.generation.0).unwrap_or(i64::MAX));
    attributes.id("pointsman.worker", receipt.worker);
    attributes.int("pointsman.rank", receipt.rank.0);
    attributes.int("pointsman.attempt", receipt.attempt);
    attributes.int("pointsman.candidates", receipt.candidates);
    if receipt.cached_known {
        attributes.int("pointsman.cached_blocks", receipt.cached_blocks.iter().sum::<u32>());
    }
    let chosen = |(worker, rank, _): &&(_, _, f32)| (*worker, *rank) == (receipt.worker, receipt.rank);
    if let Some((_, _, cost)) = receipt.costs.iter().find(chosen) {
        attributes.float("pointsman.cost", f64::from(*cost));
    }
    attributes
}
