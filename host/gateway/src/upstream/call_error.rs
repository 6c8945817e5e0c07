//! Why a call has no usable answer, and what that says about the engine, the request and a retry.

use bytes::Bytes;
use http::{HeaderValue, StatusCode};

use super::{RetryAdvice, Silence, text};

/// A call without a usable answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    /// No connection: no byte of the request was sent.
    #[error("connect failed: {0}")]
    Connect(String),
    /// This host has no descriptor, port or memory left for a connection. The worker is not at fault.
    #[error("no connection can be opened: {0}")]
    Shortage(String),
    /// The engine closed a kept connection as the request came, and sent no byte of an answer.
    #[error("connection failed: {0}")]
    Closed(String),
    /// The connection failed before or within the answer.
    #[error("connection failed: {0}")]
    Broken(String),
    /// The engine was silent for too long.
    #[error("{0}")]
    Timeout(Silence),
    /// Health checks found that the engine does not answer while a request waited for it.
    #[error("the engine answers neither requests nor health checks")]
    Down,
    /// The engine sleeps, and sent nothing of an answer. It works: it serves the request when it is woken.
    #[error("the engine fell asleep before it answered")]
    Asleep,
    /// An answer with an error status, or one that is an error although its status is 200.
    #[error("status {status}: {}", text(body))]
    Status {
        status: StatusCode,
        /// Content type of the answer.
        content_type: Option<HeaderValue>,
        retry: RetryAdvice,
        body: Bytes,
        /// Whether the error was in the body of an answer that said 200.
        in_body: bool,
    },
    /// The answer violates the engine's protocol.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// The answer is larger than the gateway reads. The engine works, and others would answer the same.
    #[error("the answer is too large: {0}")]
    TooLarge(String),
    /// The bodies in flight leave no room for the answer: they reach this many bytes.
    #[error("the bodies in flight reach {0} bytes, the limit of limits.body_bytes_in_flight")]
    NoRoom(usize),
    /// The engine gave the request up: it ended its answer with this finish reason, such as `abort`.
    #[error("the engine ended its answer with the finish reason `{0}`")]
    GaveUp(&'static str),
    /// The engine does not say that it began from the token ids that it got. It works; others may take them.
    #[error("the rest does not begin from the token ids; vLLM has to take prompt_token_ids")]
    OtherPrompt,
}

impl From<Silence> for CallError {
    fn from(silence: Silence) -> Self {
        Self::Timeout(silence)
    }
}

impl CallError {
    /// Returns whether the engine broke while it handled the request. An engine that is overloaded refuses a
    /// request and stays usable.
    #[must_use]
    pub(crate) fn breaks_engine(&self) -> bool {
        match self {
            Self::Broken(_) | Self::Protocol(_) | Self::Timeout(_) | Self::Down | Self::GaveUp(_) => true,
            Self::Connect(_)
            | Self::Shortage(_)
            | Self::Closed(_)
            | Self::Asleep
            | Self::OtherPrompt
            | Self::NoRoom(_)
            | Self::TooLarge(_) => false,
            Self::Status { .. } => !self.is_refusal() && self.refusal().is_none(),
        }
    }

    /// Returns whether the engine answered, though not with what a leg needs.
    pub(crate) fn has_answered(&self) -> bool {
        use CallError::{GaveUp, NoRoom, Protocol, Status, TooLarge};
        matches!(self, Status { .. } | Protocol(_) | TooLarge(_) | NoRoom(_) | GaveUp(_))
    }

    /// Returns whether the worker made progress up to the limit that ended the call: it works.
    #[must_use]
    pub(crate) fn is_of_slow_worker(&self) -> bool {
        matches!(self, Self::Timeout(silence) if silence.worker_made_progress())
    }

    /// Like [`Self::breaks_engine`], or the engine may have broken on a request that it did not answer.
    #[must_use]
    pub(crate) fn may_break_engine(&self) -> bool {
        self.breaks_engine() || matches!(self, Self::Closed(_))
    }

    /// Returns whether another engine that fails in the same way makes the request itself suspect: the
    /// connection ended, a kept one too, or the status is 5xx.
    #[must_use]
    pub(crate) fn is_suspicious(&self) -> bool {
        matches!(self, Self::Closed(_) | Self::Broken(_))
            || (self.breaks_engine() && matches!(self, Self::Status { .. }))
    }

    /// Returns whether the engine may work on although its call ended: it has not ended the answer itself.
    #[must_use]
    pub(crate) fn leaves_engine_at_work(&self) -> bool {
        use CallError::{Asleep, Down, NoRoom, OtherPrompt, Protocol, Timeout, TooLarge};
        matches!(self, Timeout(_) | Down | Asleep | Protocol(_) | OtherPrompt | TooLarge(_) | NoRoom(_))
    }

    /// Returns whether another worker is tried.
    #[must_use]
    pub(crate) fn retryable(&self) -> bool {
        match self {
            Self::Connect(_)
            | Self::Shortage(_)
            | Self::Closed(_)
            | Self::Broken(_)
            | Self::Protocol(_)
            | Self::GaveUp(_)
            | Self::OtherPrompt
            | Self::Timeout(_)
            | Self::Asleep
            | Self::Down => true,
            Self::TooLarge(_) | Self::NoRoom(_) => false,
            Self::Status { .. } => !self.is_refusal() || self.refusal().is_some(),
        }
    }

    /// Returns whether a refusal may be about the worker and not about the request: it has unloaded the model
    /// or the adapter (404), has another key (401, 407), takes its client for gone (499), or is a gateway
    /// that the request passed before (508).
    #[must_use]
    pub(crate) fn is_of_worker(&self) -> bool {
        matches!(self, Self::Status { status, .. } if matches!(status.as_u16(), 401 | 404 | 407 | 499 | 508))
    }

    /// Returns whether the engine refused the request as the client's error. Engines answer 501 to what their
    /// model or endpoint cannot do, and gateways 508 to what they got before.
    #[must_use]
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Status { status, .. }
            if status.is_client_error()
                || matches!(*status, StatusCode::NOT_IMPLEMENTED | StatusCode::LOOP_DETECTED))
    }

    /// Returns whether it counts as a failure of the worker. An overloaded engine works, and a refused
    /// request is the client's error.
    #[must_use]
    pub(crate) fn is_fault(&self) -> bool {
        matches!(self, Self::Connect(_)) || self.breaks_engine()
    }

    /// Returns whether the engine may have begun to work on the request. It has not when no byte reached it,
    /// or when its answer was a refusal, also within an answer that said 200: some engines check a request,
    /// or their load, only there. After an event of its output, this says nothing.
    #[must_use]
    pub(crate) fn began(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Shortage(_) => false,
            // 499: the client left, perhaps after the engine began.
            Self::Status { status, .. } => {
                status.as_u16() == 499 || !(self.is_refusal() || self.refusal().is_some())
            }
            Self::Closed(_)
            | Self::Broken(_)
            | Self::Protocol(_)
            | Self::TooLarge(_)
            | Self::NoRoom(_)
            | Self::GaveUp(_)
            | Self::OtherPrompt
            | Self::Timeout(_)
            | Self::Asleep
            | Self::Down => true,
        }
    }

    /// Stable metric label.
    #[must_use]
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Shortage(_) => "shortage",
            Self::Closed(_) => "closed",
            Self::Broken(_) => "broken",
            Self::Timeout(_) => "timeout",
            Self::Down => "down",
            Self::Asleep => "asleep",
            Self::Status { .. } if self.refusal().is_some() => "overloaded",
            Self::Status { .. } if self.is_refusal() => "status_4xx",
            Self::Status { .. } => "status_5xx",
            Self::Protocol(_) | Self::OtherPrompt => "protocol",
            Self::TooLarge(_) => "too_large",
            Self::NoRoom(_) => "no_room",
            Self::GaveUp(_) => "gave_up",
        }
    }
}
