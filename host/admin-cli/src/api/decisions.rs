//! The answers of `GET /decisions`.

#![allow(missing_docs, reason = "docs/receipts.md describes the fields")]

use serde::Deserialize;

/// `GET /decisions`.
#[derive(Clone, Debug, Deserialize)]
pub struct Decisions {
    pub kept: u64,
    pub decisions: Vec<Decision>,
}

/// A receipt (docs/receipts.md).
#[derive(Clone, Debug, Deserialize)]
pub struct Decision {
    pub id: String,
    pub request_id: String,
    pub model: String,
    pub leg: String,
    pub attempt: u32,
    pub slot: String,
    /// Model of the slot; `None`: the slot of all models.
    #[serde(default)]
    pub slot_model: Option<String>,
    pub generation: u64,
    pub mode: String,
    /// The last filter and the policy that ranks.
    #[serde(default)]
    pub program: Option<String>,
    pub policy: Option<String>,
    pub digest: Option<String>,
    #[serde(default)]
    pub settings_digest: Option<String>,
    pub decider: Decider,
    pub reason: Option<String>,
    pub call: Call,
    #[serde(default)]
    pub eligible: Option<u64>,
    pub candidates: Vec<(u64, u32)>,
    /// Rows that the filters left; `None`: all.
    #[serde(default)]
    pub left: Option<Vec<u32>>,
    #[serde(default)]
    pub stages: Vec<Stage>,
    /// In place of the stages where the inputs were dropped.
    #[serde(default)]
    pub called: Vec<Stage>,
    pub choice: Option<Costed>,
    pub runner_up: Option<Costed>,
    pub plan: Option<Plan>,
    pub refused: Option<Refused>,
    pub cached_blocks: Option<(u32, u32, u32)>,
    pub shadow: Option<Shadow>,
    pub inputs_dropped: bool,
    pub took_us: f64,
    pub outcome: Option<Outcome>,
}

/// Policy, hint, session or fallback that made the decision.
#[derive(Clone, Debug, Deserialize)]
pub struct Decider {
    pub by: String,
    pub reason: Option<String>,
    pub detail: Option<String>,
    pub mode: Option<String>,
}

/// When it was decided.
#[derive(Clone, Debug, Deserialize)]
pub struct Call {
    pub now_us: u64,
}

/// A policy that was called; none for facts that are recorded for every leg.
#[derive(Clone, Debug, Deserialize)]
pub struct Stage {
    pub policy: Option<String>,
    pub digest: Option<String>,
    #[serde(default)]
    pub settings_digest: Option<String>,
    pub world: Option<String>,
    /// Number of rows that it received; `None` where the inputs were dropped.
    pub rows: Option<u64>,
    #[serde(default)]
    pub request: Facts,
    /// Of a decode override: each fact of the decode worker, as a list with one value.
    #[serde(default)]
    pub decode: Facts,
    /// A list for each fact, with a value for each row.
    #[serde(default)]
    pub workers: Facts,
}

/// Facts by name.
pub type Facts = serde_json::Map<String, serde_json::Value>;

/// A candidate and its cost.
#[derive(Clone, Debug, Deserialize)]
pub struct Costed {
    pub worker: u64,
    pub dp_rank: u32,
    pub cost: Option<f64>,
}

/// The answer of the decode override.
#[derive(Clone, Debug, Deserialize)]
pub struct Plan {
    pub word: String,
    pub decode: Option<(u64, u32)>,
}

/// Why no candidate was chosen.
#[derive(Clone, Debug, Deserialize)]
pub struct Refused {
    pub code: String,
    pub detail: String,
}

/// The answer of the shadow.
#[derive(Clone, Debug, Deserialize)]
pub struct Shadow {
    pub generation: u64,
    /// `chose`, `abstained`, `nobody_left`, `refused` or `failed`.
    #[serde(default)]
    pub answer: String,
    /// Of a refusal.
    pub status: Option<u16>,
    /// Of a failure.
    pub kind: Option<String>,
    /// Reason of a refusal, or message of a failure.
    pub detail: Option<String>,
    pub choice: Option<(u64, u32)>,
    /// Of a decode override.
    pub plan: Option<String>,
    pub agrees: Option<bool>,
}

/// End of the request.
#[derive(Clone, Debug, Deserialize)]
pub struct Outcome {
    pub status: u16,
    pub code: String,
    pub retried: bool,
    /// Whether the stream left the worker before its end, though that worked: it moved or paused.
    #[serde(default)]
    pub moved: bool,
    pub ttft_ms: Option<f64>,
    pub itl_ms: Option<f64>,
    pub prompt_tokens: Option<u64>,
    pub output_tokens: Option<u64>,
    pub duration_ms: f64,
    pub cached_tokens: CachedTokens,
    #[serde(default)]
    pub times_ms: Times,
    pub stream_failed: Option<StreamFailed>,
    pub continues: Option<String>,
    pub run: Option<LegRun>,
}

/// Time that a request waited in the queue, when its prefill leg was sent and ended, and when the leg that
/// answers was sent.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Times {
    pub queued: Option<f64>,
    pub prefill_sent: Option<f64>,
    pub prefill_ended: Option<f64>,
    pub answer_sent: Option<f64>,
}

/// When the leg of a decision was sent and ended, and why it failed.
#[derive(Clone, Debug, Deserialize)]
pub struct LegRun {
    pub sent_ms: f64,
    pub ended_ms: Option<f64>,
    pub failed: Option<String>,
    pub status: Option<u16>,
}

/// An engine that failed within a stream.
#[derive(Clone, Debug, Deserialize)]
pub struct StreamFailed {
    pub result: String,
    pub why: Option<String>,
    pub delivered_tokens: u64,
    pub rest: Option<String>,
}

/// Prompt tokens in the engine's cache.
#[derive(Clone, Debug, Deserialize)]
pub struct CachedTokens {
    pub predicted: Option<u64>,
    pub reported: Option<u64>,
}
