//! Errors that a client sees [I]: one type with status, stable code and retry advice, and one responder.
//!
//! The message names the cause and may quote an engine's own error, but never a worker's address (A5).

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use pointsman_routing::ShedReason;

use crate::{
    openai::rate_limit::Exceeded,
    upstream::{MAX_HOPS, RetryAdvice, Silence},
};

mod convert;
mod mask;
mod response;
mod retry;
#[cfg(test)]
mod tests;

use convert::hint;
pub(crate) use mask::{RequestFacts, masked};
pub(crate) use response::{answered, body, engine_text};
use retry::RETRY_AFTER;

/// Why a request fails.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum ApiError {
    /// Bad JSON, a bad field, a bad header.
    #[error("{0}")]
    InvalidRequest(String),
    /// No key where one is needed.
    #[error(
        "authenticating the request: no API key; send the header `authorization: Bearer KEY` (or `x-api-key: KEY`)"
    )]
    Unauthorized,
    /// A key that is not known.
    #[error("authenticating the request: unknown API key; use one that this gateway's operator gave you")]
    UnknownKey,
    /// A token of an identity server that is not accepted.
    #[error(
        "authenticating the request: the token is not accepted: {0}; get a new one from the identity server"
    )]
    WrongToken(&'static str),
    /// A token of an identity server that is valid and may not.
    #[error("authorising the request: the token is valid, but {0}; ask the operator of the identity server")]
    TokenMayNot(&'static str),
    /// The identity server's public keys are not known.
    #[error(
        "authenticating the request: the identity server's public keys are not available; retry after the time in \
         `retry-after`"
    )]
    NoKeySet,
    /// Too many keys with slow digests wait to be verified.
    #[error(
        "authenticating the request: too many keys are being verified; retry after the time in `retry-after`"
    )]
    KeysBusy,
    /// The caller is authenticated, but its role does not allow the request.
    #[error(
        "changing the gateway: this token or certificate does not have the role `operator`; use one that does"
    )]
    NotOperator,
    /// A request of an operator without the token that it needs.
    #[error("this needs the admin token (Authorization: Bearer …)")]
    NoAdminToken,
    /// A request of an operator with another token.
    #[error(
        "this is not the admin token; send the one of server.admin_token \
         (Authorization: Bearer …)"
    )]
    WrongAdminToken,
    /// Too many wrong keys came from the client's address.
    #[error(
        "authenticating the request: too many wrong keys from this address; check the key and send it again \
         after the time in `retry-after`"
    )]
    TooManyWrongKeys,
    /// The request comes from a page or under a name that is not this gateway's.
    #[error("{0}")]
    ForeignOrigin(String),
    /// A change of the gateway without a token that is not JSON: a page of another site could send it.
    #[error(
        "changing the gateway: the content type is not application/json; send the header `content-type: \
         application/json`, or the admin token"
    )]
    NotJson,
    /// No endpoint has this method and path.
    #[error("{shown}: this path does not exist; {}", hint(*.meant))]
    UnknownUrl {
        /// Method and path.
        shown: String,
        /// The path that the client should use, when its base URL is wrong.
        meant: Option<&'static str>,
    },
    /// The endpoint has other methods.
    #[error("{0}: this path has other methods; the header `allow` lists them")]
    WrongMethod(String),
    /// An endpoint that upgrades connections was called without an upgrade.
    #[error("{0}")]
    UpgradeRequired(String),
    /// Too many upgraded connections are open.
    #[error(
        "opening the connection: {0} are open, the limit of limits.realtime_connections; retry after the time in \
         `retry-after`"
    )]
    TooManyConnections(usize),
    /// Too many requests are open over HTTP/2.
    #[error(
        "opening the request: {0} are open over HTTP/2, the limit of limits.http2_requests; retry after the time in \
         `retry-after`"
    )]
    TooManyStreams(usize),
    /// No worker serves this model.
    #[error("the model `{0}` does not exist; {1}")]
    ModelNotFound(String, String),
    /// A request names a stored response that no worker has.
    #[error(
        "finding the response `{0}`: no worker has stored it, or the worker that did has left; send the whole \
         conversation in `input`"
    )]
    ResponseNotFound(String),
    /// A hint names a worker that does not exist.
    #[error("{0}")]
    WorkerNotFound(String),
    /// A hint names a worker that may not serve this now.
    #[error("{0}")]
    WorkerNotEligible(String),
    /// The body is larger than allowed.
    #[error(
        "reading the body: larger than {0} bytes, the limit (for clients: server.max_body_bytes); send a \
         smaller one"
    )]
    PayloadTooLarge(usize),
    /// The body has a content coding that is not decoded.
    #[error(
        "reading the body: the content coding `{0}` is not supported; send the body with `content-encoding: gzip`, \
         `zstd` or `br`, or without a coding"
    )]
    UnsupportedCoding(String),
    /// The body is not in its declared content coding.
    #[error("decoding the body: it is not valid `{0}`: {1}; send it again, or without `content-encoding`")]
    FalseCoding(&'static str, String),
    /// The client paused for too long within the body.
    #[error(
        "reading the request body: no data for {0:?}, the limit of timeouts.body_idle; send the request again"
    )]
    RequestTimeout(Duration),
    /// The client sends its body too slowly.
    #[error(
        "reading the request body: slower than {0} bytes per second, the limit of limits.min_body_rate; send the request again over a faster connection"
    )]
    BodyTooSlow(u32),
    /// The bodies of all requests in flight take too much memory.
    #[error(
        "reading a body: the bodies of all requests and answers in flight reach {0} bytes, the limit of limits.body_bytes_in_flight; retry after the time in `retry-after`"
    )]
    BodyBytesInFlight(usize),
    /// A policy refuses.
    #[error("{}", .0.reason)]
    Shed(ShedReason),
    /// The client exceeds its rate limit.
    #[error("rate limit exceeded: more than {0} requests per second; retry after the time in `retry-after`")]
    RateLimited(u32),
    /// The tenant exceeds one of its limits.
    #[error("{0}")]
    TenantLimit(Box<Exceeded>),
    /// The client disconnected; seen in logs and metrics only.
    #[error("the client closed the connection")]
    ClientClosed,
    /// The client did not read its answer in time; seen in logs and metrics only.
    #[error("the client did not read its answer within timeouts.client_write")]
    ClientTooSlow,
    /// An engine failed or violated its protocol.
    #[error("{0}")]
    BadUpstream(String),
    /// An engine failed, and would again: another try only doubles its work.
    #[error("{0}")]
    LastingFailure(String),
    /// An engine did not answer in time.
    #[error("{0}; {advice}, or raise the limit", advice = .0.advice())]
    EngineTimeout(Silence),
    /// Two workers broke on the request, or on an equal one a moment ago.
    #[error(
        "two workers broke on this request ({cause}); equal requests are refused for {} s \
         (routing.quarantine): change the request, and report it to the operator",
        .left.as_secs_f64().ceil()
    )]
    Poison {
        /// Failure of the workers.
        cause: String,
        /// How long it is refused.
        left: Duration,
    },
    /// The engine ended its answer, whose status was 200, with an error that has a name.
    #[error("the engine ended its answer with the error `{name}`: {text}")]
    EndedWithError {
        /// Its code or type.
        name: String,
        /// What the engine said.
        text: String,
    },
    /// No worker is eligible.
    #[error("{0}")]
    NoWorker(String),
    /// No worker can serve the model now, and too many requests wait for one.
    #[error("{0}")]
    TooManyWait(String),
    /// Remote prefill is enforced, and there is no prefill worker.
    #[error("no prefill worker is available, and enforce_disagg forbids local prefill; retry later")]
    PrefillUnavailable,
    /// The prefill ran, and no decode worker can continue the request.
    #[error("the prefill ran, and no decode worker can take its result: {0}; send the request again")]
    HandoffLost(String),
    /// The only worker that may take a leg failed so, or has too much to do. The text says why no other one
    /// may take it.
    #[error("{0}; {1}, so no other one was tried")]
    Pinned(Box<Self>, String),
    /// The engine of a stream failed, and the rest of the answer could not be generated elsewhere.
    #[error(
        "{cause}; {delivered} output tokens were delivered, and no other worker could generate the rest: {why}"
    )]
    NotContinued {
        /// How the engine failed.
        cause: Box<Self>,
        /// Output tokens that the client got.
        delivered: u32,
        /// Why there is no rest.
        why: String,
    },
    /// This gateway is shutting down.
    #[error("this gateway is draining; send the request to another one")]
    Draining,
    /// The request passed this gateway before, or too many gateways.
    #[error(
        "passing the request on: it has passed this gateway before, or more than {MAX_HOPS} gateways (header `via`); \
         if the client sent no such header, a worker is a gateway that sends requests back: tell the operator"
    )]
    LoopDetected,
    /// The deadline passed.
    #[error("the request was not complete within timeouts.request, counted from its first byte")]
    Deadline,
    /// Every eligible worker is busy.
    #[error("{text}")]
    Overloaded {
        /// Message, which names the leg.
        text: String,
        /// Status of the configuration; 529 by default.
        status: StatusCode,
        /// When the client should try again.
        retry_after: Duration,
    },
    /// An engine refused the request; its answer is passed on unchanged.
    #[error("the engine answered {status}")]
    Engine {
        /// The engine's status, 4xx.
        status: StatusCode,
        /// Content type of the answer.
        content_type: Option<HeaderValue>,
        /// What the answer says about further tries.
        retry: RetryAdvice,
        /// Body of the answer.
        body: Bytes,
    },
}

impl ApiError {
    /// HTTP status.
    #[must_use]
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::InvalidRequest(_) => StatusCode::BAD_REQUEST,
            Self::Unauthorized
            | Self::UnknownKey
            | Self::WrongToken(_)
            | Self::NoAdminToken
            | Self::WrongAdminToken => StatusCode::UNAUTHORIZED,
            Self::TokenMayNot(_) | Self::NotOperator | Self::ForeignOrigin(_) => StatusCode::FORBIDDEN,
            Self::NotJson | Self::UnsupportedCoding(_) | Self::FalseCoding(..) => {
                StatusCode::UNSUPPORTED_MEDIA_TYPE
            }
            Self::ModelNotFound(..)
            | Self::WorkerNotFound(_)
            | Self::ResponseNotFound(_)
            | Self::UnknownUrl { .. } => StatusCode::NOT_FOUND,
            Self::WrongMethod(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::UpgradeRequired(_) => StatusCode::UPGRADE_REQUIRED,
            Self::WorkerNotEligible(_) => StatusCode::CONFLICT,
            Self::PayloadTooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::RequestTimeout(_) | Self::BodyTooSlow(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Shed(shed) => StatusCode::from_u16(shed.status).unwrap_or(StatusCode::TOO_MANY_REQUESTS),
            Self::RateLimited(_) | Self::TooManyWrongKeys | Self::TenantLimit(_) => {
                StatusCode::TOO_MANY_REQUESTS
            }
            Self::ClientClosed | Self::ClientTooSlow => status(499),
            Self::BadUpstream(_)
            | Self::LastingFailure(_)
            | Self::EndedWithError { .. }
            | Self::Poison { .. } => StatusCode::BAD_GATEWAY,
            Self::NoWorker(_)
            | Self::TooManyWait(_)
            | Self::PrefillUnavailable
            | Self::HandoffLost(_)
            | Self::Draining
            | Self::KeysBusy
            | Self::NoKeySet
            | Self::TooManyConnections(_)
            | Self::TooManyStreams(_)
            | Self::BodyBytesInFlight(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Deadline | Self::EngineTimeout(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::LoopDetected => StatusCode::LOOP_DETECTED,
            Self::Overloaded { status, .. } | Self::Engine { status, .. } => *status,
            Self::Pinned(cause, ..) | Self::NotContinued { cause, .. } => cause.status(),
        }
    }

    /// Stable code, in bodies and metrics.
    #[must_use]
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::InvalidRequest(_) => "invalid_request",
            Self::Unauthorized
            | Self::UnknownKey
            | Self::WrongToken(_)
            | Self::NoAdminToken
            | Self::WrongAdminToken => "unauthorized",
            Self::TokenMayNot(_) | Self::NotOperator | Self::ForeignOrigin(_) => "forbidden",
            Self::KeysBusy => "keys_busy",
            Self::NoKeySet => "key_set_unavailable",
            Self::NotJson => "unsupported_media_type",
            Self::UnsupportedCoding(_) | Self::FalseCoding(..) => "unsupported_content_coding",
            Self::UnknownUrl { .. } => "unknown_url",
            Self::WrongMethod(_) => "method_not_allowed",
            Self::UpgradeRequired(_) => "upgrade_required",
            Self::TooManyConnections(_) => "too_many_connections",
            Self::TooManyStreams(_) => "too_many_streams",
            Self::ModelNotFound(..) => "model_not_found",
            Self::WorkerNotFound(_) => "worker_not_found",
            Self::ResponseNotFound(_) => "response_not_found",
            Self::WorkerNotEligible(_) => "worker_not_eligible",
            Self::PayloadTooLarge(_) => "payload_too_large",
            Self::RequestTimeout(_) => "request_timeout",
            Self::BodyTooSlow(_) => "body_too_slow",
            Self::BodyBytesInFlight(_) => "body_bytes_in_flight",
            Self::Shed(_) => "shed",
            Self::RateLimited(_) | Self::TooManyWrongKeys => "rate_limited",
            Self::TenantLimit(_) => "rate_limit_exceeded",
            Self::ClientClosed => "client_closed",
            Self::ClientTooSlow => "client_too_slow",
            Self::BadUpstream(_) | Self::LastingFailure(_) | Self::EndedWithError { .. } => "bad_upstream",
            Self::EngineTimeout(_) => "engine_timeout",
            Self::Poison { .. } => "poison_request",
            Self::NoWorker(_) | Self::TooManyWait(_) => "no_worker",
            Self::PrefillUnavailable => "prefill_unavailable",
            Self::HandoffLost(_) => "handoff_lost",
            Self::Draining => "draining",
            Self::Deadline => "deadline",
            Self::LoopDetected => "loop_detected",
            Self::Overloaded { .. } => "overloaded",
            Self::Engine { .. } => "engine_4xx",
            Self::Pinned(cause, ..) | Self::NotContinued { cause, .. } => cause.code(),
        }
    }
}

fn status(code: u16) -> StatusCode {
    StatusCode::from_u16(code).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
}
