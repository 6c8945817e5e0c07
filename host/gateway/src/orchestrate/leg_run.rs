//! One leg of a request: its worker, its booking, its call in flight and its failure.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::Response;
use pointsman_workers::{Booking, BookingHandle, Candidate, OpenHandoff};
use prefix_index::ProvisionalRecord;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::failure::refusals::Refusals;
use crate::{
    budget::Share,
    connectors::PrefillAnswer,
    openai::{error::ApiError, trace_context::Span},
    upstream::{Body, CallError, UpgradedCall},
};

/// A leg that runs or will run.
#[derive(Default)]
pub(crate) struct LegRun {
    pub(crate) candidate: Option<Candidate>,
    pub(crate) booking: LegBooking,
    /// The record that the prompt is cached there. It is withdrawn unless the worker accepts the leg.
    pub(super) record: Option<ProvisionalRecord>,
    pub(super) call: Option<BoxFuture<'static, Result<LegAnswer, CallError>>>,
    /// Cancelled when the call ends. The prefill call creates it.
    pub(super) over: Option<CancellationToken>,
    /// Whether the prefill call got the head of its answer. `None`: the answer carries no handoff.
    pub(super) answers: Option<Arc<AtomicBool>>,
    /// The head of the decode answer, kept until prefill has ended.
    pub(super) pending_head: Option<Response<Body>>,
    /// When the leg was sent.
    pub(crate) sent: Option<Instant>,
    /// Whether the gateway asked the engine to abort the leg.
    pub(super) aborted: bool,
    /// Cancelled when the engine has answered the first call that aborts the leg, or none is answered.
    pub(super) abort_answered: Option<CancellationToken>,
    /// A stream that is not read any more, until the leg is stopped.
    pub(super) unread: Option<Body>,
    /// The trace span of the leg, once it was sent.
    pub(super) span: Option<Span>,
    pub(crate) failure: Option<ApiError>,
    pub(super) refusals: Refusals,
    /// Share of the leg's whole answer in the bytes of bodies in flight, until the client has the answer.
    pub(super) held: Option<Share>,
}

/// The connection of a leg that was stopped. Dropping it closes the connection.
#[must_use]
pub(super) struct LegConnection {
    call: Option<BoxFuture<'static, Result<LegAnswer, CallError>>>,
    head: Option<Response<Body>>,
    stream: Option<Body>,
}

/// Result of a leg's call.
pub(super) enum LegAnswer {
    /// The prefill leg did its part.
    Prefilled(PrefillDone),
    /// The head of a streamed answer.
    Stream(Response<Body>),
    Whole(Response<Bytes>, Share),
    /// A connection to the engine of a realtime session.
    Upgraded(UpgradedCall),
}

/// A prefill call that ended.
#[derive(Default)]
pub(super) struct PrefillDone {
    /// The prefill engine's answer, with the data of the handoff.
    pub(super) answer: Option<(Response<Bytes>, PrefillAnswer)>,
    /// Number of cached prompt tokens in an answer that was not kept.
    pub(super) cached_tokens: Option<u32>,
    pub(super) held: Option<Share>,
    /// The handoff that decode has to consume.
    pub(super) open_handoff: Option<OpenHandoff>,
}

/// The load that a leg is booked for.
#[derive(Default)]
pub(crate) enum LegBooking {
    #[default]
    Released,
    Own(Booking),
    /// The task of the leg's call has the booking, and releases it at its end; the request releases it when
    /// it gives the leg up.
    OfTask(BookingHandle),
}

impl LegRun {
    /// Returns whether the prefill engine has begun to send an answer that carries the handoff.
    pub(super) fn answers(&self) -> bool {
        self.call.is_some() && self.answers.as_ref().is_some_and(|answers| answers.load(Ordering::Relaxed))
    }

    /// Notes that the worker took the prompt.
    pub(super) fn keep_record(&mut self) {
        if let Some(record) = &mut self.record {
            record.keep();
        }
    }

    /// Withdraws the record although the worker took the prompt: nothing can be made of it.
    pub(super) fn withdraw_record(&mut self) {
        self.record.take().into_iter().for_each(ProvisionalRecord::withdraw);
    }

    /// Ends the leg's call, and with it the record, unless the worker has the prompt: most likely it has that
    /// of a call in flight. Returns the connection.
    pub(super) fn stop(&mut self) -> LegConnection {
        let call = self.call.take();
        if call.is_some() {
            self.keep_record();
        }
        self.record = None;
        LegConnection { call, head: self.pending_head.take(), stream: self.unread.take() }
    }

    /// Notes why the leg failed. An engine's own refusal says more than another engine that did not answer
    /// after it.
    pub(super) fn fails(&mut self, cause: ApiError, has_answered: bool) {
        if has_answered || !matches!(self.failure, Some(ApiError::Engine { .. })) {
            self.failure = Some(cause);
        }
    }
}

impl LegConnection {
    pub(super) fn is_open(&self) -> bool {
        self.call.is_some() || self.head.is_some() || self.stream.is_some()
    }
}

impl LegBooking {
    pub(super) fn is_booked(&self) -> bool {
        match self {
            Self::Released => false,
            Self::Own(booking) => booking.is_booked(),
            Self::OfTask(booking) => booking.is_booked(),
        }
    }

    /// Releases the booking. Returns whether it was booked.
    pub(super) fn release(&mut self) -> bool {
        match std::mem::take(self) {
            Self::Released => false,
            Self::Own(booking) => booking.release(),
            Self::OfTask(booking) => booking.release(),
        }
    }

    /// Returns the booking, unless a task has it.
    pub(super) fn own(&mut self) -> Option<&mut Booking> {
        if let Self::Own(booking) = self { Some(booking) } else { None }
    }

    /// Returns a handle that releases the booking, unless a task has it.
    pub(super) fn handle(&mut self) -> Option<BookingHandle> {
        if let Self::Own(booking) = self { Some(booking.handle()) } else { None }
    }

    /// Gives the booking to a task.
    pub(super) fn give(&mut self) -> Option<Booking> {
        let Self::Own(mut booking) = std::mem::take(self) else { return None };
        *self = Self::OfTask(booking.handle());
        Some(booking)
    }
}
