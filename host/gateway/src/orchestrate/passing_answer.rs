//! Watches an answer that a proxy carries: counts its tokens, judges its worker, and releases the bookings.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use pointsman_workers::{Booking, InFlight, Leg};
use tokio::time::Instant;

use super::{
    PlannedRequest, id_of,
    outcome::{acquit, note_failure, note_success},
    pick::{PickedWorker, PickedWorkers},
    relay::book,
    respond::decorate,
    stored,
    whole_estimate::WholeEstimate,
};
use crate::{
    openai::{
        endpoint::Format,
        error::ApiError,
        request::Request,
        seen,
        sse::{self, Seen, Splitter},
    },
    state::State,
    telemetry::account::Account,
    upstream::CallError,
};

/// Largest answer without a stream whose usage is read, bytes.
const MAX_WHOLE: usize = 4 * 1024 * 1024;

/// An answer on its way. When it is dropped before its end, the client has left.
#[derive(Debug)]
pub(crate) struct PassingAnswer {
    state: Arc<State>,
    account: Box<Account>,
    request: Arc<Request>,
    session: Option<u64>,
    tenant: Option<u64>,
    /// Whether the worker of a stored response was noted.
    stored: bool,
    /// Whether the client asked for the decisions.
    explain: bool,
    leg: Leg,
    answering: PickedWorker,
    prefill: Option<PickedWorker>,
    picked_at: Instant,
    /// Call that the worker has to answer; `None` if another worker, which is not watched, prefills first.
    call: Option<InFlight>,
    /// Progress of an answer that is not streamed.
    estimate: Option<WholeEstimate>,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// The head has not come.
    Nothing,
    /// Events. `closed`: the one that ends an answer came.
    Stream { splitter: Splitter, closed: bool },
    /// Bytes of a whole answer, until there are too many.
    Whole(Vec<u8>),
    /// Nothing more is read: the answer is too large, or its outcome is known.
    Ignored { failed: bool },
}

impl PassingAnswer {
    pub(crate) fn new(
        state: Arc<State>,
        account: Box<Account>,
        planned: &PlannedRequest,
        workers: PickedWorkers,
    ) -> Self {
        let PlannedRequest { request, routing_request, explain, .. } = planned;
        let (request, explain) = (request.clone(), *explain);
        let (session, tenant) = (routing_request.session_hash, routing_request.tenant_hash);
        let PickedWorkers { leg, answering, prefill, .. } = workers;
        let (picked_at, content) = (Instant::now(), Content::Nothing);
        let alone = prefill.is_none();
        let call = alone.then(|| InFlight::new(answering.candidate.worker.clone(), None));
        let booking = answering.booking.as_ref().filter(|_| alone && !request.stream);
        let estimate = booking.map(|booking| WholeEstimate::new(booking, &request, leg, Some(picked_at)));
        Self {
            state,
            account,
            request,
            session,
            tenant,
            stored: false,
            explain,
            leg,
            answering,
            prefill,
            picked_at,
            call,
            estimate,
            content,
        }
    }

    /// The id the client knows the request by.
    pub(crate) fn request_id(&self) -> &str {
        &self.account.request_id
    }

    /// Returns the gateway's own headers for the answer.
    pub(crate) fn own_headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        decorate(&mut headers, &self.account, &self.request, self.explain);
        headers
    }

    /// The worker that answers.
    pub(crate) fn worker(&self) -> &pointsman_workers::Worker {
        &self.answering.candidate.worker
    }

    /// Returns until when something has to happen: the end of the request, or a token before the bookings
    /// expire.
    pub(crate) fn deadline(&self) -> Instant {
        let end = self.account.started() + self.state.settings.request_timeout;
        if self.answering.booking.is_none() {
            return end;
        }
        let due = self.estimate.as_ref().and_then(WholeEstimate::due);
        let next = end.min(self.stale_at());
        due.map_or(next, |due| due.min(next))
    }

    /// When the bookings expire unless a token comes.
    fn stale_at(&self) -> Instant {
        self.account.last_life().max(self.picked_at) + self.state.settings.booking_ttl
    }

    /// Takes note that the deadline has passed. Returns the error that ends the request, if it has ended.
    pub(crate) fn time_passed(&mut self) -> Option<ApiError> {
        let now = Instant::now();
        if now < self.account.started() + self.state.settings.request_timeout {
            if now >= self.stale_at() {
                self.state.metrics.expired_bookings.inc();
                self.release();
            } else if let (Some(estimate), Some(booking)) = (&mut self.estimate, &mut self.answering.booking)
            {
                estimate.advance(booking);
            }
            return None;
        }
        let error = ApiError::Deadline;
        self.account.ended(error.status().as_u16(), error.code());
        Some(error)
    }

    /// Takes note of the head.
    pub(crate) fn head(&mut self, status: u16, headers: &HeaderMap) {
        self.account.relay_begins();
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
        let content_type = headers.get(header::CONTENT_TYPE);
        self.end_prefill(status);
        if !status.is_success() {
            let content_type = content_type.cloned();
            let retry_after = headers.get(header::RETRY_AFTER).cloned();
            let (body, in_body) = (Bytes::new(), false);
            return self.fail(&CallError::Status { status, content_type, retry_after, body, in_body });
        }
        self.bind(self.leg);
        let is_stream = content_type.is_some_and(|kind| sse::is_stream(kind.as_bytes()));
        self.content = if is_stream {
            Content::Stream { splitter: Splitter::default(), closed: false }
        } else {
            Content::Whole(Vec::new())
        };
    }

    /// Takes note of bytes of the body.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.state.metrics.relayed_bytes.inc_by(bytes.len() as u64);
        self.answering.candidate.worker.note_sign_of_life();
        match std::mem::replace(&mut self.content, Content::Ignored { failed: false }) {
            Content::Stream { mut splitter, closed } => {
                splitter.room().extend_from_slice(bytes);
                self.content = match splitter.whole() {
                    Ok(whole) => {
                        let (closed, error) = self.look(splitter.first(whole), closed);
                        splitter.discard(whole);
                        match error {
                            Some(error) => return self.fail(&error),
                            None => Content::Stream { splitter, closed },
                        }
                    }
                    Err(error) => return self.fail(&CallError::Protocol(error.to_string())),
                };
            }
            Content::Whole(mut body) if body.len() + bytes.len() <= MAX_WHOLE => {
                body.extend_from_slice(bytes);
                self.content = Content::Whole(body);
            }
            Content::Whole(_) => {}
            other => self.content = other,
        }
    }

    /// Looks at whole events. Returns whether the one that ends the answer came, and an error event.
    fn look(&mut self, events: &[u8], mut closed: bool) -> (bool, Option<CallError>) {
        let format = self.request.endpoint.format();
        for place in sse::events(events) {
            let event = events.get(place).unwrap_or_default();
            if self.account.tokens() == 0 {
                self.note_stored(sse::object(event));
            }
            let seen = seen::event(format, event);
            if seen.error {
                return (closed, Some(CallError::of_error_body(sse::object(event))));
            }
            closed |= seen.done;
            self.count(&seen);
        }
        (closed, None)
    }

    fn count(&mut self, seen: &Seen) {
        let now = Instant::now();
        let first = seen.tokens > 0 && self.account.output(seen.tokens, now);
        if let Some(usage) = seen.usage {
            self.account.usage(usage);
        }
        let Some(booking) = self.answering.booking.as_mut() else { return };
        if seen.tokens > 0 || seen.usage.is_some() {
            let first = first.then(|| (now - self.picked_at, self.leg != Leg::Decode));
            book(booking, &mut self.account, &self.state.metrics, now, first);
        }
    }

    /// Takes note of the end.
    pub(crate) fn end(mut self) {
        match std::mem::replace(&mut self.content, Content::Ignored { failed: false }) {
            Content::Stream { closed: true, .. } | Content::Ignored { failed: false } => self.served(),
            Content::Stream { .. } | Content::Nothing => {
                self.fail(&CallError::Broken("the stream ended before its last event".to_owned()));
            }
            Content::Whole(body) => {
                let seen = seen::whole(self.request.is_chat(), &body);
                if seen.error {
                    return self.fail(&CallError::of_error_body(&body));
                }
                if let Some(usage) = seen.usage {
                    self.account.usage(usage);
                }
                self.note_stored(&body);
                if let (Some(estimate), Some(booking)) = (self.estimate.take(), &self.answering.booking) {
                    let tokens = seen.usage.and_then(|usage| usage.completion_tokens);
                    estimate.ended(booking, tokens, &self.state.metrics);
                }
                self.served();
            }
            Content::Ignored { failed: true } => {}
        }
    }

    /// Notes which worker stored the response that an answer is about (I12).
    fn note_stored(&mut self, json: &[u8]) {
        if !self.stored && self.request.endpoint.format() == Format::Responses {
            let worker = id_of(&self.answering.candidate);
            self.stored = stored::note(&self.state, json, self.tenant, worker);
        }
    }

    fn served(&mut self) {
        let candidate = &self.answering.candidate;
        note_success(&self.state, self.leg, candidate);
        self.account.leg_ended(self.leg, Ok(()));
        acquit(&self.state, &self.request);
        if let Some(itl) = self.account.rest_itl() {
            candidate.load().observe_itl(itl);
        }
        self.account.ended(200, "ok");
    }

    /// Records a failed answer with its worker, and releases the bookings.
    fn fail(&mut self, error: &CallError) {
        self.content = Content::Ignored { failed: true };
        note_failure(&self.state, self.leg, (&self.answering.candidate, self.picked_at), error, false);
        self.account.leg_ended(self.leg, Err(error.kind()));
        let (status, code) = match error {
            CallError::Status { status, .. } if status.is_client_error() => (status.as_u16(), "engine_4xx"),
            CallError::Status { status, .. } if error.refusal().is_some() => (status.as_u16(), "overloaded"),
            CallError::Status { status, .. } => (status.as_u16(), "bad_upstream"),
            _ => (StatusCode::BAD_GATEWAY.as_u16(), "bad_upstream"),
        };
        self.account.ended(status, code);
        self.release();
    }

    /// Releases the prefill worker: the answer has begun.
    fn end_prefill(&mut self, status: StatusCode) {
        let Some(prefill) = &mut self.prefill else { return };
        let Some(mut booking) = prefill.booking.take() else { return };
        if status.is_success() {
            let took = self.picked_at.elapsed();
            booking.first_token(took, true);
            note_success(&self.state, Leg::Prefill, &prefill.candidate);
            // The answer's head shows that it ended. When a request fails, nothing says which leg did.
            let engine = prefill.candidate.worker.spec().engine.as_str();
            self.state.metrics.leg_took(Leg::Prefill.as_str(), engine, "ok", took);
        }
        drop(booking);
        self.state.queue.wake();
        if status.is_success() {
            self.bind(Leg::Prefill);
        }
    }

    /// Binds the session to the worker that a leg reached (F8).
    fn bind(&self, leg: Leg) {
        let worker = if leg == Leg::Prefill { self.prefill.as_ref() } else { Some(&self.answering) };
        let ttl = self.state.settings.affinity(&self.request.hints);
        if let (Some(ttl), Some(session), Some(worker)) = (ttl, self.session, worker) {
            self.state.sessions.bind(session, leg, id_of(&worker.candidate), ttl);
        }
    }

    fn release(&mut self) {
        self.call = None;
        let of_prefill = self.prefill.as_mut().and_then(|prefill| prefill.booking.take());
        let released: [Option<Booking>; 2] = [self.answering.booking.take(), of_prefill];
        if released.iter().any(Option::is_some) {
            drop(released);
            self.state.queue.wake();
        }
    }
}

impl Drop for PassingAnswer {
    fn drop(&mut self) {
        self.release();
        let control = self.request.hints.session_control;
        if let Some(session) = self.session.filter(|_| control.is_some_and(|control| control.close)) {
            self.state.sessions.close(session);
        }
    }
}
