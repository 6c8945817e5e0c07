//! The clients' listener: OpenAI endpoints over HTTP/1.1. Reads a body once, and hands the request to the driver.

use std::sync::Arc;

use axum::{
    Json, Router,
    body::Body,
    extract::State as Extract,
    http::{HeaderMap, Request as HttpRequest, Response, header},
    response::IntoResponse,
    routing::{get, post},
};
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use pointsman_routing::scope::Scope;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub(crate) mod rate_limit;

use crate::{
    openai::error::ApiError,
    openai::json::JsonBody,
    openai::request::{Endpoint, Request},
    orchestrate::{self, after_disconnect::Detach, preview, relay::Answer},
    state::{SharedState, State},
    telemetry::account::Account,
    tokenization::routing_request::subject,
};

/// The clients' endpoints.
pub(crate) fn routes(state: SharedState) -> Router {
    Router::new()
        .route(Endpoint::ChatCompletions.path(), post(chat_completions))
        .route(Endpoint::Completions.path(), post(completions))
        .route(Endpoint::Embeddings.path(), post(embeddings))
        .route(Endpoint::Tokenize.path(), post(tokenize))
        .route("/v1/route", post(route))
        .route("/v1/models", get(models))
        .route("/health", get(|| async { "ok" }))
        .with_state(state)
}

/// Accepts connections until told to stop, and lets those that are open finish their request.
pub(crate) async fn serve(listener: TcpListener, routes: Router, stop: CancellationToken) {
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let Ok((stream, _)) = accepted else {
            // Out of file descriptors, most likely: a moment later some are free again.
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            continue;
        };
        // An event must not wait for the acknowledgement of the one before.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(routes.clone());
        let stop = stop.clone();
        connections.spawn(async move {
            let mut builder = hyper::server::conn::http1::Builder::new();
            builder.timer(TokioTimer::new()).pipeline_flush(true);
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            tokio::pin!(connection);
            tokio::select! {
                ended = connection.as_mut() => drop(ended),
                () = stop.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    let _ = connection.await;
                }
            }
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn chat_completions(Extract(state): Extract<Arc<State>>, request: HttpRequest<Body>) -> Response<Body> {
    complete(state, Endpoint::ChatCompletions, request).await
}

async fn embeddings(Extract(state): Extract<Arc<State>>, request: HttpRequest<Body>) -> Response<Body> {
    complete(state, Endpoint::Embeddings, request).await
}

async fn tokenize(Extract(state): Extract<Arc<State>>, request: HttpRequest<Body>) -> Response<Body> {
    complete(state, Endpoint::Tokenize, request).await
}

/// Where a chat or completion would run (spec F2).
async fn route(Extract(state): Extract<Arc<State>>, request: HttpRequest<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let id = request_id(&parts.headers);
    let answered = async {
        let body = prepare(&state, &parts.headers, body).await?;
        let chat = JsonBody::parse(body.clone()).is_ok_and(|body| body.get("messages").is_some());
        let endpoint = if chat { Endpoint::ChatCompletions } else { Endpoint::Completions };
        let request = Request::parse(endpoint, &parts.headers, body, state.settings.trust)?;
        let tokens = state.tokens.of(&request, &state.metrics).await;
        let subject = subject(&request, &state.settings.measure, tokens.as_deref());
        let snapshot = state.registry.snapshot();
        let _preview = Scope::preview();
        let planning = orchestrate::plan(&state, &request, &subject, &snapshot, None)?;
        preview::preview(&state, &request, &subject, &snapshot, &planning)
    };
    match answered.await {
        Ok(answer) => Json(answer).into_response(),
        Err(cause) => cause.response(&id).map(Body::from),
    }
}

async fn completions(Extract(state): Extract<Arc<State>>, request: HttpRequest<Body>) -> Response<Body> {
    complete(state, Endpoint::Completions, request).await
}

/// Models that can be served now (spec B3).
async fn models(Extract(state): Extract<Arc<State>>, headers: HeaderMap) -> Response<Body> {
    if let Err(cause) = authorize(&state, &headers) {
        return cause.response(&request_id(&headers)).map(Body::from);
    }
    let names = crate::admin::servable(&state);
    let data: Vec<_> = names
        .iter()
        .map(|name| json!({ "id": name, "object": "model", "created": 0, "owned_by": "pointsman" }))
        .collect();
    Json(json!({ "object": "list", "data": data })).into_response()
}

async fn complete(state: Arc<State>, endpoint: Endpoint, request: HttpRequest<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let id = request_id(&parts.headers);
    let gone = CancellationToken::new();
    let tracker = state.tracker.clone();
    let answer = match prepare(&state, &parts.headers, body).await {
        Err(cause) => {
            let model = pointsman_workers::ModelName::new("other");
            let mut account = Account::new(state.metrics.clone(), id.clone(), endpoint, model);
            account.ended(cause.status().as_u16(), cause.code());
            cause.response(&id).map(Answer::whole)
        }
        Ok(bytes) => {
            let work = answer(state, endpoint, parts.headers, bytes, id, gone.clone());
            Detach::new(work, gone, tracker).await
        }
    };
    answer.map(Body::new)
}

/// What is refused before a request is looked at, and its body.
async fn prepare(state: &State, headers: &HeaderMap, body: Body) -> Result<Bytes, ApiError> {
    if state.draining.is_cancelled() {
        return Err(ApiError::Draining);
    }
    authorize(state, headers)?;
    if let Some(limiter) = &state.limiter {
        limiter
            .check(bearer(headers).unwrap_or_default())
            .map_err(|error| ApiError::RateLimited(error.per_second))?;
    }
    let limit = state.settings.max_body_bytes;
    let collected = Limited::new(body, limit).collect().await;
    collected.map(|body| body.to_bytes()).map_err(|error| {
        if error.is::<http_body_util::LengthLimitError>() {
            ApiError::PayloadTooLarge(limit)
        } else {
            ApiError::InvalidRequest(format!("body: {error}"))
        }
    })
}

async fn answer(
    state: Arc<State>,
    endpoint: Endpoint,
    headers: HeaderMap,
    body: Bytes,
    id: String,
    gone: CancellationToken,
) -> Response<Answer> {
    let refuse = |model: &str, cause: ApiError| {
        let model = pointsman_workers::ModelName::new(model);
        let mut account = Account::new(state.metrics.clone(), id.clone(), endpoint, model);
        account.ended(cause.status().as_u16(), cause.code());
        cause.response(&id).map(Answer::whole)
    };
    let request = match Request::parse(endpoint, &headers, body, state.settings.trust) {
        Ok(request) => request,
        Err(error) => return refuse("other", error.into()),
    };
    let tokens = state.tokens.of(&request, &state.metrics).await;
    let subject = subject(&request, &state.settings.measure, tokens.as_deref());
    let snapshot = state.registry.snapshot();
    let recorded = Some(id.as_str()).filter(|_| !request.hints.query_only);
    let planning = {
        let _preview = request.hints.query_only.then(Scope::preview);
        orchestrate::plan(&state, &request, &subject, &snapshot, recorded)
    };
    let planning = match planning {
        Ok(planning) => planning,
        Err(cause) => return refuse(request.model.as_str(), cause),
    };
    if request.hints.query_only {
        return match preview::preview(&state, &request, &subject, &snapshot, &planning) {
            Ok(answer) => whole_json(&answer),
            Err(cause) => refuse(request.model.as_str(), cause),
        };
    }
    let account = Account::new(state.metrics.clone(), id, endpoint, request.model.clone()).recording(
        state.router.decisions().clone(),
        state.learning.clone(),
        planning.word,
    );
    let explain = state.settings.tell_decisions && headers.contains_key("x-pointsman-decision");
    let planned = orchestrate::Planned { request, subject, snapshot, planning, explain };
    orchestrate::drive(state, planned, account, gone).await
}

fn whole_json(value: &serde_json::Value) -> Response<Answer> {
    let mut response = Response::new(Answer::whole(Bytes::from(value.to_string())));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

fn authorize(state: &State, headers: &HeaderMap) -> Result<(), ApiError> {
    let keys = &state.settings.api_keys;
    if keys.is_empty() {
        return Ok(());
    }
    let key = bearer(headers).ok_or(ApiError::Unauthorized)?;
    // Every key is compared whole, so that the time says nothing about how much of one was right.
    let known = keys.iter().fold(false, |known, other| known | same(key.as_bytes(), other.as_bytes()));
    if known { Ok(()) } else { Err(ApiError::Forbidden) }
}

pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

pub(crate) fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
}

/// The client's own id, else one of ours.
pub(crate) fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get("x-request-id").and_then(|value| value.to_str().ok());
    let short = given.filter(|id| !id.is_empty() && id.len() <= 128);
    short.map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned)
}
