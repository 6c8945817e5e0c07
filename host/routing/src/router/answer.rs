//! What the router answers: a booked worker, what would be chosen, or why nobody is.

use pointsman_workers::{Booking, Candidate, Leg, WorkerId};

use crate::{
    config::RouterConfig, cost::CostTerms, policy::ShedReason, query::CandidateId, receipt::Receipt,
};

/// What would be chosen now, and what the native cost is made of.
#[derive(Debug)]
pub struct RoutePreview {
    /// The choice.
    pub candidate: Candidate,
    /// Why.
    pub receipt: Receipt,
    /// The config in force.
    pub config: RouterConfig,
    /// Terms of the native cost of each eligible candidate; only when the query asked to be explained.
    pub terms: Vec<(CandidateId, CostTerms)>,
}

/// A leg with its worker. Dropping the booking frees the worker.
#[derive(Debug)]
pub struct Routed {
    /// The chosen worker and rank.
    pub candidate: Candidate,
    /// Its load, until dropped.
    pub booking: Booking,
    /// Why.
    pub receipt: Receipt,
}

/// Why a leg got no worker.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RouteError {
    /// No candidate is eligible.
    #[error("no {leg} worker is eligible{detail}")]
    NoWorker {
        /// The leg.
        leg: Leg,
        /// Why the candidates are not, for the operator.
        detail: String,
    },
    /// Every candidate that could serve is at its limit.
    #[error("every {0} worker is busy")]
    AllBusy(Leg),
    /// The pinned worker does not exist.
    #[error("worker {0} is not known")]
    UnknownWorker(WorkerId),
    /// The pinned worker may not serve this leg now.
    #[error("worker {0} is not eligible for this request: {1}")]
    NotEligible(WorkerId, String),
    /// Direct mode, and no hint names a worker.
    #[error("routing is direct and the request names no {0} worker")]
    NoPin(Leg),
    /// The policy refuses the request.
    #[error("{}", .0.reason)]
    Shed(ShedReason),
    /// The policy failed and the operator wants such requests refused.
    #[error("the routing policy failed: {0}")]
    PolicyFailed(&'static str),
}
