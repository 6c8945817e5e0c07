//! Plans a request before any leg runs: whether its model can be served, and by one worker or two (B, D4).

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use pointsman_routing::{CandidateId, Plan, Purpose, Query, RoutingRequest, SlotKind};
use pointsman_workers::{Leg, Role, Snapshot};

use super::{availability::is_up, legs::Shape};
use crate::{
    connectors::connector_for,
    openai::{error::ApiError, request::Request},
    state::State,
    telemetry::account::Word,
};

/// How a request is going to be run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestPlan {
    pub(crate) shape: Shape,
    /// Local prefill was decided for this decode candidate.
    pub(crate) planned: Option<CandidateId>,
    /// The decode override's decision, when it was asked.
    pub(crate) word: Option<Word>,
}

/// Decides how many workers run the request. `id` is the request's id when the decision is to be recorded.
///
/// # Errors
/// [`ApiError`] when it cannot be served at all.
pub(crate) fn plan(
    state: &State,
    request: &Arc<Request>,
    subject: &RoutingRequest,
    snapshot: &Snapshot,
    purpose: Purpose,
    id: Option<&str>,
) -> Result<RequestPlan, ApiError> {
    const SINGLE: RequestPlan = RequestPlan { shape: Shape::Aggregated, planned: None, word: None };
    const REMOTE: RequestPlan = RequestPlan { shape: Shape::Remote, planned: None, word: None };
    let model = &request.model;
    let Some(activation) = snapshot.activation(model) else {
        return Err(ApiError::ModelNotFound(model.to_string()));
    };
    // A probe runs on its worker alone [A1]. Requests that generate nothing have no prefill to hand over.
    if request.hints.probe || !request.endpoint.splits() {
        return Ok(SINGLE);
    }
    let up = |leg| snapshot.pool(model, leg).iter().find(|candidate| is_up(candidate));
    let local = !snapshot.pool(model, Leg::Aggregated).is_empty();
    let enforced = state.settings.enforce_disagg;
    let pair = up(Leg::Prefill).zip(up(Leg::Decode));
    if let Some(state) = activation.observe(pair.is_some()) {
        tracing::info!(model = model.as_str(), state = state.as_str(), enforced, "remote prefill changed");
    }
    // No prefill worker was ever seen, or all are down [B1].
    let Some((prefill, _)) = pair else {
        return match (enforced, local) {
            (true, _) => Err(ApiError::PrefillUnavailable),
            (false, true) => Ok(SINGLE),
            (false, false) => {
                Err(ApiError::NoWorker("no worker can prefill for this model; check GET /workers".to_owned()))
            }
        };
    };
    if let Some(reason) = connector_for(prefill.worker.spec()).unsplittable(request) {
        state.metrics.handoff("unsplittable");
        return if local && !enforced {
            Ok(SINGLE)
        } else {
            Err(ApiError::InvalidRequest(format!(
                "{reason}: the request cannot be split over two workers, and none may serve it alone"
            )))
        };
    }
    let question = question(state, request, subject, snapshot, Leg::Decode);
    let planned = state.router.plan(&Query { request_id: id, ..question }, purpose);
    if let Some(reason) = planned.fallback.filter(|_| id.is_some()) {
        state.metrics.fell_back(SlotKind::DecodeOverride, reason);
    }
    let word = Some(Word::of(&planned, question.seed));
    match planned.plan {
        Plan::Remote => Ok(RequestPlan { word, ..REMOTE }),
        Plan::Local if local && !enforced => Ok(RequestPlan { planned: planned.decode, word, ..SINGLE }),
        Plan::Local => {
            state.metrics.handoff("local_refused");
            Ok(RequestPlan { word, ..REMOTE })
        }
        Plan::Shed(shed) => Err(ApiError::Shed(shed)),
    }
}

/// Builds the query for the first attempt of a leg, with new randomness and the current time. Its decision is
/// not recorded.
pub(crate) fn question<'a>(
    state: &State,
    request: &'a Request,
    subject: &'a RoutingRequest,
    snapshot: &'a Snapshot,
    leg: Leg,
) -> Query<'a> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let pin = request.hints.pinned(leg);
    // A probe runs on its worker in that worker's own role.
    let probed = pin.filter(|_| request.hints.probe).and_then(|(worker, _)| snapshot.get(worker));
    let affinity = subject.session_hash.filter(|_| state.settings.affinity(&request.hints).is_some());
    Query {
        snapshot,
        model: &request.model,
        leg: probed.map_or(leg, |worker| own_leg(worker.spec().role)),
        attempt: 0,
        request: subject,
        pin,
        session: affinity.and_then(|session| state.sessions.get(session, leg)),
        planned: None,
        tried: &[],
        other_leg: None,
        explain: false,
        probe: request.hints.probe,
        seed: rand::random(),
        now_us: u64::try_from(now.as_micros()).unwrap_or(u64::MAX),
        request_id: None,
    }
}

fn own_leg(role: Role) -> Leg {
    match role {
        Role::Prefill => Leg::Prefill,
        Role::Decode => Leg::Decode,
        Role::Aggregated => Leg::Aggregated,
    }
}
