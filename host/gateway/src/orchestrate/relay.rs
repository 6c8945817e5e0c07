//! Relays the engine's bytes to the client, unchanged except for a closed list of edits.
//!
//! The relay is the response body. The client's connection polls it, it polls the engine's connection, and it
//! reports what it sees to the leg state machine, without a task or a channel in between. When the client
//! leaves, the body is dropped, and the work that is still needed (E1) continues in the background.

use std::{
    ops::Range,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Response, header};
use pointsman_orchestration::{Action, Event};
use pointsman_workers::Leg;
use tokio::time::{Instant, Sleep};

use crate::{
    budget::Share,
    openai::endpoint::Format,
    openai::error::ApiError,
    openai::sequence::LastNumber,
    openai::sse::{self, Splitter},
    openai::stream_headers::set_stream_headers,
    openai::token_ids::Lists,
    orchestrate::{Drive, answer::first_event::not_an_event, client::connection::ClientConnection},
    upstream::{self, CallError, RoomWait},
};

mod answer;
mod beginning;
mod byte_stream;
mod detached;
mod edit;
mod eligible;
mod end;
mod event;
mod limits;
mod moves;
mod pauses;
mod prefill_answer;
mod resume;
mod seam;

/// Events that arrived together are sent as one chunk of at most this size, bytes.
const MAX_CHUNK: usize = 16 * 1024;
/// Initial capacity of the output buffer, bytes: a few events.
const OUT_CAPACITY: usize = 2 * 1024;
/// Number of bytes that a stream counts locally before it adds them to the counter of all streams. Threads
/// share that counter, so adding for each event would make them contend for it.
const COUNTED_AT_ONCE: usize = 16 * 1024;

pub(crate) use answer::Answer;
use byte_stream::ByteStream;
pub(crate) use detached::drain;
pub(crate) use edit::{CachedTokens, edit, hide_ids};
pub(crate) use eligible::form_of;
pub(crate) use end::{end_last_event, ended_early};
pub(crate) use limits::END_GRACE;
pub(crate) use prefill_answer::prefill_answer;
use resume::Resumption;

/// A stream on its way.
struct Relay {
    drive: Box<Drive>,
    /// The connection that takes the stream.
    client: Option<ClientConnection>,
    format: Format,
    /// Its bytes are passed on as they come; `None`: as events.
    bytes: Option<ByteStream>,
    incoming: Option<upstream::Body>,
    splitter: Splitter,
    /// Room of large events among the bodies in flight.
    room: Share,
    room_wait: RoomWait,
    /// When the engine's bytes were last read.
    read_at: Instant,
    /// When an event with data last arrived, or the wait for the first one began.
    event_at: Instant,
    /// When the client last got a comment, or the first event began to wait.
    commented_at: Instant,
    /// Whether an event with data was passed on.
    begun: bool,
    /// Length of the events that wait in the splitter for the next one.
    waiting: usize,
    /// When the first of them arrived.
    waiting_since: Instant,
    /// Whether an event came that engines send with their first output, when they have the handoff.
    has_output: bool,
    /// Bytes for the client.
    out: BytesMut,
    last_number: LastNumber,
    /// Bytes of the engine that the metrics do not have yet.
    uncounted: usize,
    /// Bytes that are held back until prefill ended (C11).
    held: Option<Vec<u8>>,
    /// The deadline, or the moment the bookings expire.
    timer: Pin<Box<Sleep>>,
    finish_seen: bool,
    /// The engine sent the event that ends an answer. The relay reads nothing that the engine sends
    /// afterwards, except for a `[DONE]` after it.
    closed: bool,
    /// The client got the end of its answer, or left. Work that engines still need continues without it.
    detached: bool,
    over: bool,
    resumption: Resumption,
}

/// Starts to relay a stream whose head has arrived.
pub(crate) fn stream(mut drive: Box<Drive>, head: Response<upstream::Body>) -> Response<Answer> {
    drive.account.relay_begins();
    let (parts, incoming) = head.into_parts();
    let content_type = parts.headers.get(header::CONTENT_TYPE).cloned();
    let mut response = Response::new(());
    *response.status_mut() = parts.status;
    let headers = response.headers_mut();
    let is_bytes = drive.request.endpoint.streams_bytes();
    let unknown = if is_bytes { "application/octet-stream" } else { "text/event-stream" };
    headers.insert(header::CONTENT_TYPE, content_type.unwrap_or(HeaderValue::from_static(unknown)));
    set_stream_headers(headers);
    let has_events = headers.get(header::CONTENT_TYPE).is_some_and(|kind| sse::is_stream(kind.as_bytes()));
    drive.add_own_headers(headers);
    response.map(|()| Answer::relayed(Box::new(Relay::new(drive, incoming, has_events))))
}

impl Relay {
    fn new(drive: Box<Drive>, incoming: upstream::Body, has_events: bool) -> Self {
        let now = Instant::now();
        let timer = Box::pin(tokio::time::sleep_until(now));
        let mut relay = Self {
            format: drive.request.endpoint.format(),
            bytes: ByteStream::of(&drive, has_events),
            resumption: Resumption::of(&drive),
            room: drive.body_share(),
            room_wait: RoomWait::default(),
            drive,
            client: None,
            incoming: Some(incoming),
            splitter: Splitter::default(),
            read_at: now,
            event_at: now,
            commented_at: now,
            begun: false,
            waiting: 0,
            waiting_since: now,
            has_output: false,
            out: BytesMut::with_capacity(OUT_CAPACITY),
            last_number: LastNumber::default(),
            uncounted: 0,
            held: None,
            timer,
            finish_seen: false,
            closed: false,
            detached: false,
            over: false,
        };
        relay.set_timer();
        relay
    }

    /// Returns the next chunk for the client: all bytes that the engine has written so far, without waiting
    /// for more.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        while !self.over && !self.detached && !self.resumption.is_pending && self.out.len() < MAX_CHUNK {
            if self.poll_step(cx).is_pending() {
                if self.out.is_empty() {
                    return Poll::Pending;
                }
                break;
            }
        }
        Poll::Ready(self.next_chunk())
    }

    /// Takes what arrived first: the end of prefill, bytes of the engine, or, with nothing to send, the
    /// timer.
    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.drive.prefill_runs()
            && let Poll::Ready(event) = self.drive.poll_prefill(cx)
        {
            self.prefill_ended();
            if matches!(event, Event::Failed(..) | Event::PrefillWasAll) && self.client_has_nothing() {
                self.drive.legs.begin_again();
            }
            self.report(event);
            return Poll::Ready(());
        }
        if self.poll_engine(cx).is_ready() {
            return Poll::Ready(());
        }
        if self.out.is_empty() && (self.timer.as_mut().poll(cx).is_ready() || self.drain_ends()) {
            self.time_passed();
            return Poll::Ready(());
        }
        Poll::Pending
    }

    fn poll_engine(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.incoming.is_none() {
            return Poll::Pending;
        }
        std::task::ready!(self.poll_room(cx));
        let Some(incoming) = self.incoming.as_mut() else { return Poll::Ready(()) };
        let room = self.splitter.room();
        let before = room.len();
        match std::task::ready!(incoming.poll_read(cx, room)) {
            Ok(true) => {
                self.uncounted += room.len().saturating_sub(before);
                if self.uncounted >= COUNTED_AT_ONCE {
                    self.count_bytes();
                }
                self.read_at = Instant::now();
                if self.closed {
                    self.skip();
                } else if self.bytes.is_some() {
                    self.pass_bytes();
                } else {
                    self.relay_whole_events();
                    self.move_if_asked();
                    self.pause_if_asked();
                }
            }
            Ok(false) => self.end(),
            Err(error) => self.broke(error.into()),
        }
        Poll::Ready(())
    }

    /// Adds the bytes that came to the metrics.
    fn count_bytes(&mut self) {
        let bytes = std::mem::take(&mut self.uncounted) as u64;
        self.drive.state.metrics.relayed_bytes.inc_by(bytes);
    }

    /// Processes the events that are complete.
    fn relay_whole_events(&mut self) {
        let mut splitter = std::mem::take(&mut self.splitter);
        match splitter.whole() {
            Ok(whole) => {
                let events = splitter.first(whole);
                if events.get(self.waiting..).is_some_and(sse::has_data) {
                    self.event_at = self.read_at;
                }
                match self.begins(events) {
                    Ok(true) => {
                        self.relay_events(events);
                        splitter.discard(whole);
                    }
                    Ok(false) => {}
                    Err(error) => return self.fail(error),
                }
            }
            Err(error) => self.fail(CallError::Protocol(error.to_string())),
        }
        self.splitter = splitter;
    }

    /// Passes complete events on, as one slice unless one has to be edited or held back.
    fn relay_events(&mut self, events: &[u8]) {
        let hidden = self.drive.hide_ids(events);
        let events = hidden.as_deref().unwrap_or(events);
        let Some(seam) = &mut self.resumption.seam else {
            self.relay_joined(events);
            return;
        };
        let (joined, problem) = seam.join(events);
        self.note_origin();
        self.relay_joined(&joined);
        if let Some(problem) = problem.filter(|_| self.incoming.is_some()) {
            self.fail(problem);
        }
    }

    fn relay_joined(&mut self, events: &[u8]) {
        let slice = |place: Range<usize>| events.get(place).unwrap_or_default();
        let mut from = 0;
        for place in sse::events(events) {
            let event = slice(place.clone());
            if !sse::is_event(event) {
                self.push(slice(from..place.start));
                self.fail(not_an_event());
                return;
            }
            if sse::is_empty(event) {
                self.push(slice(from..place.start));
                from = place.end;
                continue;
            }
            let lists = if self.drive.wants_ids() { Lists::of(event) } else { Lists::default() };
            let seen = match self.look_and_note(event, &lists) {
                Ok(seen) => seen,
                Err(error) => {
                    self.push(slice(from..place.start));
                    return self.fail(error);
                }
            };
            let held_before = self.held.is_some();
            self.account_for(&seen);
            let begins_hold = self.held.is_some() && !held_before;
            let cached = self.drive.shown_cached_tokens();
            let edits = seen.may_have_private_fields
                || (cached != CachedTokens::OfAnswer && self.counts_cached(&seen));
            let is_hidden = self.drive.is_unasked_usage(event, &seen);
            if begins_hold || edits || is_hidden || !lists.is_empty() {
                // The events before this one go first, and are not held back even if this one is.
                let before = slice(from..place.start);
                if begins_hold {
                    self.send(before);
                } else {
                    self.push(before);
                }
                let edited = if edits { self.edited(event, &seen, cached) } else { None };
                match edited {
                    _ if is_hidden => {}
                    // An edit moves the lists.
                    Some(edited) => self.push_without_ids(&edited, &Lists::of(&edited)),
                    None => self.push_without_ids(event, &lists),
                }
                from = place.end;
            }
            if self.over {
                return;
            }
            if self.closed {
                let end = place.end + self.end_mark(slice(place.end..events.len()));
                self.push(slice(from..end));
                self.wait_for_end();
                return;
            }
        }
        self.push(slice(from..events.len()));
    }

    fn report(&mut self, event: Event) {
        self.drive.report(event);
        self.perform_all();
    }

    fn perform_all(&mut self) {
        while let Some(action) = self.drive.next_action() {
            self.perform(action);
        }
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Hold => self.held = Some(Vec::new()),
            Action::Release => self.release(),
            Action::Continue => self.continue_elsewhere(),
            Action::AnswerPrefill => self.take_prefill_answer(),
            Action::Fail(leg) => {
                let cause = self.drive.cause(leg);
                self.fail_client(cause);
            }
            Action::FailDeadline => self.fail_client(self.drive.out_of_time()),
            Action::Cancel(leg) => {
                // A local plan or a fallback changes which leg answers before the old one is cancelled.
                if leg != Leg::Prefill {
                    self.stop_reading();
                }
                self.drive.perform(action);
            }
            Action::Finish => {
                self.over = true;
                self.incoming = None;
                if !self.detached && self.closed && self.finished_well() {
                    self.drive.account.ended(200, "ok");
                }
                self.drive.perform(action);
            }
            other => {
                // A worker is waited for after a retry of legs that sent nothing.
                let is_route = matches!(other, Action::Route(_)) && self.incoming.is_none();
                self.resumption.is_pending |= is_route && !self.over && !self.detached;
                self.drive.perform(other);
            }
        }
    }

    /// Ends the stream with an error. Bytes that were held back are dropped.
    fn fail_client(&mut self, cause: ApiError) {
        let cause = self.cause_with_delivered(cause);
        (self.held, self.detached) = (None, true);
        self.end_with_error(&cause);
        self.drive.account.ended(cause.status().as_u16(), cause.code());
        // `ended` is final: a failure after the head has status 200 on the wire and its own code in the log.
        self.closed = false;
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.count_bytes();
    }
}
