//! Whether a request runs on one worker or on two, and requests whose decode worker is planned to prefill the
//! prompt itself, as in the gateway (D4).

use pointsman_orchestration::{
    Event as LegEvent, Queued, Shape, Splittable, has_pair_without, pair_may_take_over,
};
use pointsman_routing::{CandidateId, Plan, Purpose, RoutingRequest};
use pointsman_workers::{Leg, PerLeg, Snapshot, WorkerId};
use rand::RngExt as _;

use super::{
    Lab,
    flight::{Flight, Override},
};
use crate::outcome::Ended;

/// Whether a request runs on one worker or on two.
pub(super) struct RequestPlan {
    pub(super) shape: Shape,
    pub(super) planned: Option<CandidateId>,
    pub(super) decode_override: Option<Override>,
    pub(super) fell_back: bool,
}

/// Returns the workers that a request does not allow.
fn excluded(snapshot: &Snapshot, request: &RoutingRequest) -> Vec<WorkerId> {
    let Some(allowed) = &request.allowed_workers else { return Vec::new() };
    snapshot.workers().iter().map(|worker| worker.id()).filter(|id| !allowed.contains(id)).collect()
}

impl Lab<'_> {
    /// Chooses between one worker and two.
    pub(super) fn plan_request(
        &mut self,
        number: usize,
        request: &RoutingRequest,
    ) -> Result<RequestPlan, Ended> {
        let snapshot = &self.gateways.of(number).snapshot;
        let excluded = excluded(snapshot, request);
        let aggregated = snapshot.pool(&self.model, Leg::Aggregated);
        let local = aggregated.iter().any(|candidate| !excluded.contains(&candidate.worker_id()));
        let enforce_disagg = self.split.enforce_disagg;
        let splittable = Splittable { enforce_disagg, pins_prefill: false, local };
        let plan = |shape| RequestPlan { shape, planned: None, decode_override: None, fell_back: false };
        if !has_pair_without(snapshot, &self.model, &excluded) {
            return splittable.without_pair().map(plan).map_err(|_| Ended::NoWorker);
        }
        if let Some(place) = self.assigned.get(number) {
            return Ok(plan(if place.is_local() { Shape::Aggregated } else { Shape::Remote }));
        }
        let seed = self.rng.random();
        let query = self.query(number, request, Leg::Decode, seed);
        let router = &self.gateways.of(number).router;
        let decided = router.plan(&query, Purpose::Route);
        let is_local = matches!(decided.plan, Plan::Local) && splittable.may_run_locally();
        if let Some(reason) = decided.fallback {
            *self.fallbacks.entry(reason).or_insert(0) += 1;
        }
        if matches!(decided.plan, Plan::Shed(_)) {
            return Err(Ended::Shed);
        }
        let shape = if is_local { Shape::Aggregated } else { Shape::Remote };
        Ok(RequestPlan {
            planned: decided.decode.filter(|_| shape == Shape::Aggregated),
            decode_override: decided.learns.then_some(Override {
                lane: decided.lane,
                seed,
                by_policy: decided.fallback.is_none(),
            }),
            fell_back: decided.fallback.is_some(),
            ..plan(shape)
        })
    }

    /// Returns whether the plan of a request that may be routed holds, and has the slot `prefill` count it.
    /// After a wait in the queue, the plan is made anew.
    pub(super) fn plan_holds(&mut self, number: usize, leg: Leg, has_waited: bool) -> bool {
        let is_planned = |flight: &Flight| flight.planned_for(leg).is_some();
        if !self.flights.get(&number).is_some_and(is_planned) {
            return true;
        }
        let seed = self.rng.random();
        let Some(flight) = self.flights.get(&number) else { return true };
        let query = self.query(number, &flight.request, Leg::Decode, seed);
        let router = &self.gateways.of(number).router;
        let decided = has_waited.then(|| router.plan(&query, Purpose::Preview));
        let refuses = router.prefill_refuses(&query, Purpose::Route);
        if let (Some(decided), Some(flight)) = (decided, self.flights.get_mut(&number)) {
            flight.planned = decided.decode.filter(|_| matches!(decided.plan, Plan::Local));
        }
        !refuses && self.flights.get(&number).is_some_and(is_planned)
    }

    /// Continues without the planned worker, which cannot take the request now.
    pub(super) fn plan_refused(&mut self, number: usize, place: Option<Queued>) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        flight.attempts.leave_plan(place);
        let snapshot = &self.gateways.of(number).snapshot;
        flight.legs.note_pair(pair_may_take_over(snapshot, &self.model, None, &[]));
        self.report(number, LegEvent::PlanRefused);
    }

    /// Notes that the planned worker failed the request.
    pub(super) fn note_failed_plan(&mut self, number: usize, leg: Leg) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        let Some((worker, _)) = flight.planned_for(leg) else { return };
        let (snapshot, tried) = (&self.gateways.of(number).snapshot, flight.attempts.tried());
        let takes_over = pair_may_take_over(snapshot, &self.model, None, tried);
        flight.legs.note_pair(takes_over);
        if takes_over {
            flight.attempts.suspect(PerLeg { prefill: None, answering: Some(worker) }, []);
        }
    }
}
