//! `POST /config/reload`: reloads the configuration file.

use axum::{
    Json,
    body::Body,
    extract::State as Extract,
    http::{HeaderMap, Response, StatusCode},
    response::IntoResponse,
};

use crate::{config::reload::ReloadError, http::request_id, openai::error, state::SharedState};

pub(super) async fn reload(Extract(state): Extract<SharedState>, headers: HeaderMap) -> Response<Body> {
    let error = match state.get().config.reload(&state).await {
        Ok(reloaded) => return Json(reloaded).into_response(),
        Err(error) => error,
    };
    let (status, code) = match &error {
        ReloadError::NoFile => (StatusCode::CONFLICT, "no_config_file"),
        ReloadError::Invalid(_) | ReloadError::NeedsOperator(_) => {
            (StatusCode::BAD_REQUEST, "invalid_config")
        }
        ReloadError::NotRead => (StatusCode::SERVICE_UNAVAILABLE, "config_not_read"),
        ReloadError::Policies(_) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
    };
    let body = error::body(status, code, &error.to_string(), &request_id(&headers));
    (status, Json(body)).into_response()
}
