//! The body of a request that is answered before it is read.
//!
//! Over HTTP/1 the next request follows behind the body. The HTTP server therefore closes a connection whose
//! body was not read, but its answer does not say so: a client or a proxy would send its next request into
//! the closed connection.

use std::{
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::{Either, ready as done};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::{Request, body::Incoming, header::EXPECT};
use parking_lot::Mutex;

/// How much of a body is read before its answer, and for how long, so that the connection stays.
const MAX_REST: usize = 64 * 1024;
const REST: Duration = Duration::from_secs(1);

/// The body of the current request on a connection of HTTP/1.
#[derive(Clone, Debug, Default)]
pub(super) struct CurrentBody(Arc<Mutex<State>>);

#[derive(Debug, Default)]
enum State {
    /// The body was read to its end, or the request has none.
    #[default]
    Read,
    /// The body was not read to its end.
    Unread,
    /// The same, and its reader is gone: this is the rest.
    Left(Incoming),
}

impl CurrentBody {
    /// Watches how far the body of a request is read.
    pub(super) fn of(&self, request: Request<Incoming>) -> Request<WatchedBody> {
        let is_empty = request.body().is_end_stream();
        if !is_empty {
            *self.0.lock() = State::Unread;
        }
        let is_awaited = !is_empty && request.headers().contains_key(EXPECT);
        let state = (!is_empty).then(|| self.clone());
        request.map(|body| WatchedBody { body: Some(body), state, is_awaited })
    }

    /// Returns whether the body was read to its end when its answer is made. Reads a short rest.
    pub(super) fn is_read(&self) -> impl Future<Output = bool> + use<> {
        match mem::take(&mut *self.0.lock()) {
            State::Read => Either::Left(done(true)),
            // Boxed, because few requests wait here.
            State::Left(rest) if rest.size_hint().lower() <= MAX_REST as u64 => {
                Either::Right(Box::pin(read_rest(rest, MAX_REST, REST)))
            }
            State::Unread | State::Left(_) => Either::Left(done(false)),
        }
    }
}

/// A body that tells its connection when it was read to its end.
pub(super) struct WatchedBody {
    body: Option<Incoming>,
    /// `None`: there is no body, or it was read.
    state: Option<CurrentBody>,
    /// Whether the client waits for `100 Continue` before it sends the body. The first read asks for that.
    is_awaited: bool,
}

impl Body for WatchedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.is_awaited = false;
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(cx));
        match &frame {
            Some(Ok(_)) => {}
            // The rest cannot be read.
            Some(Err(_)) => self.body = None,
            None => {
                if let Some(state) = self.state.take() {
                    *state.0.lock() = State::Read;
                }
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }
}

impl Drop for WatchedBody {
    fn drop(&mut self) {
        let (Some(state), Some(rest)) = (self.state.take(), self.body.take()) else { return };
        if rest.is_end_stream() {
            *state.0.lock() = State::Read;
        } else if !self.is_awaited {
            *state.0.lock() = State::Left(rest);
        }
    }
}

/// Reads the rest of a body, and drops its bytes. Returns whether it ended within `bytes` and `time`.
pub(super) async fn read_rest(mut body: Incoming, bytes: usize, time: Duration) -> bool {
    let read = async {
        let mut left = bytes;
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { return false };
            let Some(less) = left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) else { return false };
            left = less;
        }
        true
    };
    tokio::time::timeout(time, read).await.unwrap_or(false)
}
