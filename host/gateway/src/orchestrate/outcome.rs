//! Turns the outcome of a leg's call into an event: an answer, the head of a stream, or a failure.

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use pointsman_orchestration::{Event, Failed};
use pointsman_workers::{Candidate, Leg};
use tokio::time::Instant;

use super::{Drive, PrefillDone, Refusals, id_of, stored};
use crate::{
    connectors::{PrefillAnswer, connector_for},
    openai::error::ApiError,
    openai::hide::without_fields,
    openai::request::{Endpoint, Request},
    openai::{
        endpoint::Format,
        seen,
        sse::{self, Seen},
    },
    orchestrate::relay,
    state::{State, quarantine::Broke},
    upstream::{self, Body, CallError, PauseLimits},
};

impl Drive {
    pub(super) fn prefill_outcome(&mut self, outcome: Result<PrefillDone, CallError>) -> Event {
        if let Some(over) = self.prefill_over.take() {
            over.cancel();
        }
        self.estimate_begins();
        let PrefillDone { answer, cached_tokens } = match outcome {
            Ok(done) => done,
            Err(error) => return Event::Failed(Leg::Prefill, self.leg_failed(Leg::Prefill, error)),
        };
        self.prefill.refusals = Refusals::default();
        self.bind(Leg::Prefill);
        let Some(candidate) = &self.prefill.candidate else { return Event::PrefillEnded };
        let spec = candidate.worker.spec();
        if !connector_for(spec).decode_knows_cached_tokens() {
            self.cached_tokens = cached_tokens;
        }
        note_success(&self.state, Leg::Prefill, candidate);
        self.account.leg_ended(Leg::Prefill, Ok(()));
        self.failed_prefill = None;
        let lease = spec.handoff_lease();
        let Some((answer, read)) = answer else { return Event::PrefillEnded };
        match read {
            PrefillAnswer::Handoff { parameters, cached_tokens } => {
                self.state.metrics.handoff("complete");
                (self.handoff, self.cached_tokens) = (Some(parameters), cached_tokens);
                self.attempts.commit(lease);
                Event::PrefillHandoff
            }
            PrefillAnswer::WasAll => {
                self.state.metrics.handoff("ended_in_prefill");
                self.whole = Some(relay::prefill_answer(self, answer));
                Event::PrefillWasAll
            }
            // The call's task has turned missing data into a failed call.
            PrefillAnswer::MissingData(_) | PrefillAnswer::MissingParameters => self
                .no_handoff("missing_parameters", "the prefill answer has no handoff parameters".to_owned()),
            PrefillAnswer::Incomplete(field) => self.no_handoff(
                "incomplete",
                format!("the handoff parameters of the prefill answer lack `{field}`"),
            ),
        }
    }

    pub(super) fn no_handoff(&mut self, result: &'static str, problem: String) -> Event {
        self.state.metrics.handoff(result);
        self.failed_span = self.prefill.span;
        self.failed_prefill = self.prefill.candidate.as_ref().map(|prefill| (prefill.worker.id(), result));
        self.prefill.failure = Some(ApiError::BadUpstream(problem));
        let failed = Failed { retryable: false, refused: false, began: true, broke: false };
        Event::Failed(Leg::Prefill, failed)
    }

    pub(super) fn decode_whole(&mut self, whole: Response<Bytes>) -> Event {
        if !is_whole_answer(&self.request, &whole) {
            return self.decode_failed(CallError::Protocol("the answer is not a JSON object".to_owned()));
        }
        let (mut head, body) = whole.into_parts();
        let seen = seen::whole(self.request.is_chat(), &body);
        if seen.error {
            return self.decode_failed(CallError::of_error_body(&body));
        }
        if let Some(usage) = seen.usage {
            self.usage(usage);
        }
        self.estimate_ends(seen.usage.and_then(|usage| usage.completion_tokens));
        self.served();
        self.handoff_done();
        self.bind(self.legs.answering());
        self.note_stored(&body);
        let edited = relay::edit(&body, &seen, self.cached_tokens).map_or(body, Bytes::from);
        let hidden = self.hide_ids(&edited);
        let shown = self.without_private_fields(self.legs.answering(), hidden.map_or(edited, Bytes::from));
        let json = HeaderValue::from_static("application/json");
        let content_type = head.headers.remove(header::CONTENT_TYPE).unwrap_or(json);
        // The others are between the gateway and the engine.
        head.headers.clear();
        head.headers.insert(header::CONTENT_TYPE, content_type);
        self.whole = Some(Response::from_parts(head, shown));
        Event::Ended
    }

    /// Looks at an event of the answer's stream.
    pub(crate) fn look(&mut self, event: &[u8]) -> Seen {
        // The first event of a stored response names it.
        if self.account.tokens() == 0 {
            self.note_stored(sse::object(event));
        }
        seen::event(self.request.endpoint.format(), event)
    }

    /// Notes which worker stored the response that an answer is about (I12).
    fn note_stored(&mut self, json: &[u8]) {
        if self.stored || self.request.endpoint.format() != Format::Responses {
            return;
        }
        if let Some(candidate) = &self.decode.candidate {
            let tenant = self.routing_request.tenant_hash;
            self.stored = stored::note(&self.state, json, tenant, id_of(candidate));
        }
    }

    /// Puts null in the place of fields that only the gateway may see in the answer of a leg.
    pub(crate) fn without_private_fields(&self, leg: Leg, body: Bytes) -> Bytes {
        let answered = if leg == Leg::Prefill { &self.prefill.candidate } else { &self.decode.candidate };
        let Some(candidate) = answered else { return body };
        let fields = connector_for(candidate.worker.spec()).private_answer_fields();
        without_fields(&body, fields).map_or(body, Bytes::from)
    }

    /// Checks the head of a stream, and its first event if that came with the head: an error can still have a
    /// status of its own, or be tried elsewhere.
    pub(super) async fn take_head(&mut self, mut head: Response<Body>) -> Result<Response<Body>, Event> {
        let content_type =
            head.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        if !sse::is_stream(content_type) {
            let shown: String = String::from_utf8_lossy(content_type).chars().take(60).collect();
            let pause = self.state.settings.leg_timeouts.pause();
            let refusal = Box::pin(refusal(head, shown, pause));
            let refusal = tokio::time::timeout_at(self.deadline, refusal).await;
            let error = refusal.unwrap_or(CallError::Protocol("the stream has no events".to_owned()));
            return Err(self.decode_failed(error));
        }
        let first = head.body_mut().peek();
        let first_event = sse::first_event(first);
        let has_event = first_event.is_some();
        if let Some(event) = first_event
            && event.ends_with(b"\n")
            && seen::event(self.request.endpoint.format(), event).error
        {
            let error = CallError::of_error_body(sse::object(event));
            return Err(self.decode_failed(error));
        }
        // Comments before it do not count.
        if !has_event && let Some(error) = head.body_mut().failed_at_once() {
            return Err(self.decode_failed(error.into()));
        }
        self.bind(self.legs.answering());
        Ok(head)
    }

    /// Turns a failed decode or aggregated call into an event.
    pub(crate) fn decode_failed(&mut self, error: CallError) -> Event {
        let failed = self.leg_failed(self.legs.answering(), error);
        self.free(Leg::Decode);
        Event::Failed(self.legs.answering(), failed)
    }

    /// Records a failed leg: with its worker, or with the request if that is to blame.
    fn leg_failed(&mut self, leg: Leg, error: CallError) -> Failed {
        let candidate = if leg == Leg::Prefill { &self.prefill.candidate } else { &self.decode.candidate };
        let candidate = candidate.clone();
        let is_poison =
            candidate.as_ref().is_some_and(|candidate| self.blames_request(leg, candidate, &error));
        // No other worker may take a pinned leg. A handoff that was not taken goes to the same one again.
        let pin = self.request.hints.pinned(leg);
        let is_pinned = pin.is_some() && (leg != Leg::Decode || error.began());
        let failed = Failed {
            retryable: error.retryable() && !is_poison && !is_pinned,
            refused: error.is_refusal(),
            began: error.began(),
            broke: error.breaks_engine(),
        };
        if let Some(candidate) = &candidate {
            let sent = if leg == Leg::Prefill { self.prefill.sent } else { self.decode.sent };
            let sent = sent.unwrap_or_else(Instant::now);
            note_failure(&self.state, leg, (candidate, sent), &error, is_poison);
        }
        self.account.leg_ended(leg, Err(error.kind()));
        self.attempts.note_failure(candidate.as_ref().map(id_of));
        self.failed_span = if leg == Leg::Prefill { self.prefill.span } else { self.decode.span };
        if leg == Leg::Prefill && error.is_fault() {
            self.failed_prefill = candidate.as_ref().map(|prefill| (prefill.worker.id(), error.kind()));
        }
        if matches!(error, CallError::Timeout(_)) {
            self.note_late(leg);
            if leg == Leg::Prefill {
                self.suspect_decode();
            }
        }
        let refusal = error.refusal();
        let mut cause = self.client_error(error);
        if is_poison {
            cause = ApiError::Poison { cause: cause.to_string(), left: self.state.settings.quarantine };
        }
        if let Some((worker, _)) = pin {
            cause = cause.of_pinned(leg, worker);
        }
        let (refusals, failure) = match leg {
            Leg::Prefill => (&mut self.prefill.refusals, &mut self.prefill.failure),
            _ => (&mut self.decode.refusals, &mut self.decode.failure),
        };
        if let Some(candidate) = &candidate {
            refusals.note(refusal, &cause, &candidate.worker);
        }
        *failure = Some(cause);
        failed
    }

    /// Suspects the decode worker too when the prefill leg of a pair timed out: the prefill engine waits for
    /// the decode engine, so either of them may hang.
    fn suspect_decode(&mut self) {
        if self.decode.call.is_none() {
            return;
        }
        let Some(candidate) = &self.decode.candidate else { return };
        candidate.worker.note_timeout();
        self.attempts.suspect(self.prefill.candidate.as_ref().map(id_of), id_of(candidate));
    }

    /// Whether this failure shows that the request breaks its engines. A worker that fails with other
    /// requests, too, proves nothing.
    fn blames_request(&self, leg: Leg, candidate: &Candidate, error: &CallError) -> bool {
        let keep = self.state.settings.quarantine;
        if keep.is_zero() || !error.is_suspicious() || candidate.worker.is_failing() {
            return false;
        }
        let quarantine = &self.state.quarantine;
        let broke = Broke { worker: candidate.worker.id(), leg, kind: error.kind() };
        let is_poison = quarantine.note(quarantine.hash(self.request.bytes()), broke, keep);
        if is_poison {
            self.state.metrics.poison("quarantined");
            let request = &self.account.request_id;
            tracing::warn!(request, %leg, kind = error.kind(), "request quarantined: two workers broke on it");
        }
        is_poison
    }

    /// Returns why the request is refused before it is sent, if an equal one broke two workers.
    pub(super) fn quarantined(&self) -> Option<ApiError> {
        quarantined(&self.state, &self.request)
    }

    /// Records the success of the decode or aggregated leg in metrics and averages.
    pub(crate) fn served(&mut self) {
        let Some(candidate) = &self.decode.candidate else { return };
        let leg = self.legs.answering();
        note_success(&self.state, leg, candidate);
        self.account.leg_ended(leg, Ok(()));
        acquit(&self.state, &self.request);
        if let Some(itl) = self.account.rest_itl() {
            candidate.load().observe_itl(itl);
        }
    }

    /// Logs, once, that the remote prefill of the request failed for good. `local`: a local one follows.
    pub(super) fn log_failed_prefill(&mut self, local: bool) {
        let Some((worker, kind)) = self.failed_prefill.take() else { return };
        let (request, tried) = (&self.account.request_id, self.attempts.tried().len());
        tracing::error!(request, %worker, kind, tried, local, "remote prefill failed");
    }

    /// Turns a failed call into the client's error. Ids that name workers are removed from the engine's text
    /// (A5).
    fn client_error(&self, error: CallError) -> ApiError {
        match error {
            CallError::Status { status, content_type, retry_after, body, in_body } => {
                let body = self.hide_ids(&body).map_or(body, Bytes::from);
                CallError::Status { status, content_type, retry_after, body, in_body }.into()
            }
            other => other.into(),
        }
    }
}

/// Returns why a request is refused before it is sent, if an equal one broke two workers.
pub(super) fn quarantined(state: &State, request: &Request) -> Option<ApiError> {
    let refused = would_be_quarantined(state, request)?;
    state.metrics.poison("refused");
    Some(refused)
}

/// Like [`quarantined`], without counting it.
pub(super) fn would_be_quarantined(state: &State, request: &Request) -> Option<ApiError> {
    let quarantine = &state.quarantine;
    if quarantine.is_empty() || state.settings.quarantine.is_zero() {
        return None;
    }
    let left = quarantine.refuses(quarantine.hash(request.bytes()))?;
    Some(ApiError::Poison { cause: "an equal request was sent a moment ago".to_owned(), left })
}

/// Records that the request was served: it does not break engines.
pub(super) fn acquit(state: &State, request: &Request) {
    let quarantine = &state.quarantine;
    if !state.settings.quarantine.is_zero() {
        quarantine.served(quarantine.hash(request.bytes()));
    }
}

/// Whether an answer is complete. A truncated body may have a matching length. No byte was sent downstream
/// yet, so another worker may answer.
fn is_whole_answer(request: &Request, answer: &Response<Bytes>) -> bool {
    let (body, content_type) = (answer.body(), answer.headers().get(header::CONTENT_TYPE));
    let is_json = content_type.is_none_or(|kind| kind.as_bytes().starts_with(b"application/json"));
    if request.endpoint.is_form() && !is_json {
        // Transcripts may be text or subtitles.
        return true;
    }
    let is_list = matches!(request.endpoint, Endpoint::Rerank(_)) && body.starts_with(b"[");
    let is_value = body.starts_with(b"{") || is_list || request.endpoint.is_form();
    is_value && serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok()
}

/// Error of an answer that should have been a stream: an error object, or another body.
async fn refusal(head: Response<Body>, content_type: String, pause: PauseLimits) -> CallError {
    let unexpected = format!("expected text/event-stream, got content type `{content_type}`");
    if !content_type.to_ascii_lowercase().starts_with("application/json") {
        return CallError::Protocol(unexpected);
    }
    match upstream::collect(head.into_body(), Some(pause)).await {
        Ok(body) if sse::look(&body).error => CallError::of_error_body(&body),
        Ok(_) => CallError::Protocol(unexpected),
        Err(error) => error,
    }
}

/// Counts a leg that succeeded, and reports it to its worker.
pub(super) fn note_success(state: &State, leg: Leg, candidate: &Candidate) {
    state.metrics.leg(leg.as_str(), candidate.worker.spec().engine.as_str(), "ok");
    candidate.load().observe_outcome(true);
    candidate.worker.note_outcome(true);
}

/// Counts a failed leg, and reports it to its worker unless the request is to blame. `candidate` comes with
/// the time at which the leg was sent.
pub(super) fn note_failure(
    state: &State,
    leg: Leg,
    (candidate, sent): (&Candidate, Instant),
    error: &CallError,
    is_poison: bool,
) {
    let (spec, worker) = (candidate.worker.spec(), &candidate.worker);
    state.metrics.leg(leg.as_str(), spec.engine.as_str(), error.kind());
    if let Some(refusal) = error.refusal() {
        // The task of a prefill call has released its booking.
        let others = worker.own_requests().saturating_sub(u32::from(leg != Leg::Prefill));
        if worker.note_refusal(refusal, sent, others) {
            candidate.load().observe_outcome(false);
        }
        tracing::debug!(worker = %spec.id, pause = ?worker.pause(), "worker paused: its engine has too much to do");
    } else if error.is_fault() && !is_poison {
        candidate.load().observe_outcome(false);
        worker.note_outcome(false);
    }
    match error {
        CallError::Connect(problem) => {
            tracing::warn!(worker = %spec.id, url = %spec.url, problem, "worker unreachable");
            worker.note_connect_failed();
        }
        CallError::Timeout(_) => worker.note_timeout(),
        CallError::Broken(_) => worker.note_restart(),
        CallError::Status { status, .. } if *status == http::StatusCode::NOT_FOUND => worker.note_restart(),
        _ => {}
    }
}
