//! The header by which a client knows its request.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::endpoint::Format;

/// Name of the header, in requests and answers.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Name of the header in answers of the Anthropic API, besides the other one.
pub(crate) const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Writes the id into the headers of an answer. An empty id, of a connection on which no request could be
/// read, is left out.
pub(crate) fn set_request_id(headers: &mut HeaderMap, format: Format, id: &str) {
    if let Ok(value) = HeaderValue::from_str(id)
        && !id.is_empty()
    {
        if format == Format::Anthropic {
            headers.insert(ANTHROPIC_REQUEST_ID, value.clone());
        }
        headers.insert(REQUEST_ID, value);
    }
}
