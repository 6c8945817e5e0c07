//! The receipt of one decision: who decided, among how many candidates, why, and at what cost.

use std::sync::Arc;

use pointsman_workers::{DpRank, Leg, ModelName, WorkerId};
use serde::Serialize;
use tokio::time::Duration;

use crate::{
    ids::{DecisionId, Generation},
    leg_run::LegRun,
    outcome::ObservedOutcome,
    policy::{Digest, Failure, ShedReason},
    query::CandidateId,
    slot::{Lane, NativeMode, ProgramSummary, SlotKind},
};

/// Policy, hint, session or fallback that made a decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum Decider {
    /// The policy in the slot.
    Policy,
    /// The native selector in the slot.
    Native {
        /// Mode of the native selector.
        mode: NativeMode,
    },
    /// The fallback, because the policy gave no usable answer.
    Fallback {
        /// Stable label: `abstain`, `breaker_open`, `committed` (a refusal after the prefill), or the kind of
        /// a failure.
        reason: &'static str,
        /// The failure's message.
        detail: String,
    },
    /// A hint of the request.
    Pin,
    /// The binding of the request's session.
    Session,
    /// The decode override, which previewed this worker for local prefill (D4).
    Plan,
}

/// The answer of the slot's shadow, compared with the decision that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ShadowResult {
    /// The shadow's generation.
    pub generation: Generation,
    /// Kind of the answer.
    #[serde(flatten)]
    pub answer: ShadowAnswer,
    /// The candidate that the shadow chose; `None` if it chose none, or is a decode override.
    pub choice: Option<CandidateId>,
    /// For a decode override: `remote`, `local` or `shed`; `None` if the shadow failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<&'static str>,
    /// Whether the request went to that candidate, or that plan is in force.
    pub agrees: bool,
    /// Cached prefix blocks at that candidate (device, host, disk); `None`: they were not looked up.
    pub cached_blocks: Option<[u32; 3]>,
}

/// Kind of a shadow's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum ShadowAnswer {
    /// It chose a candidate, or for a decode override a plan.
    Chose,
    /// It had no opinion.
    Abstained,
    /// Its filters dropped every candidate, so that it would have refused the request.
    NobodyLeft,
    /// It would have refused the request.
    Refused {
        /// HTTP status.
        status: u16,
        /// The policy's reason.
        detail: Arc<str>,
    },
    /// Its call failed.
    Failed {
        /// Kind of the failure.
        kind: &'static str,
        /// The failure's message.
        detail: Arc<str>,
    },
}

/// A decision by which a slot refused a request.
#[derive(Clone, Debug)]
pub struct RefusedDecision {
    /// The id of the decision's record; `None`: the decision is not recorded.
    pub id: Option<DecisionId>,
    /// The program of the generation that refused.
    pub program: Arc<ProgramSummary>,
    /// Stable label: `shed`, `policy_failed`, `nobody_left` or `no_pin`.
    pub code: &'static str,
}

/// Explains one decision. Holds no prompt text.
#[derive(Clone, Debug, Serialize)]
pub struct Receipt {
    /// The id of the decision's record; `None`: the decision is not recorded.
    pub id: Option<DecisionId>,
    /// The leg routed.
    pub leg: Leg,
    /// 0 for the leg's first try.
    pub attempt: u32,
    /// The slot.
    pub slot: SlotKind,
    /// Model of the slot; `None`: the slot of all models.
    pub slot_model: Option<ModelName>,
    /// The generation that decided.
    pub generation: Generation,
    /// The generation's lane: active or canary.
    #[serde(rename = "mode")]
    pub lane: Lane,
    /// The shadow's choice, when there was one.
    pub shadow: Option<ShadowResult>,
    /// The shadow's program, when there was one.
    #[serde(skip)]
    pub shadow_program: Option<Arc<ProgramSummary>>,
    /// The generation's program.
    #[serde(skip)]
    pub program: Arc<ProgramSummary>,
    /// Name of the policy that ranks, when the slot has one.
    pub policy: Option<Arc<str>>,
    /// Digest of the policy that ranks, when the slot has one.
    pub digest: Option<Digest>,
    /// Digest of that policy's settings, when it has any.
    pub settings_digest: Option<Digest>,
    /// Policy, hint, session or fallback that decided.
    pub decider: Decider,
    /// Whether a policy of the generation, or of the slot's shadow, observes the outcome.
    #[serde(skip)]
    pub learns: bool,
    /// Whether the stream left the worker, because that drains or the stream paused.
    #[serde(skip)]
    pub moved: bool,
    /// Whether the leg did its part of a stream that moved later: that it is decided again is not a failure.
    #[serde(skip)]
    pub served_until_move: bool,
    /// The run of the leg, once it was sent.
    #[serde(skip)]
    pub run: Option<LegRun>,
    /// The policy's explanation.
    pub reason: Option<String>,
    /// The worker chosen.
    pub worker: WorkerId,
    /// Its rank.
    pub rank: DpRank,
    /// Number of eligible candidates.
    pub candidates: u32,
    /// Cached prefix blocks at the chosen candidate (device, host, disk); zeros when they were not looked up.
    pub cached_blocks: [u32; 3],
    /// Whether the cached blocks were looked up.
    pub cached_known: bool,
    /// Whether the answer that the client gets says how many tokens were cached at this worker. SGLang's
    /// decode workers report their own cache.
    #[serde(skip)]
    pub cached_is_reported: bool,
    /// Tokens in a block of the chosen worker's engine, if known.
    #[serde(skip)]
    pub engine_block: Option<u32>,
    /// `(worker, rank, cost)` of each ranked candidate; only when the request asked for an explanation.
    pub costs: Vec<(WorkerId, DpRank, f32)>,
    /// The seed of the decision.
    pub seed: u64,
    /// Microseconds since the Unix epoch.
    pub now_us: u64,
    /// Duration of the whole decision.
    #[serde(serialize_with = "as_micros")]
    pub took: Duration,
}

impl Receipt {
    /// Returns the decisions of a request, each with whether its leg was decided again later because it
    /// failed. A request whose planned worker or pair failed may go on with other legs.
    pub fn with_retried(receipts: &[Self]) -> impl Iterator<Item = (&Self, bool)> {
        receipts.iter().enumerate().map(|(place, receipt)| {
            let mut later = receipts.iter().skip(place + 1);
            let is_alone = |receipt: &Self| receipt.leg == Leg::Aggregated;
            let replaces = |other: &Self| other.leg == receipt.leg || is_alone(other) != is_alone(receipt);
            (receipt, !receipt.served_until_move && later.any(replaces))
        })
    }

    /// Returns what the policies that learn observe of this decision. Status, times and token counts are
    /// those of the request, and remain to be filled in.
    #[must_use]
    pub fn outcome(&self, retried: bool) -> ObservedOutcome {
        ObservedOutcome {
            decision: self.id,
            seed: self.seed,
            leg: self.leg,
            attempt: self.attempt,
            worker: self.worker,
            rank: self.rank,
            by_policy: self.decider == Decider::Policy,
            retried,
            status: 0,
            ttft: None,
            itl: None,
            duration: Duration::ZERO,
            prompt_tokens: 0,
            output_tokens: 0,
            cached_predicted: None,
            cached_reported: None,
        }
    }

    /// Returns the program of the shadow if its call failed.
    pub(crate) fn failed_shadow(&self) -> Option<&Arc<ProgramSummary>> {
        let has_failed = |shadow: &ShadowResult| matches!(shadow.answer, ShadowAnswer::Failed { .. });
        self.shadow_program.as_ref().filter(|_| self.shadow.as_ref().is_some_and(has_failed))
    }

    /// Returns the cheapest of the candidates that were not chosen, when costs are known.
    #[must_use]
    pub fn runner_up(&self) -> Option<(WorkerId, DpRank, f32)> {
        let others =
            self.costs.iter().filter(|(worker, rank, _)| (*worker, *rank) != (self.worker, self.rank));
        others.min_by(|a, b| a.2.total_cmp(&b.2)).copied()
    }
}

impl ShadowAnswer {
    /// Stable label, as in receipts.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Chose => "chose",
            Self::Abstained => "abstained",
            Self::NobodyLeft => "nobody_left",
            Self::Refused { .. } => "refused",
            Self::Failed { .. } => "failed",
        }
    }

    /// Returns whether the request would have been refused.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::NobodyLeft | Self::Refused { .. })
    }

    /// Returns whether the native fallback would have decided.
    #[must_use]
    pub fn is_fallback(&self) -> bool {
        matches!(self, Self::Abstained | Self::Failed { .. })
    }

    pub(crate) fn failed(failure: &Failure) -> Self {
        Self::Failed { kind: failure.kind(), detail: failure.to_string().into() }
    }

    pub(crate) fn refused(shed: &ShedReason) -> Self {
        Self::Refused { status: shed.status, detail: shed.reason.as_str().into() }
    }
}

impl Decider {
    /// The reason of the fallback, when the fallback decided.
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
