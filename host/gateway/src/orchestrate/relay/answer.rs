//! The body of an answer: whole, or relayed. It ends with the record of its request: `ok` only if the
//! client's connection took all of it.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Duration, Instant, Sleep};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{MAX_CHUNK, Relay};
use crate::{
    openai::error::ApiError,
    orchestrate::{Drive, client::connection::ClientConnection},
};

/// Bytes of one stream after which other connections of the thread get their turn. A stream of tokens does
/// not reach it; one that an engine sends as fast as it can would take the thread for a megabyte at a time.
const MAX_BURST: usize = 32 * 1024;

/// Largest chunk of a stream, bytes. A larger event goes in pieces of [`MAX_CHUNK`]: the connection ends a
/// client for which too many bytes wait at once.
const MAX_WHOLE: usize = 64 * 1024;

/// A response body: whole, or relayed.
pub(crate) struct Answer {
    content: Content,
    /// The connection that takes the answer; a client that does not read gets no more.
    client: Option<ClientConnection>,
    /// Bytes that were returned since this was last pending.
    burst: usize,
}

enum Content {
    Whole {
        rest: Bytes,
        /// The request that was served, until the client's connection took the answer.
        drive: Option<Box<Drive>>,
    },
    Relayed(Option<Box<Relay>>),
    /// The engine of the stream failed, and workers for the rest are being found.
    Continued(Option<Box<Continued>>),
}

/// A relay whose stream is to be continued.
struct Continued {
    /// Runs whether or not the client reads: a rest that waits in the queue must take its turn. `None` is the
    /// end of a task that panicked.
    relay: BoxFuture<'static, Option<Box<Relay>>>,
    /// Cancelled when the client leaves.
    gone: CancellationToken,
    tracker: TaskTracker,
    /// When the client gets the next comment, and how often it does; `None`: it gets none.
    comment: Option<(Pin<Box<Sleep>>, Duration)>,
    /// Its bytes.
    keep_alive: &'static [u8],
}

impl Answer {
    /// A complete body.
    #[must_use]
    pub(crate) fn whole(rest: Bytes) -> Self {
        Self::new(Content::Whole { rest, drive: None })
    }

    /// A complete body, with its request.
    pub(crate) fn served(rest: Bytes, drive: Box<Drive>) -> Self {
        let drive = Some(drive).filter(|_| !rest.is_empty());
        Self::new(Content::Whole { rest, drive })
    }

    pub(super) fn relayed(relay: Box<Relay>) -> Self {
        Self::new(Content::Relayed(Some(relay)))
    }

    fn new(content: Content) -> Self {
        Self { content, client: None, burst: 0 }
    }

    /// Sets the connection that takes the answer.
    #[must_use]
    pub(crate) fn on(mut self, client: Option<ClientConnection>) -> Self {
        match &mut self.content {
            Content::Relayed(Some(relay)) => relay.set_client(client.clone()),
            // It is written at once, whether or not the client has closed its sending side.
            _ => client.iter().for_each(|client| client.set_answering(false)),
        }
        self.client = client;
        self
    }

    /// Why a client did not get the whole answer.
    fn lost(&self) -> ApiError {
        if self.client.as_ref().is_some_and(ClientConnection::is_too_slow) {
            return ApiError::ClientTooSlow;
        }
        let state = match &self.content {
            Content::Whole { drive, .. } => drive.as_ref().map(|drive| &drive.state),
            Content::Relayed(relay) => relay.as_ref().map(|relay| &relay.drive.state),
            Content::Continued(_) => None,
        };
        // A client that did not read was not told.
        let ends = state.is_some_and(|state| state.drain_end.has_passed());
        if ends { ApiError::Draining } else { ApiError::ClientClosed }
    }
}

impl Body for Answer {
    type Data = Bytes;
    /// A part of the answer is missing, and the client can learn it in no other way.
    type Error = io::Error;

    /// Returns the next piece. While the client does not read, this is `Pending` without a wake-up of its
    /// own: the blocked write wakes the same task.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let blocked = self.client.as_ref().is_some_and(ClientConnection::is_blocked);
        let this = &mut *self;
        let next = match &mut this.content {
            Content::Whole { rest, .. } if rest.is_empty() => None,
            Content::Whole { .. } if blocked => return Poll::Pending,
            Content::Whole { rest, drive } => {
                let piece = rest.split_to(rest.len().min(MAX_CHUNK));
                if rest.is_empty() {
                    *drive = None;
                }
                Some(piece)
            }
            Content::Relayed(relay) => {
                let Some(running) = relay.as_mut() else { return Poll::Ready(None) };
                if blocked {
                    running.not_read();
                    return Poll::Pending;
                }
                if this.burst >= MAX_BURST {
                    this.burst = 0;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                let Poll::Ready(next) = running.poll_next(cx) else {
                    this.burst = 0;
                    return Poll::Pending;
                };
                this.burst += next.as_ref().map_or(0, Bytes::len);
                // At once: HTTP/2 polls no more while the client gives no room.
                if let Some(rest) = relay.take_if(|running| running.is_to_be_continued()) {
                    this.content = Content::Continued(Some(Box::new(Continued::of(rest))));
                    if next.is_none() {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                } else if next.is_none()
                    && let Some(rest) = relay.take()
                {
                    let cut = rest.cut();
                    rest.go_on();
                    if let Some(cut) = cut {
                        return Poll::Ready(Some(Err(cut)));
                    }
                }
                next
            }
            Content::Continued(continued) => {
                let Some(running) = continued.as_mut() else { return Poll::Ready(None) };
                if let Poll::Ready(relay) = running.relay.as_mut().poll(cx) {
                    this.content = Content::Relayed(relay);
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                if blocked || running.poll_comment(cx).is_pending() {
                    return Poll::Pending;
                }
                Some(Bytes::from_static(running.keep_alive))
            }
        };
        Poll::Ready(next.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole { rest, .. } => SizeHint::with_exact(rest.len() as u64),
            Content::Relayed(_) | Content::Continued(_) => SizeHint::default(),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Whole { rest, .. } => rest.is_empty(),
            Content::Relayed(relay) => relay.is_none(),
            Content::Continued(_) => false,
        }
    }
}

impl Relay {
    pub(super) fn next_chunk(&mut self) -> Option<Bytes> {
        let length = self.out.len();
        let length = if length > MAX_WHOLE { MAX_CHUNK } else { length };
        (length > 0).then(|| self.out.split_to(length).freeze())
    }
}

impl Continued {
    fn of(relay: Box<Relay>) -> Self {
        let state = &relay.drive.state;
        let every = state.settings.leg_timeouts.stream_comment;
        let due = relay.event_at.max(relay.commented_at) + every;
        let (gone, tracker) = (relay.drive.gone.clone(), state.tracker.clone());
        let comment = (!every.is_zero() && relay.bytes.is_none())
            .then(|| (Box::pin(tokio::time::sleep_until(due)), every));
        let keep_alive = relay.format.keep_alive();
        let resumed = tracker.spawn(relay.resume());
        Self { relay: Box::pin(async move { resumed.await.ok() }), gone, tracker, comment, keep_alive }
    }

    fn poll_comment(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some((timer, every)) = &mut self.comment else { return Poll::Pending };
        std::task::ready!(timer.as_mut().poll(cx));
        timer.as_mut().reset(Instant::now() + *every);
        Poll::Ready(())
    }

    /// Goes on without the client, as far as engines depend on it.
    fn client_gone(self, lost: ApiError) {
        self.gone.cancel();
        let relay = self.relay;
        self.tracker.spawn(async move {
            if let Some(relay) = relay.await {
                relay.client_gone(&lost);
            }
        });
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let lost = self.lost();
        self.client.iter().for_each(|client| client.set_booking(None));
        match &mut self.content {
            Content::Whole { drive, .. } => {
                if let Some(mut drive) = drive.take() {
                    drive.account.ended(lost.status().as_u16(), lost.code());
                }
            }
            Content::Relayed(relay) => {
                if let Some(relay) = relay.take() {
                    relay.client_gone(&lost);
                }
            }
            Content::Continued(continued) => {
                if let Some(continued) = continued.take() {
                    continued.client_gone(lost);
                }
            }
        }
    }
}
