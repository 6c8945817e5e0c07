//! The parts of the admin listener's answers that the commands show. Unknown keys are ignored, so that a
//! command reads the answers of a later release.

use serde::Deserialize;

/// `GET /status`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Status {
    pub(crate) version: String,
    pub(crate) uptime_s: u64,
    pub(crate) ready: bool,
    pub(crate) reasons: Vec<String>,
    pub(crate) models: Vec<String>,
    pub(crate) live: Live,
    pub(crate) workers: WorkerCounts,
    pub(crate) slots: Vec<Slot>,
}

/// Load now and latencies of the last minute.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Live {
    pub(crate) requests_per_second: f64,
    pub(crate) errors_per_second: f64,
    pub(crate) refusals_per_second: f64,
    pub(crate) ttft_p50_ms: Option<f64>,
    pub(crate) ttft_p90_ms: Option<f64>,
    pub(crate) ttft_p99_ms: Option<f64>,
    pub(crate) itl_p50_ms: Option<f64>,
    pub(crate) itl_p90_ms: Option<f64>,
    pub(crate) itl_p99_ms: Option<f64>,
    pub(crate) inflight: i64,
    pub(crate) connections: i64,
    pub(crate) session_bindings: u64,
    pub(crate) queue: Queue,
}

/// The admission queue.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Queue {
    pub(crate) waiting: u64,
    pub(crate) waiting_bytes: u64,
}

/// Numbers of workers.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct WorkerCounts {
    pub(crate) total: u64,
    pub(crate) eligible: u64,
    /// Workers that get no request, by reason.
    pub(crate) ineligible: std::collections::BTreeMap<String, u64>,
}

/// A slot of `GET /policies`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Slot {
    pub(crate) slot: String,
    pub(crate) model: Option<String>,
    pub(crate) state: String,
    pub(crate) generation: u64,
    pub(crate) policy: String,
    pub(crate) version: Option<String>,
    pub(crate) digest: Option<String>,
    pub(crate) calls: u64,
    pub(crate) failures: u64,
    pub(crate) breaker_open: bool,
    #[serde(default)]
    pub(crate) only_choice: Option<OnlyChoice>,
    pub(crate) canary: Option<Trial>,
    pub(crate) shadow: Option<Trial>,
}

/// The only candidate that a lane chooses.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct OnlyChoice {
    pub(crate) worker: u64,
    pub(crate) dp_rank: u32,
    pub(crate) decisions: u64,
}

/// A canary or shadow.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Trial {
    pub(crate) generation: u64,
    pub(crate) share: f64,
    pub(crate) policy: String,
    #[serde(default)]
    pub(crate) only_choice: Option<OnlyChoice>,
}

/// `GET /workers`.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Workers {
    pub(crate) workers: Vec<Worker>,
}

/// A worker.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Worker {
    pub(crate) id: u64,
    pub(crate) spec: Spec,
    pub(crate) models: Vec<String>,
    pub(crate) draining: bool,
    pub(crate) ineligible: Option<String>,
    /// Whether its engine has too much to do, and the worker is not chosen for a pause.
    #[serde(default)]
    pub(crate) paused: bool,
    pub(crate) reason: Option<String>,
    pub(crate) engine_load: Option<EngineLoad>,
    pub(crate) ranks: Vec<Rank>,
}

/// What the operator configured.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Spec {
    pub(crate) url: String,
    pub(crate) role: String,
    pub(crate) engine: String,
}

/// What the engine reports.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct EngineLoad {
    pub(crate) running: Option<u64>,
    pub(crate) waiting: Option<u64>,
    pub(crate) kv_usage: Option<f64>,
}

/// A data-parallel rank.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Rank {
    pub(crate) active_requests: u64,
    pub(crate) ttft_ewma_us: Option<f64>,
    pub(crate) itl_ewma_us: Option<f64>,
    pub(crate) error_ppm: u64,
}

impl Worker {
    /// `eligible`, or the reason why the worker gets no request.
    pub(crate) fn state(&self) -> &str {
        self.ineligible.as_deref().unwrap_or(if self.paused { "paused" } else { "eligible" })
    }

    /// Requests that the gateway booked on all ranks.
    pub(crate) fn active(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.active_requests).sum()
    }

    /// Mean time to first token of the ranks that have one, milliseconds.
    pub(crate) fn ttft_ms(&self) -> Option<f64> {
        mean(self.ranks.iter().filter_map(|rank| rank.ttft_ewma_us))
    }

    /// Mean time between tokens of the ranks that have one, milliseconds.
    pub(crate) fn itl_ms(&self) -> Option<f64> {
        mean(self.ranks.iter().filter_map(|rank| rank.itl_ewma_us))
    }

    /// Largest share of failed requests of a rank.
    #[expect(clippy::cast_precision_loss, reason = "at most a million")]
    pub(crate) fn errors(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.error_ppm).max().unwrap_or(0) as f64 / 1e6
    }
}

/// Mean of microseconds in milliseconds. 0 stands for a time that is not known.
fn mean(times: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) =
        times.filter(|time| *time > 0.0).fold((0.0, 0.0), |(sum, count), time| (sum + time, count + 1.0));
    (count > 0.0).then(|| sum / count / 1e3)
}

/// `GET /decisions`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Decisions {
    pub(crate) kept: u64,
    pub(crate) decisions: Vec<Decision>,
}

/// A receipt (docs/receipts.md).
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Decision {
    pub(crate) id: String,
    pub(crate) request_id: String,
    pub(crate) model: String,
    pub(crate) leg: String,
    pub(crate) attempt: u32,
    pub(crate) slot: String,
    pub(crate) generation: u64,
    pub(crate) mode: String,
    pub(crate) policy: Option<String>,
    pub(crate) digest: Option<String>,
    pub(crate) decider: Decider,
    pub(crate) reason: Option<String>,
    pub(crate) call: Call,
    pub(crate) candidates: Vec<(u64, u32)>,
    pub(crate) left: Option<Vec<u32>>,
    pub(crate) choice: Option<Costed>,
    pub(crate) runner_up: Option<Costed>,
    pub(crate) plan: Option<Plan>,
    pub(crate) refused: Option<Refused>,
    pub(crate) cached_blocks: Option<(u32, u32, u32)>,
    pub(crate) shadow: Option<Shadow>,
    pub(crate) inputs_dropped: bool,
    pub(crate) took_us: f64,
    pub(crate) outcome: Option<Outcome>,
}

/// What decided.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Decider {
    pub(crate) by: String,
    pub(crate) reason: Option<String>,
    pub(crate) detail: Option<String>,
    pub(crate) mode: Option<String>,
}

/// When it was decided.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Call {
    pub(crate) now_us: u64,
}

/// A candidate and its cost.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Costed {
    pub(crate) worker: u64,
    pub(crate) dp_rank: u32,
    pub(crate) cost: Option<f64>,
}

/// The answer of the decode override.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Plan {
    pub(crate) word: String,
    pub(crate) decode: Option<(u64, u32)>,
}

/// Why no candidate was chosen.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Refused {
    pub(crate) code: String,
    pub(crate) detail: String,
}

/// The answer of the shadow.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Shadow {
    pub(crate) generation: u64,
    pub(crate) choice: Option<(u64, u32)>,
    pub(crate) agrees: Option<bool>,
}

/// How the request ended.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) status: u16,
    pub(crate) code: String,
    pub(crate) retried: bool,
    pub(crate) ttft_ms: Option<f64>,
    pub(crate) itl_ms: Option<f64>,
    pub(crate) output_tokens: Option<u64>,
    pub(crate) duration_ms: f64,
    pub(crate) cached_tokens: CachedTokens,
}

/// Prompt tokens in the engine's cache.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct CachedTokens {
    pub(crate) predicted: Option<u64>,
    pub(crate) reported: Option<u64>,
}
