//! The id under which a client, the access log and error bodies know a request.

use axum::http::HeaderMap;

/// Longest id that is taken from a client, bytes.
const MAX_LENGTH: usize = 128;

/// Returns the client's `x-request-id`, else a random one.
pub(crate) fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get("x-request-id").and_then(|value| value.to_str().ok());
    let usable = given.filter(|id| !id.is_empty() && id.len() <= MAX_LENGTH);
    usable.map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned)
}
