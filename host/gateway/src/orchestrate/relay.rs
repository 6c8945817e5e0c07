//! Relays the engine's bytes to the client, unchanged except for a closed list of edits.
//!
//! The relay is the response body. The client's connection polls it, it polls the engine's connection, and it
//! reports what it sees to the leg state machine, without a task or a channel in between. When the client
//! leaves, the body is dropped, and the work that is still needed (E1) continues in the background.

use std::{
    convert::Infallible,
    ops::Range,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Response, header};
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use crate::{
    connectors::connector_for,
    openai::error::ApiError,
    openai::sse::{self, Seen, Splitter},
    orchestrate::Drive,
    orchestrate::legs::{Action, Event},
    upstream::{self, CallError},
};

mod edit;
mod prefill_answer;

/// Events that arrived together are sent as one chunk of at most this size, bytes.
const MAX_CHUNK: usize = 16 * 1024;
/// Initial capacity of the output buffer, bytes: a few events.
const OUT_CAPACITY: usize = 2 * 1024;

pub(crate) use edit::{edit, hide_ids, hide_ids_in_error};
pub(crate) use prefill_answer::prefill_answer;

/// A response body: whole, or relayed.
pub(crate) struct Answer(Kind);

enum Kind {
    Whole(Option<Bytes>),
    Relayed(Option<Box<Relay>>),
}

/// A stream on its way.
struct Relay {
    drive: Box<Drive>,
    incoming: Option<upstream::Body>,
    splitter: Splitter,
    /// When the engine's bytes were last read.
    read_at: Instant,
    /// Bytes for the client.
    out: BytesMut,
    /// Bytes that are held back until prefill ended (C11).
    held: Option<Vec<u8>>,
    /// The deadline, or the moment the bookings expire.
    timer: Pin<Box<Sleep>>,
    first_token: bool,
    finish_seen: bool,
    /// The engine sent `[DONE]` or an error event.
    closed: bool,
    over: bool,
}

/// Starts to relay a stream whose head has arrived.
pub(crate) fn stream(drive: Box<Drive>, head: Response<upstream::Body>) -> Response<Answer> {
    let (parts, incoming) = head.into_parts();
    let content_type = parts.headers.get(header::CONTENT_TYPE).cloned();
    let mut response = Response::new(());
    *response.status_mut() = parts.status;
    let headers = response.headers_mut();
    headers
        .insert(header::CONTENT_TYPE, content_type.unwrap_or(HeaderValue::from_static("text/event-stream")));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    drive.decorate(headers);
    response.map(|()| Answer(Kind::Relayed(Some(Box::new(Relay::new(drive, incoming))))))
}

/// Reads the stream of a client that left, until the state machine ends the request.
pub(crate) async fn drain(drive: Box<Drive>, head: Response<upstream::Body>) {
    Box::new(Relay::new(drive, head.into_body())).drain().await;
}

impl Answer {
    /// A body that is there whole.
    #[must_use]
    pub(crate) fn whole(bytes: Bytes) -> Self {
        Self(Kind::Whole(Some(bytes)))
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.0 {
            Kind::Whole(bytes) => Poll::Ready(
                bytes.take().filter(|bytes| !bytes.is_empty()).map(|bytes| Ok(Frame::data(bytes))),
            ),
            Kind::Relayed(relay) => {
                let Some(running) = relay.as_mut() else { return Poll::Ready(None) };
                let next = std::task::ready!(running.poll_next(cx));
                if next.is_none() {
                    *relay = None;
                }
                Poll::Ready(next.map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Kind::Relayed(_) => SizeHint::default(),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Whole(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Kind::Relayed(relay) => relay.is_none(),
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let Kind::Relayed(relay) = &mut self.0 else { return };
        let Some(mut relay) = relay.take() else { return };
        relay.report(Event::ClientGone);
        if !relay.over {
            let tracker = relay.drive.state.tracker.clone();
            tracker.spawn(relay.drain());
        }
    }
}

fn next_moment(drive: &Drive) -> Instant {
    drive.stale_at().map_or(drive.deadline, |stale| stale.min(drive.deadline))
}

impl Relay {
    fn new(drive: Box<Drive>, incoming: upstream::Body) -> Self {
        let timer = Box::pin(tokio::time::sleep_until(next_moment(&drive)));
        Self {
            drive,
            incoming: Some(incoming),
            splitter: Splitter::default(),
            read_at: Instant::now(),
            out: BytesMut::with_capacity(OUT_CAPACITY),
            held: None,
            timer,
            first_token: false,
            finish_seen: false,
            closed: false,
            over: false,
        }
    }

    async fn drain(mut self: Box<Self>) {
        while std::future::poll_fn(|cx| self.poll_next(cx)).await.is_some() {}
    }

    /// Returns the next chunk for the client: all bytes that the engine has written so far, without waiting
    /// for more.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            if self.over || self.out.len() >= MAX_CHUNK {
                return Poll::Ready(self.next_chunk());
            }
            if self.drive.prefill_runs()
                && let Poll::Ready(event) = self.drive.poll_prefill(cx)
            {
                self.report(event);
                continue;
            }
            match self.poll_engine(cx) {
                Poll::Ready(()) => {}
                Poll::Pending if !self.out.is_empty() => return Poll::Ready(self.next_chunk()),
                Poll::Pending if self.timer.as_mut().poll(cx).is_ready() => self.time_passed(),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    fn next_chunk(&mut self) -> Option<Bytes> {
        if self.out.is_empty() { None } else { Some(self.out.split().freeze()) }
    }

    fn time_passed(&mut self) {
        let now = Instant::now();
        if now >= self.drive.deadline {
            self.report(Event::Deadline);
            return;
        }
        if self.drive.stale_at().is_some_and(|stale| now >= stale) {
            self.drive.expire();
        }
        let next = next_moment(&self.drive);
        self.timer.as_mut().reset(next);
    }

    fn poll_engine(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(incoming) = self.incoming.as_mut() else { return Poll::Pending };
        let room = self.splitter.room();
        let before = room.len();
        match std::task::ready!(incoming.poll_read(cx, room)) {
            Ok(true) => {
                let came = room.len().saturating_sub(before);
                self.drive.state.metrics.relayed_bytes.inc_by(came as u64);
                self.read_at = Instant::now();
                self.take();
            }
            Ok(false) => self.end(),
            Err(error) => self.fail(error.into()),
        }
        Poll::Ready(())
    }

    /// Processes the events that are complete.
    fn take(&mut self) {
        let mut splitter = std::mem::take(&mut self.splitter);
        match splitter.whole() {
            Ok(whole) => {
                self.pass(splitter.first(whole));
                splitter.pass(whole);
            }
            Err(error) => self.fail(CallError::Protocol(error.to_string())),
        }
        self.splitter = splitter;
    }

    /// Passes complete events on, as one slice unless one has to be edited or held back.
    fn pass(&mut self, events: &[u8]) {
        let hidden = self.drive.hides_id().then(|| hide_ids(events, self.drive.token())).flatten();
        let events = hidden.as_deref().unwrap_or(events);
        let slice = |place: Range<usize>| events.get(place).unwrap_or_default();
        let mut from = 0;
        for place in sse::events(events) {
            let event = slice(place.clone());
            if !sse::is_event(event) {
                self.push(slice(from..place.start));
                self.fail(CallError::Protocol("the stream contains bytes that are not an event".to_owned()));
                return;
            }
            let seen = sse::look(event);
            let held_before = self.held.is_some();
            self.see(&seen);
            let begins_hold = self.held.is_some() && !held_before;
            let cached = self.drive.cached_tokens.filter(|_| !self.decode_knows());
            let edits = seen.handoff_at.is_some() || (seen.cached_at.is_some() && cached.is_some());
            if begins_hold || edits {
                // The events before this one go first, and are not held back even if this one is.
                let before = slice(from..place.start);
                if begins_hold {
                    self.out.extend_from_slice(before);
                } else {
                    self.push(before);
                }
                let edited = if edits { edit(event, &seen, cached) } else { None };
                self.push(edited.as_deref().unwrap_or(event));
                from = place.end;
            }
            if self.over {
                return;
            }
        }
        self.push(slice(from..events.len()));
    }

    fn see(&mut self, seen: &Seen) {
        self.closed |= seen.done || seen.error;
        if seen.tokens > 0 {
            self.count(seen.tokens);
        }
        if let Some(usage) = seen.usage {
            self.drive.usage(usage);
        }
        if seen.finish && !self.finish_seen {
            self.finish_seen = true;
            self.report(Event::FinishSeen);
        }
    }

    fn count(&mut self, tokens: u32) {
        let ttft = self.drive.account.output(tokens, self.read_at);
        let total = self.drive.account.tokens();
        if let Some(booking) = self.drive.decode.booking.as_mut() {
            if let Some(ttft) = ttft {
                booking.prefill_done();
                booking.load().observe_ttft(ttft);
            }
            booking.output_tokens(total);
        }
        if !self.first_token {
            self.first_token = true;
            self.report(Event::FirstToken);
        }
    }

    fn end(&mut self) {
        self.incoming = None;
        if self.splitter.rest() > 0 || !self.closed {
            self.fail(CallError::Broken("the stream ended before `[DONE]`".to_owned()));
            return;
        }
        self.drive.served();
        self.report(Event::Ended);
    }

    fn fail(&mut self, error: CallError) {
        self.incoming = None;
        let event = self.drive.decode_failed(error);
        self.report(event);
    }

    fn report(&mut self, event: Event) {
        self.drive.report(event);
        while let Some(action) = self.drive.next_action() {
            self.perform(action);
        }
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Hold => self.held = Some(Vec::new()),
            Action::Release => {
                let held = self.held.take().unwrap_or_default();
                self.out.extend_from_slice(&held);
            }
            Action::Fail(leg) => {
                let cause = self.drive.cause(leg);
                self.fail_client(&cause);
            }
            Action::FailDeadline => self.fail_client(&ApiError::Deadline),
            Action::Cancel(leg) => {
                if leg != pointsman_workers::Leg::Prefill {
                    self.incoming = None;
                }
                self.drive.perform(action);
            }
            Action::Finish => {
                self.over = true;
                self.incoming = None;
                if !self.drive.gone.is_cancelled() && self.closed && self.finished_well() {
                    self.drive.account.ended(200, "ok");
                }
                self.drive.perform(action);
            }
            other => self.drive.perform(other),
        }
    }

    /// Whether the client got the whole answer, and nothing failed.
    fn finished_well(&self) -> bool {
        self.drive.decode.failure.is_none() && self.held.is_none()
    }

    /// Ends the stream with one valid error event. Bytes that were held back are dropped.
    fn fail_client(&mut self, cause: &ApiError) {
        self.held = None;
        self.out.extend_from_slice(&cause.event(&self.drive.account.request_id));
        self.drive.account.ended(cause.status().as_u16(), cause.code());
        // `ended` is final: a failure after the head has status 200 on the wire and its own code in the log.
        self.closed = false;
    }

    fn push(&mut self, bytes: &[u8]) {
        match &mut self.held {
            Some(held) => held.extend_from_slice(bytes),
            None => self.out.extend_from_slice(bytes),
        }
    }

    fn decode_knows(&self) -> bool {
        let candidate = self.drive.decode.candidate.as_ref();
        candidate.is_none_or(|candidate| connector_for(candidate.worker.spec()).decode_knows_cached_tokens())
    }
}
