//! Errors that a client sees [I]: one type with status, stable code and retry advice, and one responder.
//!
//! The message names the cause and may quote an engine's own error, but never a worker's address (A5).

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use pointsman_routing::{RouteError, ShedReason};
use serde_json::json;

use crate::{openai::request_error::RequestError, upstream::CallError};

/// Seconds after which a client may try again.
const RETRY_AFTER: u64 = 1;
/// Limit of an engine's own text in a message, characters.
const MAX_TEXT: usize = 500;

/// Why a request fails.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum ApiError {
    /// Bad JSON, a bad field, a bad header.
    #[error("{0}")]
    InvalidRequest(String),
    /// No key where one is needed.
    #[error("authenticating the request: no API key; send the header `authorization: Bearer KEY`")]
    Unauthorized,
    /// A key that is not known.
    #[error("authenticating the request: unknown API key; use one of server.api_keys")]
    Forbidden,
    /// No worker serves this model.
    #[error("the model `{0}` does not exist; GET /v1/models lists the models")]
    ModelNotFound(String),
    /// A hint names a worker that does not exist.
    #[error("{0}")]
    WorkerNotFound(String),
    /// A hint names a worker that may not serve this now.
    #[error("{0}")]
    WorkerNotEligible(String),
    /// The body is larger than allowed.
    #[error(
        "reading the body: larger than {0} bytes, the limit of server.max_body_bytes; send a smaller one"
    )]
    PayloadTooLarge(usize),
    /// The client paused for too long within the body.
    #[error(
        "reading the request body: no data for {0:?}, the limit of timeouts.body_idle; send the request again"
    )]
    RequestTimeout(Duration),
    /// A policy refuses.
    #[error("{}", .0.reason)]
    Shed(ShedReason),
    /// The client exceeds its rate limit.
    #[error("rate limit exceeded: more than {0} requests per second; retry after the time in `retry-after`")]
    RateLimited(u32),
    /// The client disconnected; seen in logs and metrics only.
    #[error("the client closed the connection")]
    ClientClosed,
    /// An engine failed or violated its protocol.
    #[error("{0}")]
    BadUpstream(String),
    /// No worker is eligible.
    #[error("{0}")]
    NoWorker(String),
    /// Remote prefill is enforced, and there is no prefill worker.
    #[error("no prefill worker is available, and routing.enforce_disagg forbids local prefill; retry later")]
    PrefillUnavailable,
    /// This gateway is shutting down.
    #[error("this gateway is draining; send the request to another one")]
    Draining,
    /// The deadline passed.
    #[error("the request was not complete within timeouts.request, counted from its first byte")]
    Deadline,
    /// Every eligible worker is busy.
    #[error("{text}")]
    Overloaded {
        /// Which leg.
        text: String,
        /// As configured; 529 by default.
        status: StatusCode,
    },
    /// An engine refused the request; its answer is passed on unchanged.
    #[error("the engine answered {status}")]
    Engine {
        /// The engine's status, 4xx.
        status: StatusCode,
        /// Its content type.
        content_type: Option<HeaderValue>,
        /// Its body.
        body: Bytes,
    },
}

impl ApiError {
    /// HTTP status.
    #[must_use]
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::InvalidRequest(_) => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::ModelNotFound(_) | Self::WorkerNotFound(_) => StatusCode::NOT_FOUND,
            Self::WorkerNotEligible(_) => StatusCode::CONFLICT,
            Self::PayloadTooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::RequestTimeout(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Shed(shed) => StatusCode::from_u16(shed.status).unwrap_or(StatusCode::TOO_MANY_REQUESTS),
            Self::RateLimited(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::ClientClosed => status(499),
            Self::BadUpstream(_) => StatusCode::BAD_GATEWAY,
            Self::NoWorker(_) | Self::PrefillUnavailable | Self::Draining => StatusCode::SERVICE_UNAVAILABLE,
            Self::Deadline => StatusCode::GATEWAY_TIMEOUT,
            Self::Overloaded { status, .. } | Self::Engine { status, .. } => *status,
        }
    }

    /// Stable code, in bodies and metrics.
    #[must_use]
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::InvalidRequest(_) => "invalid_request",
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::ModelNotFound(_) => "model_not_found",
            Self::WorkerNotFound(_) => "worker_not_found",
            Self::WorkerNotEligible(_) => "worker_not_eligible",
            Self::PayloadTooLarge(_) => "payload_too_large",
            Self::RequestTimeout(_) => "request_timeout",
            Self::Shed(_) => "shed",
            Self::RateLimited(_) => "rate_limited",
            Self::ClientClosed => "client_closed",
            Self::BadUpstream(_) => "bad_upstream",
            Self::NoWorker(_) => "no_worker",
            Self::PrefillUnavailable => "prefill_unavailable",
            Self::Draining => "draining",
            Self::Deadline => "deadline",
            Self::Overloaded { .. } => "overloaded",
            Self::Engine { .. } => "engine_4xx",
        }
    }

    fn retry_after(&self) -> Option<u64> {
        let retry = matches!(
            self,
            Self::Shed(_)
                | Self::RateLimited(_)
                | Self::NoWorker(_)
                | Self::PrefillUnavailable
                | Self::Draining
                | Self::Overloaded { .. }
        );
        retry.then_some(RETRY_AFTER)
    }

    /// Returns the whole answer, in OpenAI's error shape. An engine's own refusal is passed on unchanged.
    #[must_use]
    pub(crate) fn response(&self, request_id: &str) -> Response<Bytes> {
        let mut response = match self {
            Self::Engine { content_type, body, .. } => {
                let mut response = Response::new(body.clone());
                let json = HeaderValue::from_static("application/json");
                response.headers_mut().insert(header::CONTENT_TYPE, content_type.clone().unwrap_or(json));
                response
            }
            _ => {
                let mut response = Response::new(Bytes::from(self.body(request_id).to_string()));
                response
                    .headers_mut()
                    .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
                response
            }
        };
        *response.status_mut() = self.status();
        if let Some(seconds) = self.retry_after() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }

    /// Returns one valid error event, for a stream that has begun.
    #[must_use]
    pub(crate) fn event(&self, request_id: &str) -> Bytes {
        Bytes::from(format!("data: {}\n\n", self.body(request_id)))
    }

    fn body(&self, request_id: &str) -> serde_json::Value {
        body(self.status(), self.code(), &self.to_string(), request_id)
    }
}

/// An error's body in OpenAI's shape.
pub(crate) fn body(status: StatusCode, code: &str, message: &str, request_id: &str) -> serde_json::Value {
    let kind = if status.is_client_error() { "invalid_request_error" } else { "server_error" };
    json!({ "error": {
        "message": message, "type": kind, "param": null, "code": code, "request_id": request_id,
    } })
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        Self::InvalidRequest(error.to_string())
    }
}

impl ApiError {
    /// Converts a routing error; `busy_status` is the status when every eligible worker is busy.
    #[must_use]
    pub(crate) fn of_route(error: RouteError, busy_status: u16) -> Self {
        let text = error.to_string();
        match error {
            RouteError::NoWorker { .. } | RouteError::PolicyFailed(_) => Self::NoWorker(text),
            RouteError::AllBusy(_) => Self::Overloaded { text, status: status(busy_status) },
            RouteError::UnknownWorker(_) => Self::WorkerNotFound(text),
            RouteError::NotEligible(..) => Self::WorkerNotEligible(text),
            // In direct mode the message names the missing hint [C4, F3].
            RouteError::NoPin(pointsman_workers::Leg::Prefill) => {
                Self::InvalidRequest(format!("{text}: set the header x-prefill-instance-id"))
            }
            RouteError::NoPin(_) => Self::InvalidRequest(format!(
                "{text}: set nvext.decode_worker_id or nvext.backend_instance_id (or the header x-worker-instance-id)"
            )),
            RouteError::Shed(shed) => Self::Shed(shed),
        }
    }
}

impl From<CallError> for ApiError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Status { status, content_type, body } if status.is_client_error() => {
                Self::Engine { status, content_type, body }
            }
            CallError::Status { status, body, .. } => {
                Self::BadUpstream(format!("the engine answered {}: {}", status.as_u16(), engine_text(&body)))
            }
            CallError::Connect(_) => Self::BadUpstream("the engine cannot be reached".to_owned()),
            CallError::Broken(text) => {
                Self::BadUpstream(format!("the connection to the engine failed: {text}"))
            }
            CallError::Protocol(text) => {
                Self::BadUpstream(format!("the engine violated its protocol: {text}"))
            }
        }
    }
}

/// The message an engine put into its error body, else the body's beginning.
fn engine_text(body: &[u8]) -> String {
    let message = serde_json::from_slice::<serde_json::Value>(body).ok().and_then(|json| {
        let message = json.pointer("/error/message").or(json.pointer("/message"))?;
        message.as_str().map(str::to_owned)
    });
    let text = message.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    text.chars().take(MAX_TEXT).collect()
}

fn status(code: u16) -> StatusCode {
    StatusCode::from_u16(code).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
}

#[cfg(test)]
mod tests {
    use pointsman_workers::{Leg, WorkerId};

    use super::*;

    fn check(cause: impl Into<ApiError>, status: u16, code: &str, retry: bool) {
        let response = cause.into().response("id-1");
        assert_eq!(response.status().as_u16(), status, "{code}");
        assert_eq!(response.headers().contains_key(header::RETRY_AFTER), retry, "{code}");
        let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
        assert_eq!((&body["error"]["code"], &body["error"]["request_id"]), (&json!(code), &json!("id-1")));
        assert!(!body["error"]["message"].as_str().unwrap().is_empty());
    }

    #[test]
    fn i_every_row_of_the_table_has_its_status_and_code() {
        check(RequestError::new("n", "`0`"), 400, "invalid_request", false);
        check(ApiError::Unauthorized, 401, "unauthorized", false);
        check(ApiError::Forbidden, 403, "forbidden", false);
        check(ApiError::ModelNotFound("m".into()), 404, "model_not_found", false);
        check(
            ApiError::of_route(RouteError::UnknownWorker(WorkerId(1)), 529),
            404,
            "worker_not_found",
            false,
        );
        check(
            ApiError::of_route(RouteError::NotEligible(WorkerId(1), "draining".into()), 529),
            409,
            "worker_not_eligible",
            false,
        );
        check(ApiError::PayloadTooLarge(9), 413, "payload_too_large", false);
        check(ApiError::RequestTimeout(Duration::from_secs(30)), 408, "request_timeout", false);
        check(
            ApiError::of_route(RouteError::Shed(ShedReason { status: 429, reason: "quota".into() }), 529),
            429,
            "shed",
            true,
        );
        check(ApiError::ClientClosed, 499, "client_closed", false);
        check(CallError::Broken("eof".into()), 502, "bad_upstream", false);
        check(
            ApiError::of_route(RouteError::NoWorker { leg: Leg::Decode, detail: String::new() }, 529),
            503,
            "no_worker",
            true,
        );
        check(ApiError::PrefillUnavailable, 503, "prefill_unavailable", true);
        check(ApiError::Draining, 503, "draining", true);
        check(ApiError::Deadline, 504, "deadline", false);
        check(ApiError::of_route(RouteError::AllBusy(Leg::Decode), 529), 529, "overloaded", true);
        check(ApiError::of_route(RouteError::NoPin(Leg::Prefill), 529), 400, "invalid_request", false);
    }

    #[test]
    fn i_an_engine_s_4xx_passes_unchanged_and_its_5xx_text_is_carried() {
        let refused = CallError::Status {
            status: StatusCode::BAD_REQUEST,
            content_type: Some(HeaderValue::from_static("text/x")),
            body: Bytes::from_static(b"{\"error\": 1 }"),
        };
        let response = ApiError::from(refused).response("id");
        assert_eq!(
            (response.status().as_u16(), response.body().as_ref()),
            (400, b"{\"error\": 1 }".as_slice())
        );
        assert_eq!(response.headers().get(header::CONTENT_TYPE).unwrap(), "text/x");
        let body = Bytes::from_static(br#"{"error":{"message":"out of blocks","code":500}}"#);
        let failed =
            CallError::Status { status: StatusCode::INTERNAL_SERVER_ERROR, content_type: None, body };
        assert_eq!(ApiError::from(failed).to_string(), "the engine answered 500: out of blocks");
    }

    #[test]
    fn a5_a_connect_error_does_not_name_the_address() {
        let cause = ApiError::from(CallError::Connect("tcp connect error 10.1.2.3:99".into()));
        assert!(!cause.to_string().contains("10.1.2.3"));
    }

    #[test]
    fn i_a_mid_stream_error_is_one_valid_event() {
        let event = ApiError::Deadline.event("id");
        let json = event.strip_prefix(b"data: ").and_then(|rest| rest.strip_suffix(b"\n\n")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(json).unwrap();
        assert_eq!(json["error"]["code"], "deadline");
    }
}
