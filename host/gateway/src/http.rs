//! The clients' listener: OpenAI endpoints over HTTP/1.1.
//!
//! It authenticates a request, reads its body within the limits, and passes it on. `listener`, `auth` and
//! `request_id` serve the operators' listener, too.

use std::sync::Arc;

use axum::{
    Json, Router,
    body::Body,
    extract::State as Extract,
    http::{HeaderMap, Request as HttpRequest, Response},
    response::IntoResponse,
    routing::{get, post},
};
use serde_json::json;

use crate::{
    openai::request::Endpoint,
    orchestrate::availability::servable_models,
    state::{SharedState, State},
    upstream::{ConnectionPool, Upstream},
};

mod accept_errors;
mod admit;
pub(crate) mod auth;
mod body;
mod completion;
mod first_byte;
pub(crate) mod listener;
mod preview;
mod request_id;

pub(crate) use request_id::request_id;

/// What the handlers of one data thread share.
#[derive(Clone, Debug)]
pub(crate) struct DataThread {
    state: SharedState,
    /// Connections to engines that this thread's runtime owns.
    connections: ConnectionPool,
}

impl DataThread {
    /// Returns the handlers' context of a thread that has no connection yet.
    #[must_use]
    pub(crate) fn new(state: SharedState) -> Self {
        Self { state, connections: ConnectionPool::default() }
    }

    /// Returns what one request uses: the state in force now, and a client for calls to workers.
    fn context(&self) -> (Arc<State>, Upstream) {
        let state = self.state.get();
        let upstream = Upstream::new(self.connections.clone(), state.settings.connect_timeout);
        (state, upstream)
    }
}

/// Returns the clients' endpoints.
pub(crate) fn routes(thread: DataThread) -> Router {
    Router::new()
        .route(Endpoint::ChatCompletions.path(), post(chat_completions))
        .route(Endpoint::Completions.path(), post(completions))
        .route(Endpoint::Embeddings.path(), post(embeddings))
        .route(Endpoint::Tokenize.path(), post(tokenize))
        .route("/v1/route", post(preview::route))
        .route("/v1/models", get(models))
        .route("/health", get(|| async { "ok" }))
        .with_state(thread)
}

async fn chat_completions(thread: Extract<DataThread>, request: HttpRequest<Body>) -> Response<Body> {
    completion::serve(&thread, Endpoint::ChatCompletions, request).await
}

async fn completions(thread: Extract<DataThread>, request: HttpRequest<Body>) -> Response<Body> {
    completion::serve(&thread, Endpoint::Completions, request).await
}

async fn embeddings(thread: Extract<DataThread>, request: HttpRequest<Body>) -> Response<Body> {
    completion::serve(&thread, Endpoint::Embeddings, request).await
}

async fn tokenize(thread: Extract<DataThread>, request: HttpRequest<Body>) -> Response<Body> {
    completion::serve(&thread, Endpoint::Tokenize, request).await
}

/// Answers which models can be served now (B3).
async fn models(thread: Extract<DataThread>, headers: HeaderMap) -> Response<Body> {
    let state = thread.state.get();
    if let Err(error) = auth::authorize(&state.settings.api_keys, &headers) {
        return error.response(&request_id(&headers)).map(Body::from);
    }
    let names = servable_models(&state.registry.snapshot(), state.settings.enforce_disagg);
    let data: Vec<_> = names
        .iter()
        .map(|name| json!({ "id": name, "object": "model", "created": 0, "owned_by": "pointsman" }))
        .collect();
    Json(json!({ "object": "list", "data": data })).into_response()
}
