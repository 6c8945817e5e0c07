//! Record of one request: when it ends, updates metrics and decisions and writes one line of the access log. It never
//! contains prompt text.

use std::{cmp::Ordering, sync::Arc};

use pointsman_routing::{
    Decider, DecisionId, DecisionSource, Decisions, Lane, Learning, ObservedOutcome, Outcome as Recorded,
    OverrideDecision, Receipt, RoutingRequest, SlotKind,
};
use pointsman_workers::{Leg, ModelName};
use tokio::time::{Duration, Instant};

use super::{
    labels::Name,
    metrics::{DecisionLabels, Metrics, NATIVE, OTHER, ReasonLabels, RequestLabels, seconds},
    prediction_checks::{Turn, WINDOW},
};
use crate::{openai::request::Endpoint, openai::sse::Usage};

/// Record of one request. Dropping it writes it.
#[derive(Debug)]
pub(crate) struct Account {
    metrics: Arc<Metrics>,
    /// The id the client knows the request by.
    pub request_id: String,
    endpoint: Endpoint,
    model: ModelName,
    /// Whether a worker serves the model. Other names are not used as metric labels: clients could send any number.
    model_is_served: bool,
    /// Whether the request leaves no record.
    discarded: bool,
    started: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    tokens: u32,
    usage: Option<Usage>,
    predicted_tokens: u32,
    /// Whether the index was searched for cached blocks.
    predicted: bool,
    /// Tokens in a block, when the prompt's tokens are exact, so that the prediction can be judged.
    exact_block: Option<u32>,
    receipts: Vec<Receipt>,
    prompt_tokens: u32,
    word: Option<Word>,
    decisions: Option<Arc<Decisions>>,
    learning: Option<Arc<Learning>>,
    outcome: Outcome,
}

/// A decode override's word, as far as what becomes of it is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Word {
    id: Option<DecisionId>,
    mode: Lane,
    seed: u64,
    learns: bool,
    by_policy: bool,
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
    ) -> Self {
        metrics.inflight.inc();
        Self {
            metrics,
            request_id,
            endpoint,
            model: ModelName(OTHER.clone()),
            model_is_served: false,
            discarded: false,
            started,
            first_token: None,
            last_token: None,
            tokens: 0,
            usage: None,
            predicted_tokens: 0,
            predicted: false,
            exact_block: None,
            receipts: Vec::with_capacity(2),
            prompt_tokens: 0,
            word: None,
            decisions: None,
            learning: None,
            outcome: Outcome { status: 499, code: "client_closed" },
        }
    }

    /// What comes of the request is written down with its decisions too, and told to policies that learn; `word` is the decode
    /// override's.
    #[must_use]
    pub(crate) fn recording(
        mut self,
        decisions: Arc<Decisions>,
        learning: Arc<Learning>,
        word: Option<Word>,
    ) -> Self {
        (self.decisions, self.learning, self.word) = (Some(decisions), Some(learning), word);
        self
    }

    /// Adds the receipt of a decision.
    pub(crate) fn decided(&mut self, receipt: Receipt, subject: &RoutingRequest) {
        self.metrics.route.observe(seconds(receipt.took));
        let slot = receipt.slot.as_str();
        let policy = receipt.policy.as_ref().unwrap_or(&NATIVE).clone();
        let labels = DecisionLabels {
            slot,
            policy: Name(policy),
            generation: receipt.generation.0,
            decider: receipt.decider.label(),
        };
        self.metrics.decisions.get_or_create(&labels).inc();
        if let Decider::Fallback { reason, detail } = &receipt.decider {
            self.metrics.fell_back(receipt.slot, reason);
            tracing::debug!(request = self.request_id, slot, reason, detail, "the fallback decided");
        }
        self.prompt_tokens = subject.prompt_tokens;
        if receipt.leg != Leg::Decode {
            let block = subject.block_size.max(1);
            // An engine computes at least the last token: it credits what lies before it.
            let most = subject.prompt_tokens.saturating_sub(1) / block;
            self.predicted_tokens = receipt.cached_blocks.iter().sum::<u32>().min(most) * block;
            self.predicted = receipt.cached_known;
            let judged = receipt.cached_known && !subject.prompt_tokens_estimated;
            self.exact_block = judged.then_some(block);
        }
        self.receipts.push(receipt);
    }

    /// Counts output tokens relayed at `now`; returns the time to first token when these are the first.
    pub(crate) fn output(&mut self, tokens: u32, now: Instant) -> Option<Duration> {
        self.tokens += tokens;
        self.last_token = Some(now);
        if self.first_token.is_some() {
            return None;
        }
        self.first_token = Some(now);
        Some(now - self.started)
    }

    /// Sets the model once the body is parsed. `is_served`: whether a worker serves it.
    pub(crate) fn set_model(&mut self, model: &ModelName, is_served: bool) {
        (self.model, self.model_is_served) = (model.clone(), is_served);
    }

    /// Ends without a record: the request was a preview.
    pub(crate) fn discard(mut self) {
        self.discarded = true;
    }

    /// Returns when the first byte of the request arrived.
    #[must_use]
    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// Returns when the last token was relayed, or when the request arrived.
    #[must_use]
    pub(crate) fn last_life(&self) -> Instant {
        self.last_token.unwrap_or(self.started)
    }

    /// Returns the number of output tokens so far.
    #[must_use]
    pub(crate) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Takes the usage that an engine reported; it corrects the count.
    pub(crate) fn usage(&mut self, usage: Usage) {
        self.tokens = self.tokens.max(usage.completion_tokens);
        self.usage = Some(usage);
    }

    /// Returns the mean time between tokens; `None` for fewer than two.
    #[must_use]
    pub(crate) fn itl(&self) -> Option<Duration> {
        let between = self.last_token?.checked_duration_since(self.first_token?)?;
        (self.tokens > 1).then(|| between / (self.tokens - 1))
    }

    /// Records how the request ended.
    pub(crate) fn ended(&mut self, status: u16, code: &'static str) {
        self.outcome = Outcome { status, code };
    }

    /// Returns the decisions so far, for the `x-pointsman-decision` header: `leg=worker/rank id=ID policy@generation by`.
    #[must_use]
    pub(crate) fn decisions(&self) -> String {
        let one = |receipt: &Receipt| {
            let policy = receipt.policy.as_deref().unwrap_or("native");
            let by = receipt.decider.fallback().unwrap_or(receipt.decider.label());
            let id = receipt.id.map(|id| format!(" id={id}")).unwrap_or_default();
            format!(
                "{}={}/{}{id} {policy}@{} {by}",
                receipt.leg, receipt.worker, receipt.rank, receipt.generation
            )
        };
        self.receipts.iter().map(one).collect::<Vec<_>>().join(", ")
    }

    /// Adds the outcome to each recorded decision of this request.
    fn record(&self) {
        let Some(decisions) = &self.decisions else { return };
        let outcome = Recorded {
            status: self.outcome.status,
            code: self.outcome.code,
            retried: false,
            ttft: self.first_token.map(|first| first - self.started),
            itl: self.itl(),
            output_tokens: self.tokens,
            cached_predicted: self.predicted.then_some(self.predicted_tokens),
            cached_reported: self.usage.and_then(|usage| usage.cached_tokens),
        };
        if let Some(plan) = self.word.and_then(|word| word.id) {
            decisions.outcome(plan, outcome);
        }
        for (receipt, retried) in self.decided_legs() {
            if let Some(id) = receipt.id {
                decisions.outcome(id, Recorded { retried, ..outcome });
            }
        }
    }

    /// Returns the decisions, each with whether its leg was routed again later.
    fn decided_legs(&self) -> impl Iterator<Item = (&Receipt, bool)> {
        self.receipts.iter().enumerate().map(|(place, receipt)| {
            let mut later = self.receipts.iter().skip(place + 1);
            (receipt, later.any(|other| other.leg == receipt.leg))
        })
    }

    /// Queues the outcome for policies that learn.
    fn teach(&self) {
        let Some(learning) = &self.learning else { return };
        let asked = |slot, mode| DecisionSource { slot, model: self.model.clone(), lane: mode };
        for (receipt, retried) in self.decided_legs().filter(|(receipt, _)| receipt.learns) {
            learning.submit(asked(receipt.slot, receipt.lane), self.observed(receipt, retried));
        }
        // A decode override is judged by the leg that answered, or was to.
        let answering = self.receipts.iter().rev().find(|receipt| receipt.leg != Leg::Prefill);
        if let (Some(word), Some(receipt)) = (self.word.filter(|word| word.learns), answering) {
            let observed = ObservedOutcome {
                decision: word.id,
                seed: word.seed,
                by_policy: word.by_policy,
                ..self.observed(receipt, false)
            };
            learning.submit(asked(SlotKind::DecodeOverride, word.mode), observed);
        }
    }

    fn observed(&self, receipt: &Receipt, retried: bool) -> ObservedOutcome {
        ObservedOutcome {
            decision: receipt.id,
            seed: receipt.seed,
            leg: receipt.leg,
            attempt: receipt.attempt,
            worker: receipt.worker,
            rank: receipt.rank,
            by_policy: receipt.decider == Decider::Policy,
            retried,
            status: self.outcome.status,
            ttft: self.first_token.map(|first| first - self.started),
            itl: self.itl(),
            duration: self.started.elapsed(),
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.tokens,
            cached_predicted: self.predicted.then_some(self.predicted_tokens),
            cached_reported: self.usage.and_then(|usage| usage.cached_tokens),
        }
    }
}

impl Word {
    /// The word of a plan that was made with this seed.
    #[must_use]
    pub(crate) fn of(planned: &OverrideDecision, seed: u64) -> Self {
        let OverrideDecision { id, lane: mode, learns, fallback, .. } = *planned;
        Self { id, mode, seed, learns, by_policy: fallback.is_none() }
    }
}

fn tell(model: &ModelName, turn: Option<Turn>) {
    match turn {
        None => {}
        Some(Turn::Broke(wrong)) => tracing::warn!(
            %model,
            wrong,
            of = WINDOW,
            "cached-token predictions are wrong: check the tokenizer, chat template and block size"
        ),
        Some(Turn::Recovered) => tracing::info!(%model, "cached-token predictions are right again"),
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let metrics = &self.metrics;
        metrics.inflight.dec();
        if self.discarded {
            return;
        }
        self.record();
        self.teach();
        let Outcome { status, code } = self.outcome;
        let took = self.started.elapsed();
        metrics.duration.observe(seconds(took));
        let ttft = self.first_token.map(|first| first - self.started);
        if let Some(ttft) = ttft {
            metrics.ttft.observe(seconds(ttft));
        }
        metrics.live_stats.note(ttft);
        if let Some(itl) = self.itl() {
            metrics.itl.observe(seconds(itl));
        }
        metrics.output_tokens.inc_by(u64::from(self.tokens));
        let usage = self.usage.unwrap_or_default();
        metrics.prompt_tokens.inc_by(u64::from(usage.prompt_tokens));
        metrics.cached_tokens.inc_by(u64::from(usage.cached_tokens.unwrap_or(0)));
        metrics.predicted_tokens.inc_by(u64::from(self.predicted_tokens));
        if let (Some(block), Some(cached)) = (self.exact_block, usage.cached_tokens) {
            let reason = match self.predicted_tokens.div_ceil(block).cmp(&cached.div_ceil(block)) {
                Ordering::Equal => "equal",
                Ordering::Greater => "over",
                Ordering::Less => "under",
            };
            metrics.predictions.get_or_create(&ReasonLabels { reason }).inc();
            tell(&self.model, metrics.prediction_checks.take(&self.model, reason != "equal"));
        }
        let model = Name(if self.model_is_served { self.model.0.clone() } else { OTHER.clone() });
        let labels = RequestLabels { endpoint: self.endpoint.label(), model, status, code };
        metrics.requests.get_or_create(&labels).inc();
        tracing::info!(
            target: "pointsman::access",
            request = self.request_id,
            endpoint = self.endpoint.label(),
            model = self.model.as_str(),
            status,
            code,
            decisions = self.decisions(),
            prompt_tokens = usage.prompt_tokens,
            output_tokens = self.tokens,
            cached_tokens = usage.cached_tokens,
            ttft_ms = ttft.map(|ttft| ttft.as_secs_f64() * 1e3),
            took_ms = took.as_secs_f64() * 1e3,
            "request"
        );
    }
}
