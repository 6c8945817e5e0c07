//! Record of one request. When the request ends, the record updates metrics and decisions, and writes one
//! line of the access log. It never contains prompt text.

use std::sync::Arc;

use pointsman_routing::{Decider, Decisions, Learning, LegTimes, Receipt, RefusedDecision, RoutingRequest};
use pointsman_workers::{ModelName, PerLeg, Snapshot};
use tokio::time::{Duration, Instant};

use super::{
    decision_stats::DecisionStats,
    labels::Name,
    metrics::{DecisionLabels, Metrics, OTHER, seconds},
    tenant_metrics::TenantSeries,
    tenants::TenantRequest,
    traces::RequestTrace,
};
mod decision_list;
mod end;
mod legs;
mod log;
mod outcome;
mod override_record;
mod quota;
mod stream_failures;
mod token_times;
mod trace;

use end::InFlight;
use legs::OpenLeg;
use log::LogDraft;
pub(crate) use override_record::OverrideRecord;
use quota::Quota;
use stream_failures::StreamFailure;
use token_times::TokenTimes;

use crate::{
    budget::Share,
    openai::request::{Endpoint, Request},
    openai::sse::Usage,
};

/// Largest part of a running request's reported tokens that one event adds to the metrics.
const MAX_TOKENS_OF_EVENT: u32 = 16;

/// Record of one request. Dropping it writes it.
#[derive(Debug)]
pub(crate) struct Account {
    metrics: Arc<Metrics>,
    /// Id by which the client knows the request.
    pub request_id: String,
    /// The endpoint that the client called.
    pub endpoint: Endpoint,
    model: ModelName,
    /// The model that `model` is an adapter of.
    parent: Option<ModelName>,
    /// Whether a worker serves the model, or its requests wait for one. Of other names clients could send any
    /// number: they are no labels.
    model_is_served: bool,
    /// Whether the request leaves no record, because it was a preview.
    discarded: bool,
    started: Instant,
    /// When its head had been read, or its body if it has one.
    received: Instant,
    first_token: Option<Instant>,
    /// Number of decisions before the first token. Later ones are about the rest of a stream.
    first_decisions: usize,
    last_token: Option<Instant>,
    tokens: u32,
    /// Number of these tokens that the metrics contain.
    tokens_in_metrics: u32,
    /// Most of these tokens that the metrics contain before the request ends.
    credible_tokens: u32,
    /// Whether tokens were counted since the engine last reported their number.
    counted: bool,
    token_times: TokenTimes,
    usage: Option<Usage>,
    predicted_tokens: u32,
    /// Whether the index was searched for cached blocks.
    predicted: bool,
    /// Number of tokens in a block if the prompt's tokens are exact, so that the prediction can be compared.
    exact_block: Option<u32>,
    receipts: Vec<Receipt>,
    /// Decisions by which a slot refused the request.
    refusals: Vec<RefusedDecision>,
    /// Whether the last decision is a refusal.
    ends_refused: bool,
    prompt_tokens: u32,
    /// Number of tokens in a block of the index.
    block_tokens: u32,
    /// Whether `prompt_tokens` was estimated from bytes.
    prompt_tokens_estimated: bool,
    decode_override: Option<OverrideRecord>,
    decisions: Option<Arc<Decisions>>,
    learning: Option<Arc<Learning>>,
    stats: Option<Arc<DecisionStats>>,
    /// Keeps the request counted for its tenant until it ends.
    tenant: Option<TenantRequest>,
    /// Metrics of the tenant; `None` until the sender is known.
    tenant_series: Option<Arc<TenantSeries>>,
    outcome: Outcome,
    /// Reason for which the stream was not continued when its engine failed.
    not_continued: Option<&'static str>,
    /// Why the stream did not leave a worker that drains.
    not_moved: Option<&'static str>,
    /// How long the stream was paused for requests of a higher priority.
    paused: Duration,
    /// Failures of engines within the stream.
    stream_failures: Vec<StreamFailure>,
    /// The request's share of the memory limit for all bodies.
    body: Option<Share>,
    /// The request's place among those in flight, and its part of the tenant's limits.
    quota: Quota,
    /// Fields of the access log besides the outcome.
    origin: Option<Arc<Request>>,
    /// The decision log, and the fields of the request's entry.
    log: Option<LogDraft>,
    /// Spans of the request, if they are recorded.
    trace: Option<Box<RequestTrace>>,
    /// Whether traces are recorded but this request's trace is not.
    is_untraced: bool,
    /// Legs that are running.
    open_legs: PerLeg<Option<OpenLeg>>,
    /// Start and end times of the legs.
    times: LegTimes,
    /// The last field, so that a request is in flight until everything else is released.
    _in_flight: InFlight,
}

#[derive(Clone, Copy, Debug)]
struct Outcome {
    status: u16,
    code: &'static str,
}

impl Account {
    /// Starts the record of a request whose first byte arrived at `started`. Its model is not known yet.
    #[must_use]
    pub(crate) fn new(
        metrics: Arc<Metrics>,
        request_id: String,
        endpoint: Endpoint,
        started: Instant,
    ) -> Box<Self> {
        Box::new(Self {
            _in_flight: InFlight::begin(&metrics),
            metrics,
            request_id,
            endpoint,
            model: ModelName(OTHER.clone()),
            parent: None,
            model_is_served: false,
            discarded: false,
            started,
            received: Instant::now(),
            first_token: None,
            first_decisions: 0,
            last_token: None,
            tokens: 0,
            tokens_in_metrics: 0,
            credible_tokens: 0,
            counted: false,
            token_times: TokenTimes::default(),
            usage: None,
            predicted_tokens: 0,
            predicted: false,
            exact_block: None,
            receipts: Vec::with_capacity(2),
            refusals: Vec::new(),
            ends_refused: false,
            prompt_tokens: 0,
            block_tokens: 1,
            prompt_tokens_estimated: false,
            decode_override: None,
            decisions: None,
            learning: None,
            stats: None,
            tenant: None,
            tenant_series: None,
            outcome: Outcome { status: 499, code: "client_closed" },
            not_continued: None,
            not_moved: None,
            paused: Duration::ZERO,
            stream_failures: Vec::new(),
            body: None,
            quota: Quota::default(),
            origin: None,
            log: None,
            trace: None,
            is_untraced: false,
            open_legs: PerLeg::default(),
            times: LegTimes::default(),
        })
    }

    /// Makes the record also store the outcome with the request's decisions, pass it to policies that learn,
    /// and add both to the statistics.
    pub(crate) fn records(
        &mut self,
        decisions: &Arc<Decisions>,
        learning: &Arc<Learning>,
        stats: &Arc<DecisionStats>,
        decode_override: Option<OverrideRecord>,
    ) {
        (self.decisions, self.learning) = (Some(decisions.clone()), Some(learning.clone()));
        self.stats = Some(stats.clone());
        self.decode_override = decode_override;
    }

    /// Adds the receipt of a decision.
    pub(crate) fn decided(&mut self, receipt: Receipt, routing_request: &RoutingRequest) {
        self.metrics.route.observe(seconds(receipt.took));
        let slot = receipt.slot.as_str();
        let labels = DecisionLabels {
            slot,
            policy: Name(receipt.program.name.clone()),
            lane: receipt.lane.as_str(),
            decider: receipt.decider.label(),
        };
        self.metrics.decisions.get_or_create(&labels).inc();
        let fallback = match &receipt.decider {
            Decider::Fallback { reason, detail } => {
                self.metrics.fell_back(receipt.slot, reason);
                Some((*reason, detail.as_str()))
            }
            _ => None,
        };
        tracing::debug!(
            request = self.request_id,
            leg = receipt.leg.as_str(),
            worker = %receipt.worker,
            rank = %receipt.rank,
            slot,
            policy = &*labels.policy.0,
            generation = %receipt.generation,
            decider = labels.decider,
            fallback = fallback.map(|(reason, _)| reason),
            detail = fallback.map(|(_, detail)| detail),
            cached_blocks = ?receipt.cached_blocks,
            prompt_tokens = routing_request.prompt_tokens,
            took_us = receipt.took.as_secs_f64() * 1e6,
            "leg routed"
        );
        self.prompt_tokens = routing_request.prompt_tokens;
        self.block_tokens = routing_request.block_size;
        self.prompt_tokens_estimated = routing_request.prompt_tokens_estimated;
        if receipt.leg.computes_prompt() {
            let block = routing_request.block_size.max(1);
            // An engine always computes the last token. It reports at most its whole blocks before that token
            // as cached.
            let own = receipt.engine_block.unwrap_or(block);
            let most = routing_request.prompt_tokens.saturating_sub(1) / own * own / block;
            self.predicted_tokens = receipt.cached_blocks.iter().sum::<u32>().min(most) * block;
            self.predicted = receipt.cached_known;
            let known = receipt.cached_known && receipt.cached_is_reported;
            let judged = known && !routing_request.prompt_tokens_estimated;
            self.exact_block = judged.then_some(block);
        }
        if let Some(trace) = &mut self.trace {
            trace.add_decision(&receipt);
        }
        self.receipts.push(receipt);
        self.ends_refused = false;
    }

    /// Adds a decision that refused the request.
    pub(crate) fn refused(&mut self, decision: Option<RefusedDecision>) {
        if let Some(refused) = &decision {
            let (slot, code) = (refused.program.slot.as_str(), refused.code);
            tracing::debug!(request = self.request_id, slot, code, "leg refused");
            self.ends_refused = true;
        }
        self.refusals.extend(decision);
    }

    /// Counts output tokens of a stream relayed at `now`: when a whole answer's tokens came is not known.
    pub(crate) fn output(&mut self, tokens: u32, now: Instant) {
        self.tokens = self.tokens.saturating_add(tokens);
        self.credible_tokens = self.credible_tokens.saturating_add(tokens);
        self.counted |= tokens > 0;
        self.last_token = Some(now);
        if self.first_token.is_none() {
            (self.first_token, self.first_decisions) = (Some(now), self.receipts.len());
            self.token_times.begin(now);
            self.observe_first_token();
        }
    }

    /// Sets the model once the body is parsed.
    pub(crate) fn set_model(&mut self, model: &ModelName, workers: &Snapshot) {
        (self.model, self.model_is_served) = (model.clone(), workers.serves(model));
        self.parent = workers.parent_of(model).cloned();
    }

    /// Notes that the configuration names the model, which no worker serves.
    pub(crate) fn model_is_known(&mut self) {
        self.model_is_served = true;
    }

    /// Counts the request for its tenant until it ends.
    pub(crate) fn of_tenant(&mut self, request: TenantRequest) {
        self.tenant = Some(request);
    }

    /// Adds the request to the metrics of its tenant.
    pub(crate) fn counts_for(&mut self, series: &Arc<TenantSeries>) {
        self.tenant_series = Some(series.clone());
    }

    /// Records that the request was read whole, and keeps the body's bytes counted until it ends.
    pub(crate) fn holds(&mut self, body: Share) {
        (self.body, self.received) = (Some(body), Instant::now());
    }

    /// Sets the origin of the request, for the access log.
    pub(crate) fn of_request(&mut self, request: &Arc<Request>) {
        self.origin = Some(request.clone());
    }

    /// Ends without a record, because the request was a preview.
    pub(crate) fn discard(mut self: Box<Self>) {
        self.discarded = true;
    }

    /// Returns the time at which the first byte of the request arrived.
    #[must_use]
    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// Returns the time at which the request was read whole: from then on it waits for its turn. A client
    /// that begins a request and holds its rest back gets no earlier place by that.
    pub(crate) fn received(&self) -> Instant {
        self.received
    }

    /// Returns the time at which the last token was relayed, or at which the request arrived if there is no
    /// token.
    #[must_use]
    pub(crate) fn last_life(&self) -> Instant {
        self.last_token.unwrap_or(self.started)
    }

    /// Returns the number of output tokens so far.
    #[must_use]
    pub(crate) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Returns whether the engine of the answer reported usage. That of a prefill has no output.
    pub(crate) fn has_usage(&self) -> bool {
        self.usage.is_some_and(|usage| usage.completion_tokens.is_some())
    }

    /// Forgets the usage of a prompt without an answer.
    pub(crate) fn forget_prompt(&mut self) {
        self.usage = self.usage.filter(|usage| usage.completion_tokens.is_some());
    }

    /// Replaces the counted tokens with the usage that an engine reported. An engine may report the parts of
    /// the usage one after another.
    pub(crate) fn usage(&mut self, usage: Usage) {
        if let Some(tokens) = usage.completion_tokens {
            // A number that an engine takes back must not stay in a counter that cannot go down.
            let more = tokens.saturating_sub(self.tokens).min(MAX_TOKENS_OF_EVENT);
            self.credible_tokens = self.credible_tokens.saturating_add(more);
            (self.tokens, self.counted) = (tokens, false);
        }
        self.token_times.go_back(self.tokens);
        let before = self.usage.unwrap_or_default();
        let prompt = Some(usage.prompt_tokens).filter(|tokens| *tokens > 0);
        self.usage = Some(Usage {
            prompt_tokens: prompt.unwrap_or(before.prompt_tokens),
            completion_tokens: usage.completion_tokens.or(before.completion_tokens),
            cached_tokens: usage.cached_tokens.or(before.cached_tokens),
        });
    }

    /// Records for how long the request waited in the admission queue in all, if it did.
    pub(crate) fn queued(&mut self, total: Duration) {
        self.times.queued = Some(micros(total)).filter(|total| *total > 0);
    }

    /// Observes a wait in the admission queue that ended.
    pub(crate) fn left_queue(&self, waited: Duration) {
        self.metrics.queue_wait.observe(seconds(waited));
        if let Some(series) = &self.tenant_series {
            series.queued(waited);
        }
    }

    /// Records how the request ended.
    pub(crate) fn ended(&mut self, status: u16, code: &'static str) {
        self.outcome = Outcome { status, code };
    }
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}
