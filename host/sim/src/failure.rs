//! Failures of requests, independent of the dialect's error format.

use std::borrow::Cow;

use crate::core::Refusal;

/// Reason for which a request is not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) status: u16,
    /// `type` of the error object.
    pub(crate) kind: &'static str,
    pub(crate) message: Cow<'static, str>,
    pub(crate) param: Option<Cow<'static, str>>,
    pub(crate) retry_after: Option<u32>,
}

impl Failure {
    fn new(status: u16, kind: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, kind, message: message.into(), param: None, retry_after: None }
    }

    /// Status 400: a value is invalid.
    pub(crate) fn bad(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(400, "BadRequestError", message)
    }

    /// Status 400: the body is malformed.
    pub(crate) fn shape(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(400, "Bad Request", message)
    }

    /// Status 404: the model is unknown.
    pub(crate) fn not_found(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(404, "NotFoundError", message)
    }

    /// Status 500.
    pub(crate) fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(500, "InternalServerError", message)
    }

    /// vLLM's response when its engine process has ended.
    pub(crate) fn engine_dead() -> Self {
        Self::internal("EngineCore encountered an issue. See stack trace (above) for the root cause.")
    }

    /// vLLM's response when a KV transfer fails.
    pub(crate) fn transfer() -> Self {
        Self::internal("Internal server error")
    }

    /// Status of an injected fault.
    pub(crate) fn injected(status: u16, retry_after: Option<u32>) -> Self {
        let kind = match status {
            404 => "NotFoundError",
            429 => "RateLimitError",
            400..=499 => "BadRequestError",
            503 => "ServiceUnavailableError",
            _ => "InternalServerError",
        };
        Self { retry_after, ..Self::new(status, kind, format!("injected fault: status {status}")) }
    }

    pub(crate) fn with_param(self, param: impl Into<Cow<'static, str>>) -> Self {
        Self { param: Some(param.into()), ..self }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::QueueFull { .. } => Self::new(503, "ServiceUnavailableError", refusal.to_string()),
            Refusal::TooLarge { .. } => Self::bad(refusal.to_string()),
        }
    }
}
