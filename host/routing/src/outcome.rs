//! Outcome of a request, in the form that learning policies get. Mirrors `record outcome` of
//! `wit/policy.wit`.

use pointsman_workers::{DpRank, Leg, WorkerId};
use tokio::time::Duration;

use crate::ids::DecisionId;

/// How the request of a decision ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ObservedOutcome {
    /// The decision's id; `None` when it was not recorded.
    pub decision: Option<DecisionId>,
    /// The seed of the decision.
    pub seed: u64,
    /// The leg; of a decode override, the leg that answered.
    pub leg: Leg,
    /// 0 for the leg's first try.
    pub attempt: u32,
    /// The worker that was chosen.
    pub worker: WorkerId,
    /// Its rank.
    pub rank: DpRank,
    /// Whether the policy chose; otherwise a hint, a session or the fallback did.
    pub by_policy: bool,
    /// Whether the leg was decided again later, because the attempt of the request failed.
    pub retried: bool,
    /// HTTP status of the request, 499 when the client disconnected.
    pub status: u16,
    /// Time to first token, from the request's arrival; `None` for a decision about the rest of a stream.
    pub ttft: Option<Duration>,
    /// Mean time between tokens.
    pub itl: Option<Duration>,
    /// Duration of the whole request.
    pub duration: Duration,
    /// Prompt tokens, as routing counted them.
    pub prompt_tokens: u32,
    /// Output tokens.
    pub output_tokens: u32,
    /// Cached prompt tokens as predicted when the prompt's worker was chosen.
    pub cached_predicted: Option<u32>,
    /// Cached prompt tokens as the engine reported.
    pub cached_reported: Option<u32>,
}

/// Time and randomness of one batch of outcomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Microseconds since the Unix epoch.
    pub now_us: u64,
    /// Seed of random choices.
    pub seed: u64,
}
