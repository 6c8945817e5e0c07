//! Access to the operators' listener: with the admin token, or unrestricted without one.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::{Request, State as Extract},
    http::{HeaderMap, Method, Response},
    middleware::Next,
};

use crate::{
    http::{
        auth::{bearer, is_token},
        request_id,
    },
    openai::error::ApiError,
    state::{Settings, State},
};

/// Lets a request pass, or answers 401 or 403.
pub(super) async fn guard(
    Extract(state): Extract<Arc<State>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    match allowed(&state.settings, request.method(), request.uri().path(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(cause) => cause.response(&request_id(request.headers())).map(Body::from),
    }
}

/// Whether a request with these headers may change anything.
pub(super) fn may_change(settings: &Settings, headers: &HeaderMap) -> bool {
    settings.admin_token.as_ref().is_none_or(|token| gives(headers, token) == Some(true))
}

/// Whether the request carries the right token; `None`: it carries none.
fn gives(headers: &HeaderMap, token: &str) -> Option<bool> {
    Some(is_token(bearer(headers)?, token))
}

fn allowed(settings: &Settings, method: &Method, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
    let reads = method == Method::GET || method == Method::HEAD;
    let site = headers.get("sec-fetch-site").map_or(&b"none"[..], |site| site.as_bytes());
    if !reads && !matches!(site, b"same-origin" | b"none") {
        // A page of another site sent this request through an operator's browser.
        return Err(ApiError::Forbidden);
    }
    let Some(token) = &settings.admin_token else { return Ok(()) };
    // Health checks carry no token. The files of the page contain no data; the page asks for the token.
    let open = matches!(path, "/healthz" | "/readyz") || super::page::is_of(path);
    if reads && (open || !settings.admin_token_reads) {
        return Ok(());
    }
    if gives(headers, token).ok_or(ApiError::Unauthorized)? { Ok(()) } else { Err(ApiError::Forbidden) }
}
