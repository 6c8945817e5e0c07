//! The streams of a connection: how many are open, which wait for the client, and how many it abandoned.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::{Method, Request};
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Duration, Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::{
    budget::Share,
    http::{connected::AnswerBody, pieces::Pieces},
    orchestrate::client::connection::ClientConnection,
};

/// Largest piece of an answer, bytes. A client has to take it in the time in which it may accept nothing.
const PIECE: usize = 4 * 1024;
/// Time in which abandoned requests are counted together.
const WINDOW: Duration = Duration::from_secs(10);

/// The streams of a connection.
#[derive(Debug)]
pub(super) struct Streams {
    counts: Mutex<Counts>,
    /// The stream whose request was handed over last: the HTTP server spawns it next.
    opened: Mutex<Option<Arc<Stream>>>,
    changed: Notify,
    max_abandoned: u32,
    /// Cancelled when the client has abandoned too many requests.
    flooded: CancellationToken,
}

#[derive(Debug)]
struct Counts {
    open: usize,
    /// When the last one ended.
    idle_since: Instant,
    abandoned: u32,
    window_began: Instant,
}

#[derive(Debug)]
pub(super) struct Stream {
    streams: Arc<Streams>,
    client: ClientConnection,
    /// When a piece of its answer began to wait for the client.
    blocked_since: Mutex<Option<Instant>>,
}

impl Streams {
    /// Returns an empty connection, whose client may abandon `max_abandoned` requests in ten seconds.
    pub(super) fn new(max_abandoned: u32) -> Arc<Self> {
        let now = Instant::now();
        let counts = Counts { open: 0, idle_since: now, abandoned: 0, window_began: now };
        Arc::new(Self {
            counts: Mutex::new(counts),
            opened: Mutex::default(),
            changed: Notify::new(),
            max_abandoned,
            flooded: CancellationToken::new(),
        })
    }

    /// Opens a stream for a request.
    pub(super) fn open(self: &Arc<Self>) -> Arc<Stream> {
        self.counts.lock().open += 1;
        let stream = Arc::new(Stream {
            streams: self.clone(),
            client: ClientConnection::default(),
            blocked_since: Mutex::default(),
        });
        *self.opened.lock() = Some(stream.clone());
        self.changed.notify_one();
        stream
    }

    /// Returns the stream that the HTTP server is about to run.
    pub(super) fn take_opened(&self) -> Option<Arc<Stream>> {
        self.opened.lock().take()
    }

    /// Waits until no stream was open for `limit`, counted from `since` at the earliest.
    pub(super) async fn idle(&self, since: Instant, limit: Duration) {
        loop {
            let until = {
                let counts = self.counts.lock();
                (counts.open == 0).then(|| counts.idle_since.max(since) + limit)
            };
            let Some(until) = until else {
                self.changed.notified().await;
                continue;
            };
            tokio::select! {
                () = sleep_until(until) => return,
                () = self.changed.notified() => {}
            }
        }
    }

    /// Waits until the client has abandoned too many requests.
    pub(super) async fn abandoned_too_often(&self) {
        self.flooded.cancelled().await;
    }

    fn abandoned(&self) {
        let mut counts = self.counts.lock();
        if counts.window_began.elapsed() >= WINDOW {
            (counts.window_began, counts.abandoned) = (Instant::now(), 0);
        }
        counts.abandoned += 1;
        if counts.abandoned > self.max_abandoned {
            self.flooded.cancel();
        }
    }
}

impl Stream {
    /// State of the client that its answer has to know.
    pub(super) fn client(&self) -> &ClientConnection {
        &self.client
    }

    /// When a piece of the answer began to wait for the client.
    pub(super) fn blocked_since(&self) -> Option<Instant> {
        *self.blocked_since.lock()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let mut counts = self.streams.counts.lock();
        counts.open -= 1;
        counts.idle_since = Instant::now();
        drop(counts);
        self.streams.changed.notify_one();
    }
}

/// The answer of a stream. Until there is an answer, it stands for the request.
pub(super) struct StreamBody {
    stream: Arc<Stream>,
    /// The request's part of those that all connections may have open.
    _place: Option<Share>,
    answer: Option<Pieces<AnswerBody>>,
    /// The client does not need the rest of the stream.
    is_complete: bool,
    /// An answer to HEAD has no body that could be sent.
    is_head: bool,
}

impl StreamBody {
    pub(super) fn of<T>(stream: Arc<Stream>, request: &Request<T>, place: Option<Share>) -> Self {
        Self {
            stream,
            _place: place,
            answer: None,
            is_complete: false,
            is_head: request.method() == Method::HEAD,
        }
    }

    pub(super) fn with(mut self, answer: AnswerBody) -> Self {
        self.is_complete = self.is_head || answer.is_end_stream();
        // The HTTP server asks for the first piece when the client has a window for it, which may be never.
        *self.stream.blocked_since.lock() = (!self.is_complete).then(Instant::now);
        self.answer = Some(Pieces::of(answer, PIECE));
        self
    }
}

impl Body for StreamBody {
    type Data = Bytes;
    type Error = <AnswerBody as Body>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        // The HTTP server asks for a piece when it has sent the one before.
        *self.stream.blocked_since.lock() = None;
        let Some(answer) = &mut self.answer else { return Poll::Ready(None) };
        let piece = ready!(Pin::new(&mut *answer).poll_frame(cx));
        let ends = piece.is_none() || answer.is_end_stream();
        *self.stream.blocked_since.lock() = piece.is_some().then(Instant::now);
        // An answer that fails has no rest that the client could want.
        self.is_complete |= ends || matches!(piece, Some(Err(_)));
        Poll::Ready(piece)
    }

    fn is_end_stream(&self) -> bool {
        self.answer.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.answer.as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }
}

impl Drop for StreamBody {
    fn drop(&mut self) {
        if !self.is_complete && !self.stream.client.is_too_slow() {
            self.stream.streams.abandoned();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::orchestrate::relay::Answer;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_when_its_last_stream_has_ended() {
        let (streams, began) = (Streams::new(1), Instant::now());
        let stream = streams.open();
        assert!(streams.take_opened().is_some() && streams.take_opened().is_none());
        let limit = Duration::from_secs(5);
        let waiting = tokio::time::timeout(Duration::from_secs(60), streams.idle(began, limit));
        assert!(waiting.await.is_err(), "a stream is open");
        drop(stream);
        streams.idle(began, limit).await;
        assert_eq!(began.elapsed(), Duration::from_secs(65));
        streams.idle(Instant::now(), limit).await;
        assert_eq!(began.elapsed(), Duration::from_secs(70), "no earlier than asked for");
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_a_client_abandons_are_counted_for_ten_seconds() {
        let streams = Streams::new(2);
        let abandon = || drop(StreamBody::of(streams.open(), &Request::new(()), None));
        let is_flooded = || streams.flooded.is_cancelled();
        abandon();
        abandon();
        tokio::time::advance(WINDOW).await;
        abandon();
        abandon();
        assert!(!is_flooded());
        let answered = StreamBody::of(streams.open(), &Request::new(()), None);
        drop(answered.with(AnswerBody::Left(Answer::whole(Bytes::new()))));
        assert!(!is_flooded());
        abandon();
        assert!(is_flooded());
        streams.abandoned_too_often().await;
    }
}
