//! Events that the driver waits for, up to the head of an answer.

use std::task::{Context, Poll};

use futures_util::{FutureExt, future::BoxFuture};
use http::Response;
use pointsman_orchestration::{Event, Waiting};
use tokio::time::Instant;

use super::{DecodeHead, Drive, pending_head::first_event};
use crate::upstream::Body;

/// What came first.
#[expect(clippy::large_enum_variant, reason = "it is taken apart where it is made")]
pub(super) enum Next {
    Event(Event),
    /// A wait of a leg is over: route it.
    Again,
    /// The bookings expired (F4).
    Stale,
    /// Something came that waits for something else.
    Nothing,
    Stream(Response<Body>),
}

/// Timers that are due at a moment.
#[derive(Clone, Copy)]
enum Alarm {
    /// The end of the request.
    Deadline,
    /// The end of the bookings.
    Stale,
    /// A step of the estimate of an answer that is not streamed.
    Estimate,
}

impl Drive {
    /// Waits for the next event of the client, the legs and the clock.
    pub(super) async fn next(&mut self) -> Next {
        if let Some(head) = self.due_head() {
            return Next::Stream(head);
        }
        let (until, alarm) = self.next_alarm();
        let waiting = self.attempts.waiting();
        let (prefill, decode) = (&mut self.prefill.call, &mut self.decode.call);
        let pending = self.pending_head.as_mut();
        tokio::select! {
            biased;
            () = self.gone.cancelled(), if !self.saw_gone => {
                self.saw_gone = true;
                Next::Event(Event::ClientGone)
            }
            outcome = maybe(prefill), if prefill.is_some() => {
                self.prefill.call = None;
                Next::Event(self.prefill_outcome(outcome))
            }
            outcome = maybe(decode), if decode.is_some() => {
                self.decode.call = None;
                match outcome {
                    Ok(DecodeHead::Stream(head)) => self.keep_head(head).map_or(Next::Nothing, Next::Stream),
                    Ok(DecodeHead::Whole(whole)) => Next::Event(self.decode_whole(whole)),
                    Err(error) => Next::Event(self.decode_failed(error)),
                }
            }
            () = first_event(pending) => self.pending_head.take().map_or(Next::Nothing, Next::Stream),
            () = over(waiting) => Next::Again,
            () = tokio::time::sleep_until(until) => match alarm {
                Alarm::Estimate => {
                    self.advance_estimate();
                    Next::Nothing
                }
                Alarm::Stale => Next::Stale,
                Alarm::Deadline => {
                    self.note_deadline(self.decode.sent.filter(|_| self.decode.call.is_some()));
                    Next::Event(Event::Deadline)
                }
            },
        }
    }

    /// Returns the moment to wait for, and what is due then.
    fn next_alarm(&self) -> (Instant, Alarm) {
        let stale = self.stale_at().filter(|stale| *stale < self.deadline);
        let (until, alarm) = stale.map_or((self.deadline, Alarm::Deadline), |stale| (stale, Alarm::Stale));
        match self.estimate_due().filter(|due| *due < until) {
            Some(due) => (due, Alarm::Estimate),
            None => (until, alarm),
        }
    }

    /// Polls the prefill call; its outcome as an event.
    pub(crate) fn poll_prefill(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        let Some(call) = self.prefill.call.as_mut() else { return Poll::Pending };
        let outcome = std::task::ready!(call.poll_unpin(cx));
        self.prefill.call = None;
        Poll::Ready(self.prefill_outcome(outcome))
    }
}

/// Waits until a leg may be routed again; without a wait, forever.
async fn over(waiting: Option<&Waiting>) {
    match waiting {
        Some(waiting) => waiting.over().await,
        None => std::future::pending().await,
    }
}

/// Waits for a call; without one, forever.
async fn maybe<T>(call: &mut Option<BoxFuture<'static, T>>) -> T {
    match call {
        Some(call) => call.await,
        None => std::future::pending().await,
    }
}
