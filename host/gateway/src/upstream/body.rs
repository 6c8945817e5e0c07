//! The body of an engine's answer, and the call that its bytes are signs of life of.

use std::{
    future::poll_fn,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http1_client::{Observer, WireError};
use pointsman_workers::{InFlight, Worker};
use tokio::time::Instant;

use super::{CallError, PauseLimits, room::RoomWait, stream::EngineStream};
use crate::budget::{Share, UNCOUNTED};

/// The body of an answer. At its end the connection goes back to the pool. Dropping it earlier closes the
/// connection, which stops the engine's work.
#[derive(Debug)]
pub(crate) struct Body(http1_client::Body<EngineStream, ObservedCall>, MaxLength);

/// Maximum length of a body that is read whole, bytes.
type MaxLength = usize;

/// The call that a worker owes the bytes of an answer to.
#[derive(Debug)]
pub(super) struct ObservedCall(InFlight);

impl Observer for ObservedCall {
    fn before_read(&mut self) {
        self.0.check();
    }

    fn on_bytes(&self) {
        self.0.note_sign_of_life();
    }
}

/// Reads a whole body. `held` counts its bytes. `limits` bounds each pause of the engine.
///
/// # Errors
/// [`CallError`], also when the body is larger than its limit.
pub(crate) async fn collect(
    mut body: Body,
    limits: Option<PauseLimits>,
    mut held: Option<&mut Share>,
) -> Result<Bytes, CallError> {
    let mut whole = Vec::new();
    while read_within(&mut body, &mut whole, limits).await? {
        let (max, left) = (body.1, body.left());
        if whole.len().saturating_add(left) > max {
            return Err(CallError::TooLarge(format!(
                "it has more than {max} bytes, the limit of limits.answer_bytes; raise it, or ask for less at once"
            )));
        }
        if let Some(held) = held.as_deref_mut().filter(|_| whole.len() > UNCOUNTED) {
            // At once: answers that took their room piece by piece would wait for each other.
            let more = whole.len() + left - held.amount();
            if more > 0 {
                wait_for_room(&mut body, held, |held| held.grow_body(more)).await?;
                whole.reserve_exact(left);
            }
        }
    }
    Ok(whole.into())
}

/// Appends the bytes that arrive next to `out`, within `limits`; `false` at the end of the body.
///
/// # Errors
/// [`CallError`].
pub(crate) async fn read_within(
    body: &mut Body,
    out: &mut Vec<u8>,
    limits: Option<PauseLimits>,
) -> Result<bool, CallError> {
    let Some(limits) = limits else { return Ok(body.read(out).await?) };
    // Of a short answer, everything is there: no clock is read for it.
    if let Some(read) = body.read(out).now_or_never() {
        return Ok(read?);
    }
    let from = Instant::now();
    let mut until = limits.half(from);
    loop {
        if let Ok(read) = tokio::time::timeout_at(until, body.read(out)).await {
            return Ok(read?);
        }
        if let Some(worker) = body.worker() {
            worker.read_figures();
        }
        let (now, end) = (Instant::now(), limits.end(from, body.worker()));
        if now >= end {
            return Err(CallError::Timeout(limits.silence("rest of the engine's answer", from, now)));
        }
        until = end;
    }
}

/// Waits until `take` finds room for bytes of an answer. Meanwhile, nothing is read from the engine.
///
/// # Errors
/// [`CallError::NoRoom`].
pub(crate) async fn wait_for_room(
    body: &mut Body,
    held: &mut Share,
    take: impl Fn(&mut Share) -> bool,
) -> Result<(), CallError> {
    let mut wait = RoomWait::default();
    while !take(held) {
        body.rest();
        if !poll_fn(|cx| wait.poll_next(cx)).await {
            return Err(CallError::NoRoom(held.limit()));
        }
    }
    Ok(())
}

impl Body {
    /// Wraps a body of which at most `max` bytes are read as a whole.
    pub(super) fn new(body: http1_client::Body<EngineStream, ObservedCall>, max: MaxLength) -> Self {
        Self(body, max)
    }

    /// Tells the worker of `call` of the bytes that come, until the body has ended.
    pub(crate) fn of_call(&mut self, call: InFlight) {
        self.0.observe(ObservedCall(call));
    }

    /// Returns the worker that sends the body.
    pub(crate) fn worker(&self) -> Option<&Worker> {
        self.0.observer().map(|call| call.0.worker())
    }

    /// Notes that the body is not being read: the worker's silence does not count until reading resumes.
    pub(crate) fn rest(&mut self) {
        if let Some(call) = self.0.observer_mut() {
            call.0.pause();
        }
    }

    /// Returns how many bytes are left to read; 0 if that is not known.
    fn left(&self) -> usize {
        self.0.left().map_or(0, |left| usize::try_from(left).unwrap_or(usize::MAX))
    }

    /// Returns the bytes of the body that arrived with the head.
    pub(crate) fn peek(&mut self) -> &[u8] {
        self.0.peek()
    }

    /// Waits until lines of the body have come that are `enough`, or too many, or there will be none.
    pub(crate) fn poll_peek(&mut self, cx: &mut Context<'_>, enough: impl Fn(&[u8]) -> bool) -> Poll<()> {
        self.0.poll_peek(cx, enough)
    }

    /// Returns why nothing can be read after the bytes that were looked at, when that is known.
    pub(crate) fn failed_at_once(&mut self) -> Option<WireError> {
        self.0.failed_at_once()
    }

    /// Appends the bytes that have arrived to `out`; `false` at the end of the body. Bytes that came before
    /// an error are appended first, and the next call returns the error.
    pub(crate) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Vec<u8>,
    ) -> Poll<Result<bool, WireError>> {
        self.0.poll_read(cx, out)
    }

    /// Waits for more bytes and appends them to `out`; `false` at the end of the body.
    pub(crate) async fn read(&mut self, out: &mut Vec<u8>) -> Result<bool, WireError> {
        self.0.read(out).await
    }
}
