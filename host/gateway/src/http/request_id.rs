//! The id under which a client, the access log and error bodies know a request.

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderMap, Response},
    middleware::Next,
};

use crate::{
    hex::Hex,
    openai::endpoint::Format,
    openai::request_id::{REQUEST_ID, set_request_id},
};

/// Longest id that is taken from a client, bytes.
const MAX_LENGTH: usize = 128;

/// Returns the client's `x-request-id`, else a random one.
pub(crate) fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let usable = given.filter(|id| !id.is_empty() && id.len() <= MAX_LENGTH);
    usable.map_or_else(fresh_id, str::to_owned)
}

/// Returns a random id.
pub(crate) fn fresh_id() -> String {
    Hex::of_u128(rand::random()).as_str().to_owned()
}

/// Adds the id to an answer that does not have it yet (A5.5).
pub(crate) async fn add_request_id(request: Request, next: Next) -> Response<Body> {
    let id = request.headers().get(REQUEST_ID).cloned();
    let mut response = next.run(request).await;
    if !response.headers().contains_key(REQUEST_ID) {
        let given: HeaderMap = id.into_iter().map(|id| (REQUEST_ID, id)).collect();
        set_request_id(response.headers_mut(), Format::OpenAi, &request_id(&given));
    }
    response
}
