//! Counters and histograms of requests, decisions and legs, in the OpenMetrics text format.
//!
//! Label values are bounded: models are those of the registry, everything else is one of our own labels.

use std::{
    sync::{Arc, LazyLock, atomic::AtomicU64},
    time::Duration,
};

use pointsman_routing::SlotKind;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use super::{live_stats::LiveStats, prediction_checks::PredictionChecks};

/// Buckets of times as clients see them, seconds.
const CLIENT_BUCKETS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 15.0, 60.0];
/// Buckets of times within the gateway, seconds.
const ROUTE_BUCKETS: [f64; 14] =
    [1e-6, 2e-6, 4e-6, 8e-6, 16e-6, 32e-6, 64e-6, 128e-6, 256e-6, 512e-6, 1e-3, 2e-3, 5e-3, 2e-2];

/// The label of a model that nobody serves.
pub(crate) static OTHER: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from("other"));
/// The label of a slot without a policy.
pub(crate) static NATIVE: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from("native"));

/// Labels of a request.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RequestLabels {
    /// Endpoint.
    pub endpoint: &'static str,
    /// Model, or `other`.
    pub model: Arc<str>,
    /// HTTP status.
    pub status: u16,
    /// `ok`, or a cause's code.
    pub code: &'static str,
}

/// Labels of a decision.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct DecisionLabels {
    /// The slot asked.
    pub slot: &'static str,
    /// The policy in it, or `native`.
    pub policy: Arc<str>,
    /// The generation.
    pub generation: u64,
    /// Who decided.
    pub decider: &'static str,
}

/// Labels of a fallback.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct FallbackLabels {
    /// The slot asked.
    pub slot: &'static str,
    /// Why.
    pub reason: &'static str,
}

/// Labels of a leg.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct LegLabels {
    /// Which leg.
    pub leg: &'static str,
    /// The engine's dialect.
    pub engine: &'static str,
    /// `ok`, `cancelled`, or a call error's kind.
    pub outcome: &'static str,
}

/// A single label.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ReasonLabels {
    /// Why, or how.
    pub reason: &'static str,
}

/// Every metric of the gateway itself.
#[derive(Debug)]
pub struct Metrics {
    /// Requests by how they ended.
    pub requests: Family<RequestLabels, Counter>,
    /// Requests under way.
    pub inflight: Gauge,
    /// Time to first token.
    pub ttft: Histogram,
    /// Mean inter-token latency of a request.
    pub itl: Histogram,
    /// Whole requests.
    pub duration: Histogram,
    /// Routing decisions.
    pub decisions: Family<DecisionLabels, Counter>,
    /// Decisions by the native fallback.
    pub fallbacks: Family<FallbackLabels, Counter>,
    /// The route stage.
    pub route: Histogram,
    /// Legs by how they ended.
    pub legs: Family<LegLabels, Counter>,
    /// Retries by leg.
    pub retries: Family<ReasonLabels, Counter>,
    /// Completed handoffs by result.
    pub handoffs: Family<ReasonLabels, Counter>,
    /// Prompts that a configured tokenizer could not encode, by reason.
    pub not_tokenized: Family<ReasonLabels, Counter>,
    /// Cached blocks as predicted from exact tokens, beside what the engine then reported: `equal`, `over`, `under`.
    pub predictions: Family<ReasonLabels, Counter>,
    /// Whether they hold, by model; for the log.
    pub prediction_checks: PredictionChecks,
    /// Bookings that had no life for too long.
    pub expired_bookings: Counter,
    /// Prompt tokens, as engines report them.
    pub prompt_tokens: Counter,
    /// Prompt tokens that engines found cached.
    pub cached_tokens: Counter,
    /// Prompt blocks that routing expected to be cached, in tokens.
    pub predicted_tokens: Counter,
    /// Output tokens.
    pub output_tokens: Counter,
    /// Relayed bytes.
    pub relayed_bytes: Counter<u64, AtomicU64>,
    /// The last minute, for the admin port's page.
    pub live_stats: LiveStats,
}

impl Metrics {
    /// All metrics, registered.
    #[must_use]
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            inflight: Gauge::default(),
            ttft: Histogram::new(CLIENT_BUCKETS),
            itl: Histogram::new(CLIENT_BUCKETS),
            duration: Histogram::new(CLIENT_BUCKETS),
            decisions: Family::default(),
            fallbacks: Family::default(),
            route: Histogram::new(ROUTE_BUCKETS),
            legs: Family::default(),
            retries: Family::default(),
            handoffs: Family::default(),
            not_tokenized: Family::default(),
            predictions: Family::default(),
            prediction_checks: PredictionChecks::default(),
            expired_bookings: Counter::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            predicted_tokens: Counter::default(),
            output_tokens: Counter::default(),
            relayed_bytes: Counter::default(),
            live_stats: LiveStats::default(),
        };
        metrics.register(registry);
        metrics
    }

    fn register(&self, registry: &mut Registry) {
        let r = registry;
        r.register("pointsman_requests", "Requests by how they ended", self.requests.clone());
        r.register("pointsman_inflight_requests", "Requests under way", self.inflight.clone());
        r.register("pointsman_ttft_seconds", "Time to first token", self.ttft.clone());
        r.register("pointsman_itl_seconds", "Mean inter-token latency of a request", self.itl.clone());
        r.register("pointsman_request_seconds", "Whole requests", self.duration.clone());
        r.register("pointsman_decisions", "Routing decisions", self.decisions.clone());
        r.register("pointsman_fallbacks", "Decisions by the native fallback", self.fallbacks.clone());
        r.register("pointsman_route_seconds", "The route stage of one leg", self.route.clone());
        r.register("pointsman_legs", "Legs by how they ended", self.legs.clone());
        r.register("pointsman_retries", "Retries by leg", self.retries.clone());
        r.register("pointsman_handoffs", "Completed handoffs by result", self.handoffs.clone());
        r.register(
            "pointsman_not_tokenized",
            "Prompts that a configured tokenizer could not encode",
            self.not_tokenized.clone(),
        );
        r.register(
            "pointsman_predictions",
            "Requests by how the predicted cached blocks compare with what the engine reported",
            self.predictions.clone(),
        );
        r.register(
            "pointsman_expired_bookings",
            "Requests whose bookings had no life for too long",
            self.expired_bookings.clone(),
        );
        r.register(
            "pointsman_prompt_tokens",
            "Prompt tokens as engines report them",
            self.prompt_tokens.clone(),
        );
        r.register(
            "pointsman_cached_tokens",
            "Prompt tokens that engines found cached",
            self.cached_tokens.clone(),
        );
        r.register(
            "pointsman_predicted_tokens",
            "Prompt tokens expected to be cached",
            self.predicted_tokens.clone(),
        );
        r.register("pointsman_output_tokens", "Output tokens", self.output_tokens.clone());
        r.register("pointsman_relayed_bytes", "Bytes relayed to clients", self.relayed_bytes.clone());
    }

    /// Counts a leg.
    pub fn leg(&self, leg: &'static str, engine: &'static str, outcome: &'static str) {
        self.legs.get_or_create(&LegLabels { leg, engine, outcome }).inc();
    }

    /// Counts that the native fallback decided in a slot's place.
    pub fn fell_back(&self, slot: SlotKind, reason: &'static str) {
        self.fallbacks.get_or_create(&FallbackLabels { slot: slot.as_str(), reason }).inc();
    }

    /// Counts a handoff.
    pub fn handoff(&self, reason: &'static str) {
        self.handoffs.get_or_create(&ReasonLabels { reason }).inc();
    }
}

/// Seconds, for histograms.
#[must_use]
pub(crate) fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}
