//! The header by which a client knows its request.

use http::{HeaderMap, HeaderName, HeaderValue};

/// Name of the header, in requests and answers.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Writes the id into the headers of an answer. An empty id, of a connection on which no request could be
/// read, is left out.
pub(crate) fn set_request_id(headers: &mut HeaderMap, id: &str) {
    if let Ok(value) = HeaderValue::from_str(id)
        && !id.is_empty()
    {
        headers.insert(REQUEST_ID, value);
    }
}
