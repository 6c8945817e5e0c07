//! The events of a stored response: passed on whole, with comments while the engine is silent, and with an
//! error event when the last event of the response is missing (I12.9).

use std::future::poll_fn;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use crate::{
    budget::Share,
    connectors::connector_for,
    openai::{
        endpoint::Format,
        error::{ApiError, RequestFacts, masked},
        hide::without_fields,
        seen,
        sequence::LastNumber,
        sse::{self, Seen, Splitter},
    },
    orchestrate::{
        answer::first_event::error_in,
        relay::{END_GRACE, end_last_event, ended_early},
    },
    state::{drain_end::DrainEnd, settings::LegTimeouts},
    telemetry::account::Account,
    upstream::{Body, CallError, RoomWait},
};

/// A stream of events to a client.
pub(crate) struct StoredEvents {
    body: Body,
    splitter: Splitter,
    /// Share of a large event in the bytes of bodies in flight.
    held: Share,
    room_wait: RoomWait,
    timeouts: LegTimeouts,
    deadline: Instant,
    drain_end: DrainEnd,
    account: Box<Account>,
    /// Bytes for the client.
    out: Vec<u8>,
    last_number: LastNumber,
    /// When an event with data last arrived.
    event_at: Instant,
    commented_at: Instant,
    /// Whether the stream may end without an event: the client has named the last one that it has.
    may_be_empty: bool,
    /// Status and code of a response whose last event has come.
    outcome: Option<(u16, &'static str)>,
    over: bool,
}

impl StoredEvents {
    /// Returns the events in `body`, until `deadline` or the end of the drain. Large ones count in `held`.
    /// `may_be_empty`: whether the client may have them all.
    pub(crate) fn new(
        (body, held): (Body, Share),
        timeouts: LegTimeouts,
        (deadline, drain_end): (Instant, DrainEnd),
        account: Box<Account>,
        may_be_empty: bool,
    ) -> Self {
        let now = Instant::now();
        Self {
            body,
            splitter: Splitter::default(),
            held,
            room_wait: RoomWait::default(),
            timeouts,
            deadline,
            drain_end,
            account,
            out: Vec::new(),
            last_number: LastNumber::default(),
            event_at: now,
            commented_at: now,
            may_be_empty,
            outcome: None,
            over: false,
        }
    }

    /// Returns the next bytes for the client; `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        loop {
            if !self.out.is_empty() {
                return Some(std::mem::take(&mut self.out).into());
            }
            // The client has everything that came before.
            if let Some((status, code)) = self.outcome {
                self.account.ended(status, code);
            }
            if self.over {
                return None;
            }
            let buffered = self.splitter.room().capacity();
            if !self.held.hold_events(buffered) {
                self.wait_for_room().await;
                continue;
            }
            if self.room_wait.end() {
                // The engine was not silent: nothing was read.
                self.event_at = Instant::now();
            }
            let read = timeout_at(self.next_moment(), self.body.read(self.splitter.room()));
            tokio::select! {
                biased;
                read = read => match read {
                    Ok(Ok(true)) => self.take_events(),
                    Ok(Ok(false)) => self.end(None),
                    Ok(Err(error)) => self.end(Some(error.into())),
                    Err(_) => self.time_passed(),
                },
                () = self.drain_end.seen(), if self.outcome.is_none() => self.fail(&ApiError::Draining),
            }
        }
    }

    /// Waits a moment for room for a large event. Meanwhile, nothing is read from the engine.
    async fn wait_for_room(&mut self) {
        if self.outcome.is_some() {
            // The client has the last event. What follows it is worth no wait.
            self.over = true;
            return;
        }
        self.body.rest();
        let may_wait = tokio::select! {
            may_wait = poll_fn(|cx| self.room_wait.poll_next(cx)) => may_wait,
            () = self.drain_end.seen() => return self.fail(&ApiError::Draining),
        };
        let now = Instant::now();
        if now >= self.deadline {
            self.fail(&ApiError::Deadline);
        } else if !may_wait {
            self.fail(&CallError::NoRoom(self.held.limit()).into());
        } else {
            self.comment_if_due(now);
        }
    }

    /// Returns when time has to be looked at next, if nothing comes before.
    fn next_moment(&self) -> Instant {
        if self.outcome.is_some() {
            return self.event_at + END_GRACE;
        }
        let pause = self.timeouts.pause();
        let end = pause.end_between_events(self.event_at, self.body.worker()).min(self.deadline);
        // The engine's figures are read before they decide.
        let half = Some(pause.half(self.event_at)).filter(|half| *half > Instant::now());
        [half, self.comment_at()].into_iter().flatten().fold(end, Instant::min)
    }

    /// When the client gets a comment unless an event comes (I3.8).
    fn comment_at(&self) -> Option<Instant> {
        let every = self.timeouts.stream_comment;
        (!every.is_zero()).then(|| self.event_at.max(self.commented_at) + every)
    }

    fn time_passed(&mut self) {
        let (now, pause) = (Instant::now(), self.timeouts.pause());
        let worker = self.body.worker();
        if self.outcome.is_some() {
            self.over = true;
        } else if now >= self.deadline {
            self.fail(&ApiError::Deadline);
        } else if now >= pause.end_between_events(self.event_at, worker) {
            let silence = pause.silence_between_events(self.event_at, worker);
            self.fail(&CallError::Timeout(silence).into());
        } else {
            if let Some(worker) = worker.filter(|_| now >= pause.half(self.event_at)) {
                worker.read_figures();
            }
            self.comment_if_due(now);
        }
    }

    fn comment_if_due(&mut self, now: Instant) {
        if self.comment_at().is_some_and(|at| now >= at) {
            self.commented_at = now;
            self.out.extend_from_slice(Format::Responses.keep_alive());
        }
    }

    /// Passes on the events that are complete.
    fn take_events(&mut self) {
        let mut splitter = std::mem::take(&mut self.splitter);
        match splitter.whole() {
            Ok(whole) => {
                self.pass(splitter.first(whole));
                splitter.discard(whole);
                self.splitter = splitter;
            }
            Err(error) => self.fail(&CallError::Protocol(error.to_string()).into()),
        }
    }

    fn pass(&mut self, events: &[u8]) {
        for event in sse::events(events).filter_map(|place| events.get(place)) {
            if self.outcome.is_some() {
                // Nothing but the end mark follows the last event.
                if sse::is_done(event) {
                    self.out.extend_from_slice(event);
                } else if !event.trim_ascii().is_empty() {
                    self.over = true;
                    return;
                }
                continue;
            }
            let seen = seen::event(Format::Responses, event);
            let shown = match seen {
                Seen { error: true, .. } => masked(event, &RequestFacts::default()),
                Seen { may_have_private_fields: true, .. } => self.without_private_fields(event),
                _ => None,
            };
            self.out.extend_from_slice(shown.as_deref().unwrap_or(event));
            if sse::has_data(event) {
                (self.event_at, self.may_be_empty) = (Instant::now(), false);
                self.last_number.note(event);
            }
            if let Some(error) = error_in(&seen, event) {
                let error = ApiError::from(error);
                self.outcome = Some((error.status().as_u16(), error.code()));
            } else if seen.done {
                self.outcome = Some((200, "ok"));
            }
        }
    }

    fn without_private_fields(&self, event: &[u8]) -> Option<Vec<u8>> {
        without_fields(event, connector_for(self.body.worker()?.spec()).private_answer_fields())
    }

    /// The engine's body has ended, or its connection has failed.
    fn end(&mut self, error: Option<CallError>) {
        if self.outcome.is_none() && end_last_event(&mut self.splitter) {
            self.take_events();
        }
        if self.may_be_empty && error.is_none() && self.splitter.rest() == 0 {
            self.outcome = Some((200, "ok"));
        }
        self.over = true;
        if self.outcome.is_none() {
            let is_within_event = self.splitter.rest() > 0;
            self.fail(&error.unwrap_or_else(|| ended_early(is_within_event)).into());
        }
    }

    /// Ends the stream with an error event.
    fn fail(&mut self, error: &ApiError) {
        self.over = true;
        self.account.ended(error.status().as_u16(), error.code());
        let event = error.event(Format::Responses, &self.account.request_id, self.last_number);
        self.out.extend_from_slice(&event);
    }
}
