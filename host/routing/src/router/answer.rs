//! Answers of the router: a booked worker, a preview, or an error.

use pointsman_workers::{Booking, Candidate, Leg, Pause, WorkerId};
use prefix_index::ProvisionalRecord;

use crate::{
    config::RouterConfig, cost::CostTerms, policy::ShedReason, query::CandidateId, receipt::Receipt,
};

/// The choice that routing would make now, with the terms of the native cost.
#[derive(Debug)]
pub struct RoutePreview {
    /// The chosen worker and rank.
    pub candidate: Candidate,
    /// Explains the choice.
    pub receipt: Receipt,
    /// The router configuration of the decision.
    pub config: RouterConfig,
    /// Terms of the native cost of each eligible candidate; only when the query asks for an explanation.
    pub terms: Vec<(CandidateId, CostTerms)>,
}

/// A leg with its worker.
#[derive(Debug)]
pub struct Routed {
    /// The chosen worker and rank.
    pub candidate: Candidate,
    /// The booked load, released when dropped.
    pub booking: Booking,
    /// Says that the prompt is cached at the worker. Withdrawn when dropped, unless it was kept.
    pub record: ProvisionalRecord,
    /// Explains the choice.
    pub receipt: Receipt,
}

/// Why a leg got no worker.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RouteError {
    /// No candidate is eligible.
    #[error("{text}")]
    NoWorker {
        /// The leg.
        leg: Leg,
        /// How many workers there are, and what is wrong with them.
        text: String,
    },
    /// Every candidate that could serve is at its limit.
    #[error("every {0} worker is busy")]
    AllBusy(Leg),
    /// Every candidate that could serve refused a request a moment ago because it has too much to do.
    #[error("every {leg} worker refuses more work for now")]
    AllPaused {
        /// The leg.
        leg: Leg,
        /// Time until the first of them may be asked again.
        pause: Pause,
    },
    /// The pinned worker does not exist.
    #[error("worker {0} is not known")]
    UnknownWorker(WorkerId),
    /// The pinned worker may not serve this leg now.
    #[error("worker {0} is not eligible for this request: {1}")]
    NotEligible(WorkerId, String),
    /// Direct mode without a hint that names a worker.
    #[error("routing is direct and the request names no {0} worker")]
    NoPin(Leg),
    /// The policy refuses the request.
    #[error("{}", .0.reason)]
    Shed(ShedReason),
    /// The policy failed, and the operator chose to refuse such requests.
    #[error("the routing policy failed: {0}")]
    PolicyFailed(&'static str),
}

impl RouteError {
    /// Returns the rest of the pause of the first worker that may be asked again, when all are paused.
    #[must_use]
    pub fn pause(&self) -> Option<Pause> {
        match self {
            Self::AllPaused { pause, .. } => Some(*pause),
            _ => None,
        }
    }

    /// Returns whether workers could serve the leg and only have too much to do now.
    #[must_use]
    pub fn is_back_pressure(&self) -> bool {
        matches!(self, Self::AllBusy(_) | Self::AllPaused { .. })
    }
}
