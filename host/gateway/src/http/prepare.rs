//! Prepares a request whose body was read: parsed, counted against the limits of its tenant, measured and
//! planned.

use std::sync::Arc;

use axum::http::{HeaderMap, Response};
use bytes::Bytes;
use json_splice::JsonBody;
use pointsman_routing::{Purpose, RoutingRequest};
use pointsman_workers::{Engine, Leg, ModelName, Snapshot, WorkerId};
use tokio::time::Duration;
use tokio_util::sync::CancellationToken;

use super::{
    find_model::{check_limits, find_model},
    worker_wait::wait_for_worker,
};
use crate::{
    openai::{
        canary,
        error::ApiError,
        generate,
        hints::Hints,
        request::{Endpoint, Request, json_object, names_model},
        request_error::RequestError,
    },
    orchestrate::{
        self, PlannedRequest, Unplanned,
        affinity::{cached_media, engine_session, stored},
        availability::listed,
        preview,
    },
    state::{
        State,
        caller::{Caller, Tenant},
    },
    telemetry::account::Account,
    tokenization::{RequestTokens, routing_request::TenantLoad},
    upstream::Upstream,
};

/// A search for tokens that found none gets a span in the trace if it took this long.
const SLOW_TOKENS: Duration = Duration::from_millis(1);

/// A request whose body was read.
pub(crate) struct Received {
    pub(crate) endpoint: Endpoint,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) caller: Caller,
    pub(crate) account: Box<Account>,
    /// Workers of which one must be chosen; `None` allows any.
    pub(crate) only: Option<Vec<WorkerId>>,
}

/// A request that can be answered.
pub(crate) enum Prepared {
    /// It is going to be run.
    Planned { planned: Box<PlannedRequest>, account: Box<Account> },
    /// The client asked where it would run.
    Preview { answer: Response<Bytes>, account: Box<Account> },
}

/// A request that is refused, with its record.
pub(crate) struct Refused {
    pub(crate) account: Box<Account>,
    pub(crate) error: Box<ApiError>,
    /// Whether the client wants to see the decisions.
    pub(crate) explain: bool,
}

impl Refused {
    pub(crate) fn new(account: Box<Account>, error: impl Into<ApiError>) -> Self {
        Self { account, error: Box::new(error.into()), explain: false }
    }
}

/// Prepares a request. `gone` is cancelled when its client leaves.
///
/// # Errors
/// [`Refused`]: the request fails.
pub(crate) async fn prepare(
    state: &State,
    upstream: &Upstream,
    received: Received,
    gone: &CancellationToken,
) -> Result<Prepared, Refused> {
    let Received { endpoint, headers, body, caller, mut account, only } = received;
    let mut request = match read_before_stop((state, upstream), endpoint, &headers, body, &caller).await {
        Ok(request) => request,
        Err(error) => return Err(Refused::new(account, error)),
    };
    account.set_model(&request.model, &state.registry.snapshot());
    if let Some(limits) = &state.tenant_limits
        && let Err(error) =
            account.reserve(limits, caller.tenant_hash(), &request.model, &state.registry.snapshot())
    {
        return Err(Refused::new(account, error));
    }
    let for_worker = (&mut request, caller.tenant_hash(), only.is_some());
    let worker_wait = match wait_for_worker(state, for_worker, &mut account, gone).await {
        Ok(wait) => wait,
        Err(error) => return Err(Refused::new(account, error)),
    };
    let tokens = match tokens_of(state, upstream, &request, &caller, gone, &mut account).await {
        Ok(tokens) => tokens,
        Err(error) => return Err(Refused::new(account, error)),
    };
    let tenant = caller.tenant.map(|Tenant { hash, .. }| {
        account.of_tenant(state.tenants.enter(hash));
        TenantLoad { hash, active_requests: state.tenants.active(hash) }
    });
    let snapshot = state.registry.snapshot();
    let mut routing_request = state.routing_request((&request, &snapshot), tokens.as_ref(), tenant);
    if let Some(error) = only.and_then(|only| restrict(&mut routing_request, only)) {
        return Err(Refused::new(account, error));
    }
    let reserved = (!request.hints.query_only).then(|| account.reserve_tokens(&routing_request, endpoint));
    if let Some(Err(exceeded)) = reserved {
        return Err(Refused::new(account, ApiError::TenantLimit(exceeded)));
    }
    account.of_request(&request);
    account.logging(state.decision_log.as_ref(), &routing_request);
    if request.hints.query_only {
        return show(state, (&request, tokens.as_ref()), &routing_request, &snapshot, account);
    }
    if request.hints.session_control.is_some_and(|control| control.open) {
        // The session starts without its earlier bindings (A2).
        routing_request.session_hash.inspect(|session| state.sessions.close(*session));
    }
    let planning = account.stage_begins();
    let id = Some(account.request_id.as_str());
    let plan = orchestrate::plan(state, &request, &routing_request, &snapshot, Purpose::Route, id);
    let decode_override = match &plan {
        Ok(plan) => plan.decode_override.clone(),
        Err(unplanned) => unplanned.decode_override.as_deref().cloned(),
    };
    account.records(state.router.decisions(), &state.learning, &state.decision_stats, decode_override);
    account.planned(planning);
    let explain = state.settings.tell_decisions && headers.contains_key(orchestrate::DECISION);
    let plan = match plan {
        Ok(plan) => plan,
        Err(Unplanned { error, .. }) => return Err(Refused { account, error, explain }),
    };
    let planned = PlannedRequest { request, routing_request, snapshot, plan, worker_wait, explain };
    Ok(Prepared::Planned { planned: Box::new(planned), account })
}

/// Answers a request whose client asked where it would run.
fn show(
    state: &State,
    (request, tokens): (&Arc<Request>, Option<&RequestTokens>),
    routing_request: &RoutingRequest,
    snapshot: &Snapshot,
    account: Box<Account>,
) -> Result<Prepared, Refused> {
    let plan = orchestrate::plan(state, request, routing_request, snapshot, Purpose::Preview, None);
    let show = |it| preview::preview(state, request, tokens, routing_request, snapshot, &it);
    let shown = plan.map_err(ApiError::from).and_then(show);
    match shown.map(|answer| preview::response(request, &answer, &account.request_id)) {
        Ok(answer) => Ok(Prepared::Preview { answer, account }),
        Err(error) => Err(Refused::new(account, error)),
    }
}

/// Restricts a request to workers, besides those that it allows itself. Returns why none is left.
fn restrict(request: &mut RoutingRequest, only: Vec<WorkerId>) -> Option<ApiError> {
    let allowed = request.allowed_workers.take();
    let is_allowed = |id: &WorkerId| allowed.as_ref().is_none_or(|allowed| allowed.contains(id));
    let both: Vec<WorkerId> = only.into_iter().filter(is_allowed).collect();
    let is_empty = both.is_empty();
    request.allowed_workers = Some(both);
    let text = "no worker is among those that the proxy and the request allow; check the proxy's endpoints";
    is_empty.then(|| ApiError::NoWorker(text.to_owned()))
}

/// Returns the tokens of the prompt, if they can be had before the client leaves and the deadline passes.
async fn tokens_of(
    state: &State,
    upstream: &Upstream,
    request: &Arc<Request>,
    caller: &Caller,
    gone: &CancellationToken,
    account: &mut Account,
) -> Result<Option<RequestTokens>, ApiError> {
    let workers = state.registry.snapshot();
    let (begun, deadline) = (account.stage_begins(), account.started() + state.settings.request_timeout);
    let tenant = caller.tenant_hash();
    let tokens = tokio::select! {
        biased;
        tokens = state.tokens.of(request, tenant, upstream, &state.metrics, &workers) => tokens,
        () = gone.cancelled() => None,
        () = tokio::time::sleep_until(deadline) => return Err(ApiError::Deadline),
        () = state.drain_end.seen() => return Err(ApiError::Draining),
    };
    if let Some(begun) = begun.filter(|begun| tokens.is_some() || begun.elapsed() > SLOW_TOKENS) {
        account.stage("tokenize", begun);
    }
    // Nothing was sent for a client that left: planning and prefill would be wasted.
    if gone.is_cancelled() { Err(ApiError::ClientClosed) } else { Ok(tokens) }
}

/// Parses a request, unless the drain ends before.
async fn read_before_stop(
    of_gateway: (&State, &Upstream),
    endpoint: Endpoint,
    headers: &HeaderMap,
    body: Bytes,
    caller: &Caller,
) -> Result<Arc<Request>, ApiError> {
    tokio::select! {
        biased;
        read = read(of_gateway, endpoint, headers, body, caller) => read,
        () = of_gateway.0.drain_end.seen() => Err(ApiError::Draining),
    }
}

/// Parses a request. A canary is a completion; what continues a stored response, or a session of an
/// engine, is pinned to its worker.
async fn read(
    (state, upstream): (&State, &Upstream),
    endpoint: Endpoint,
    headers: &HeaderMap,
    body: Bytes,
    caller: &Caller,
) -> Result<Arc<Request>, ApiError> {
    let rules = &state.settings.request_rules;
    if endpoint.is_form() {
        let unnamed = || only_model(state, &state.registry.snapshot());
        let mut request = Request::of_form(endpoint, headers, body, rules, unnamed)?;
        find_model(state, &mut request).await;
        return Ok(request);
    }
    let body = json_object(body)?;
    let canary =
        endpoint.splits().then(|| canary::completion(&body, |body| probed_model(state, headers, body)));
    let mut request = match canary.flatten() {
        Some(completion) => Request::parse(Endpoint::Completions, headers, completion, rules)?,
        None => {
            let unnamed = unnamed_model(state, endpoint, &body)?;
            Request::of_json(endpoint, headers, body, rules, unnamed)?
        }
    };
    find_model(state, &mut request).await;
    check_limits(&request, &state.registry.snapshot())?;
    if endpoint == Endpoint::Responses {
        // Boxed, because few requests wait here.
        let tenant = caller.tenant_hash();
        Box::pin(stored::pin(state, upstream, &mut request, tenant)).await?;
    } else {
        engine_session::pin(state, &mut request, caller.tenant_hash())?;
    }
    if let Some(request) = Arc::get_mut(&mut request) {
        cached_media::find(state, request, caller.tenant_hash());
    }
    Ok(request)
}

/// The model of a canary that names none: its worker's, or the only one.
fn probed_model(state: &State, headers: &HeaderMap, body: &JsonBody) -> Option<String> {
    let snapshot = state.registry.snapshot();
    let hints = Hints::parse(headers, body, state.settings.request_rules.trust).ok()?;
    let models = snapshot.models();
    if let Some((worker, _)) = hints.pinned(Leg::Aggregated) {
        let legs = [Leg::Aggregated, Leg::Prefill, Leg::Decode];
        let is_its = |model: &ModelName, leg| {
            snapshot.pool(model, leg).iter().any(|candidate| candidate.worker.id() == worker)
        };
        let its = models.iter().find(|model| legs.into_iter().any(|leg| is_its(model, leg)));
        return its.map(ToString::to_string);
    }
    only_model(state, &snapshot).ok()
}

/// Returns the model of a body that names none; `None` if it names one. A body for SGLang may name an adapter
/// that is served.
///
/// # Errors
/// There is not exactly one model.
pub(super) fn unnamed_model(
    state: &State,
    endpoint: Endpoint,
    body: &JsonBody,
) -> Result<Option<String>, ApiError> {
    if names_model(body) {
        return Ok(None);
    }
    let snapshot = state.registry.snapshot();
    let is_generate = endpoint == Endpoint::Generate;
    let adapter =
        if is_generate { generate::adapter(body)? } else { generate::adapter(body).unwrap_or(None) };
    let served = adapter.filter(|adapter| {
        let adapter = ModelName::new(adapter);
        snapshot.is_adapter(&adapter) && (is_generate || snapshot.is_only_on(Engine::Sglang, &adapter))
    });
    served.map_or_else(|| only_model(state, &snapshot), Ok).map(Some)
}

/// Returns the only model of the fleet. Adapters are asked for by their names.
///
/// # Errors
/// No model is served, or several are: the message lists them.
pub(super) fn only_model(state: &State, snapshot: &Snapshot) -> Result<String, ApiError> {
    let models = snapshot.models().into_iter().filter(|model| !snapshot.is_adapter(model));
    let models: Vec<&str> = models.map(ModelName::as_str).collect();
    match models.as_slice() {
        [only] => Ok((*only).to_owned()),
        [] => Err(orchestrate::no_worker_registered(state)),
        several => {
            let problem = format!("is missing: expected one of {}", listed(several.iter().copied()));
            Err(RequestError::new("model", &problem).into())
        }
    }
}
