//! How long a relay waits for its engine: for the first event, between events, and for the end of a body
//! after `[DONE]`; and for room for what it buffers.

use std::task::{Context, Poll, ready};

use pointsman_orchestration::Event;
use pointsman_workers::Worker;
use tokio::time::{Duration, Instant};

use super::Relay;
use crate::{
    openai::sse,
    upstream::{CallError, EVENT_IDLE_MAX, Silence},
};

/// How long the body may take to end after `[DONE]`. The client has the whole answer by then.
pub(crate) const END_GRACE: Duration = Duration::from_secs(1);
/// How often a stream without an event checks whether its worker is down.
const HEALTH_INTERVAL: Duration = Duration::from_millis(500);

impl Relay {
    /// Sets the timer to the next moment at which time has to be looked at. The first event and the end of
    /// prefill begin a wait for the engine, which may end earlier than the moment before. Other events move
    /// no moment to an earlier time, so they do not touch the timer.
    pub(super) fn set_timer(&mut self) {
        let next = self.next_moment();
        self.timer.as_mut().reset(next);
    }

    fn next_moment(&self) -> Instant {
        let deadline = self.drive.deadline;
        // While the engine is read, a stale booking stays.
        let stays = |stale: &Instant| self.incoming.is_some() && *stale <= Instant::now();
        let stale = self.drive.stale_at().filter(|stale| !stays(stale));
        let bounded = stale.map_or(deadline, |stale| stale.min(deadline));
        let bounded = self.wait_ends().map_or(bounded, |at| at.min(bounded));
        let bounded = self.comment_at().map_or(bounded, |at| at.min(bounded));
        match self.silent_at() {
            Some(at) if self.begun => {
                // The engine's figures are read before they decide.
                let half = self.drive.state.settings.leg_timeouts.pause().half(self.event_at);
                if half > Instant::now() { bounded.min(at).min(half) } else { bounded.min(at) }
            }
            Some(at) => bounded.min(at).min(Instant::now() + HEALTH_INTERVAL),
            None => bounded,
        }
    }

    /// Returns whether the drain ends and the answer is not whole.
    pub(super) fn drain_ends(&self) -> bool {
        (!self.closed || self.held.is_some()) && self.drive.drain_ends()
    }

    /// Acts on what is due: the end of the drain, the deadline, a silent engine, or bookings that expired.
    pub(super) fn time_passed(&mut self) {
        let now = Instant::now();
        let ends = self.drain_ends().then(|| self.drive.drain_ended());
        let is_late = ends.is_none() && now >= self.drive.deadline;
        if is_late {
            self.drive.note_deadline(self.incoming.as_ref().map(|_| self.event_at));
        }
        if let Some(event) = ends.or(is_late.then_some(Event::Deadline)) {
            self.report(event);
            if !self.over {
                self.set_timer();
            }
            return;
        }
        if let Some(error) = self.lost(now) {
            if self.closed { self.end() } else { self.fail(error) }
        }
        if self.over {
            return;
        }
        if self.incoming.is_none() && self.drive.stale_at().is_some_and(|stale| now >= stale) {
            self.drive.expire();
        }
        if self.wait_ends().is_some_and(|at| now >= at) {
            self.relay_whole_events();
        }
        if self.comment_at().is_some_and(|at| now >= at) {
            self.commented_at = now;
            self.out.extend_from_slice(self.format.keep_alive());
        }
        let limits = &self.drive.state.settings.leg_timeouts;
        if self.begun && now >= limits.pause().half(self.event_at) {
            self.worker().inspect(|worker| worker.read_figures());
        }
        if !self.begun
            && let Some(end) = self.silent_at()
        {
            let idle = if self.has_event() { limits.event_idle } else { limits.head };
            // Once, half of the limit before the end.
            let is_due = (end..end + HEALTH_INTERVAL).contains(&(now + idle / 2));
            self.worker().filter(|_| is_due).inspect(|worker| worker.read_figures());
            if !self.has_event() && now >= self.event_at + idle {
                self.drive.note_late_event();
            }
        }
        self.set_timer();
    }

    /// When the client gets a comment unless an event comes. Events that are held back stay after it.
    fn comment_at(&self) -> Option<Instant> {
        let every = self.drive.state.settings.leg_timeouts.stream_comment;
        let has_all = self.detached || (self.closed && self.held.is_none());
        let takes_comments = self.bytes.is_none() && !every.is_zero();
        let waits = !self.over && !has_all && takes_comments && !self.drive.gone.is_cancelled();
        // The client has none of the events that wait.
        let last_event = Some(self.event_at).filter(|_| self.waiting == 0);
        waits.then(|| last_event.map_or(self.commented_at, |at| at.max(self.commented_at)) + every)
    }

    /// The worker whose answer is relayed.
    pub(super) fn worker(&self) -> Option<&Worker> {
        self.drive.candidate(self.drive.answering()).map(|candidate| &*candidate.worker)
    }

    /// Waits no longer than a moment for the end of the body: then its connection can serve another call.
    pub(super) fn wait_for_end(&mut self) {
        self.event_at = self.read_at;
        self.set_timer();
    }

    /// Length of the end mark that `more` begins with. Some engines send it after the last event.
    pub(super) fn end_mark(&self, more: &[u8]) -> usize {
        let first = sse::events(more).next().filter(|_| self.format.has_last_event());
        let mark = first.filter(|place| more.get(place.clone()).is_some_and(sse::is_done));
        mark.map_or(0, |place| place.end)
    }

    /// Ends a body that continues after its last event: its connection is out of step.
    pub(super) fn skip(&mut self) {
        let mut more = std::mem::take(self.splitter.room());
        let mark: Vec<u8> = more.drain(..self.end_mark(&more)).collect();
        self.push(&mark);
        // The second half of a CRLF may come late.
        if !more.iter().all(u8::is_ascii_whitespace) {
            self.end();
        }
    }

    /// Takes room for what the relay buffers before it reads more: an event that has not ended, and events
    /// that are held back [I6.22]. Events that the client has not taken keep theirs, since nothing is read
    /// then. Without room, the stream fails after a while. After its last event, what comes is not kept, and
    /// needs no room.
    pub(super) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let bytes = self.splitter.room().capacity() + self.held.as_ref().map_or(0, Vec::len);
        while !self.room.hold_events(bytes) && !self.closed {
            self.not_read();
            if !ready!(self.room_wait.poll_next(cx)) {
                self.fail(CallError::NoRoom(self.room.limit()));
                break;
            }
        }
        self.room_wait.end();
        Poll::Ready(())
    }

    /// The wait for the first event begins when prefill ended.
    pub(super) fn prefill_ended(&mut self) {
        self.keep_cached_tokens();
        if !self.begun {
            self.event_at = Instant::now();
            self.set_timer();
        }
    }

    /// Returns whether the engine sent an event with data, which the client may not have yet.
    fn has_event(&self) -> bool {
        self.begun || self.waiting > 0
    }

    /// The worker whose answer is relayed. Until the client has an event, another worker may serve the
    /// request, so one that is stuck is not waited for.
    fn awaited_worker(&self) -> Option<&Worker> {
        self.worker().filter(|worker| self.begun || worker.stuck().is_none())
    }

    /// Returns why the engine is given up, if it is.
    fn lost(&self, now: Instant) -> Option<CallError> {
        // An engine within an answer may be slow to answer a health check. One that is silent, too, is gone.
        let pause = self.drive.state.settings.leg_timeouts.pause();
        let is_quiet = !self.begun || (!self.closed && now >= pause.half(self.event_at));
        if is_quiet && self.incoming.is_some() && self.worker().is_some_and(Worker::is_down) {
            return Some(CallError::Down);
        }
        if self.client_has_nothing() && self.incoming.is_some() {
            let leg = self.drive.answering();
            if self.drive.may_leave_sleeper(leg) {
                return Some(CallError::Asleep);
            }
        }
        if now < self.silent_at()? {
            return None;
        }
        let limits = &self.drive.state.settings.leg_timeouts;
        Some(CallError::Timeout(if self.has_event() {
            limits.pause().silence_between_events(self.event_at, self.awaited_worker())
        } else {
            let silence = Silence { what: "first event of the stream", key: "head", limit: limits.head };
            limits.first_event().silence_before(silence, EVENT_IDLE_MAX, self.event_at, self.worker())
        }))
    }

    /// When the engine will have been silent for too long; `None` while nothing is expected of it.
    fn silent_at(&self) -> Option<Instant> {
        self.incoming.as_ref()?;
        let limits = &self.drive.state.settings.leg_timeouts;
        if self.closed {
            return Some(self.event_at + END_GRACE);
        }
        // The prefill leg has a limit of its own.
        if !self.begun && self.drive.prefill_runs() {
            return None;
        }
        Some(if self.has_event() {
            limits.pause().end_between_events(self.event_at, self.awaited_worker())
        } else {
            limits.first_event().end_before(self.event_at, self.worker())
        })
    }
}
