//! What the driver waits for, up to the head of an answer.

use futures_util::future::BoxFuture;
use http::Response;
use pointsman_orchestration::{Event, Waiting};

use super::{DecodeHead, Drive, pending_head::first_bytes};
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

impl Drive {
    /// Waits for the next event of the client, the legs and the clock.
    pub(super) async fn next(&mut self) -> Next {
        if let Some(head) = self.due_head() {
            return Next::Stream(head);
        }
        let (deadline, stale) = (self.deadline, self.stale_at().filter(|stale| *stale < self.deadline));
        let bounded = stale.unwrap_or(deadline);
        let until = self.estimate_due().map_or(bounded, |due| due.min(bounded));
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
            () = first_bytes(pending) => self.pending_head.take().map_or(Next::Nothing, Next::Stream),
            () = over(waiting) => Next::Again,
            () = tokio::time::sleep_until(until) => match stale {
                _ if until < bounded => {
                    self.advance_estimate();
                    Next::Nothing
                }
                Some(_) => Next::Stale,
                None => Next::Event(Event::Deadline),
            },
        }
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
