//! Events that the driver waits for, up to the beginning of an answer.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, OptionFuture},
};
use http::Response;
use pointsman_orchestration::{Event, Waiting};
use pointsman_workers::{Leg, PerLeg};
use tokio::time::Instant;

use super::{
    Drive,
    answer::{first_event::Head, pending_head::first_event},
    executor::Reached,
    leg_run::LegAnswer,
};
use crate::upstream::{Body, CallError, REQUEST, UpgradedCall};

/// How often the runtime looks at its sockets, and at least how long in between, before a prefill is closed
/// whose client left: the answer may be in one of them already.
const LOOKS: u32 = 5;
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// The event that arrived first.
enum Next {
    Event(Event),
    /// A wait of a leg is over: route it.
    Again,
    /// An event that changes nothing until another one comes.
    Nothing,
    Stream(Response<Body>),
    Upgraded(UpgradedCall),
}

/// Timers that are due at the same time.
#[derive(Clone, Copy)]
pub(super) enum Alarm {
    /// The end of the request.
    Deadline,
    /// The end of the bookings (F4).
    Stale,
    /// A step of the estimate of an answer that is not streamed.
    Estimate,
    /// The handoff of an answer that no client waits for counts as consumed.
    Consumed,
}

/// Events that are reported once.
#[derive(Default)]
pub(super) struct Reported {
    pub(super) client_gone: bool,
    pub(super) drain_end: bool,
}

impl Drive {
    /// Waits for the next event and reports it. Returns what begins with it.
    pub(super) async fn step(&mut self) -> Option<Reached> {
        if let Some((leg, event)) = self.held_event.take() {
            // Boxed, because few requests wait here.
            Box::pin(self.look_for_model(leg)).await;
            self.report(event);
            return None;
        }
        match self.next().await {
            Next::Event(event) => self.report_or_hold(event),
            Next::Again => self.route_again(),
            Next::Nothing => {}
            Next::Stream(head) => {
                let mut head = self.take_head(head);
                if let Head::NoStream(unknown) = head {
                    // Boxed, because few requests wait for it.
                    head = Box::pin(self.no_stream(unknown)).await;
                }
                match head {
                    Head::Stream(head) => {
                        self.report(Event::Head);
                        return Some(Reached::Stream(head));
                    }
                    Head::Over(event) => self.report_or_hold(event),
                    Head::NoStream(_) => {}
                }
            }
            Next::Upgraded(engine) => {
                self.upgraded();
                self.report(Event::Head);
                return Some(Reached::Upgraded(engine));
            }
        }
        None
    }

    /// Waits for the next event of the client, the legs and the clock.
    async fn next(&mut self) -> Next {
        if let Some(head) = self.due_head() {
            return Next::Stream(head);
        }
        let (until, alarm) = self.next_alarm();
        let waiting = self.attempts.waiting();
        let (PerLeg { prefill, answering }, drain_end) = (&mut self.runs, &self.state.drain_end);
        let prefills_alone = prefill.call.is_some() && answering.call.is_none();
        let answers = prefill.answers.as_deref().filter(|_| prefills_alone);
        tokio::select! {
            biased;
            // A handoff that is in hand is consumed, whether or not its client left meanwhile (E1.7).
            outcome = finish_or_never(&mut prefill.call) => self.call_ended(Leg::Prefill, outcome),
            _ = self.gone.cancelled().then(|()| last_looks(answers)), if !self.reported.client_gone => {
                self.reported.client_gone = true;
                Next::Event(Event::ClientGone)
            }
            outcome = finish_or_never(&mut answering.call) => self.call_ended(self.legs.answering(), outcome),
            () = first_event(answering.pending_head.as_mut()) => {
                self.runs.answering.pending_head.take().map_or(Next::Nothing, Next::Stream)
            }
            () = wait_or_never(waiting) => Next::Again,
            () = drain_end.seen(), if !self.reported.drain_end => Next::Event(self.drain_ended()),
            () = tokio::time::sleep_until(until) => {
                let sent = self.runs.answering.sent.filter(|_| self.runs.answering.call.is_some());
                self.on_alarm(alarm, sent).map_or(Next::Nothing, Next::Event)
            }
        }
    }

    /// Returns the time of the next timer, and what is due then.
    pub(super) fn next_alarm(&self) -> (Instant, Alarm) {
        let stale = self.stale_at().filter(|stale| *stale < self.deadline);
        let (until, alarm) = stale.map_or((self.deadline, Alarm::Deadline), |stale| (stale, Alarm::Stale));
        let estimate = self.estimate_due().map(|due| (due, Alarm::Estimate));
        let consumed = self.consumed_at().map(|due| (due, Alarm::Consumed));
        let timers = [Some((until, alarm)), estimate, consumed];
        timers.into_iter().flatten().min_by_key(|(due, _)| *due).unwrap_or((until, alarm))
    }

    /// Does what is due. `silent_from`: when the leg that answers was sent, or last sent an event.
    pub(super) fn on_alarm(&mut self, alarm: Alarm, silent_from: Option<Instant>) -> Option<Event> {
        match alarm {
            Alarm::Estimate => self.advance_estimate(),
            Alarm::Stale => self.expire(),
            Alarm::Consumed => return self.is_consumed().then_some(Event::FirstToken),
            Alarm::Deadline => {
                if self.runs.answering.call.is_some() {
                    self.warn_of_whole(REQUEST);
                }
                self.note_deadline(silent_from);
                return Some(Event::Deadline);
            }
        }
        None
    }

    /// Takes the outcome of a leg's call.
    fn call_ended(&mut self, leg: Leg, outcome: Result<LegAnswer, CallError>) -> Next {
        let run = &mut self.runs[leg];
        run.call = None;
        if let Some(over) = run.over.take() {
            over.cancel();
        }
        Next::Event(match outcome {
            Ok(LegAnswer::Prefilled(done)) => self.prefilled(done),
            Ok(LegAnswer::Whole(whole, held)) => self.answered_whole(whole, held),
            Ok(LegAnswer::Stream(head)) => return self.keep_head(head).map_or(Next::Nothing, Next::Stream),
            Ok(LegAnswer::Upgraded(engine)) => return Next::Upgraded(engine),
            Err(error) => self.leg_failed(leg, error),
        })
    }

    /// Polls the prefill call; its outcome as an event.
    pub(crate) fn poll_prefill(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        let Some(call) = self.runs.prefill.call.as_mut() else { return Poll::Pending };
        let outcome = std::task::ready!(call.poll_unpin(cx));
        match self.call_ended(Leg::Prefill, outcome) {
            Next::Event(event) => Poll::Ready(event),
            // A prefill call has no other outcome.
            _ => Poll::Pending,
        }
    }
}

/// Looks for an answer that arrived before its client left, while a prefill runs alone: from its head on,
/// which `answers` tells, it is waited for. Under a CPU limit, a thread may see both at once.
fn last_looks(answers: Option<&AtomicBool>) -> OptionFuture<BoxFuture<'_, ()>> {
    async fn looks(answers: &AtomicBool) {
        for _ in 0..LOOKS {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        if answers.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    }
    // Boxed, because few requests wait here.
    OptionFuture::from(answers.map(|answers| looks(answers).boxed()))
}

/// Waits until a leg may be routed again; without a wait, forever.
async fn wait_or_never(waiting: Option<&Waiting>) {
    match waiting {
        // Boxed, because few requests wait here.
        Some(waiting) => Box::pin(waiting.over()).await,
        None => std::future::pending().await,
    }
}

/// Waits for a call; without one, forever.
async fn finish_or_never<T>(call: &mut Option<BoxFuture<'static, T>>) -> T {
    match call {
        Some(call) => call.await,
        None => std::future::pending().await,
    }
}
