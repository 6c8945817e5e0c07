//! `GET /v1/models` and `GET /v1/models/{id}`: which models can be served now (B3).

use axum::{
    Json,
    body::Body,
    extract::{Path, State as Extract},
    http::{HeaderMap, Request as HttpRequest, Response},
    response::IntoResponse,
};
use serde_json::{Value, json};

use super::{DataThread, arrival::Arrival, auth, peer::Sender, request_id};
use crate::{
    openai::{error::ApiError, short_text::shortened},
    orchestrate::{availability::servable_models, no_worker_registered},
};

/// Lists the models.
pub(super) async fn list(thread: Extract<DataThread>, request: HttpRequest<Body>) -> Response<Body> {
    let (headers, sender) = (request.headers().clone(), Arrival::of(request.extensions()).sender);
    let models = async {
        let names = allowed(&thread, &headers, &sender).await?;
        let data: Vec<_> = names.iter().map(describe).collect();
        Ok(json!({ "object": "list", "data": data }))
    };
    answer(models.await, &headers)
}

/// Describes one model. Its name may contain slashes.
pub(super) async fn one(
    thread: Extract<DataThread>,
    Path(id): Path<String>,
    request: HttpRequest<Body>,
) -> Response<Body> {
    let (headers, sender) = (request.headers().clone(), Arrival::of(request.extensions()).sender);
    let model = async {
        let names = allowed(&thread, &headers, &sender).await?;
        let found = names.iter().find(|name| **name == id).map(describe);
        let none = thread.state.get().registry.snapshot().workers().is_empty();
        let missing = || if none { no_worker_registered() } else { ApiError::ModelNotFound(shortened(&id)) };
        found.ok_or_else(missing)
    };
    answer(model.await, &headers)
}

/// The models, for a client that may know them.
async fn allowed(thread: &DataThread, headers: &HeaderMap, sender: &Sender) -> Result<Vec<String>, ApiError> {
    let state = thread.state.get();
    auth::authorize_client(&state, headers, sender).await?;
    Ok(servable_models(&state.registry.snapshot(), &state.settings))
}

fn describe(name: &String) -> Value {
    json!({ "id": name, "object": "model", "created": 0, "owned_by": "pointsman" })
}

fn answer(answered: Result<Value, ApiError>, headers: &HeaderMap) -> Response<Body> {
    match answered {
        Ok(value) => Json(value).into_response(),
        Err(error) => error.response(&request_id(headers)).map(Body::from),
    }
}
