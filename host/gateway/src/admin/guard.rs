//! Who may use the operators' listener: everybody who can connect, or those who have the token.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, Method, Response},
    middleware::Next,
};

use crate::{
    app::{App, Settings},
    error::Cause,
    server::{bearer, request_id, same},
};

/// Lets a request pass, or answers 401 or 403.
pub(super) async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response<Body> {
    match allowed(&app.settings, request.method(), request.uri().path(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(cause) => cause.response(&request_id(request.headers())).map(Body::from),
    }
}

fn allowed(settings: &Settings, method: &Method, path: &str, headers: &HeaderMap) -> Result<(), Cause> {
    let Some(token) = &settings.admin_token else { return Ok(()) };
    let reads = method == Method::GET || method == Method::HEAD;
    // What asks whether the daemon lives has no token to give.
    let open = matches!(path, "/healthz" | "/readyz") || !settings.admin_token_reads;
    if reads && open {
        return Ok(());
    }
    let given = bearer(headers).ok_or(Cause::Unauthorized)?;
    if same(given.as_bytes(), token.as_bytes()) { Ok(()) } else { Err(Cause::Forbidden) }
}
