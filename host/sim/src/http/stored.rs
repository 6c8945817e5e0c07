//! Responses that the engine stored. Each engine finds only its own.

use std::sync::Arc;

use axum::{
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::answer::EVENT_STREAM;
use crate::engine::Engine;

pub(super) async fn read(
    State(engine): State<Arc<Engine>>,
    Path(id): Path<String>,
    request: axum::extract::Request,
) -> Response {
    if !engine.has_stored(&id) {
        return not_found(&id);
    }
    if request.uri().query().is_some_and(|query| query.contains("stream=true")) {
        let data = json!({ "type": "response.completed", "response": stored(&id, "completed") });
        let event = format!("event: response.completed\ndata: {data}\n\n");
        return ([(header::CONTENT_TYPE, EVENT_STREAM)], event).into_response();
    }
    super::json(StatusCode::OK, stored(&id, "completed").to_string())
}

pub(super) async fn delete(State(engine): State<Arc<Engine>>, Path(id): Path<String>) -> Response {
    if !engine.delete_stored(&id) {
        return not_found(&id);
    }
    super::json(StatusCode::OK, json!({ "id": id, "object": "response", "deleted": true }).to_string())
}

pub(super) async fn cancel(State(engine): State<Arc<Engine>>, Path(id): Path<String>) -> Response {
    if !engine.has_stored(&id) {
        return not_found(&id);
    }
    super::json(StatusCode::OK, stored(&id, "cancelled").to_string())
}

/// Returns vLLM's answer to an unknown id.
pub(super) fn not_found(id: &str) -> Response {
    let message = format!("Response with id '{id}' not found.");
    let error = json!({ "message": message, "type": "invalid_request_error", "param": null, "code": 404 });
    super::json(StatusCode::NOT_FOUND, json!({ "error": error }).to_string())
}

fn stored(id: &str, status: &str) -> serde_json::Value {
    json!({ "id": id, "object": "response", "status": status, "output": [], "error": null })
}
