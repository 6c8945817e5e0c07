//! Refusals on the operators' listener: one shape for all.

use axum::{
    Json,
    body::Body,
    extract::{FromRequestParts, Path, Request},
    http::{HeaderMap, Method, Response, StatusCode, request::Parts},
    response::IntoResponse,
};
use pointsman_workers::WorkerId;

use crate::{
    http::request_id,
    openai::{
        error::{self, ApiError},
        short_text::shortened,
    },
};

/// Answers with an error body.
pub(super) fn refuse(headers: &HeaderMap, status: StatusCode, code: &str, message: &str) -> Response<Body> {
    (status, Json(error::body(status, code, message, &request_id(headers)))).into_response()
}

/// Refuses a request whose content or query string is not valid.
pub(super) fn invalid(headers: &HeaderMap, message: &str) -> Response<Body> {
    refuse(headers, StatusCode::BAD_REQUEST, "invalid_request", message)
}

/// Refuses an id that no worker has.
pub(super) fn no_worker(headers: &HeaderMap, id: WorkerId) -> Response<Body> {
    let message = format!("worker {id} is not registered; GET /workers lists the ids");
    refuse(headers, StatusCode::NOT_FOUND, "worker_not_found", &message)
}

/// The id of a worker in a path.
pub(super) struct PathId(pub(super) WorkerId);

impl<S: Send + Sync> FromRequestParts<S> for PathId {
    type Rejection = Response<Body>;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let id = Path::from_request_parts(parts, state).await;
        id.map(|Path(id)| Self(WorkerId(id))).map_err(|error| {
            let problem = shortened(&error.body_text());
            invalid(&parts.headers, &format!("the id of the worker is not a number of 64 bits: {problem}"))
        })
    }
}

/// A text in a path: an id or a name.
pub(super) struct PathText(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for PathText {
    type Rejection = Response<Body>;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let text = Path::from_request_parts(parts, state).await;
        text.map(|Path(text)| Self(text))
            .map_err(|error| invalid(&parts.headers, &format!("path: {}", shortened(&error.body_text()))))
    }
}

/// Answers a path that does not exist.
pub(super) async fn unknown_url(request: Request) -> Response<Body> {
    let error = ApiError::UnknownUrl { shown: method_and_path(&request), meant: None };
    error.response(&request_id(request.headers())).map(Body::from)
}

/// Answers a method that an endpoint does not have.
pub(super) async fn other_method(request: Request) -> Response<Body> {
    if request.method() == Method::OPTIONS {
        return StatusCode::NO_CONTENT.into_response();
    }
    let error = ApiError::WrongMethod(method_and_path(&request));
    error.response(&request_id(request.headers())).map(Body::from)
}

fn method_and_path(request: &Request) -> String {
    shortened(&format!("{} {}", request.method(), request.uri().path()))
}
