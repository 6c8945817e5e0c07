//! Headers of answers that come in parts.

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// Tells nginx and proxies like it to pass an answer on as it comes. Without it, nginx collects the answer.
pub(crate) const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Sets the headers that let an answer through caches and proxies as it comes.
pub(crate) fn set_stream_headers(headers: &mut HeaderMap) {
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
}
