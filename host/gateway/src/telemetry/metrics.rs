//! Counters and histograms of requests, decisions and legs.
//!
//! Label values are bounded: models are those of the registry, policies are those that the operator
//! installed, tenants are those that the configuration names, and all other values come from a fixed list. A
//! generation is not a label, because each reload of a slot would add series.

use std::{
    sync::{Arc, LazyLock, atomic::AtomicU64},
    time::Duration,
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, exemplar::HistogramWithExemplars, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

#[cfg(feature = "ext-proc")]
use super::ext_proc_metrics::ExtProcMetrics;
use super::{
    family::Family,
    labels::{ListenerLabels, Name, ResultLabels, TraceLabel},
    live_stats::LiveStats,
    prediction_checks::PredictionChecks,
    tenant_metrics::TenantFamilies,
    tls_metrics::TlsMetrics,
    unrouted::Unrouted,
};

/// Upper bounds of the time to first token, in seconds. They are vLLM's, so that quantiles can be compared.
const TTFT_BUCKETS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// Upper bounds of the time between tokens, in seconds. From 10 ms on, they are vLLM's.
const ITL_BUCKETS: [f64; 22] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
];
/// Upper bounds of the duration of requests, in seconds. From 0.3 s on, they are vLLM's.
const DURATION_BUCKETS: [f64; 25] = [
    0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];
/// Upper bounds of times within the gateway, in seconds.
const ROUTE_BUCKETS: [f64; 18] = [
    1e-6, 2e-6, 4e-6, 8e-6, 16e-6, 32e-6, 64e-6, 128e-6, 256e-6, 512e-6, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05,
    0.1, 0.25,
];
/// Upper bounds of lengths of prompts and outputs, in tokens.
const TOKEN_BUCKETS: [f64; 20] = [
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
    32768.0,
    65536.0,
    131_072.0,
    262_144.0,
    524_288.0,
    1_048_576.0,
];
/// Upper bounds of shares.
const SHARE_BUCKETS: [f64; 11] = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];

/// Upper bounds of relative errors.
const ERROR_BUCKETS: [f64; 10] = [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0];

/// A histogram for each source of its figures.
type BySource = Family<SourceLabels, Histogram>;

/// Label value of models that no worker serves.
pub(crate) static OTHER: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from("other"));
/// Outcome label, and `error.type` in traces, of a leg that the gateway ended.
pub(crate) const CANCELLED: &str = "cancelled";
/// Label value of a slot without a policy.
pub(crate) static NATIVE: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from("native"));

/// Labels of a request.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RequestLabels {
    /// Endpoint.
    pub endpoint: &'static str,
    /// Model, or `other`.
    pub model: Name,
    /// HTTP status.
    pub status: u16,
    /// `ok`, or the code of an error.
    pub code: &'static str,
}

/// Labels of a decision.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct DecisionLabels {
    /// Slot.
    pub slot: &'static str,
    /// Policy in it, or `native`.
    pub policy: Name,
    /// Lane that decided: `active` or `canary`.
    pub lane: &'static str,
    /// Kind of the decider, such as `policy`, `fallback` or `session`.
    pub decider: &'static str,
}

/// Labels of a fallback.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct FallbackLabels {
    /// Slot.
    pub slot: &'static str,
    /// Kind of the failure.
    pub reason: &'static str,
}

/// Labels of a leg.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct LegLabels {
    /// Leg.
    pub leg: &'static str,
    /// Dialect of the engine.
    pub engine: &'static str,
    /// `ok`, `cancelled`, or the kind of a call error.
    pub outcome: &'static str,
}

/// Labels of a change through the operators' listener.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct AdminLabels {
    /// Method and route.
    pub action: Name,
    /// HTTP status.
    pub status: u16,
}

/// Source of a figure.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct SourceLabels {
    /// `usage` if the engine reported the figure; otherwise the way in which the gateway got it.
    pub source: &'static str,
}

/// Labels of a reason.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ReasonLabels {
    /// Reason.
    pub reason: &'static str,
}

/// Labels of a retry.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RetryLabels {
    /// Leg.
    pub leg: &'static str,
}

/// Metrics that the handling of requests updates.
#[derive(Debug)]
pub struct Metrics {
    /// Requests by how they ended.
    pub requests: Family<RequestLabels, Counter>,
    /// Models that have series of their own.
    pub(crate) labelled: LabelledModels,
    /// Connections of clients that the gateway ended, by reason.
    pub connections_ended: Family<ReasonLabels, Counter>,
    /// Idle connections to workers that the gateway closed.
    pub upstream_connections_closed: Counter,
    /// Open connections of clients and operators.
    pub connections: Gauge,
    /// Requests in flight.
    pub inflight: Gauge,
    /// Time to first token in seconds.
    pub(crate) ttft: HistogramWithExemplars<TraceLabel>,
    /// Mean inter-token latency in seconds, observed at each new KV block and at the end.
    pub itl: Histogram,
    /// Prompt tokens of a request (ISL).
    pub(crate) isl: BySource,
    /// Output tokens of a request (OSL).
    pub(crate) osl: BySource,
    /// Share of a request's prompt that was cached.
    pub(crate) hit_rate: BySource,
    /// Duration of a request in seconds.
    pub(crate) duration: HistogramWithExemplars<TraceLabel>,
    /// Time that a request waited in the admission queue in seconds.
    pub(crate) queue_wait: Histogram,
    /// Routing decisions.
    pub decisions: Family<DecisionLabels, Counter>,
    /// Decisions by the native fallback.
    pub fallbacks: Family<FallbackLabels, Counter>,
    /// Time of routing one leg in seconds.
    pub route: Histogram,
    /// Legs by how they ended.
    pub legs: Family<LegLabels, Counter>,
    /// Time from sending a leg to its end in seconds.
    pub(crate) leg_seconds: Family<LegLabels, Histogram>,
    /// Retries by leg.
    pub retries: Family<RetryLabels, Counter>,
    /// Streams that were to continue on another worker, by what followed.
    pub(crate) continuations: Family<continuations::ContinuationLabels, Counter>,
    /// Completed handoffs by result.
    pub handoffs: Family<ResultLabels, Counter>,
    /// Requests that broke two workers (`quarantined`), and later requests equal to them (`refused`).
    pub poison_requests: Family<ResultLabels, Counter>,
    /// Prompts without token ids, by reason.
    pub not_tokenized: Family<ReasonLabels, Counter>,
    /// Predictions of cached blocks from exact tokens, compared with the engine's report: `equal`, `over`,
    /// `under`.
    pub predictions: Family<ResultLabels, Counter>,
    /// Whether the predictions of each model are right, for the log.
    pub prediction_checks: PredictionChecks,
    /// Relative error of the estimated duration of answers that are not streamed.
    pub(crate) whole_estimate_errors: Histogram,
    /// Requests that lost their places in the full queue.
    pub(crate) displaced: Counter,
    /// Bookings released because no token arrived for too long.
    pub expired_bookings: Counter,
    /// Wrong keys by listener: `clients` or `operators`.
    pub wrong_keys: Family<ListenerLabels, Counter>,
    /// Fetches of an identity server's public keys, by result.
    pub(crate) key_set_fetches: Family<ResultLabels, Counter>,
    /// Changes through the operators' listener, refused ones included.
    pub admin_changes: Family<AdminLabels, Counter>,
    /// Prompt tokens of requests that an engine ran, as it reported them, or else as the gateway measured
    /// them.
    pub prompt_tokens: Counter,
    /// Prompt tokens of the requests whose engine reported how many of them it found in its cache.
    pub(crate) cache_reported_prompt_tokens: Counter,
    /// Prompt tokens that engines reported as cached.
    pub cached_tokens: Counter,
    /// Those of `prompt_tokens` whose cached part routing predicted, because a policy asked for it.
    pub(crate) cache_predicted_prompt_tokens: Counter,
    /// Those of `cache_predicted_prompt_tokens` that routing expected to be cached.
    pub predicted_tokens: Counter,
    /// Output tokens, also of requests that run.
    pub(crate) output_tokens: OutputTokens,
    /// Relayed bytes.
    pub relayed_bytes: Counter<u64, AtomicU64>,
    /// Requests that the decision log contains.
    pub(crate) decision_log_records: Counter,
    /// Bytes that were written to the decision log, compressed.
    pub(crate) decision_log_bytes: Counter,
    /// Requests missing in the decision log: the queue was full (`queue`), or the disk failed (`disk`).
    pub(crate) decision_log_dropped: Family<ReasonLabels, Counter>,
    /// Spans that the collector accepted.
    pub(crate) trace_spans_exported: Counter,
    /// Spans that were recorded but not exported, by reason.
    pub(crate) trace_spans_dropped: Family<ReasonLabels, Counter>,
    /// TLS metrics of the listeners.
    pub(crate) tls: TlsMetrics,
    /// Metrics of the endpoint picker.
    #[cfg(feature = "ext-proc")]
    pub(crate) ext_proc: ExtProcMetrics,
    /// Requests, tokens and queue times of tenants.
    pub(crate) tenants: TenantFamilies,
    /// The last minute, for operators.
    pub live_stats: LiveStats,
    /// The last requests without a recorded decision, for operators.
    pub(crate) unrouted: Unrouted,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            requests: Family::default(),
            labelled: LabelledModels::default(),
            connections_ended: Family::default(),
            upstream_connections_closed: Counter::default(),
            connections: Gauge::default(),
            inflight: Gauge::default(),
            ttft: HistogramWithExemplars::new(TTFT_BUCKETS.into_iter()),
            itl: Histogram::new(ITL_BUCKETS),
            isl: Family::new(|| Histogram::new(TOKEN_BUCKETS)),
            osl: Family::new(|| Histogram::new(TOKEN_BUCKETS)),
            hit_rate: Family::new(|| Histogram::new(SHARE_BUCKETS)),
            duration: HistogramWithExemplars::new(DURATION_BUCKETS.into_iter()),
            queue_wait: Histogram::new(DURATION_BUCKETS),
            decisions: Family::default(),
            fallbacks: Family::default(),
            route: Histogram::new(ROUTE_BUCKETS),
            legs: Family::default(),
            leg_seconds: Family::new(|| Histogram::new(DURATION_BUCKETS)),
            retries: Family::default(),
            continuations: Family::default(),
            handoffs: Family::default(),
            poison_requests: Family::default(),
            not_tokenized: Family::default(),
            predictions: Family::default(),
            prediction_checks: PredictionChecks::default(),
            whole_estimate_errors: Histogram::new(ERROR_BUCKETS),
            displaced: Counter::default(),
            expired_bookings: Counter::default(),
            wrong_keys: Family::default(),
            key_set_fetches: Family::default(),
            admin_changes: Family::default(),
            prompt_tokens: Counter::default(),
            cache_reported_prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            cache_predicted_prompt_tokens: Counter::default(),
            predicted_tokens: Counter::default(),
            output_tokens: OutputTokens::default(),
            relayed_bytes: Counter::default(),
            decision_log_records: Counter::default(),
            decision_log_bytes: Counter::default(),
            decision_log_dropped: Family::default(),
            trace_spans_exported: Counter::default(),
            trace_spans_dropped: Family::default(),
            tls: TlsMetrics::default(),
            #[cfg(feature = "ext-proc")]
            ext_proc: ExtProcMetrics::default(),
            tenants: TenantFamilies::default(),
            live_stats: LiveStats::default(),
            unrouted: Unrouted::default(),
        }
    }
}

mod continuations;
mod count;
mod dropped_spans;
mod every_series;
mod expected;
mod output_tokens;

pub(crate) use dropped_spans::DropReason;
use expected::LabelledModels;
pub(crate) use expected::MAX_MODELS;
use output_tokens::OutputTokens;

impl Metrics {
    /// Registers every metric for one scrape.
    pub fn register(&self, registry: &mut Registry) {
        macro_rules! register {
            ($($field:ident $name:literal $help:literal,)*) => {
                $(registry.register(concat!("pointsman_", $name), $help, self.$field.clone());)*
            };
        }
        register! {
            requests "requests" "Number of requests by how they ended",
            connections_ended "client_connections_ended" "Number of connections of clients and operators that the gateway ended, by reason",
            upstream_connections_closed "upstream_connections_closed" "Number of idle connections to workers that the gateway closed: idle for upstream.idle_timeout, or closed by the worker",
            connections "client_connections" "Number of open connections of clients and operators",
            inflight "inflight_requests" "Number of requests in flight",
            ttft "ttft_seconds" "Time from a request to its first token in seconds, observed at that token",
            itl "itl_seconds" "Mean time between the output tokens of a stream in seconds, observed at each new KV block and at the end",
            isl "isl_tokens" "Number of prompt tokens of a request by the source of the number",
            osl "osl_tokens" "Number of output tokens of a request by the source of the number",
            hit_rate "cache_hit_ratio" "Share of a request's prompt tokens that were cached, by the source of the number",
            duration "request_seconds" "Duration of a request in seconds",
            queue_wait "queue_seconds" "Time of a wait in the admission queue in seconds, observed when the request leaves the queue; only requests that waited",
            decisions "decisions" "Number of routing decisions",
            fallbacks "fallbacks" "Number of decisions by the native fallback, by the failure that caused it",
            route "route_seconds" "Time of routing one leg in seconds",
            legs "legs" "Number of legs by how they ended",
            leg_seconds "leg_seconds" "Time from sending a leg to its end in seconds, by how it ended",
            retries "retries" "Number of retries by leg",
            continuations "continuations" "Streams to be continued, by cause (failure, drain or preempt) and result: continued, moved, failed, or why they were not",
            handoffs "handoffs" "Number of handoffs from prefill to decode by result",
            poison_requests "poison_requests" "Number of requests that broke two workers, and of equal requests refused afterwards",
            not_tokenized "not_tokenized" "Number of prompts without token ids although their model has a tokenizer, or workers with KV events",
            predictions "predictions" "Number of cached-token predictions by how they compare with the engine's report",
            whole_estimate_errors "whole_estimate_error_ratio" "Share of the time by which the estimated duration of an answer that is not streamed was wrong",
            displaced "displaced_requests" "Number of requests that lost their places in the full queue to requests that come before them",
            expired_bookings "expired_bookings" "Number of requests whose bookings expired without a token",
            wrong_keys "wrong_keys" "Number of requests with a wrong key or admin token, by listener",
            key_set_fetches "key_set_fetches" "Number of fetches of the identity server's public keys, by result",
            admin_changes "admin_changes" "Number of changes asked for at the admin listener, by route and status",
            prompt_tokens "prompt_tokens" "Number of prompt tokens of requests that an engine ran, as the engine reported or the gateway counted them",
            cache_reported_prompt_tokens "cache_reported_prompt_tokens" "Number of prompt tokens of requests whose engine reported how many of them it found in its cache",
            cached_tokens "cached_tokens" "Number of prompt tokens that engines found in their cache",
            cache_predicted_prompt_tokens "cache_predicted_prompt_tokens" "Number of prompt tokens of requests for which routing predicted how many of them are cached",
            predicted_tokens "predicted_tokens" "Number of prompt tokens that routing expected to be cached",
            output_tokens "output_tokens" "Number of output tokens; a stream adds its own at each new KV block and at its end",
            relayed_bytes "relayed_bytes" "Size of all answers relayed to clients in bytes; a stream adds its own by 16 KB and at its end",
            decision_log_records "decision_log_records" "Number of requests that were written to the decision log",
            decision_log_bytes "decision_log_bytes" "Size of what was written to the decision log in bytes, compressed",
            trace_spans_exported "trace_spans_exported" "Number of spans that the collector took",
            trace_spans_dropped "trace_spans_dropped" "Number of spans that were recorded and not exported, by reason",
            decision_log_dropped "decision_log_dropped" "Number of requests that the decision log lacks, by reason",
        }
        self.tls.register(registry);
        #[cfg(feature = "ext-proc")]
        self.ext_proc.register(registry);
        self.tenants.register(registry);
    }
}

/// Returns a duration in seconds, for histograms.
#[must_use]
pub(crate) fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}
