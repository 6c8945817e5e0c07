//! Access to the operators' listener: requests of this listener's own page and of tools, with the token of an
//! operator where one is configured. Every change is recorded in the audit log, refused ones included.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::{Request, State as Extract},
    http::{HeaderMap, Method, Response},
    middleware::Next,
};

use super::{
    audit::{Change, is_read},
    origin::{check_host, check_origin},
};
use crate::{
    config::Role,
    http::{
        arrival::Arrival,
        auth::{operator_of, wrong_key},
        credentials::bearer,
        cross_site::is_json,
        request_id,
    },
    openai::error::ApiError,
    state::{Settings, State, caller::Operator},
};

/// Lets a request pass, or answers 401, 403, 415 or 429.
pub(super) async fn guard(
    Extract(state): Extract<Arc<State>>,
    mut request: Request,
    next: Next,
) -> Response<Body> {
    let sender = Arrival::of(request.extensions()).sender;
    let peer = sender.address;
    let change = Change::of(&request, peer);
    let (operator, found) = match operator_of(&state, request.headers(), &sender).await {
        Ok(operator) => (operator, Ok(None)),
        Err(error @ (ApiError::NotOperator | ApiError::WrongToken(_))) => (None, Ok(Some(error))),
        Err(error) => (None, Err(error)),
    };
    let (method, path) = (request.method(), request.uri().path());
    let by = operator.as_ref();
    let headers = request.headers();
    let allowed = found.and_then(|problem| allowed(&state.settings, method, path, headers, (by, problem)));
    let response = match allowed {
        Ok(()) => {
            request.extensions_mut().insert(MayChange(may_change(&state.settings, by)));
            next.run(request).await
        }
        Err(cause) => {
            let cause = match cause {
                ApiError::WrongAdminToken => {
                    wrong_key(&state, "operators", peer, ApiError::WrongAdminToken).await
                }
                other => other,
            };
            cause.response(&request_id(request.headers())).map(Body::from)
        }
    };
    if let Some(change) = change {
        change.record(&state.metrics, operator.as_ref().map(|operator| &*operator.id), &response);
    }
    response
}

/// Whether the sender of a request may change anything; an extension of the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct MayChange(pub(super) bool);

fn may_change(settings: &Settings, operator: Option<&Operator>) -> bool {
    !settings.operators_are_known || operator.is_some_and(|operator| operator.role == Role::Operator)
}

fn allowed(
    settings: &Settings,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
    (operator, problem): (Option<&Operator>, Option<ApiError>),
) -> Result<(), ApiError> {
    let reads = is_read(method);
    let is_health = matches!(path, "/healthz" | "/readyz");
    // A browser sends a certificate with requests of every site, and a token only with those of this page.
    let by_token = operator.is_some() && matches!(bearer(headers), Ok(Some(_)));
    // A page of another site has no token, and learns nothing from a health check.
    if !by_token && !is_health {
        check_host(headers, &settings.admin_names)?;
    }
    if !reads {
        check_site(headers)?;
    }
    check_origin(headers, &settings.admin_names)?;
    // The files of the page contain no data; the page asks for the token.
    let open = !settings.operators_are_known
        || (reads && (is_health || !settings.admin_token_reads || super::page::is_of(path)));
    if !open && operator.is_none() {
        return Err(match bearer(headers)? {
            Some(_) => problem.unwrap_or(ApiError::WrongAdminToken),
            None => ApiError::NoAdminToken,
        });
    }
    if !reads && !may_change(settings, operator) {
        return Err(ApiError::NotOperator);
    }
    // A browser sends DELETE to another site only after it asked, and this listener does not allow it.
    if method == Method::POST && !by_token && !is_json(headers) {
        return Err(ApiError::NotJson);
    }
    Ok(())
}

/// Refuses a change that a page of another site sent through an operator's browser.
fn check_site(headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.get("sec-fetch-site").map_or(&b"none"[..], |site| site.as_bytes()) {
        b"same-origin" | b"none" => Ok(()),
        _ => Err(ApiError::ForeignOrigin(
            "checking the Sec-Fetch-Site header: a page of another site sent this change; use this listener's own page"
                .to_owned(),
        )),
    }
}
