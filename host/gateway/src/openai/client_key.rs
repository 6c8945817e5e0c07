//! The key of a client, as it arrives and as engines get it.

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// The header of the key in the Anthropic API.
pub(crate) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Returns the `authorization` header of a request to an engine that gets the client's key: as it arrived, or
/// the key of the Anthropic API as a bearer token.
pub(crate) fn forwarded(headers: &HeaderMap) -> Option<HeaderValue> {
    let bearer = |key: &HeaderValue| HeaderValue::from_bytes(&[b"Bearer ", key.as_bytes()].concat()).ok();
    let key = || headers.get(API_KEY).filter(|key| !key.is_empty());
    headers.get(header::AUTHORIZATION).cloned().or_else(|| key().and_then(bearer))
}
