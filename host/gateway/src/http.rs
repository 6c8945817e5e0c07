//! The clients' listener: OpenAI endpoints over HTTP/1.1, with or without TLS, and over HTTP/2 with it.
//!
//! It authenticates a request, reads its body within the limits, and passes it on. `listener`, `auth` and
//! `request_id` serve the operators' listener, too.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Body,
    extract::{FromRequestParts, Path, State as Extract},
    http::{
        HeaderMap, HeaderName, HeaderValue, Method, Request as HttpRequest, Response, StatusCode, Uri,
        request::Parts,
    },
    middleware::from_fn,
    response::IntoResponse,
    routing::{any, get, post},
};
use serde_json::json;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::{
    openai::{
        endpoint::{Endpoint, Format},
        error::ApiError,
        rate_limit::RateHeaders,
        short_text::shortened,
    },
    openapi,
    state::{SharedState, State},
    upstream::{CallContext, ConnectionPool, Upstream},
    version::RELEASE,
};

mod accept_errors;
pub(crate) mod admit;
pub(crate) mod arrival;
pub(crate) mod audience;
pub(crate) mod auth;
mod base_url;
pub(crate) mod body;
mod client_socket;
mod client_stream;
mod completion;
pub(crate) mod connected;
pub(crate) mod content_coding;
pub(crate) mod credentials;
pub(crate) mod cross_site;
mod find_model;
mod handshake;
mod http2;
pub(crate) mod listener;
mod models;
pub(crate) mod peer;
mod pieces;
pub(crate) mod prepare;
mod preview;
mod realtime;
mod refuse_connection;
mod request_head;
mod request_id;
mod responses;
mod room;
mod tunnel;
mod unread_body;
mod worker_wait;

use arrival::Arrival;
use base_url::intended_path;
use connected::Service;
pub(crate) use request_id::{add_request_id, request_id};

/// Paths of OpenAI's API that would be taken for ids of responses. No worker is called on them.
pub(crate) const NOT_RESPONSES: [&str; 2] = ["/v1/responses/compact", "/v1/responses/input_tokens"];

/// How long a browser may remember what it is allowed.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);

/// Data that the handlers of one data thread share.
#[derive(Clone, Debug)]
pub(crate) struct DataThread {
    state: SharedState,
    /// Connections to engines that this thread's runtime owns.
    connections: ConnectionPool,
    /// Origins of other sites whose pages may call.
    cors_origins: Arc<[HeaderValue]>,
}

impl DataThread {
    /// Returns the handlers' context of a thread that has no connection yet.
    #[must_use]
    pub(crate) fn new(state: SharedState, cors_origins: &[HeaderValue]) -> Self {
        let now = state.get();
        let context = CallContext {
            tls: now.tls.engines().clone(),
            resolver: now.resolver.clone(),
            via: now.via.clone(),
        };
        let connections = ConnectionPool::new((&now.settings.upstream).into(), context);
        Self { state, connections, cors_origins: cors_origins.into() }
    }

    /// Closes idle connections to workers in time, until the future is dropped.
    pub(crate) async fn close_idle_connections(self) {
        loop {
            let state = self.state.get();
            let (closed, next) = self.connections.limited((&state.settings.upstream).into()).sweep();
            state.metrics.upstream_connections_closed.inc_by(closed as u64);
            drop(state);
            tokio::time::sleep_until(next).await;
        }
    }

    /// Refuses what a page of another site sends unasked.
    fn check_page(&self, headers: &HeaderMap, uri: &Uri) -> Result<(), ApiError> {
        cross_site::check_page(headers, uri, &self.cors_origins)
    }

    /// Returns what one request uses: the state in force now, and a client for calls to workers.
    pub(crate) fn context(&self) -> (Arc<State>, Upstream) {
        let state = self.state.get();
        let connections = self.connections.limited((&state.settings.upstream).into());
        let upstream = Upstream::new(
            connections,
            state.settings.connect_timeout,
            state.settings.request_rules.limits.answer_bytes,
        );
        (state, upstream)
    }
}

/// Returns what answers clients. With origins of other sites, every answer passes the layer that adds their
/// headers.
pub(crate) fn service(thread: DataThread) -> Service {
    let routes = endpoints().with_state(thread.clone());
    if thread.cors_origins.is_empty() {
        Service::of_clients(routes.layer(from_fn(add_request_id)), thread)
    } else {
        Service::of_router(routes.layer(cors(&thread.cors_origins)).layer(from_fn(add_request_id)))
    }
}

/// Returns the clients' endpoints. `openapi/clients.json` describes them.
pub(crate) fn endpoints() -> Router<DataThread> {
    let mut routes = Router::new();
    for endpoint in Endpoint::POSTED {
        let serve = move |thread: Extract<DataThread>, request: HttpRequest<Body>| async move {
            let arrival = Arrival::of(request.extensions());
            let page = thread.check_page(request.headers(), request.uri());
            completion::serve(thread.context(), endpoint, arrival, request, page).await.map(Body::new)
        };
        routes = routes.route(endpoint.path(), post(serve));
    }
    for path in NOT_RESPONSES {
        routes = routes.route(path, any(unknown_url));
    }
    routes
        .route(Endpoint::Realtime.path(), get(realtime::serve))
        .route("/v1/responses/{id}", get(responses::one).delete(responses::one))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/route", post(preview::route))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/version", get(version))
        .route("/health", get(|| async { "ok" }))
        .route("/healthz", get(|| async { "ok" }))
        .route("/openapi.json", get(|| openapi::document(openapi::CLIENTS)))
        .fallback(unknown_url)
        .method_not_allowed_fallback(other_method)
}

/// The gateway's release, in the shape of vLLM's. Which commit it was built from is for operators.
async fn version() -> Json<serde_json::Value> {
    Json(json!({ "version": RELEASE, "server": "pointsman" }))
}

async fn unknown_url(thread: Extract<DataThread>, request: HttpRequest<Body>) -> Response<Body> {
    let (method, uri) = (request.method(), request.uri());
    let error =
        ApiError::UnknownUrl { shown: method_and_path(method, uri), meant: intended_path(uri.path()) };
    refuse(&thread, &request.into_parts().0, &error)
}

/// Answers a method that an endpoint does not have. `axum` adds the header `allow`.
async fn other_method(thread: Extract<DataThread>, request: HttpRequest<Body>) -> Response<Body> {
    if request.method() == Method::OPTIONS {
        return StatusCode::NO_CONTENT.into_response();
    }
    let parts = request.into_parts().0;
    let error = if is_responses_socket(&parts) {
        let problem = "opening a WebSocket: /v1/responses answers POST only, over HTTP; set `stream` to true for events";
        ApiError::UpgradeRequired(problem.to_owned())
    } else {
        ApiError::WrongMethod(method_and_path(&parts.method, &parts.uri))
    };
    refuse(&thread, &parts, &error)
}

/// Returns whether a request asks for the WebSocket of OpenAI's API for responses. On 426, and on no other
/// status, Codex sends its requests over HTTP at once (`WebsocketStreamOutcome` in its `core/src/client.rs`).
fn is_responses_socket(request: &Parts) -> bool {
    let (path, get) = (request.uri.path(), request.method == Method::GET);
    get && path == Endpoint::Responses.path() && realtime::asks_for_websocket(&request.headers)
}

/// A text in the path of a request: an id or a name.
struct PathText(String);

impl FromRequestParts<DataThread> for PathText {
    type Rejection = Response<Body>;

    async fn from_request_parts(parts: &mut Parts, thread: &DataThread) -> Result<Self, Self::Rejection> {
        let text = Path::from_request_parts(parts, thread).await;
        text.map(|Path(text)| Self(text)).map_err(|error| {
            let problem = format!("path: {}", shortened(&error.body_text()));
            refuse(thread, parts, &ApiError::InvalidRequest(problem))
        })
    }
}

/// Answers a request that no endpoint takes, with an error in the shape that clients of the path expect.
/// Counts it, and writes its line of the access log.
fn refuse(thread: &DataThread, request: &Parts, error: &ApiError) -> Response<Body> {
    let (id, status, code) = (request_id(&request.headers), error.status().as_u16(), error.code());
    thread.state.get().metrics.without_endpoint(status, code);
    tracing::info!(
        target: "pointsman::access",
        request = id,
        endpoint = "other",
        status,
        code,
        asked = method_and_path(&request.method, &request.uri),
        "request"
    );
    let below = request.uri.path().strip_prefix(Endpoint::Messages.path());
    let is_message = below.is_some_and(|below| below.is_empty() || below.starts_with('/'));
    let format = if is_message { Format::Anthropic } else { Format::OpenAi };
    error.response_as(format, &id).map(Body::from)
}

/// The method and path of a request, for an error message.
fn method_and_path(method: &Method, uri: &Uri) -> String {
    shortened(&format!("{method} {}", uri.path()))
}

/// Answers for pages of other sites: which of them may call the endpoints, with any header that they ask for.
/// Cookies are not used, so credentials are not allowed.
fn cors(origins: &[HeaderValue]) -> CorsLayer {
    let any = origins.iter().any(|origin| origin == "*");
    let origins = if any { AllowOrigin::any() } else { AllowOrigin::list(origins.iter().cloned()) };
    let shown = [
        "x-request-id",
        "request-id",
        "x-pointsman-decision",
        "x-pointsman-warning",
        "retry-after",
        "retry-after-ms",
        "x-should-retry",
    ];
    let shown =
        shown.map(HeaderName::from_static).into_iter().chain(RateHeaders::NAMES.into_iter().flatten());
    CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST, Method::HEAD, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(shown.collect::<Vec<_>>())
        .max_age(PREFLIGHT_AGE)
}
