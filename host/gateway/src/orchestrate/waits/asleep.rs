//! Requests whose engine falls asleep before anything of the answer came. It keeps them until it is woken, so
//! they leave it for a worker that may be chosen now (B8.19).

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
};

use pointsman_routing::{CandidateId, Committed, Pairing, Query, ReservedPlace, RoutingRequest};
use pointsman_workers::{Leg, Snapshot, Worker, WorkerId};
use tokio::time::{Duration, timeout};

use crate::{
    openai::{request::Request, responses::is_in_background},
    orchestrate::{Drive, plan},
    state::State,
    upstream::CallError,
};

/// How often a request whose engine sleeps looks for another worker. It begins at a random moment of this
/// time, so that requests which left before are booked.
const SEARCH_INTERVAL: Duration = Duration::from_millis(500);

/// Finds out whether another worker takes a leg, and keeps a place on it until the leg is routed.
pub(crate) struct OtherWorkers {
    state: Arc<State>,
    request: Arc<Request>,
    conditions: RoutingRequest,
    /// The workers when the leg was sent.
    snapshot: Arc<Snapshot>,
    leg: Leg,
    /// The other leg's worker, which the leg has to fit.
    partner: Option<CandidateId>,
    /// The handoff that the leg consumes.
    committed: Option<Committed>,
    /// The workers that are not tried again.
    tried: Vec<CandidateId>,
    place: OnceLock<ReservedPlace>,
}

impl Drive {
    /// Returns where a leg may go if its engine falls asleep; `None` if it has to stay, or if its engine
    /// cannot be put to sleep: then the leg costs nothing more.
    pub(crate) fn other_workers(&self, leg: Leg) -> Option<Arc<OtherWorkers>> {
        self.candidate(leg).filter(|candidate| candidate.worker.may_sleep())?;
        let is_bound = self.request.hints.pinned(leg).is_some() || is_in_background(&self.request);
        let may_leave = self.executor.calls() && self.legs.has_retries() && !is_bound;
        let committed = || self.attempts.committed(self.legs.only_consumes());
        may_leave.then(|| {
            Arc::new(OtherWorkers {
                state: self.state.clone(),
                request: self.request.clone(),
                conditions: self.routing_request.conditions(),
                snapshot: self.snapshot.clone(),
                leg,
                partner: self.other_leg(leg),
                committed: (leg == Leg::Decode).then(committed).flatten(),
                tried: self.attempts.tried().to_vec(),
                place: OnceLock::new(),
            })
        })
    }

    /// Returns whether the engine of a leg sleeps, and another worker takes the leg at once.
    pub(crate) fn may_leave_sleeper(&self, leg: Leg) -> bool {
        let is_asleep = self.candidate(leg).is_some_and(|candidate| candidate.worker.is_asleep());
        let others = self.others[leg].as_ref().filter(|_| is_asleep && self.legs.has_retries());
        others.is_some_and(|others| others.have_room())
    }

    /// If the engine of a leg fell asleep, takes the workers that joined since the request was routed, unless
    /// the other leg's worker left.
    pub(crate) fn look_for_new_workers(&mut self, leg: Leg, error: &CallError) {
        if matches!(error, CallError::Asleep) {
            self.snapshot = workers_now(&self.state, &self.snapshot, self.other_leg(leg));
        }
    }

    /// The worker on which a place is kept for a leg.
    pub(crate) fn reserved(&self, leg: Leg) -> Option<WorkerId> {
        let kept = self.others[leg].as_ref().and_then(|others| others.place.get());
        let of_decode = self.place.as_ref().filter(|_| leg == Leg::Decode);
        of_decode.or(kept).map(ReservedPlace::worker)
    }
}

/// The workers of the registry, or those of `known` if the worker of the other leg left since.
fn workers_now(state: &State, known: &Arc<Snapshot>, partner: Option<CandidateId>) -> Arc<Snapshot> {
    let now = state.registry.snapshot();
    if partner.is_none_or(|(partner, _)| now.get(partner).is_some()) { now } else { known.clone() }
}

impl OtherWorkers {
    /// Returns whether one of them takes the leg at once. If it has a limit, a place is kept.
    fn have_room(&self) -> bool {
        let snapshot = workers_now(&self.state, &self.snapshot, self.partner);
        let question = plan::question(&self.state, &self.request, &self.conditions, &snapshot, self.leg);
        let is_first = self.leg == Leg::Decode && self.partner.is_none();
        let query = Query {
            pairing: Pairing { is_first, committed: self.committed, ..question.pairing },
            other_leg: self.partner,
            tried: &self.tried,
            ..question
        };
        let found = self.state.router.reserve_free(&query);
        found.map(|place| place.map(|place| self.place.set(place))).is_ok()
    }
}

/// Waits for a call, which ends when health checks find that the worker does not answer at all, or when it
/// sleeps and one of `others` takes the leg. The call is pinned where it was made: passed by value, each
/// function would have room for it twice.
pub(crate) async fn unless_lost<T>(
    worker: &Worker,
    others: Option<Arc<OtherWorkers>>,
    call: Pin<&mut impl Future<Output = Result<T, CallError>>>,
) -> Result<T, CallError> {
    tokio::select! {
        biased;
        outcome = call => outcome,
        error = lost(worker, others) => Err(error),
    }
}

async fn lost(worker: &Worker, others: Option<Arc<OtherWorkers>>) -> CallError {
    let mut pause = SEARCH_INTERVAL.mul_f64(rand::random());
    loop {
        let stops_serving = worker.stops_serving();
        match &others {
            Some(others) if worker.is_asleep() => {
                let is_over = timeout(pause, stops_serving).await.is_err();
                if is_over && worker.is_asleep() && others.have_room() {
                    return CallError::Asleep;
                }
                pause = SEARCH_INTERVAL;
            }
            _ => stops_serving.await,
        }
        if worker.is_down() {
            return CallError::Down;
        }
    }
}
