//! Requests that a proxy carries: the driver chooses and books their workers, the proxy sends the legs, and
//! the gateway watches the answer pass.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use pointsman_orchestration::{Action, Event};
use pointsman_workers::{InFlight, Leg, OpenHandoff, WorkerSpec};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    Drive, PlannedRequest,
    answer::first_event::error_in,
    executor::{Executor, Handover, Reached},
    leg_run::PrefillDone,
    relay,
};
use crate::{
    budget::Share,
    openai::{error::ApiError, sse},
    state::State,
    telemetry::account::Account,
    upstream::{CallError, RetryAdvice, Upstream},
};

mod content;
mod request_headers;

use content::{Content, Ends};
pub(crate) use request_headers::removed_headers;

/// Largest answer without a stream whose usage is read, bytes.
const MAX_WHOLE: usize = 4 * 1024 * 1024;

/// A request whose legs a proxy sends. When it is dropped before the head of the answer, the client has left.
/// When it is dropped within the answer, either the client has left or the engine was lost.
pub(crate) struct ProxiedRequest {
    drive: Box<Drive>,
    /// The call that the worker has to answer; `None` while another worker, whose answer does not pass here,
    /// computes the prefill.
    call: Option<InFlight>,
    /// Time at which the legs were sent, or the last bytes of the answer arrived.
    heard_at: Instant,
    /// The status of the answer, if it is an error.
    refused: Option<StatusCode>,
    content: Content,
    /// Share of what is kept of the answer in the bytes of bodies in flight.
    room: Share,
}

/// Who wrote an answer.
#[derive(Debug)]
pub(crate) enum AnswerOrigin {
    /// The engine that was picked.
    Engine,
    /// Another endpoint, or the proxy for a reason that is not the engine's.
    Elsewhere,
    /// The proxy, which could not reach the engine or lost it: why.
    Proxy(CallError),
}

impl ProxiedRequest {
    pub(crate) fn new(
        state: Arc<State>,
        upstream: Upstream,
        planned: Box<PlannedRequest>,
        account: Box<Account>,
    ) -> Self {
        // When the client leaves, the proxy ends its stream, and this is dropped.
        let (executor, gone) = (Executor::Proxy(None), CancellationToken::new());
        let drive = Drive::new(state, upstream, executor, planned, account, gone);
        let room = drive.body_share();
        Self { drive, call: None, heard_at: Instant::now(), refused: None, content: Content::Nothing, room }
    }

    /// Chooses and books the workers. Waits in the queue while every eligible one is busy.
    ///
    /// # Errors
    /// [`ApiError`]: no worker takes a leg, now or in time.
    pub(crate) async fn pick(&mut self) -> Result<Handover, ApiError> {
        let handover = match self.drive.run().await {
            Reached::HandedOver(handover) => handover,
            other => return Err(other.error()),
        };
        self.heard_at = Instant::now();
        let alone = self.drive.candidate(Leg::Aggregated).filter(|_| !self.is_pair());
        self.call = alone.map(|candidate| InFlight::new(candidate.worker.clone(), None));
        Ok(handover)
    }

    fn is_pair(&self) -> bool {
        self.drive.answering() == Leg::Decode
    }

    /// The record of the request.
    pub(crate) fn account(&mut self) -> &mut Account {
        &mut self.drive.account
    }

    /// The worker of the leg that answers.
    pub(crate) fn answering(&self) -> Option<&WorkerSpec> {
        self.drive.candidate(self.drive.answering()).map(|candidate| candidate.worker.spec())
    }

    /// The worker that prefills for another one.
    pub(crate) fn prefill(&self) -> Option<&WorkerSpec> {
        self.drive.candidate(Leg::Prefill).filter(|_| self.is_pair()).map(|candidate| candidate.worker.spec())
    }

    /// Returns the gateway's own headers for the answer.
    pub(crate) fn own_headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        self.drive.add_own_headers(&mut headers);
        headers
    }

    /// Returns until when something has to happen: the end of the request, or a token before the bookings
    /// expire.
    pub(crate) fn deadline(&self) -> Instant {
        self.drive.next_alarm().0
    }

    /// Returns whether the request has to end because the drain ends.
    pub(crate) fn must_end(&self) -> bool {
        self.drive.drain_ends()
    }

    /// Handles a deadline that has passed, or the end of the drain. Returns the error if that ends the
    /// request.
    pub(crate) fn time_passed(&mut self) -> Option<ApiError> {
        let ends = self.must_end().then(|| self.drive.drain_ended());
        let (until, alarm) = self.drive.next_alarm();
        if ends.is_none() && Instant::now() < until {
            return None;
        }
        if self.drive.legs.is_finished() {
            return Some(self.drive.out_of_time());
        }
        if let Some(event) = ends {
            self.report(event);
            return Some(self.drive.out_of_time());
        }
        // Before the head of a pair's answer, nothing says which of the two is late.
        let is_unknown = self.is_pair() && matches!(self.content, Content::Nothing);
        let is_elsewhere = matches!(self.content, Content::Elsewhere(_));
        let silent_from = Some(self.heard_at).filter(|_| !is_unknown && !is_elsewhere);
        let event = self.drive.on_alarm(alarm, silent_from)?;
        if is_unknown && self.drive.is_late(Some(self.heard_at)) {
            self.drive.note_handoff_late();
        }
        self.report(event);
        Some(self.drive.out_of_time())
    }

    /// Ends the request with an error that says nothing of its workers.
    pub(crate) fn give_up(&mut self, error: &ApiError) {
        if !self.drive.legs.is_finished() {
            self.drive.account.ended(error.status().as_u16(), error.code());
            self.report(Event::ClientGone);
        }
    }

    /// Handles the head of the answer. `hides_body`: its body does not pass here.
    pub(crate) fn head(
        &mut self,
        (status, headers): (u16, &HeaderMap),
        origin: AnswerOrigin,
        hides_body: bool,
    ) {
        self.heard_at = Instant::now();
        self.drive.account.relay_begins();
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
        match origin {
            AnswerOrigin::Engine => {}
            AnswerOrigin::Elsewhere => {
                (self.content, self.call) = (Content::Elsewhere(status), None);
                return;
            }
            AnswerOrigin::Proxy(error) => {
                self.refused = Some(status);
                return self.fail(error);
            }
        }
        if !status.is_success() {
            self.refused = Some(status);
            let content_type = headers.get(header::CONTENT_TYPE).cloned();
            let retry = RetryAdvice::of(headers);
            let (body, in_body) = (Bytes::new(), false);
            return self.fail(CallError::Status { status, content_type, retry, body, in_body });
        }
        if self.is_pair() {
            // The head shows that prefill ended.
            let event = self.drive.prefill_passed();
            self.report(event);
        }
        self.drive.accepted(self.drive.answering());
        self.report(Event::Head);
        let worker = self.answering().map(|spec| spec.id);
        self.content = Content::of(headers, hides_body, self.drive.request.endpoint, worker);
    }

    /// Handles bytes of the answer's body.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.drive.state.metrics.relayed_bytes.inc_by(bytes.len() as u64);
        self.heard_at = Instant::now();
        if matches!(self.content, Content::Elsewhere(_)) {
            return;
        }
        self.drive
            .candidate(self.drive.answering())
            .inspect(|candidate| candidate.worker.note_sign_of_life());
        self.read(bytes);
        // Without room the answer passes, but the gateway learns no more from it.
        if !self.room.hold_events(self.content.kept()) {
            self.content = Content::Ignored { failed: false };
        }
    }

    fn read(&mut self, bytes: &[u8]) {
        match std::mem::replace(&mut self.content, Content::Ignored { failed: false }) {
            Content::Stream(mut splitter, ends) => {
                splitter.room().extend_from_slice(bytes);
                self.content = match splitter.whole() {
                    Ok(whole) => {
                        let (ends, error) = self.look(splitter.first(whole), ends);
                        splitter.discard(whole);
                        match error {
                            Some(error) => return self.fail(error),
                            None => Content::Stream(splitter, ends),
                        }
                    }
                    Err(error) => return self.fail(CallError::Protocol(error.to_string())),
                };
            }
            Content::Whole(mut whole) if whole.body().len() + bytes.len() <= MAX_WHOLE => {
                let body = whole.body_mut();
                // Blanks may stand before it, and many of them.
                let bytes = if body.is_empty() { bytes.trim_ascii_start() } else { bytes };
                body.extend_from_slice(bytes);
                if self.drive.request.stream && sse::begins_as_stream(body) == Some(true) {
                    self.content = Content::stream(self.drive.request.endpoint);
                    return self.read(&std::mem::take(body));
                }
                self.content = Content::Whole(whole);
            }
            Content::Whole(_) => {}
            other => self.content = other,
        }
    }

    /// Examines complete events. Returns what has come of the end, and an error event if there was one.
    fn look(&mut self, events: &[u8], mut ends: Ends) -> (Ends, Option<CallError>) {
        for place in sse::events(events) {
            let event = events.get(place).unwrap_or_default();
            let seen = self.drive.look(event);
            if let Some(error) = error_in(&seen, event) {
                return (ends, Some(error));
            }
            ends.closed |= seen.done;
            ends.finished |= seen.finish;
            if self.drive.count(&seen, self.heard_at) {
                self.report(Event::FirstToken);
            }
        }
        (ends, None)
    }

    /// Handles the end of the answer.
    pub(crate) fn end(mut self) {
        match std::mem::replace(&mut self.content, Content::Ignored { failed: true }) {
            Content::Stream(mut splitter, mut ends) => {
                if !ends.closed && relay::end_last_event(&mut splitter) {
                    let (after, error) = self.look(splitter.first(splitter.rest()), ends);
                    if let Some(error) = error {
                        return self.fail(error);
                    }
                    ends = after;
                    splitter.discard(splitter.rest());
                }
                let is_whole = ends.finished && splitter.rest() == 0 && self.drive.lacks_only_done();
                if !ends.closed && !is_whole {
                    return self.fail(relay::ended_early(splitter.rest() > 0));
                }
                self.drive.served();
            }
            Content::Ignored { failed: false } => self.served_unread(),
            Content::Nothing => {
                return self.fail(CallError::Broken("the stream ended before its first event".to_owned()));
            }
            Content::Whole(whole) => {
                let whole = whole.map(Bytes::from);
                match self.drive.judge_whole(&whole) {
                    Ok(seen) => self.drive.served_whole(&seen, whole.body()),
                    Err(error) => return self.fail(error),
                }
            }
            Content::Ignored { failed: true } => return,
            Content::Elsewhere(status) => {
                let code = if status.is_success() { "ok" } else { "bad_upstream" };
                self.drive.account.ended(status.as_u16(), code);
                if !status.is_success() {
                    // No engine runs its legs, and its tenant pays for none.
                    self.drive.account.leg_cancelled(Leg::Prefill);
                    self.drive.account.leg_cancelled(self.drive.answering());
                }
                // Ends the legs without a word about their workers.
                return self.report(Event::ClientGone);
            }
        }
        self.ended_well();
    }

    /// Records the success of an answer in which no token was seen.
    fn served_unread(&mut self) {
        self.drive.served();
        self.drive.handoff_done();
        self.drive.candidate(self.drive.answering()).inspect(|candidate| candidate.worker.note_answered());
    }

    /// The client left, or the engine was lost.
    fn note_cut(&self) {
        self.drive.candidate(self.drive.answering()).inspect(|candidate| candidate.worker.note_cut());
    }

    fn ended_well(&mut self) {
        self.drive.account.ended(200, "ok");
        self.report(Event::Ended);
    }

    fn fail(&mut self, error: CallError) {
        (self.content, self.call) = (Content::Ignored { failed: true }, None);
        let event = self.drive.answer_failed(error);
        self.report(event);
    }

    fn report(&mut self, event: Event) {
        self.drive.report(event);
        while let Some(action) = self.drive.next_action() {
            let cause = match action {
                Action::Fail(leg) => self.drive.cause(leg),
                Action::FailDeadline => self.drive.out_of_time(),
                other => {
                    self.drive.perform(other);
                    continue;
                }
            };
            // The client has the engine's own answer, if that is an error.
            let status = self.refused.unwrap_or(cause.status());
            self.drive.account.ended(status.as_u16(), cause.code());
        }
    }
}

impl Drop for ProxiedRequest {
    /// The proxy ended the exchange within the answer, and does not say why.
    fn drop(&mut self) {
        if self.drive.legs.is_finished() {
            return;
        }
        match &self.content {
            Content::Ignored { failed: true } => {}
            // Its head may have been lost with the stream.
            Content::Nothing => self.note_cut(),
            // Clients may leave after the last event.
            Content::Stream(_, ends) if ends.closed => {
                self.drive.served();
                self.ended_well();
            }
            content => {
                if !matches!(content, Content::Elsewhere(_)) {
                    self.note_cut();
                }
                self.drive.account.ended(499, "answer_cut");
            }
        }
    }
}

impl Drive {
    /// Records that the prefill leg succeeded: the head of the answer shows it. It does not show that decode
    /// has pulled the blocks.
    fn prefill_passed(&mut self) -> Event {
        let run = &mut self.runs.prefill;
        if let (Some(booking), Some(sent)) = (run.booking.own(), run.sent) {
            booking.first_token(sent.elapsed(), true);
        }
        let prefill = self.candidate(Leg::Prefill).map(|prefill| prefill.worker.clone());
        let open_handoff = prefill.map(OpenHandoff::new);
        self.free(Leg::Prefill);
        self.prefilled(PrefillDone { open_handoff, ..PrefillDone::default() })
    }
}
