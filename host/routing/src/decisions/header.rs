//! Header of a recorded decision: everything but the facts.

use std::sync::Arc;

use pointsman_workers::{DpRank, Leg, ModelName, PerLeg, WorkerId};
use tokio::time::Duration;

use crate::{
    ids::DecisionId,
    leg_run::LegRun,
    receipt::{Decider, ShadowResult},
    slot::{NativeMode, ProgramSummary},
};

/// A decision without its inputs.
#[derive(Clone, Debug)]
pub struct DecisionHeader {
    /// The model asked for.
    pub model: ModelName,
    /// The program of the generation that decided.
    pub program: Arc<ProgramSummary>,
    /// The leg routed; for a plan, the decode leg.
    pub leg: Leg,
    /// 0 for the leg's first try.
    pub attempt: u32,
    /// Kind of the decider.
    pub by: DecidedBy,
    /// Result of the decision.
    pub result: DecisionResult,
    /// The seed of the decision.
    pub seed: u64,
    /// Microseconds since the Unix epoch.
    pub now_us: u64,
    /// Softmax temperature of the decision.
    pub temperature: f32,
    /// Cached prefix blocks at the choice: device, host, disk; `None`: they were not looked up.
    pub cached_blocks: Option<[u32; 3]>,
    /// The shadow's answer, when it was called.
    pub shadow: Option<ShadowResult>,
    /// The shadow's program, when its call about a leg failed: the facts of the call are recorded.
    pub failed_shadow: Option<Arc<ProgramSummary>>,
    /// Duration of the whole decision.
    pub took: Duration,
    /// How the request ended; `None` while it runs.
    pub outcome: Option<Outcome>,
    /// Whether the inputs were dropped because they exceed a shard.
    pub inputs_dropped: bool,
    /// Number of eligible candidates. With `max_rows` of a slot the candidates are a short list of them.
    pub eligible: u32,
    pub(crate) stages: u32,
    /// Number of stages whose policies accessed the slot's state.
    pub(crate) stateful_stages: u32,
}

/// Kind of the decider. Texts (reason, detail) are recorded with the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// The policy in the slot.
    Policy,
    /// The native selector in the slot.
    Native(NativeMode),
    /// The fallback, and why.
    Fallback(&'static str),
    /// A hint of the request.
    Pin,
    /// The binding of the request's session.
    Session,
    /// The decode override's preview.
    Plan,
}

/// Result of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionResult {
    /// This candidate.
    Chosen(WorkerId, DpRank),
    /// `remote`, `local` or `shed`, with the decode candidate that was asked about.
    Planned(&'static str, Option<(WorkerId, DpRank)>),
    /// No candidate: `shed`, `policy_failed`, `nobody_left` or `no_pin`.
    Refused(&'static str),
}

/// How the request of a decision ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// HTTP status, 499 when the client disconnected.
    pub status: u16,
    /// `ok`, or an error code.
    pub code: &'static str,
    /// Whether the leg was decided again later, because the attempt of the request failed.
    pub retried: bool,
    /// Whether the stream left the worker of this decision, because that drains or the stream paused. It was
    /// served there until then.
    pub moved: bool,
    /// Time to first token, from the request's arrival.
    pub ttft: Option<Duration>,
    /// Mean time between tokens.
    pub itl: Option<Duration>,
    /// Output tokens.
    pub output_tokens: u32,
    /// Where that number comes from: `usage` of the engine, or `counted` events; `None` without output.
    pub output_source: Option<&'static str>,
    /// When the request ended, milliseconds since the Unix epoch.
    pub ended_at_ms: u64,
    /// Duration of the request, from its first byte.
    pub duration: Duration,
    /// Cached prompt tokens as predicted when the prompt's worker was chosen.
    pub cached_predicted: Option<u32>,
    /// Cached prompt tokens as the engine reported.
    pub cached_reported: Option<u32>,
    /// Number of prompt tokens, as routing counted or estimated them.
    pub prompt_tokens: u32,
    /// When the legs of the request ran.
    pub times: LegTimes,
    /// The run of this decision's leg; `None`: it was not sent.
    pub run: Option<LegRun>,
    /// How the engine of this decision failed within the stream.
    pub stream_failed: Option<StreamFailed>,
    /// The decision whose engine failed within the stream, so that this one generated the rest.
    pub continues: Option<DecisionId>,
}

/// An engine that failed within a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamFailed {
    /// What followed: `continued`, `continued_exact`, `failed`, or why the stream was not continued.
    pub result: &'static str,
    /// Why it was continued from text and not from token ids, or the code of the error with which it failed.
    pub why: Option<&'static str>,
    /// Output tokens that the client had.
    pub delivered: u32,
    /// The decision that was to generate the rest.
    pub rest: Option<DecisionId>,
}

/// Times of a request's last attempts, microseconds since its first byte arrived. `None`: it did not happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LegTimes {
    /// Time that the request waited in the admission queue.
    pub queued: Option<u32>,
    /// When each leg was sent.
    pub sent: PerLeg<Option<u32>>,
    /// When the prefill leg ended.
    pub prefill_ended: Option<u32>,
}

impl DecidedBy {
    /// Stable label, as [`crate::Decider::label`].
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Native(_) => "native",
            Self::Fallback(_) => "fallback",
            Self::Pin => "pin",
            Self::Session => "session",
            Self::Plan => "plan",
        }
    }
}

impl From<&Decider> for DecidedBy {
    fn from(decider: &Decider) -> Self {
        match decider {
            Decider::Policy => Self::Policy,
            Decider::Native { mode } => Self::Native(*mode),
            Decider::Fallback { reason, .. } => Self::Fallback(reason),
            Decider::Pin => Self::Pin,
            Decider::Session => Self::Session,
            Decider::Plan => Self::Plan,
        }
    }
}
