//! The record of one decision: who chose, among how many, why, and what it cost.

use std::sync::Arc;

use pointsman_workers::{DpRank, Leg, WorkerId};
use serde::Serialize;
use tokio::time::Duration;

use crate::{
    decisions::{DecidedBy, DecisionId},
    policy::Digest,
    query::CandidateId,
    slot::{Generation, Lane, NativeMode, SlotKind},
};

/// Who made a decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum Decider {
    /// The policy in the slot.
    Policy,
    /// The native selector in the slot.
    Native {
        /// Which one.
        mode: NativeMode,
    },
    /// The fallback, because the policy gave no usable answer.
    Fallback {
        /// Stable label: `abstain`, `breaker_open`, `nobody_left`, or a failure's kind.
        reason: &'static str,
        /// The failure's own words.
        detail: String,
    },
    /// A hint of the request.
    Pin,
    /// The binding of the request's session.
    Session,
    /// The decode override, which previewed this worker for local prefill (spec D4).
    Plan,
}

/// What the slot's shadow would have done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ShadowResult {
    /// Its generation.
    pub generation: Generation,
    /// Where the request would have gone; `None` when it had no usable answer, no opinion, or would have refused.
    pub choice: Option<CandidateId>,
    /// Whether that is where it went.
    pub agrees: bool,
}

/// The record of one decision. Holds no prompt text.
#[derive(Clone, Debug, Serialize)]
pub struct Receipt {
    /// Its place in the ring of decisions; `None` when it is not recorded.
    pub id: Option<DecisionId>,
    /// The leg routed.
    pub leg: Leg,
    /// 0 for its first try.
    pub attempt: u32,
    /// The slot asked.
    pub slot: SlotKind,
    /// The generation pinned.
    pub generation: Generation,
    /// Whether that is the active generation or a canary.
    #[serde(rename = "mode")]
    pub lane: Lane,
    /// What the shadow said, when one was asked.
    pub shadow: Option<ShadowResult>,
    /// The policy's name, when the slot has one.
    pub policy: Option<Arc<str>>,
    /// The policy's digest, when the slot has one.
    pub digest: Option<Digest>,
    /// Who decided.
    pub decider: Decider,
    /// Somebody in the slot learns from what becomes of it.
    #[serde(skip)]
    pub learns: bool,
    /// The policy's own words.
    pub reason: Option<String>,
    /// The worker chosen.
    pub worker: WorkerId,
    /// Its rank.
    pub rank: DpRank,
    /// Candidates that were eligible.
    pub candidates: u32,
    /// Cached prefix blocks at the chosen candidate: device, host, disk; zeros when nobody asked for them.
    pub cached_blocks: [u32; 3],
    /// Whether somebody asked for them.
    pub cached_known: bool,
    /// `(worker, rank, cost)` of each ranked candidate; only when the request asked why.
    pub costs: Vec<(WorkerId, DpRank, f32)>,
    /// The seed of the decision.
    pub seed: u64,
    /// Microseconds since the Unix epoch.
    pub now_us: u64,
    /// Time the whole decision took.
    #[serde(serialize_with = "as_micros")]
    pub took: Duration,
}

impl Receipt {
    /// The cheapest of the candidates that were not chosen, when costs are known.
    #[must_use]
    pub fn runner_up(&self) -> Option<(WorkerId, DpRank, f32)> {
        let others =
            self.costs.iter().filter(|(worker, rank, _)| (*worker, *rank) != (self.worker, self.rank));
        others.min_by(|a, b| a.2.total_cmp(&b.2)).copied()
    }
}

impl Decider {
    /// Who it was, without the words.
    pub(crate) fn by(&self) -> DecidedBy {
        match self {
            Self::Policy => DecidedBy::Policy,
            Self::Native { mode } => DecidedBy::Native(*mode),
            Self::Fallback { reason, .. } => DecidedBy::Fallback(reason),
            Self::Pin => DecidedBy::Pin,
            Self::Session => DecidedBy::Session,
            Self::Plan => DecidedBy::Plan,
        }
    }

    /// The reason of a fallback, when it was one.
    #[must_use]
    pub fn fallback(&self) -> Option<&'static str> {
        match self {
            Self::Fallback { reason, .. } => Some(reason),
            _ => None,
        }
    }

    /// Stable metric label.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Native { .. } => "native",
            Self::Fallback { .. } => "fallback",
            Self::Pin => "pin",
            Self::Session => "session",
            Self::Plan => "plan",
        }
    }
}

fn as_micros<S: serde::Serializer>(took: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(took.as_secs_f64() * 1e6)
}
