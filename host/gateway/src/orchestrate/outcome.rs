//! Turns the outcome of a leg's call into an event: an answer, the head of a stream, or a failure.

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use pointsman_workers::{Candidate, Leg};
use tokio::time::Instant;

use super::{Drive, PrefillDone, id_of};
use crate::{
    connectors::{PrefillAnswer, connector_for},
    openai::error::ApiError,
    openai::sse,
    orchestrate::legs::{Event, Failed},
    orchestrate::relay,
    state::State,
    upstream::{Body, CallError},
};

impl Drive {
    pub(super) fn prefill_outcome(&mut self, outcome: Result<PrefillDone, CallError>) -> Event {
        let answer = match outcome {
            Ok(answer) => answer,
            Err(error) => {
                let failed = Failed { retryable: error.retryable(), sent: error.sent() };
                note_failure(&self.state, Leg::Prefill, self.prefill.candidate.as_ref(), &error);
                self.tried.extend(self.prefill.candidate.as_ref().map(id_of));
                self.prefill.failure = Some(self.client_error(error));
                self.failed = true;
                return Event::PrefillFailed(failed);
            }
        };
        self.free(Leg::Prefill);
        self.bind(Leg::Prefill);
        let Some(candidate) = &self.prefill.candidate else { return Event::PrefillEnded };
        let spec = candidate.worker.spec();
        self.state.metrics.leg("prefill", spec.engine.as_str(), "ok");
        candidate.load().observe_outcome(true);
        candidate.worker.note_outcome(true);
        let Some(answer) = answer else { return Event::PrefillEnded };
        match connector_for(spec).read_prefill(answer.body()) {
            PrefillAnswer::Handoff { parameters, cached_tokens } => {
                self.state.metrics.handoff("complete");
                (self.handoff, self.cached_tokens) = (Some(parameters), cached_tokens);
                Event::PrefillHandoff
            }
            PrefillAnswer::WasAll => {
                self.state.metrics.handoff("ended_in_prefill");
                self.whole = Some(relay::prefill_answer(self, answer));
                Event::PrefillWasAll
            }
            PrefillAnswer::MissingData(problem) => {
                self.no_handoff("missing_data", format!("the prefill answer has no data: {problem}"))
            }
            PrefillAnswer::MissingParameters => self
                .no_handoff("missing_parameters", "the prefill answer has no handoff parameters".to_owned()),
            PrefillAnswer::Incomplete(field) => self.no_handoff(
                "incomplete",
                format!("the handoff parameters of the prefill answer lack `{field}`"),
            ),
        }
    }

    pub(super) fn no_handoff(&mut self, result: &'static str, problem: String) -> Event {
        self.state.metrics.handoff(result);
        self.prefill.failure = Some(ApiError::BadUpstream(problem));
        Event::PrefillFailed(Failed { retryable: false, sent: true })
    }

    pub(super) fn decode_whole(&mut self, whole: Response<Bytes>) -> Event {
        let body = whole.body();
        // A truncated body may have a matching length. No byte was sent downstream yet, so another worker may
        // answer.
        if !body.starts_with(b"{") || serde_json::from_slice::<serde::de::IgnoredAny>(body).is_err() {
            return self.decode_failed(CallError::Protocol("the answer is not a JSON object".to_owned()));
        }
        let seen = sse::look(body);
        self.account.output(0, Instant::now());
        if let Some(usage) = seen.usage {
            self.usage(usage);
        }
        self.served();
        self.bind(self.legs.answering());
        let edited = relay::edit(body, &seen, self.cached_tokens).map_or_else(|| body.clone(), Bytes::from);
        let hidden = self.hides_id().then(|| relay::hide_ids(&edited, self.token)).flatten();
        let mut response = Response::new(hidden.map_or(edited, Bytes::from));
        *response.status_mut() = whole.status();
        let json = HeaderValue::from_static("application/json");
        let content_type = whole.headers().get(header::CONTENT_TYPE).cloned().unwrap_or(json);
        response.headers_mut().insert(header::CONTENT_TYPE, content_type);
        self.whole = Some(response);
        Event::Ended
    }

    pub(super) fn take_head(&mut self, head: Response<Body>) -> Result<Response<Body>, Event> {
        let content_type =
            head.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        if content_type.starts_with(b"text/event-stream") {
            self.bind(self.legs.answering());
            return Ok(head);
        }
        let shown: String = String::from_utf8_lossy(content_type).chars().take(60).collect();
        Err(self.decode_failed(CallError::Protocol(format!(
            "expected text/event-stream, got content type `{shown}`"
        ))))
    }

    /// Turns a failed decode or aggregated call into an event.
    pub(crate) fn decode_failed(&mut self, error: CallError) -> Event {
        let failed = Failed { retryable: error.retryable(), sent: error.sent() };
        let leg = self.legs.answering();
        note_failure(&self.state, leg, self.decode.candidate.as_ref(), &error);
        self.tried.extend(self.decode.candidate.as_ref().map(id_of));
        self.decode.failure = Some(self.client_error(error));
        self.failed = true;
        self.free(Leg::Decode);
        Event::DecodeFailed(failed)
    }

    /// Turns a failed call into the client's error. Ids that name workers are removed from the engine's text
    /// (A5).
    fn client_error(&self, error: CallError) -> ApiError {
        if self.hides_id() { relay::hide_ids_in_error(error, self.token).into() } else { error.into() }
    }
}

fn note_failure(state: &State, leg: Leg, candidate: Option<&Candidate>, error: &CallError) {
    let Some(candidate) = candidate else { return };
    let spec = candidate.worker.spec();
    state.metrics.leg(leg.as_str(), spec.engine.as_str(), error.kind());
    if error.is_fault() {
        candidate.load().observe_outcome(false);
        candidate.worker.note_outcome(false);
    }
    if let CallError::Connect(problem) = error {
        tracing::warn!(worker = %spec.id, url = %spec.url, problem, "worker unreachable");
        candidate.worker.note_connect_failed();
    }
}
