//! Why a request is not served, in words that every dialect can put into its own error shape.

use std::borrow::Cow;

use crate::core::Refusal;

/// A request that is not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) status: u16,
    /// The `type` of the error object.
    pub(crate) kind: &'static str,
    pub(crate) message: Cow<'static, str>,
    pub(crate) param: Option<Cow<'static, str>>,
    pub(crate) retry_after: Option<u32>,
}

impl Failure {
    fn new(status: u16, kind: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, kind, message: message.into(), param: None, retry_after: None }
    }

    /// 400: a value is wrong.
    pub(crate) fn bad(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(400, "BadRequestError", message)
    }

    /// 400: the body does not have the right shape.
    pub(crate) fn shape(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(400, "Bad Request", message)
    }

    /// 404: no such model.
    pub(crate) fn not_found(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(404, "NotFoundError", message)
    }

    /// 500.
    pub(crate) fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(500, "InternalServerError", message)
    }

    /// What vLLM says when its engine process is gone.
    pub(crate) fn engine_dead() -> Self {
        Self::internal("EngineCore encountered an issue. See stack trace (above) for the root cause.")
    }

    /// What vLLM says when a KV transfer fails.
    pub(crate) fn transfer() -> Self {
        Self::internal("Internal server error")
    }

    /// A status that a fault asked for.
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
