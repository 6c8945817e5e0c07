//! Finds workers for both legs of the rest of a stream, before any leg is routed: while the worker that
//! drains still serves it, so that a stream whose rest no other worker takes stays where it is (I15); or
//! while the stream is paused, so that its rest books nothing before its turn has come (L5).

use pointsman_orchestration::{HandoffKind, Shape};
use pointsman_routing::{CandidateId, Pairing, Query, ReservedPlace, RouteError, Routed};
use pointsman_workers::Leg;

use crate::orchestrate::{
    Drive,
    failure::quarantine::would_be_quarantined,
    id_of, plan,
    route::{Found, parking},
};

/// Workers that are booked for the legs of a rest.
#[derive(Default)]
pub(crate) struct PlannedMove {
    prefill: Option<Routed>,
    answering: Option<Routed>,
    /// The place that is kept for decode while prefill runs.
    place: Option<ReservedPlace>,
}

impl Drive {
    /// Returns whether another worker takes each leg of the rest now. It books none.
    pub(crate) fn others_are_free(&mut self) -> bool {
        // Workers joined and left since the request began.
        self.snapshot = self.state.registry.snapshot();
        let Some(tried) = self.tried_and_left() else { return false };
        if self.legs.follows_plan() {
            self.legs.note_pair(self.pair_takes_over(&tried));
        }
        let is_refused = would_be_quarantined(&self.state, &self.request).is_some();
        !is_refused && self.legs_of_rest().iter().all(|leg| self.is_free(*leg, &tried))
    }

    /// Finds and books workers for the rest of the answer. Returns whether there are some.
    pub(crate) fn plan_move(&mut self) -> bool {
        self.tried_and_left().is_some_and(|tried| self.book_both(&tried).is_ok())
    }

    fn book_both(&mut self, tried: &[CandidateId]) -> Result<(), RouteError> {
        self.planned_move = Some(Box::new(self.find_both(tried)?));
        Ok(())
    }

    /// Finds and books workers for the rest of a stream that is paused, which may go back to the worker that
    /// it left. Returns whether it has to wait: the workers that could serve it are busy.
    pub(super) fn rest_has_to_wait(&mut self) -> bool {
        // Workers joined and left while the stream was paused.
        self.snapshot = self.state.registry.snapshot();
        let tried = self.attempts.tried().to_vec();
        let free = self.legs_of_rest().iter().try_for_each(|leg| self.preview(*leg, &tried));
        free.and_then(|()| self.book_both(&tried)).is_err_and(|error| error.is_back_pressure())
    }

    /// Ends the plan: from now on, legs are routed as always.
    pub(crate) fn end_plan(&mut self) {
        self.planned_move = None;
    }

    /// Takes what is planned for the leg that is routed now.
    pub(crate) fn take_planned(&mut self, leg: Leg) -> Option<Found> {
        let reserves = self.legs.reserves();
        let planned = self.planned_move.as_mut()?;
        match leg {
            Leg::Prefill => planned.prefill.take().map(Found::Worker),
            Leg::Decode if reserves => Some(Found::Place(planned.place.take())),
            Leg::Decode | Leg::Aggregated => planned.answering.take().map(Found::Worker),
        }
    }

    fn find_both(&self, tried: &[CandidateId]) -> Result<PlannedMove, RouteError> {
        let shape = self.legs.shape_of_rest();
        let book = |leg, other| self.book_worker(leg, &self.elsewhere(leg, other, tried), &mut None);
        let id = |routed: &Routed| Some(id_of(&routed.candidate));
        let mut planned = PlannedMove::default();
        if shape == Shape::Aggregated {
            planned.answering = Some(book(Leg::Aggregated, None)?);
            return Ok(planned);
        }
        if self.legs.first_leg_of(shape) == Leg::Decode {
            let decode = book(Leg::Decode, None)?;
            planned.prefill = Some(book(Leg::Prefill, id(&decode))?);
            planned.answering = Some(decode);
            return Ok(planned);
        }
        let prefill = book(Leg::Prefill, None)?;
        let handoff = self.executor.traits(&prefill.candidate).map(|traits| traits.handoff);
        if handoff == Some(HandoffKind::Completed) {
            let query = self.elsewhere(Leg::Decode, id(&prefill), tried);
            planned.place = self.state.router.reserve(&query, &mut None)?;
        } else {
            planned.answering = Some(book(Leg::Decode, id(&prefill))?);
        }
        planned.prefill = Some(prefill);
        Ok(planned)
    }

    /// Workers that were tried, and the one that the stream leaves.
    fn tried_and_left(&self) -> Option<Vec<CandidateId>> {
        let leaves = self.candidate(self.answering())?;
        let mut tried = self.attempts.tried().to_vec();
        tried.extend(leaves.worker.candidates().iter().map(id_of));
        Some(tried)
    }

    fn legs_of_rest(&self) -> &'static [Leg] {
        match self.legs.shape_of_rest() {
            Shape::Aggregated => &[Leg::Aggregated],
            Shape::Remote => &[Leg::Prefill, Leg::Decode],
        }
    }

    /// Whether another worker takes a leg at once. A worker that fails is not a reason to leave one that
    /// works, and requests that wait for workers come first (L3).
    pub(crate) fn is_free(&self, leg: Leg, tried: &[CandidateId]) -> bool {
        let (state, request) = (&self.state, &self.routing_request);
        let admission_request = parking(state, &self.request, request, &self.account, leg).admission_request;
        let is_well = || {
            let mut others = self.snapshot.pool(&self.request.model, leg).iter();
            others.any(|candidate| !tried.contains(&id_of(candidate)) && candidate.ineligible().is_none())
        };
        !state.queue.has_line(&admission_request, leg) && is_well() && self.preview(leg, tried).is_ok()
    }

    /// Asks for a leg's worker without a record: the legs are booked when all of them have one.
    fn preview(&self, leg: Leg, tried: &[CandidateId]) -> Result<(), RouteError> {
        let question = Query { request_id: None, ..self.elsewhere(leg, None, tried) };
        self.state.router.reserve(&question, &mut None).map(drop)
    }

    /// The query for another worker. `other`: the worker of the other leg, if it is known.
    fn elsewhere<'a>(&'a self, leg: Leg, other: Option<CandidateId>, tried: &'a [CandidateId]) -> Query<'a> {
        let question = plan::question(&self.state, &self.request, &self.routing_request, &self.snapshot, leg);
        let is_first = leg == Leg::Decode && other.is_none();
        Query {
            pairing: Pairing { is_first, ..question.pairing },
            attempt: self.attempts.earlier() + 1,
            explain: self.account.is_traced(),
            other_leg: other,
            tried,
            request_id: Some(&self.account.request_id),
            ..question
        }
    }
}
