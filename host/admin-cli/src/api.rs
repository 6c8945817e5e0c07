//! The parts of the admin listener's answers that the commands show. Unknown keys are ignored, so that a
//! command reads the answers of a later release.

#![allow(missing_docs, reason = "the listener's OpenAPI document and docs/receipts.md describe the fields")]

use serde::Deserialize;

use crate::text::clean;

mod decisions;

pub use decisions::{
    CachedTokens, Call, Costed, Decider, Decision, Decisions, Facts, LegRun, Outcome, Plan, Refused, Shadow,
    Stage,
};

/// `GET /status`.
#[derive(Clone, Debug, Deserialize)]
pub struct Status {
    pub version: String,
    pub uptime_s: u64,
    pub ready: bool,
    pub reasons: Vec<String>,
    pub models: Vec<String>,
    pub live: Live,
    pub workers: WorkerCounts,
    pub slots: Vec<Slot>,
    #[serde(default)]
    pub compiling: Vec<Compiling>,
}

/// Load now and latencies of the last minute.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Live {
    pub requests_per_second: f64,
    pub errors_per_second: f64,
    pub refusals_per_second: f64,
    pub ttft_p50_ms: Option<f64>,
    pub ttft_p90_ms: Option<f64>,
    pub ttft_p99_ms: Option<f64>,
    pub itl_p50_ms: Option<f64>,
    pub itl_p90_ms: Option<f64>,
    pub itl_p99_ms: Option<f64>,
    pub inflight: i64,
    pub connections: i64,
    pub session_bindings: u64,
    pub queue: Queue,
}

/// The admission queue.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Queue {
    pub waiting: u64,
    pub waiting_bytes: u64,
}

/// Numbers of workers.
#[derive(Clone, Debug, Deserialize)]
pub struct WorkerCounts {
    pub total: u64,
    pub eligible: u64,
    /// Workers that get no request, by reason.
    pub ineligible: std::collections::BTreeMap<String, u64>,
}

/// A slot of `GET /policies`.
#[derive(Clone, Debug, Deserialize)]
pub struct Slot {
    pub slot: String,
    pub model: Option<String>,
    pub state: String,
    pub generation: u64,
    pub policy: String,
    pub version: Option<String>,
    pub digest: Option<String>,
    #[serde(default)]
    pub parts: Vec<Part>,
    pub calls: u64,
    pub failures: u64,
    pub breaker_open: bool,
    #[serde(default)]
    pub only_choice: Option<OnlyChoice>,
    pub canary: Option<Trial>,
    pub shadow: Option<Trial>,
    #[serde(default)]
    pub last_failure: Option<LastFailure>,
    /// Content that was rolled back.
    #[serde(default)]
    pub quarantined: Vec<String>,
    /// The rollback that an undo would end now.
    #[serde(default)]
    pub undo: Option<RolledBack>,
    #[serde(default)]
    pub refusals: Vec<Refusal>,
}

/// A policy of a generation.
#[derive(Clone, Debug, Deserialize)]
pub struct Part {
    pub world: String,
    pub digest: String,
}

/// A rollback.
#[derive(Clone, Debug, Deserialize)]
pub struct RolledBack {
    pub policy: String,
    pub digest: String,
}

impl Slot {
    /// Returns the refusals in force.
    pub fn current_refusals(&self) -> impl Iterator<Item = &Refusal> {
        self.refusals.iter().filter(|one| one.in_force)
    }
}

/// A refused file of a slot.
#[derive(Clone, Debug, Deserialize)]
pub struct Refusal {
    pub lane: String,
    pub file: String,
    #[serde(default)]
    pub digest: Option<String>,
    pub kind: String,
    pub message: String,
    pub at_ms: u64,
    #[serde(default)]
    pub in_force: bool,
}

/// The last failed call of a lane.
#[derive(Clone, Debug, Deserialize)]
pub struct LastFailure {
    /// Name of the policy that failed.
    #[serde(default)]
    pub policy: String,
    pub kind: String,
    pub message: String,
    pub at_ms: u64,
    /// Id of the request that the call was about.
    #[serde(default)]
    pub request_id: Option<String>,
}

/// `GET /policies`.
#[derive(Clone, Debug, Deserialize)]
pub struct Policies {
    pub slots: Vec<Slot>,
    #[serde(default)]
    pub compiling: Vec<Compiling>,
    #[serde(default)]
    pub strays: Vec<String>,
    /// What is wrong with each of the strays.
    #[serde(default)]
    pub stray_problems: Vec<String>,
    /// Number of further strays.
    #[serde(default)]
    pub more_strays: usize,
    #[serde(default)]
    pub history: Vec<LaneChange>,
}

/// A file that is being compiled.
#[derive(Clone, Debug, Deserialize)]
pub struct Compiling {
    pub file: String,
    pub since_ms: u64,
}

/// A change of a lane.
#[derive(Clone, Debug, Deserialize)]
pub struct LaneChange {
    pub at_ms: u64,
    pub slot: String,
    #[serde(default)]
    pub model: Option<String>,
    pub lane: String,
    pub result: String,
    pub reason: String,
    pub policy: Option<String>,
}

/// `GET /decisions/summary`.
#[derive(Clone, Debug, Deserialize)]
pub struct Summary {
    pub window_s: u64,
    pub slots: Vec<SlotFigures>,
}

/// A slot of the summary.
#[derive(Clone, Debug, Deserialize)]
pub struct SlotFigures {
    pub slot: String,
    pub model: Option<String>,
    pub lanes: Vec<LaneFigures>,
}

/// Decisions of a lane within the window.
#[derive(Clone, Debug, Deserialize)]
pub struct LaneFigures {
    pub lane: String,
    pub policy: Option<String>,
    pub native: Option<String>,
    pub generation: Option<u64>,
    pub decisions: u64,
    pub fallbacks: u64,
    #[serde(default)]
    pub sheds: u64,
    #[serde(default)]
    pub failed: u64,
    pub agreement: Option<f64>,
    pub predicted_hit_rate: Option<f64>,
    pub ttft_ms: Option<Quantiles>,
    pub itl_ms: Option<Quantiles>,
}

/// Quantiles of times, milliseconds.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Quantiles {
    pub p50: Option<f64>,
    pub p99: Option<f64>,
}

/// The only candidate that a lane chooses.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct OnlyChoice {
    pub worker: u64,
    pub dp_rank: u32,
    pub decisions: u64,
}

/// A canary or shadow.
#[derive(Clone, Debug, Deserialize)]
pub struct Trial {
    pub generation: u64,
    pub share: f64,
    pub policy: String,
    #[serde(default)]
    pub only_choice: Option<OnlyChoice>,
    #[serde(default)]
    pub digest: Option<String>,
    #[serde(default)]
    pub parts: Vec<Part>,
    #[serde(default)]
    pub calls: u64,
    #[serde(default)]
    pub failures: u64,
    #[serde(default)]
    pub breaker_open: bool,
    #[serde(default)]
    pub last_failure: Option<LastFailure>,
    /// Decisions of a shadow that were the same, and those that were not.
    #[serde(default)]
    pub agree: u64,
    #[serde(default)]
    pub disagree: u64,
    #[serde(default)]
    pub failed: u64,
    /// Requests that a shadow would have refused.
    #[serde(default)]
    pub shed: u64,
}

impl Trial {
    /// Number of decisions for which a shadow was asked, too, whatever came of it.
    #[must_use]
    pub fn compared(&self) -> u64 {
        self.agree + self.disagree + self.failed + self.shed
    }
}

/// `GET /workers`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Workers {
    pub workers: Vec<Worker>,
}

/// A worker.
#[derive(Clone, Debug, Deserialize)]
pub struct Worker {
    pub id: u64,
    pub spec: Spec,
    pub models: Vec<String>,
    pub draining: bool,
    /// Handoffs of the worker that decode has not consumed.
    #[serde(default)]
    pub open_handoffs: u64,
    /// Its streams that continue on another worker, if they are asked to.
    #[serde(default)]
    pub moves: Option<Moves>,
    pub ineligible: Option<String>,
    /// Whether its engine has too much to do, and the worker is not chosen for a pause.
    #[serde(default)]
    pub paused: bool,
    pub reason: Option<String>,
    pub engine_load: Option<EngineLoad>,
    pub ranks: Vec<Rank>,
}

/// The streams of a worker that drains.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Moves {
    pub moved: u64,
    pub moving: u64,
    pub failed: u64,
    /// Requests that stay until their end, by reason.
    pub stayed: std::collections::BTreeMap<String, u64>,
}

/// Values that the operator configured.
#[derive(Clone, Debug, Deserialize)]
pub struct Spec {
    pub url: String,
    pub role: String,
    pub engine: String,
}

/// Values that the engine reports.
#[derive(Clone, Debug, Deserialize)]
pub struct EngineLoad {
    pub running: Option<u64>,
    pub waiting: Option<u64>,
    pub kv_usage: Option<f64>,
}

/// A data-parallel rank.
#[derive(Clone, Debug, Deserialize)]
pub struct Rank {
    pub active_requests: u64,
    pub ttft_ewma_us: Option<f64>,
    pub itl_ewma_us: Option<f64>,
    pub error_ppm: u64,
}

impl Worker {
    /// `eligible`, or the reason why the worker gets no request.
    pub fn state(&self) -> &str {
        self.ineligible.as_deref().unwrap_or(if self.paused { "paused" } else { "eligible" })
    }

    /// Returns why the worker gets no request, safe for a terminal.
    pub(crate) fn refusal(&self) -> Option<String> {
        let state = clean(self.ineligible.as_deref()?);
        Some(match &self.reason {
            Some(reason) => format!("{state} ({})", clean(reason)),
            None => state.into_owned(),
        })
    }

    /// Requests that the gateway booked on all ranks.
    pub fn active(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.active_requests).sum()
    }

    /// Mean time to first token of the ranks that have one, milliseconds.
    pub fn ttft_ms(&self) -> Option<f64> {
        mean(self.ranks.iter().filter_map(|rank| rank.ttft_ewma_us))
    }

    /// Mean time between tokens of the ranks that have one, milliseconds.
    pub fn itl_ms(&self) -> Option<f64> {
        mean(self.ranks.iter().filter_map(|rank| rank.itl_ewma_us))
    }

    /// Largest share of failed requests of a rank.
    #[expect(clippy::cast_precision_loss, reason = "at most a million")]
    pub fn errors(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.error_ppm).max().unwrap_or(0) as f64 / 1e6
    }
}

/// Mean of microseconds in milliseconds. 0 stands for a time that is not known.
fn mean(times: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) =
        times.filter(|time| *time > 0.0).fold((0.0, 0.0), |(sum, count), time| (sum + time, count + 1.0));
    (count > 0.0).then(|| sum / count / 1e3)
}
