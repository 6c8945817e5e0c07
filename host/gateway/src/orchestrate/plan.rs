//! Plans a request before any leg runs: whether its model can be served, and by one worker or two (B, D4).

use std::sync::Arc;

use pointsman_orchestration::{
    Actions, Legs, NoPair, RetryPolicy, Shape, Splittable, WorkerWait, is_of, is_up, pair_may_take_over,
    pair_that_is_up,
};
use pointsman_routing::{
    CandidateId, Pairing, Plan, Purpose, Query, RoutingRequest, SlotKind, holder_text, no_worker_text,
};
use pointsman_workers::{Candidate, Engine, Leg, ModelName, Role, Snapshot, unix_us};

use super::{
    affinity::cached_media,
    availability::{some_servable_models, use_another, why_no_pair},
};
use crate::{
    connectors::connector_for,
    openai::{
        error::ApiError,
        request::{Endpoint, Request},
        responses::{may_store, needs_one_worker},
    },
    state::State,
    telemetry::account::OverrideRecord,
};

/// How a request will run.
#[derive(Clone, Debug)]
pub(crate) struct RequestPlan {
    pub(crate) shape: Shape,
    /// Local prefill was decided for this decode candidate.
    pub(crate) planned: Option<CandidateId>,
    /// The decode override's decision, when it was asked.
    pub(crate) decode_override: Option<OverrideRecord>,
}

impl RequestPlan {
    /// Returns the legs of the request, and their first actions.
    pub(super) fn legs(&self, policy: RetryPolicy) -> (Legs, Actions) {
        match self.planned {
            Some(_) => Legs::of_local_plan(policy),
            None => Legs::new(self.shape, policy),
        }
    }
}

/// A request that is parsed, measured and planned.
pub(crate) struct PlannedRequest {
    pub(crate) request: Arc<Request>,
    pub(crate) routing_request: RoutingRequest,
    pub(crate) snapshot: Arc<Snapshot>,
    pub(crate) plan: RequestPlan,
    /// The place in the queue of a request that waited for a worker of its model.
    pub(crate) worker_wait: Option<Box<WorkerWait>>,
    /// Whether the client asked for the decisions.
    pub(crate) explain: bool,
}

/// Why a request cannot be served.
#[derive(Debug)]
pub(crate) struct Unplanned {
    pub(crate) error: Box<ApiError>,
    /// The decode override's decision, when that refused the request.
    pub(crate) decode_override: Option<Box<OverrideRecord>>,
}

impl From<ApiError> for Unplanned {
    fn from(error: ApiError) -> Self {
        Self { error: Box::new(error), decode_override: None }
    }
}

impl From<Unplanned> for ApiError {
    fn from(unplanned: Unplanned) -> Self {
        *unplanned.error
    }
}

/// Decides how many workers run the request. `id` is the request's id when the decision is to be recorded.
///
/// # Errors
/// [`Unplanned`] when it cannot be served at all.
pub(crate) fn plan(
    state: &State,
    request: &Arc<Request>,
    routing_request: &RoutingRequest,
    snapshot: &Snapshot,
    purpose: Purpose,
    id: Option<&str>,
) -> Result<RequestPlan, Unplanned> {
    const SINGLE: RequestPlan =
        RequestPlan { shape: Shape::Aggregated, planned: None, decode_override: None };
    let model = &request.model;
    let activation = snapshot.activation(model).ok_or_else(|| unknown_model(state, model, snapshot))?;
    let engine = request.endpoint.engine();
    if !has_engine(snapshot, model, engine) {
        return Err(lacks_engine(request).into());
    }
    // A probe runs on its worker alone [A1]. Workers of any role answer what needs no run of the model.
    if request.hints.probe || request.endpoint.needs_no_model_run() {
        return Ok(SINGLE);
    }
    let local = may_run_locally(request, snapshot);
    let enforced = state.settings.split(model, snapshot).enforce_disagg;
    let splittable =
        Splittable { enforce_disagg: enforced, pins_prefill: request.hints.prefill.is_some(), local };
    if let Some(reason) = why_on_one_worker(request, snapshot, splittable.may_run_locally()) {
        if may_run_on_one_worker(request, splittable) {
            return Ok(SINGLE);
        }
        count_unsplittable(state, purpose);
        return Err(not_split(reason).into());
    }
    let pair = pair_that_is_up(snapshot, model, engine);
    // Pairs of other engines serve other requests for the model.
    if engine.is_none()
        && let Some(state) = activation.observe(pair.is_some())
    {
        tracing::info!(model = model.as_str(), state = state.as_str(), enforced, "remote prefill changed");
    }
    let Some((prefill, _)) = pair else { return plan_without_pair(splittable, model, snapshot) };
    if let Some(reason) = why_unsplittable(request, snapshot, prefill) {
        count_unsplittable(state, purpose);
        return if splittable.may_run_locally() { Ok(SINGLE) } else { Err(not_split(reason).into()) };
    }
    let question = question(state, request, routing_request, snapshot, Leg::Decode);
    let planned = state.router.plan(&Query { request_id: id, ..question }, purpose);
    if let Some(reason) = planned.fallback.filter(|_| id.is_some()) {
        state.metrics.fell_back(SlotKind::DecodeOverride, reason);
    }
    let decode_override = Some(OverrideRecord::new(&planned, question.seed));
    match planned.plan {
        Plan::Shed(shed) => {
            let decode_override = decode_override.map(Box::new);
            Err(Unplanned { error: Box::new(ApiError::Shed(shed)), decode_override })
        }
        Plan::Local if splittable.may_run_locally() => {
            // A plan for a worker counts once it has that worker. A pair refuses what these policies refuse.
            let purpose = if planned.decode.is_some() { Purpose::Preview } else { purpose };
            if state.router.prefill_refuses(&question, purpose) {
                return Ok(RequestPlan { shape: Shape::Remote, planned: None, decode_override });
            }
            Ok(RequestPlan { planned: planned.decode, decode_override, ..SINGLE })
        }
        plan => {
            // An operator or a client that excludes local prefill misses nothing.
            let excluded = splittable.enforce_disagg || splittable.pins_prefill;
            if matches!(plan, Plan::Local) && purpose == Purpose::Route && !excluded {
                state.metrics.handoff("local_refused");
            }
            Ok(RequestPlan { shape: Shape::Remote, planned: None, decode_override })
        }
    }
}

/// Plans a request for whose model no prefill worker was ever seen, or all are down [B1].
fn plan_without_pair(
    splittable: Splittable,
    model: &ModelName,
    snapshot: &Snapshot,
) -> Result<RequestPlan, Unplanned> {
    match splittable.without_pair() {
        Ok(shape) => Ok(RequestPlan { shape, planned: None, decode_override: None }),
        Err(NoPair::Enforced) => Err(ApiError::PrefillUnavailable.into()),
        Err(NoPair::NoWorker) => Err(ApiError::NoWorker(no_pair(model, snapshot)).into()),
    }
}

/// Returns whether a pair may run a request that its planned worker does not run. `tried`: workers that
/// failed it.
pub(super) fn pair_takes_over(request: &Request, snapshot: &Snapshot, tried: &[CandidateId]) -> bool {
    let (model, engine) = (&request.model, request.endpoint.engine());
    let pair = pair_that_is_up(snapshot, model, engine);
    pair.is_some_and(|(prefill, _)| why_unsplittable(request, snapshot, prefill).is_none())
        && why_on_one_worker(request, snapshot, may_run_locally(request, snapshot)).is_none()
        && pair_may_take_over(snapshot, model, engine, tried)
}

/// The error of a request that cannot be split, for a reason, and that no single worker may serve.
fn not_split(reason: &str) -> ApiError {
    ApiError::InvalidRequest(format!(
        "{reason}: the request cannot be split over two workers, and no single worker may serve it"
    ))
}

fn count_unsplittable(state: &State, purpose: Purpose) {
    if purpose == Purpose::Route {
        state.metrics.handoff("unsplittable");
    }
}

/// Returns whether a request that only one worker can run may run there. One that generates no text has no
/// prefill leg that could be enforced or pinned.
fn may_run_on_one_worker(request: &Request, splittable: Splittable) -> bool {
    if request.endpoint.generates_text() { splittable.may_run_locally() } else { splittable.local }
}

/// Returns why the request runs on one worker, even if a pair is up: its endpoint is not split, or only
/// with some engines. `local`: a single worker may serve it.
fn why_on_one_worker(request: &Request, snapshot: &Snapshot, local: bool) -> Option<&'static str> {
    let endpoint = request.endpoint;
    if endpoint.splits() {
        return None;
    }
    if endpoint != Endpoint::Responses {
        return Some(endpoint.path());
    }
    if needs_one_worker(request) {
        return Some("a response in the background, after another one, or with tools of the engine");
    }
    let (prefill, _) = pair_that_is_up(snapshot, &request.model, None)?;
    let connector = connector_for(prefill.worker.spec());
    let is_stored = connector.decode_stores_responses() || !may_store(request);
    (!connector.hands_over_responses() || (local && !is_stored)).then_some(endpoint.path())
}

/// Returns why the request cannot be split over the workers of `prefill` and its pool.
fn why_unsplittable(request: &Request, snapshot: &Snapshot, prefill: &Candidate) -> Option<&'static str> {
    let connector = connector_for(prefill.worker.spec());
    let [prefill, decode, _] = snapshot.pools(&request.model);
    connector.unsplittable(request).or_else(|| connector.refused_by(request, [prefill, decode]))
}

/// The error while the gateway knows no worker at all, so that no model can be called unknown.
pub(crate) fn no_worker_registered(state: &State) -> ApiError {
    let why = match state.fleet.never_ready() {
        0 if !state.fleet.reads_all() => ": the gateway cannot read its sources of workers".to_owned(),
        0 => "; the operator adds one with `[[workers]]`, a source of `[discovery]` or `PUT /workers/ID`"
            .to_owned(),
        1 => ": discovery lists one that is not ready, and that joins when it is".to_owned(),
        listed => format!(": discovery lists {listed} that are not ready, and that join when they are"),
    };
    ApiError::NoWorker(format!("no worker is registered{why}; retry after the time in `retry-after`"))
}

/// Returns the order of the legs, the retries, and whether a local prefill may follow a failed remote one.
pub(super) fn retry_policy(state: &State, request: &Request, snapshot: &Snapshot) -> RetryPolicy {
    let mut policy = state.settings.split(&request.model, snapshot).retry_policy;
    // Local prefill would ignore the worker that a hint names [D4].
    policy.local_fallback &= request.hints.prefill.is_none() && may_run_locally(request, snapshot);
    policy
}

/// Returns whether the model has a worker that may run the whole request.
fn may_run_locally(request: &Request, snapshot: &Snapshot) -> bool {
    let pool = snapshot.pool(&request.model, Leg::Aggregated);
    pool.iter().any(|candidate| is_of(request.endpoint.engine(), candidate))
}

/// Returns whether the model has a worker with this engine, if only one will do.
fn has_engine(snapshot: &Snapshot, model: &ModelName, engine: Option<Engine>) -> bool {
    let all = || snapshot.pools(model).into_iter().flat_map(|pool| pool.iter());
    engine.is_none() || all().any(|candidate| is_of(engine, candidate))
}

/// The error of a request whose endpoint no engine of its model has.
fn lacks_engine(request: &Request) -> ApiError {
    let (path, model) = (request.endpoint.path(), &request.model);
    let (engine, form) = match request.endpoint {
        Endpoint::Generate => ("SGLang", ""),
        _ => ("vLLM", ", with `token_ids` as `prompt`"),
    };
    ApiError::InvalidRequest(format!(
        "POST {path}: only {engine} has this endpoint, and no worker of the model `{model}` runs it; send the request to \
         /v1/completions{form}"
    ))
}

/// The error for a model that no worker serves. A worker that joined a moment ago may serve it: its models
/// are not known before it has loaded. A model whose workers left may come back, as may one that the
/// configuration names.
fn unknown_model(state: &State, model: &ModelName, snapshot: &Snapshot) -> ApiError {
    if snapshot.workers().is_empty() {
        return no_worker_registered(state);
    }
    let loading = snapshot.workers().iter().filter(|worker| worker.is_loading()).count();
    let served = some_servable_models(snapshot, &state.settings);
    let why = if loading > 0 {
        format!(" yet, and {loading} of {} have not finished loading", snapshot.workers().len())
    } else if state.registry.has_lost(model) {
        " any more: all of its workers left".to_owned()
    } else if state.settings.models.contains(model) {
        ", which the configuration names".to_owned()
    } else {
        let loras = snapshot.workers().iter().flat_map(|worker| &worker.spec().loras);
        let advice = if loras.into_iter().any(|adapter| adapter == model.as_str()) {
            "`loras` of a worker has it, and its `models` must have it, too; "
        } else {
            ""
        };
        return ApiError::ModelNotFound(model.to_string(), format!("{advice}{}", use_another(&served)));
    };
    let other = if served.is_empty() { String::new() } else { format!(", or {}", use_another(&served)) };
    ApiError::NoWorker(format!(
        "no worker serves the model `{model}`{why}; retry after the time in `retry-after`{other}"
    ))
}

/// Returns why no worker can serve a request for a model that the configuration names.
pub(crate) fn why_no_worker(state: &State, request: &Request, snapshot: &Snapshot) -> String {
    let model = &request.model;
    let pool = snapshot.pool(model, Leg::Aggregated);
    if let Some(holder) = request.hints.holder().and_then(|holder| snapshot.get(holder)) {
        holder_text(holder)
    } else if !snapshot.serves(model) {
        "none is registered for it".to_owned()
    } else if pool.is_empty() || state.settings.split(model, snapshot).enforce_disagg {
        no_pair(model, snapshot)
    } else {
        no_worker_text(snapshot, model, Leg::Aggregated)
    }
}

/// Returns which leg of a model that needs both has no worker, and why.
fn no_pair(model: &ModelName, snapshot: &Snapshot) -> String {
    let down = |leg| {
        let pool = snapshot.pool(model, leg);
        (!pool.iter().any(is_up)).then(|| no_worker_text(snapshot, model, leg))
    };
    // A leg without any worker is the cause, whatever is wrong with the other one.
    let legs = [Leg::Decode, Leg::Prefill];
    let missing = legs.into_iter().find(|leg| snapshot.pool(model, *leg).is_empty());
    let text = missing.or_else(|| legs.into_iter().find(|leg| down(*leg).is_some())).and_then(down);
    text.or_else(|| why_no_pair(snapshot, model))
        .unwrap_or_else(|| format!("no worker can serve '{model}' now"))
}

/// Builds the query for the first attempt of a leg, with new randomness and the current time. Its decision is
/// not recorded.
pub(crate) fn question<'a>(
    state: &State,
    request: &'a Request,
    routing_request: &'a RoutingRequest,
    snapshot: &'a Snapshot,
    leg: Leg,
) -> Query<'a> {
    let pin = request.hints.pinned(leg);
    // A probe runs on its worker in that worker's own role.
    let probed = pin.filter(|_| request.hints.probe).and_then(|(worker, _)| snapshot.get(worker));
    let leg =
        if request.endpoint.needs_no_model_run() { any_leg(snapshot, &request.model, leg) } else { leg };
    let is_pair = request.endpoint.splits() && !request.hints.probe;
    let other_pin = leg.partner().and_then(|partner| request.hints.pinned(partner));
    let affinity = routing_request.session_hash.filter(|_| state.settings.affinity(&request.hints).is_some());
    let queried_leg = probed.map_or(leg, |worker| own_leg(worker.spec().role));
    Query {
        pin,
        // Another engine would refuse media that it lacks.
        session: cached_media::holder(state, &request.hints, leg)
            .or_else(|| state.sessions.get(affinity?, leg)),
        pairing: Pairing { other_pin: other_pin.filter(|_| is_pair), ..Pairing::default() },
        probe: request.hints.probe,
        continues: request.hints.continues,
        seed: rand::random(),
        now_us: unix_us(),
        ..Query::new(snapshot, &request.model, queried_leg, routing_request)
    }
}

/// The leg whose workers can be asked what needs no run of the model: `leg`, else one that has workers.
fn any_leg(snapshot: &Snapshot, model: &ModelName, leg: Leg) -> Leg {
    let legs = [leg, Leg::Decode, Leg::Prefill];
    legs.into_iter().find(|leg| !snapshot.pool(model, *leg).is_empty()).unwrap_or(leg)
}

fn own_leg(role: Role) -> Leg {
    match role {
        Role::Prefill => Leg::Prefill,
        Role::Decode => Leg::Decode,
        Role::Aggregated => Leg::Aggregated,
    }
}
