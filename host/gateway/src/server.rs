//! The clients' listener: OpenAI endpoints over HTTP/1.1. Reads a body once, and hands the request to the driver.

use std::sync::Arc;

use axum::{
    Json, Router,
    body::Body,
    extract::State,
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

use crate::{
    app::App,
    detach::Detach,
    drive,
    error::Cause,
    json::JsonBody,
    preview,
    relay::Answer,
    request::{Endpoint, Request},
    subject::subject,
    telemetry::account::Account,
};

/// The clients' endpoints.
pub(crate) fn routes(app: Arc<App>) -> Router {
    Router::new()
        .route(Endpoint::ChatCompletions.path(), post(chat_completions))
        .route(Endpoint::Completions.path(), post(completions))
        .route(Endpoint::Embeddings.path(), post(embeddings))
        .route(Endpoint::Tokenize.path(), post(tokenize))
        .route("/v1/route", post(route))
        .route("/v1/models", get(models))
        .route("/health", get(|| async { "ok" }))
        .with_state(app)
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

async fn chat_completions(State(app): State<Arc<App>>, request: HttpRequest<Body>) -> Response<Body> {
    complete(app, Endpoint::ChatCompletions, request).await
}

async fn embeddings(State(app): State<Arc<App>>, request: HttpRequest<Body>) -> Response<Body> {
    complete(app, Endpoint::Embeddings, request).await
}

async fn tokenize(State(app): State<Arc<App>>, request: HttpRequest<Body>) -> Response<Body> {
    complete(app, Endpoint::Tokenize, request).await
}

/// Where a chat or completion would run (spec F2).
async fn route(State(app): State<Arc<App>>, request: HttpRequest<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let id = request_id(&parts.headers);
    let answered = async {
        let body = prepare(&app, &parts.headers, body).await?;
        let chat = JsonBody::parse(body.clone()).is_ok_and(|body| body.get("messages").is_some());
        let endpoint = if chat { Endpoint::ChatCompletions } else { Endpoint::Completions };
        let request = Request::parse(endpoint, &parts.headers, body, app.settings.trust)?;
        let tokens = app.tokens.of(&request, &app.metrics).await;
        let subject = subject(&request, &app.settings.measure, tokens.as_deref());
        let snapshot = app.registry.snapshot();
        let _preview = Scope::preview();
        let planning = drive::plan(&app, &request, &subject, &snapshot, None)?;
        preview::preview(&app, &request, &subject, &snapshot, &planning)
    };
    match answered.await {
        Ok(answer) => Json(answer).into_response(),
        Err(cause) => cause.response(&id).map(Body::from),
    }
}

async fn completions(State(app): State<Arc<App>>, request: HttpRequest<Body>) -> Response<Body> {
    complete(app, Endpoint::Completions, request).await
}

/// Models that can be served now (spec B3).
async fn models(State(app): State<Arc<App>>, headers: HeaderMap) -> Response<Body> {
    if let Err(cause) = authorize(&app, &headers) {
        return cause.response(&request_id(&headers)).map(Body::from);
    }
    let names = crate::admin::servable(&app);
    let data: Vec<_> = names
        .iter()
        .map(|name| json!({ "id": name, "object": "model", "created": 0, "owned_by": "pointsman" }))
        .collect();
    Json(json!({ "object": "list", "data": data })).into_response()
}

async fn complete(app: Arc<App>, endpoint: Endpoint, request: HttpRequest<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let id = request_id(&parts.headers);
    let gone = CancellationToken::new();
    let tracker = app.tracker.clone();
    let answer = match prepare(&app, &parts.headers, body).await {
        Err(cause) => {
            let model = pointsman_workers::ModelName::new("other");
            let mut account = Account::new(app.metrics.clone(), id.clone(), endpoint, model);
            account.ended(cause.status().as_u16(), cause.code());
            cause.response(&id).map(Answer::whole)
        }
        Ok(bytes) => {
            let work = answer(app, endpoint, parts.headers, bytes, id, gone.clone());
            Detach::new(work, gone, tracker).await
        }
    };
    answer.map(Body::new)
}

/// What is refused before a request is looked at, and its body.
async fn prepare(app: &App, headers: &HeaderMap, body: Body) -> Result<Bytes, Cause> {
    if app.draining.is_cancelled() {
        return Err(Cause::Draining);
    }
    authorize(app, headers)?;
    if let Some(limiter) = &app.limiter {
        limiter.check(bearer(headers).filter(|_| !app.settings.api_keys.is_empty()).unwrap_or_default())?;
    }
    let limit = app.settings.max_body_bytes;
    let collected = Limited::new(body, limit).collect().await;
    collected.map(|body| body.to_bytes()).map_err(|error| {
        if error.is::<http_body_util::LengthLimitError>() {
            Cause::PayloadTooLarge(limit)
        } else {
            Cause::InvalidRequest(format!("body: {error}"))
        }
    })
}

async fn answer(
    app: Arc<App>,
    endpoint: Endpoint,
    headers: HeaderMap,
    body: Bytes,
    id: String,
    gone: CancellationToken,
) -> Response<Answer> {
    let refuse = |model: &str, cause: Cause| {
        let model = pointsman_workers::ModelName::new(model);
        let mut account = Account::new(app.metrics.clone(), id.clone(), endpoint, model);
        account.ended(cause.status().as_u16(), cause.code());
        cause.response(&id).map(Answer::whole)
    };
    let request = match Request::parse(endpoint, &headers, body, app.settings.trust) {
        Ok(request) => request,
        Err(error) => return refuse("other", error.into()),
    };
    let tokens = app.tokens.of(&request, &app.metrics).await;
    let subject = subject(&request, &app.settings.measure, tokens.as_deref());
    let snapshot = app.registry.snapshot();
    let recorded = Some(id.as_str()).filter(|_| !request.hints.query_only);
    let planning = {
        let _preview = request.hints.query_only.then(Scope::preview);
        drive::plan(&app, &request, &subject, &snapshot, recorded)
    };
    let planning = match planning {
        Ok(planning) => planning,
        Err(cause) => return refuse(request.model.as_str(), cause),
    };
    if request.hints.query_only {
        return match preview::preview(&app, &request, &subject, &snapshot, &planning) {
            Ok(answer) => whole_json(&answer),
            Err(cause) => refuse(request.model.as_str(), cause),
        };
    }
    let account = Account::new(app.metrics.clone(), id, endpoint, request.model.clone()).recording(
        app.router.decisions().clone(),
        app.learning.clone(),
        planning.word,
    );
    let explain = app.settings.tell_decisions && headers.contains_key("x-pointsman-decision");
    let planned = drive::Planned { request, subject, snapshot, planning, explain };
    drive::drive(app, planned, account, gone).await
}

fn whole_json(value: &serde_json::Value) -> Response<Answer> {
    let mut response = Response::new(Answer::whole(Bytes::from(value.to_string())));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

fn authorize(app: &App, headers: &HeaderMap) -> Result<(), Cause> {
    let keys = &app.settings.api_keys;
    if keys.is_empty() {
        return Ok(());
    }
    let key = bearer(headers).ok_or(Cause::Unauthorized)?;
    // Every key is compared whole, so that the time says nothing about how much of one was right.
    let known = keys.iter().fold(false, |known, other| known | same(key.as_bytes(), other.as_bytes()));
    if known { Ok(()) } else { Err(Cause::Forbidden) }
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
