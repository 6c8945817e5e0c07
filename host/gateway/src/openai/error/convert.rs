//! Errors of other modules, as clients see them.

use std::time::Duration;

use http::StatusCode;
use pointsman_orchestration::Pressure;
use pointsman_routing::RouteError;
use pointsman_workers::{Leg, LogLimit};

use super::{
    ApiError, RETRY_AFTER, RequestFacts,
    mask::masked_error,
    response::{answered, engine_text, error_name},
    status,
};
use crate::{
    openai::{hints::Hints, request_error::RequestError},
    upstream::{CallError, Looped, whole_seconds},
};

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        Self::InvalidRequest(error.to_string())
    }
}

impl ApiError {
    /// The error of a request that the queue does not take. `lost_place`: it waited, and another request took
    /// its place.
    pub(crate) fn queue_full(busy_status: u16, pressure: &Pressure, lost_place: bool) -> Self {
        let why = if lost_place {
            "the queue is full, and a request that comes before this one took its place"
        } else {
            "the queue is full, or the request waited for queue.timeout"
        };
        let text = format!("waiting for a worker: {why}: {pressure}; retry after the time in `retry-after`");
        Self::Overloaded { text, status: status(busy_status), retry_after: pressure.retry_after }
    }

    /// Adds how full the queue is to the error of a request that found all workers busy.
    fn under(mut self, pressure: impl FnOnce() -> Pressure) -> Self {
        if let Self::Overloaded { text, retry_after, .. } = &mut self {
            let pressure = pressure();
            *text = format!("{text}: {pressure}; retry after the time in `retry-after`");
            *retry_after = pressure.retry_after;
        }
        self
    }

    /// Sets the time after which a client should try again, if the error says that the workers are busy.
    pub(crate) fn retried_after(mut self, when: Duration) -> Self {
        match &mut self {
            Self::Overloaded { retry_after, .. } => *retry_after = when,
            Self::Pinned(cause, ..) => {
                let changed = cause.as_ref().clone().retried_after(when);
                **cause = changed;
            }
            _ => {}
        }
        self
    }

    /// Converts the routing error of a request that does not wait in the queue any more. `pressure`: how full
    /// the queue is.
    pub(crate) fn of_refusal(
        error: RouteError,
        busy_status: u16,
        pressure: impl FnOnce() -> Pressure,
    ) -> Self {
        let is_busy = matches!(error, RouteError::AllBusy(_));
        let error = Self::of_route(error, busy_status);
        if is_busy { error.under(pressure) } else { error }
    }

    /// Names the worker that the leg is pinned to, if it is, and that failed. An engine's own answer passes
    /// unchanged.
    pub(crate) fn of_pinned(self, hints: &Hints, leg: Leg) -> Self {
        let is_meant = matches!(
            self,
            Self::BadUpstream(_) | Self::LastingFailure(_) | Self::EngineTimeout(_) | Self::Overloaded { .. }
        );
        let Some((worker, _)) = hints.pinned(leg).filter(|_| is_meant) else { return self };
        let why = match hints.holder() {
            Some(holder) if holder == worker => {
                format!("only worker {worker} has what the request continues")
            }
            _ => format!("the request pins its {leg} leg to worker {worker}"),
        };
        Self::Pinned(Box::new(self), why)
    }

    /// Converts a routing error; `busy_status` is the status when every eligible worker is busy.
    #[must_use]
    pub(crate) fn of_route(error: RouteError, busy_status: u16) -> Self {
        let text = error.to_string();
        match error {
            RouteError::NoWorker { .. } | RouteError::PolicyFailed(_) => Self::NoWorker(text),
            RouteError::AllBusy(_) => {
                let retry_after = Duration::from_secs(RETRY_AFTER);
                Self::Overloaded { text, status: status(busy_status), retry_after }
            }
            RouteError::AllPaused { pause, .. } => Self::Overloaded {
                text: format!("{text}; retry after the time in `retry-after`"),
                status: if pause.is_too_many {
                    StatusCode::TOO_MANY_REQUESTS
                } else {
                    StatusCode::SERVICE_UNAVAILABLE
                },
                retry_after: pause.left,
            },
            RouteError::UnknownWorker(_) => Self::WorkerNotFound(text),
            RouteError::NotEligible(..) => Self::WorkerNotEligible(text),
            // In direct mode the message names the missing hint [C4, F3].
            RouteError::NoPin(Leg::Prefill) => {
                Self::InvalidRequest(format!("{text}: set the header x-prefill-instance-id"))
            }
            RouteError::NoPin(_) => Self::InvalidRequest(format!(
                "{text}: set nvext.decode_worker_id or nvext.backend_instance_id (or the header x-worker-instance-id)"
            )),
            RouteError::Shed(shed) => Self::Shed(shed),
        }
    }
}

impl From<Looped> for ApiError {
    fn from(_: Looped) -> Self {
        Self::LoopDetected
    }
}

impl From<CallError> for ApiError {
    fn from(error: CallError) -> Self {
        Self::of_call(error, &RequestFacts::default())
    }
}

impl ApiError {
    /// Converts the failed call of a request, without what its client must not see of the engine's text (A5).
    /// The log gets that, unless the failure follows from the gateway's own abort.
    pub(crate) fn of_call(error: CallError, facts: &RequestFacts<'_>) -> Self {
        static LINES: LogLimit = LogLimit::new(Duration::from_secs(1));
        let Some(masked) = masked_error(&error, facts) else { return Self::of_text(error) };
        if !facts.is_cancelled
            && let Some(suppressed) = LINES.due()
        {
            let request = facts.id;
            tracing::warn!(request, %error, suppressed, "engine's error names workers, which the client does not see");
        }
        Self::of_text(masked)
    }

    fn of_text(error: CallError) -> Self {
        let is_refusal = error.is_refusal();
        match error {
            CallError::Status { status, content_type, mut retry, body, .. } if is_refusal => {
                retry.after = retry.after.map(whole_seconds);
                Self::Engine { status, content_type, retry, body }
            }
            CallError::Status { status, ref body, .. } if error.refusal().is_some() => Self::Overloaded {
                text: format!(
                    "the engine has too much to do and {}; retry after the time in `retry-after`",
                    answered(status, body)
                ),
                status: StatusCode::SERVICE_UNAVAILABLE,
                retry_after: Duration::from_secs(RETRY_AFTER),
            },
            // No status was named (I1.4).
            CallError::Status { status: StatusCode::BAD_GATEWAY, body, in_body: true, .. } => {
                let text = engine_text(&body);
                match error_name(&body) {
                    Some(name) => Self::EndedWithError { name, text },
                    None => Self::BadUpstream(format!("the engine ended its answer with an error: {text}")),
                }
            }
            CallError::Status { status, body, retry, .. } => {
                let text = format!("the engine {}", answered(status, &body));
                let is_lasting = retry.should == Some(false);
                if is_lasting { Self::LastingFailure(text) } else { Self::BadUpstream(text) }
            }
            CallError::Connect(_) => Self::BadUpstream("the engine cannot be reached".to_owned()),
            CallError::Shortage(_) => Self::Overloaded {
                text: "this gateway has no free connection to an engine; retry later".to_owned(),
                status: StatusCode::SERVICE_UNAVAILABLE,
                retry_after: Duration::from_secs(RETRY_AFTER),
            },
            CallError::Closed(text) | CallError::Broken(text) => {
                Self::BadUpstream(format!("the connection to the engine failed: {text}"))
            }
            CallError::NoRoom(limit) => Self::BodyBytesInFlight(limit),
            CallError::Timeout(silence) => Self::EngineTimeout(silence),
            CallError::Down | CallError::Asleep | CallError::OtherPrompt | CallError::GaveUp(_) => {
                Self::BadUpstream(error.to_string())
            }
            CallError::TooLarge(text) => {
                Self::LastingFailure(format!("the engine's answer is too large: {text}"))
            }
            CallError::Protocol(text) => {
                Self::BadUpstream(format!("the engine violated its protocol: {text}"))
            }
        }
    }
}

/// Says what to do about a path that does not exist.
pub(super) fn hint(meant: Option<&'static str>) -> String {
    match meant {
        Some(path) => format!("the path is {path}: correct the base URL of the client"),
        None => "GET /openapi.json lists the endpoints of this listener".to_owned(),
    }
}
