//! The call of a prefill leg. It runs as a task of its own (C6.7), so that it ends, and its booking with it,
//! whether or not the client reads its answer.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{FutureExt as _, future::BoxFuture};
use http::Response;
use parking_lot::Mutex;
use pointsman_workers::Booking;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    connectors::{Connector, PrefillAnswer},
    openai::seen,
    state::State,
    upstream::CallError,
};

/// A prefill call that ended: its answer and what it carries, or (bootstrap) nothing.
pub(super) type PrefillDone = Option<(Response<Bytes>, PrefillAnswer)>;

/// The booking of a prefill leg. The call's task releases it at its end, and the request when it gives the
/// leg up.
#[derive(Clone, Debug, Default)]
pub(super) struct PrefillBooking(Arc<Mutex<Option<Booking>>>);

/// What the task of a call needs, besides the call.
pub(super) struct PrefillCall {
    pub(super) state: Arc<State>,
    pub(super) connector: &'static dyn Connector,
    pub(super) is_chat: bool,
    pub(super) booking: PrefillBooking,
}

impl PrefillBooking {
    /// Wraps the booking of a new leg.
    pub(super) fn new(booking: Booking) -> Self {
        Self(Arc::new(Mutex::new(Some(booking))))
    }

    pub(super) fn is_some(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Takes the booking, to be released.
    pub(super) fn take(&self) -> Option<Booking> {
        self.0.lock().take()
    }
}

impl PrefillCall {
    /// Starts the call. It ends when the returned future is dropped.
    pub(super) fn start(
        self,
        call: impl Future<Output = Result<Option<Response<Bytes>>, CallError>> + Send + 'static,
    ) -> BoxFuture<'static, Result<PrefillDone, CallError>> {
        let (tracker, sent) = (self.state.tracker.clone(), Instant::now());
        let task = tracker.spawn(async move {
            let outcome = call.await.and_then(|answer| self.read(answer));
            self.release(outcome.is_ok().then(|| sent.elapsed()));
            outcome
        });
        let ended = AbortOnDropHandle::new(task);
        ended.map(|joined| joined.unwrap_or_else(|error| Err(CallError::Broken(error.to_string())))).boxed()
    }

    /// Reads the answer of a prefill leg, if it carries data. One that is an error, or that cannot be read,
    /// is a failed call: another prefill worker may answer.
    fn read(&self, answer: Option<Response<Bytes>>) -> Result<PrefillDone, CallError> {
        let Some(answer) = answer else { return Ok(None) };
        if seen::whole(self.is_chat, answer.body()).error {
            return Err(CallError::of_error_body(answer.body()));
        }
        match self.connector.read_prefill(answer.body()) {
            PrefillAnswer::MissingData(problem) => {
                self.state.metrics.handoff("missing_data");
                Err(CallError::Protocol(format!("the prefill answer has no data: {problem}")))
            }
            read => Ok(Some((answer, read))),
        }
    }

    /// Releases the booking. `took`: how long the prefill took, if it succeeded.
    fn release(&self, took: Option<std::time::Duration>) {
        let Some(mut booking) = self.booking.take() else { return };
        if let Some(took) = took {
            booking.first_token(took, true);
        }
        drop(booking);
        self.state.queue.wake();
    }
}
