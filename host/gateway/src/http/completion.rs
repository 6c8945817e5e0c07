//! Serves one request of a client: admitted, parsed, measured, planned, and then driven to its answer.

use std::sync::Arc;

use axum::{
    body::Body,
    http::{HeaderMap, Request as HttpRequest, Response, header},
};
use bytes::Bytes;
use pointsman_routing::Purpose;
use pointsman_workers::{Leg, ModelName};
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

use super::{
    DataThread,
    admit::{Admitted, admit},
    first_byte::FirstByte,
    peer::Sender,
    request_id,
};
use crate::{
    openai::{
        canary,
        error::ApiError,
        hints::Hints,
        json::JsonBody,
        request::{Endpoint, Request},
        request_error::RequestError,
    },
    orchestrate::{
        self, Unplanned, after_disconnect::AfterDisconnect, client_connection::ClientConnection, preview,
        relay::Answer,
    },
    state::{
        State,
        caller::{Caller, Tenant},
    },
    telemetry::account::Account,
    tokenization::routing_request::{TenantLoad, routing_request},
    upstream::Upstream,
};

/// Body from which on a client may have left unnoticed while it was read, bytes.
const LARGE_BODY: usize = 64 * 1024;

/// Time from which a search for tokens that found none is worth a span.
const SLOW_TOKENS: Duration = Duration::from_millis(1);

/// A request whose body was read.
struct Received {
    endpoint: Endpoint,
    headers: HeaderMap,
    body: Bytes,
    caller: Caller,
    account: Account,
}

/// Serves a request. Its account, with the number of requests in flight, begins before the body is read.
pub(super) async fn serve(
    thread: &DataThread,
    endpoint: Endpoint,
    request: HttpRequest<Body>,
) -> Response<Body> {
    let (state, upstream) = thread.context();
    let (parts, body) = request.into_parts();
    let started = FirstByte::of(&parts.extensions);
    let client = parts.extensions.get::<ClientConnection>().cloned();
    if let Some(client) = &client {
        client.set_deadline(started + state.settings.request_timeout);
    }
    let mut account = Account::new(state.metrics.clone(), request_id(&parts.headers), endpoint, started);
    if let Some(traces) = &state.traces {
        account.traced(traces.begin(&parts.headers, state.settings.request_rules.trust, started));
    }
    let answer = match admit(&state, &parts.headers, body, started, &Sender::of(&parts.extensions)).await {
        Err(error) => refuse(account, &error),
        Ok(Admitted { body, caller, held }) => {
            account.stage("receive", started);
            account.holds(held);
            let (gone, tracker) = (CancellationToken::new(), state.tracker.clone());
            let received = Received { endpoint, headers: parts.headers, body, caller, account };
            let work = answer(state, upstream, received, gone.clone());
            AfterDisconnect::new(work, gone, tracker).await
        }
    };
    answer.map(|answer| Body::new(answer.on(client)))
}

#[expect(clippy::too_many_lines, reason = "the steps of a request in their order")]
async fn answer(
    state: Arc<State>,
    upstream: Upstream,
    received: Received,
    gone: CancellationToken,
) -> Response<Answer> {
    let Received { endpoint, headers, body, caller, mut account } = received;
    if body.len() > LARGE_BODY {
        // The connection looks for its end now: a client that sent a large body and left is not worth the
        // parsing.
        tokio::task::yield_now().await;
        if gone.is_cancelled() {
            return refuse(account, &ApiError::ClientClosed);
        }
    }
    let request = match read(&state, endpoint, &headers, body).await {
        Ok(request) => request,
        Err(error) => return refuse(account, &error.into()),
    };
    account.set_model(&request.model, state.registry.snapshot().activation(&request.model).is_some());
    if let Some(limits) = state.tenant_limits.as_ref().filter(|_| !request.hints.query_only) {
        match limits.request(caller.tenant.as_ref().map(|tenant| tenant.hash), &request.model) {
            Ok(reservation) => account.reserved(reservation),
            Err(exceeded) => return refuse(account, &ApiError::TenantLimit(exceeded)),
        }
    }
    let tokens = match tokens_of(&state, &upstream, &request, &gone, &mut account).await {
        Ok(tokens) => tokens,
        Err(error) => return refuse(account, &error),
    };
    let tenant = caller.tenant.map(|Tenant { hash, .. }| {
        account.of_tenant(state.tenants.enter(hash));
        TenantLoad { hash, active_requests: state.tenants.active(hash) }
    });
    let routing_request = routing_request(&request, &state.settings.measure, tokens.as_deref(), tenant);
    if let Err(exceeded) = account.reserve_tokens(&routing_request, request.endpoint) {
        return refuse(account, &ApiError::TenantLimit(exceeded));
    }
    account.of_request(&request);
    account.logging(state.decision_log.as_ref(), &routing_request);
    let snapshot = state.registry.snapshot();
    if request.hints.query_only {
        let plan = orchestrate::plan(&state, &request, &routing_request, &snapshot, Purpose::Preview, None);
        let tokens = tokens.as_deref();
        let show_plan = |plan| preview::preview(&state, &request, tokens, &routing_request, &snapshot, &plan);
        return show(plan.map_err(ApiError::from).and_then(show_plan), account);
    }
    if request.hints.session_control.is_some_and(|control| control.open) {
        // The session begins anew (A2).
        routing_request.session_hash.inspect(|session| state.sessions.close(*session));
    }
    let planning = Instant::now();
    let id = Some(account.request_id.as_str());
    let plan = orchestrate::plan(&state, &request, &routing_request, &snapshot, Purpose::Route, id);
    let decode_override = match &plan {
        Ok(plan) => plan.decode_override.clone(),
        Err(unplanned) => unplanned.decode_override.as_deref().cloned(),
    };
    let mut account =
        account.recording(state.router.decisions(), &state.learning, &state.decision_stats, decode_override);
    account.planned(planning);
    let plan = match plan {
        Ok(plan) => plan,
        Err(Unplanned { error, .. }) => return refuse(account, &error),
    };
    let explain = state.settings.tell_decisions && headers.contains_key("x-pointsman-decision");
    let planned = orchestrate::PlannedRequest { request, routing_request, snapshot, plan, explain };
    orchestrate::drive(state, upstream, planned, account, gone).await
}

/// Returns the tokens of the prompt, if they can be had before the client leaves and the deadline passes.
async fn tokens_of(
    state: &State,
    upstream: &Upstream,
    request: &Arc<Request>,
    gone: &CancellationToken,
    account: &mut Account,
) -> Result<Option<Vec<u32>>, ApiError> {
    let (begun, deadline) = (Instant::now(), account.started() + state.settings.request_timeout);
    let tokens = tokio::select! {
        biased;
        tokens = state.tokens.of(request, upstream, &state.metrics) => tokens,
        () = gone.cancelled() => None,
        () = tokio::time::sleep_until(deadline) => return Err(ApiError::Deadline),
    };
    if tokens.is_some() || begun.elapsed() > SLOW_TOKENS {
        account.stage("tokenize", begun);
    }
    // Nothing was sent for a client that left: planning and prefill would be wasted.
    if gone.is_cancelled() { Err(ApiError::ClientClosed) } else { Ok(tokens) }
}

/// Parses a request. A canary is a completion.
async fn read(
    state: &State,
    endpoint: Endpoint,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Arc<Request>, RequestError> {
    let canary =
        endpoint.splits().then(|| canary::completion(&body, |body| probed_model(state, headers, body)));
    let (endpoint, body) = match canary.flatten() {
        Some(completion) => (Endpoint::Completions, completion),
        None => (endpoint, body),
    };
    Request::read(endpoint, headers, body, &state.settings.request_rules).await
}

/// Answers a query-only request, which leaves no record.
fn show(previewed: Result<serde_json::Value, ApiError>, account: Account) -> Response<Answer> {
    match previewed {
        Ok(answer) => {
            account.discard();
            whole_json(&answer)
        }
        Err(error) => refuse(account, &error),
    }
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
    let mut models = models.into_iter();
    models.next().filter(|_| models.next().is_none()).map(ToString::to_string)
}

/// Answers with an error and records it.
fn refuse(mut account: Account, error: &ApiError) -> Response<Answer> {
    account.ended(error.status().as_u16(), error.code());
    let mut response = error.response_as(account.endpoint.format(), &account.request_id);
    account.tell_limits(response.headers_mut());
    response.map(Answer::whole)
}

fn whole_json(value: &serde_json::Value) -> Response<Answer> {
    let mut response = Response::new(Answer::whole(Bytes::from(value.to_string())));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}
