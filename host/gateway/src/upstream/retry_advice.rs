//! What an engine's answer says about sending the request again.

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// Maximum length of an engine's `Retry-After`, bytes: a number of seconds, or a date.
const MAX_LENGTH: usize = 64;
/// The time in milliseconds, as OpenAI and Azure write it. It is the more exact one of both.
pub(super) const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// Whether a client should send the request again at all, as OpenAI's and Anthropic's clients read it.
pub(crate) const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// What the answer of an engine says about sending the request again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RetryAdvice {
    /// When the engine wants to be asked again.
    pub(crate) after: Option<HeaderValue>,
    /// Whether the client should ask again.
    pub(crate) should: Option<bool>,
}

impl RetryAdvice {
    /// Reads the advice in the head of an answer.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let should = match headers.get(SHOULD_RETRY).map(HeaderValue::as_bytes) {
            Some(b"true") => Some(true),
            Some(b"false") => Some(false),
            _ => None,
        };
        Self { after: retry_after_of(headers), should }
    }
}

/// Returns when an engine wants to be asked again: a `Retry-After`, which may have a fraction.
fn retry_after_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let given = |name| headers.get(name).filter(|value: &&HeaderValue| value.len() <= MAX_LENGTH);
    let millis = given(RETRY_AFTER_MS).and_then(|value| number(value.to_str().ok()?));
    let seconds = millis.and_then(|millis| HeaderValue::try_from((millis / 1_000.0).to_string()).ok());
    seconds.or_else(|| given(header::RETRY_AFTER).cloned())
}

/// Reads a number without a sign or an exponent.
pub(super) fn number(text: &str) -> Option<f64> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.parse().ok().filter(|_| is_plain)
}
