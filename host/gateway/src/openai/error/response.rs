//! Errors as clients get them: whole answers, and events that end a stream.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};

use super::{ApiError, status};
use crate::{
    openai::{endpoint::Format, error_body::ErrorFields, request_id::set_request_id, sequence::LastNumber},
    upstream::SHOULD_RETRY,
};

/// Maximum length of the name of an engine's error, bytes.
const MAX_NAME: usize = 64;
/// Maximum length of an engine's own text in a message, characters.
const MAX_TEXT: usize = 500;

impl ApiError {
    /// Returns the whole answer, in OpenAI's error shape, with the id as a header. An engine's own refusal is
    /// passed on unchanged.
    #[must_use]
    pub(crate) fn response(&self, request_id: &str) -> Response<Bytes> {
        self.response_as(Format::OpenAi, request_id)
    }

    /// Like [`Self::response`], in the error shape of `format`.
    #[must_use]
    pub(crate) fn response_as(&self, format: Format, request_id: &str) -> Response<Bytes> {
        let mut response = match self {
            Self::Engine { content_type, retry, body, .. } => {
                let mut response = Response::new(body.clone());
                let json = HeaderValue::from_static("application/json");
                response.headers_mut().insert(header::CONTENT_TYPE, content_type.clone().unwrap_or(json));
                if let Some(value) = &retry.after {
                    response.headers_mut().insert(header::RETRY_AFTER, value.clone());
                }
                response
            }
            _ => {
                let body = self.error_fields(&self.to_string(), request_id).body(format);
                let mut response = Response::new(Bytes::from(body.to_string()));
                response
                    .headers_mut()
                    .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
                response
            }
        };
        *response.status_mut() = self.status_as(format);
        set_request_id(response.headers_mut(), format, request_id);
        if let Some(seconds) = self.retry_after() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(should) = self.should_retry() {
            let value = HeaderValue::from_static(if should { "true" } else { "false" });
            response.headers_mut().insert(SHOULD_RETRY, value);
        }
        if self.status() == StatusCode::UNAUTHORIZED && !matches!(self, Self::Engine { .. }) {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if matches!(self, Self::UnsupportedCoding(_) | Self::FalseCoding(..)) {
            response
                .headers_mut()
                .insert(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip, zstd, br"));
        }
        if let Self::TenantLimit(exceeded) = self {
            exceeded.write(response.headers_mut());
        }
        response
    }

    /// Returns the status of an answer in `format`. Clients of Anthropic's API know an overload by 529.
    #[must_use]
    pub(crate) fn status_as(&self, format: Format) -> StatusCode {
        let own = self.status();
        let is_overload = own == StatusCode::SERVICE_UNAVAILABLE && self.code() == "overloaded";
        if is_overload && format == Format::Anthropic { status(529) } else { own }
    }

    /// Returns one valid error event, for a stream that has begun after events up to `last`. An engine's own
    /// refusal is passed on, and the name of its error is the code.
    #[must_use]
    pub(crate) fn event(&self, format: Format, request_id: &str, last: LastNumber) -> Bytes {
        if let Self::Engine { body, .. } = self
            && !format.is_named()
            && let Ok(refusal) = serde_json::from_slice::<serde_json::Value>(body)
            && refusal.get("error").is_some()
        {
            return Bytes::from(format!("data: {refusal}\n\n"));
        }
        let message = self.message_without_headers();
        let fields = self.error_fields(&message, request_id);
        let code = self.engine_error().unwrap_or(fields.code);
        Bytes::from(ErrorFields { code, ..fields }.event(format, last.next()))
    }

    /// Returns the message, with what an engine said.
    #[must_use]
    pub(crate) fn message(&self) -> String {
        match self {
            Self::Engine { status, body, .. } => {
                format!("the engine {}", answered(*status, body))
            }
            other => other.to_string(),
        }
    }

    /// Returns the message for a place that no header accompanies: it says the time itself.
    fn message_without_headers(&self) -> String {
        let when = self.retry_after().map_or("later".to_owned(), |seconds| format!("after {seconds} s"));
        self.message().replace("after the time in `retry-after`", &when)
    }

    /// The name of the error with which an engine ended its answer, if it named one.
    fn engine_error(&self) -> Option<&str> {
        match self {
            Self::EndedWithError { name, .. } => Some(name),
            Self::Pinned(cause, ..) | Self::NotContinued { cause, .. } => cause.engine_error(),
            _ => None,
        }
    }

    fn error_fields<'a>(&self, message: &'a str, request_id: &'a str) -> ErrorFields<'a> {
        let kind = match self {
            Self::TenantLimit(exceeded) => Some(exceeded.limit_type()),
            _ => None,
        };
        ErrorFields { status: self.status(), code: self.code(), kind, message, request_id }
    }
}

/// An error's body in OpenAI's shape.
pub(crate) fn body(status: StatusCode, code: &str, message: &str, request_id: &str) -> serde_json::Value {
    ErrorFields { status, code, kind: None, message, request_id }.body(Format::OpenAi)
}

/// Says what an engine answered: the status, and what its body says.
pub(crate) fn answered(status: StatusCode, body: &[u8]) -> String {
    let text = engine_text(body);
    let status = status.as_u16();
    if text.trim().is_empty() { format!("answered {status}") } else { format!("answered {status}: {text}") }
}

/// Returns the name of an error in an engine's body: its code or its type, if that is no number.
pub(super) fn error_name(body: &[u8]) -> Option<String> {
    let json: serde_json::Value = serde_json::from_slice(body).ok()?;
    let fields = ["/error/code", "/code", "/error/type"];
    let mut names = fields.iter().filter_map(|field| json.pointer(field)?.as_str());
    let is_name = |text: &&str| {
        let may_be = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
        text.len() <= MAX_NAME
            && text.starts_with(|first: char| first.is_ascii_alphabetic())
            && text.bytes().all(may_be)
    };
    names.find(is_name).map(str::to_owned)
}

/// The message an engine put into its error body, else the body's beginning.
pub(crate) fn engine_text(body: &[u8]) -> String {
    let message = serde_json::from_slice::<serde_json::Value>(body).ok().and_then(|json| {
        let message = json.pointer("/error/message").or(json.pointer("/message")).or(json.get("error"))?;
        message.as_str().map(str::to_owned)
    });
    let text = message.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    text.chars().take(MAX_TEXT).collect()
}
