//! `POST /config/reload`: the configuration file read again, now.

use std::sync::Arc;

use axum::{
    Json,
    body::Body,
    extract::State,
    http::{HeaderMap, Response, StatusCode},
    response::IntoResponse,
};

use crate::{app::App, config::reload::ReloadError, error, server::request_id};

pub(super) async fn reload(State(app): State<Arc<App>>, headers: HeaderMap) -> Response<Body> {
    let error = match app.config.reload(&app).await {
        Ok(reloaded) => return Json(reloaded).into_response(),
        Err(error) => error,
    };
    let (status, code) = match &error {
        ReloadError::NoFile => (StatusCode::CONFLICT, "no_config_file"),
        ReloadError::Invalid(_) => (StatusCode::BAD_REQUEST, "invalid_config"),
        ReloadError::Policies(_) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
    };
    let body = error::body(status, code, &error.to_string(), &request_id(&headers));
    (status, Json(body)).into_response()
}
