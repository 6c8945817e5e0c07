//! The call of a prefill leg. If decode answers while it runs, it is a task of its own (C6.7), so that it
//! ends, and its booking with it, whether or not the client reads its answer.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{FutureExt as _, future::BoxFuture};
use http::Response;
use pointsman_workers::{Booking, OpenHandoff, Worker};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::{
    leg_run::{LegAnswer, PrefillDone},
    reported_usage::UNKNOWN_CONTEXT,
};
use crate::{
    budget::Share,
    connectors::{Connector, PrefillAnswer},
    openai::seen,
    state::State,
    upstream::CallError,
};

/// Result of a prefill call.
pub(super) enum Prefilled {
    /// The answer of a completed handoff.
    Answer(Response<Bytes>, Share),
    /// Any other answer; `None`: it was a stream.
    Drained(Option<Bytes>, Share),
}

/// Data that the task of a call needs, besides the call.
pub(super) struct PrefillCall {
    pub(super) state: Arc<State>,
    pub(super) connector: &'static dyn Connector,
    pub(super) worker: Arc<Worker>,
    pub(super) is_chat: bool,
    pub(super) booking: Option<Booking>,
}

impl PrefillCall {
    /// Starts the call as a task. It ends when the returned future is dropped.
    pub(super) fn start(
        self,
        call: impl Future<Output = Result<Prefilled, CallError>> + Send + 'static,
    ) -> BoxFuture<'static, Result<LegAnswer, CallError>> {
        let task = self.state.tracker.clone().spawn(self.run(call));
        let ended = AbortOnDropHandle::new(task);
        ended.map(|joined| joined.unwrap_or_else(|error| Err(CallError::Broken(error.to_string())))).boxed()
    }

    /// Waits for the call, and releases the booking. A handoff is counted before that, so that the worker is
    /// not idle in between (E6.14).
    pub(super) async fn run(
        mut self,
        call: impl Future<Output = Result<Prefilled, CallError>>,
    ) -> Result<LegAnswer, CallError> {
        let sent = Instant::now();
        let outcome = call.await.and_then(|answer| self.read(answer));
        self.release(outcome.is_ok().then(|| sent.elapsed()));
        outcome.map(LegAnswer::Prefilled)
    }

    /// Reads the answer of a prefill leg, if it carries data. An answer that is an error, or that cannot be
    /// read, is a failed call: another prefill worker may answer.
    fn read(&mut self, prefilled: Prefilled) -> Result<PrefillDone, CallError> {
        let (answer, held) = match prefilled {
            Prefilled::Answer(answer, held) => (answer, held),
            Prefilled::Drained(whole, held) => return Ok(self.drained(whole, held)),
        };
        if seen::is_error(self.is_chat, answer.body()) {
            return Err(CallError::of_error_body(answer.body()));
        }
        match self.connector.read_prefill(answer.body()) {
            PrefillAnswer::MissingData(problem) => {
                self.state.metrics.handoff("missing_data");
                Err(CallError::Protocol(format!("the prefill answer has no data: {problem}")))
            }
            read => {
                let prompt =
                    if let PrefillAnswer::Handoff { prompt, .. } = &read { Some(prompt) } else { None };
                if let Some((booking, prompt)) = self.booking.as_mut().zip(prompt.filter(|it| it.tokens > 0))
                {
                    booking.prompt_reported(prompt.tokens.min(UNKNOWN_CONTEXT), prompt.cached_tokens);
                }
                let open_handoff = prompt.map(|_| OpenHandoff::new(self.worker.clone()));
                let answer = Some((answer, read));
                Ok(PrefillDone { answer, cached_tokens: None, held: Some(held), open_handoff })
            }
        }
    }

    /// Looks whether an answer without a handoff is all of the client's answer.
    fn drained(&self, whole: Option<Bytes>, held: Share) -> PrefillDone {
        let open_handoff = self.connector.keeps_blocks().then(|| OpenHandoff::new(self.worker.clone()));
        let Some(whole) = whole else { return PrefillDone { open_handoff, ..PrefillDone::default() } };
        let cached_tokens = seen::in_whole_answer(false, &whole).usage.and_then(|usage| usage.cached_tokens);
        let ended = self.connector.ended_in_prefill(&whole);
        let answer = ended.then(|| (Response::new(whole), PrefillAnswer::WasAll));
        let open_handoff = open_handoff.filter(|_| !ended);
        PrefillDone { answer, cached_tokens, held: Some(held), open_handoff }
    }

    /// Releases the booking. `took`: how long the prefill took, if it succeeded.
    fn release(&mut self, took: Option<std::time::Duration>) {
        let Some(mut booking) = self.booking.take().filter(Booking::is_booked) else { return };
        if let Some(took) = took {
            booking.first_token(took, true);
        }
        drop(booking);
        self.state.queue.wake();
    }
}
