//! Requests whose engine falls asleep before anything of the answer came. It keeps them until it is woken, so
//! they leave it for a worker that may be chosen now (B8.19).

use std::{pin::Pin, sync::Arc};

use pointsman_routing::CandidateId;
use pointsman_workers::{Candidate, Leg, Worker};
use tokio::time::{Duration, timeout};

use super::{Drive, id_of};
use crate::{
    openai::{background::is_in_background, request::Request},
    state::State,
    upstream::CallError,
};

/// How often a request whose engine sleeps looks for another worker.
const SEARCH_INTERVAL: Duration = Duration::from_millis(500);

/// Finds out whether another worker may be chosen for a leg.
pub(super) struct OtherWorkers {
    state: Arc<State>,
    request: Arc<Request>,
    leg: Leg,
    /// The workers that are not tried again.
    tried: Vec<CandidateId>,
}

impl Drive {
    /// Returns where a leg may go if its engine falls asleep; `None` if it has to stay.
    pub(super) fn other_workers(&self, leg: Leg) -> Option<OtherWorkers> {
        let is_bound = self.request.hints.pinned(leg).is_some() || is_in_background(&self.request);
        let may_leave = self.executor.calls() && self.legs.has_retries() && !is_bound;
        may_leave.then(|| OtherWorkers {
            state: self.state.clone(),
            request: self.request.clone(),
            leg,
            tried: self.attempts.tried().to_vec(),
        })
    }

    /// Returns whether the engine of a leg sleeps, and another worker may be chosen for the leg.
    pub(super) fn may_leave_sleeper(&self, leg: Leg) -> bool {
        let asleep = self.candidate(leg).filter(|candidate| candidate.worker.is_asleep());
        asleep.is_some_and(|asleep| {
            self.other_workers(leg).is_some_and(|others| others.have_room(&asleep.worker))
        })
    }

    /// If the engine of a leg fell asleep, takes the workers that joined since the request was routed, unless
    /// the other leg's worker left.
    pub(super) fn look_for_new_workers(&mut self, leg: Leg, error: &CallError) {
        if !matches!(error, CallError::Asleep) {
            return;
        }
        let now = self.state.registry.snapshot();
        let partner = leg.partner().and_then(|partner| self.candidate(partner));
        if partner.is_none_or(|partner| now.get(partner.worker_id()).is_some()) {
            self.snapshot = now;
        }
    }
}

impl OtherWorkers {
    /// Returns whether one of them may be chosen now.
    fn have_room(&self, asleep: &Worker) -> bool {
        let may_be_chosen = |other: &Candidate| {
            let is_untried = other.worker_id() != asleep.id() && !self.tried.contains(&id_of(other));
            is_untried && other.ineligible().is_none()
        };
        self.state.registry.snapshot().pool(&self.request.model, self.leg).iter().any(may_be_chosen)
    }
}

/// Waits for a call, which ends when health checks find that the worker does not answer at all, or when it
/// sleeps and one of `others` may be chosen. The call is pinned where it was made: passed by value, each
/// function would have room for it twice.
pub(super) async fn unless_lost<T>(
    worker: &Worker,
    others: Option<OtherWorkers>,
    call: Pin<&mut impl Future<Output = Result<T, CallError>>>,
) -> Result<T, CallError> {
    tokio::select! {
        biased;
        outcome = call => outcome,
        error = lost(worker, others) => Err(error),
    }
}

async fn lost(worker: &Worker, others: Option<OtherWorkers>) -> CallError {
    loop {
        let stops_serving = worker.stops_serving();
        match &others {
            Some(others) if worker.is_asleep() => {
                if others.have_room(worker) {
                    return CallError::Asleep;
                }
                let _ = timeout(SEARCH_INTERVAL, stops_serving).await;
            }
            _ => stops_serving.await,
        }
        if worker.is_down() {
            return CallError::Down;
        }
    }
}
