//! Tells workers how the legs that they ran ended.

use std::time::Duration;

use http::StatusCode;
use pointsman_workers::{Candidate, Leg, LogLimit, Worker, WorkerSpec};
use serde_json::Value;
use tokio::time::Instant;

use super::failure_text::failure_text;
use crate::{
    openai::{error::ApiError, request::Request},
    state::State,
    upstream::{CallError, text},
};

/// To whom a failed leg is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blame {
    /// Its worker.
    Worker,
    /// Its worker, unless the prefill worker of its handoff turns out to be at fault.
    Handoff,
    /// The prefill worker of its handoff.
    PrefillWorker,
    /// The request, which breaks engines.
    Request,
}

/// Reports a leg that succeeded to its worker.
pub(crate) fn note_success(candidate: &Candidate) {
    candidate.load().observe_outcome(true);
    candidate.worker.note_outcome(true);
}

/// Reports a failed leg to its worker, and charges it if it is to blame. `candidate` comes with the time at
/// which the leg was sent.
pub(crate) fn note_failure(
    leg: Leg,
    (candidate, sent): (&Candidate, Instant),
    error: &CallError,
    blame: Blame,
) {
    let (spec, worker) = (candidate.worker.spec(), &candidate.worker);
    let is_slow = error.is_of_slow_worker();
    let is_charged = error.refusal().is_some()
        || (error.is_fault() && !is_slow && matches!(blame, Blame::Worker | Blame::Handoff));
    if let Some(refusal) = error.refusal() {
        // The task of a prefill call has released its booking.
        let others = worker.own_requests().saturating_sub(u32::from(leg != Leg::Prefill));
        if worker.note_refusal(refusal, sent, others) {
            candidate.load().observe_outcome(false);
        }
        tracing::debug!(worker = %spec.id, pause = ?worker.pause(), "worker paused: its engine has too much to do");
    } else if is_charged {
        candidate.load().observe_outcome(false);
        if blame == Blame::Handoff { worker.charge_broken_handoff() } else { worker.note_outcome(false) }
    }
    if error.breaks_engine() && !is_slow {
        worker.note_broke();
    }
    match error {
        CallError::Connect(problem) => {
            tracing::warn!(worker = %spec.id, url = %spec.url, problem, "worker unreachable");
            worker.note_connect_failed();
        }
        CallError::Status { status: StatusCode::LOOP_DETECTED, .. } => warn_of_loop(spec),
        CallError::Timeout(_) if !is_slow => worker.note_timeout(),
        CallError::Broken(_) => worker.note_restart(),
        _ => {}
    }
    if is_charged {
        worker.explain_failure(|| failure_text(leg, error));
    }
}

/// Returns whether an engine answered 429 to a request with the key of its client. That key may be over a
/// limit of its own, so the answer is for the client, and keeps the worker from no other one.
pub(super) fn limits_client(request: &Request, worker: &Worker, error: &CallError) -> bool {
    let has_client_key = request.authorization.is_some() && worker.spec().api_key.is_none();
    has_client_key && error.refusal().is_some_and(|refusal| refusal.is_too_many)
}

/// Warns, at most once a minute, that requests to a worker come back.
fn warn_of_loop(spec: &WorkerSpec) {
    static LINES: LogLimit = LogLimit::new(Duration::from_mins(1));
    if let Some(suppressed) = LINES.due() {
        let (worker, url) = (spec.id, &spec.url);
        tracing::warn!(%worker, %url, suppressed, "worker answered that a request passed too many gateways: see whether its workers lead back here");
    }
}

/// Returns the client's error, and reports the worker, if its engine refused the key of the gateway. Where
/// the engine got the client's key, its answer is for the client.
pub(crate) fn refused_key(state: &State, worker: &Worker, error: &CallError) -> Option<ApiError> {
    let is_of_key = |status: StatusCode| matches!(status.as_u16(), 401 | 407);
    let status = match error {
        CallError::Status { status, in_body: false, .. } if is_of_key(*status) => status.as_u16(),
        _ => return None,
    };
    let spec = worker.spec();
    if state.settings.request_rules.forward_authorization && spec.api_key.is_none() {
        return None;
    }
    if let Some(suppressed) = worker.note_refused_key() {
        let (worker, url) = (spec.id, &spec.url);
        tracing::warn!(%worker, %url, status, suppressed, "engine refuses the gateway's key: check `api_key` of the worker");
    }
    let text = "the engine refused the gateway's key; the operator has to check `api_key` of the worker";
    Some(ApiError::LastingFailure(text.to_owned()))
}

/// Returns whether an engine says that it does not have the model: it may have restarted with another one.
/// Any other 404 is about the request, for example about its path or a stored response.
pub(crate) fn lacks_model(error: &CallError) -> bool {
    let CallError::Status { status: StatusCode::NOT_FOUND, body, .. } = error else { return false };
    text(body).to_ascii_lowercase().contains("model")
}

/// Returns whether SGLang says that it does not have an adapter which it listed. It does so with 400.
pub(super) fn lacks_adapter(error: &CallError, adapter: &str) -> bool {
    const BEGINNINGS: [&str; 2] = [
        "Got LoRA adapter that has never been loaded: ",
        "The following requested LoRA adapters are not loaded: ",
    ];
    let CallError::Status { status: StatusCode::BAD_REQUEST, body, .. } = error else { return false };
    let json: Value = serde_json::from_slice(body).unwrap_or_default();
    let message = ["/message", "/error/message"].iter().find_map(|field| json.pointer(field)?.as_str());
    let named = message.and_then(|text| BEGINNINGS.iter().find_map(|beginning| text.strip_prefix(beginning)));
    // Old versions write a set.
    let name = named.and_then(|names| names.lines().next()).map(|line| line.trim_matches(['{', '}', '\'']));
    name == Some(adapter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::RetryAdvice;

    #[test]
    fn only_a_404_about_the_model_says_that_the_engine_lacks_it() {
        let lacks = |status: u16, body: &'static str| {
            let status = StatusCode::from_u16(status).unwrap();
            let (content_type, retry, body) = (None, RetryAdvice::default(), body.into());
            lacks_model(&CallError::Status { status, content_type, retry, body, in_body: false })
        };
        // B5.7
        assert!(lacks(404, r#"{"error":{"message":"The model `tiny` does not exist.","code":404}}"#));
        assert!(lacks(404, r#"{"error":"Model 'tiny' not found, try pulling it first"}"#));
        assert!(!lacks(400, r#"{"error":{"message":"The model `tiny` does not exist."}}"#));
        let others =
            [r#"{"detail":"Not Found"}"#, r#"{"error":{"message":"Response with id 'a' not found."}}"#, ""];
        assert!(!others.iter().any(|body| lacks(404, body)));
    }

    #[test]
    fn only_sglang_s_400_that_begins_with_the_adapter_s_name_says_that_it_lacks_it() {
        let lacks = |status: StatusCode, body: &'static str| {
            let (content_type, retry, body) = (None, RetryAdvice::default(), body.into());
            let error = CallError::Status { status, content_type, retry, body, in_body: false };
            lacks_adapter(&error, "ad")
        };
        // B5.7
        for body in [
            r#"{"object":"error","message":"Got LoRA adapter that has never been loaded: ad\nAll loaded adapters: d."}"#,
            r#"{"error":{"message":"The following requested LoRA adapters are not loaded: ad\nLoaded adapters: d."}}"#,
            r#"{"message":"The following requested LoRA adapters are not loaded: {'ad'}\nLoaded adapters: set()."}"#,
        ] {
            assert!(lacks(StatusCode::BAD_REQUEST, body), "{body}");
            assert!(!lacks(StatusCode::UNPROCESSABLE_ENTITY, body), "{body}");
        }
        // A client can have its own text quoted, and name another adapter.
        for body in [
            r#"{"message":"bad: Got LoRA adapter that has never been loaded: ad"}"#,
            r#"{"message":"Got LoRA adapter that has never been loaded: bad\nAll loaded adapters: ad."}"#,
            r#"{"message":"Got LoRA adapter that has never been loaded: "}"#,
            "Got LoRA adapter that has never been loaded: ad",
            "",
        ] {
            assert!(!lacks(StatusCode::BAD_REQUEST, body), "{body}");
        }
    }
}
