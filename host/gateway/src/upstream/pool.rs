//! Connections to engines, kept alive and driven by whoever reads from them.
//!
//! A connection has no task of its own: the future or body that waits for an answer polls it. So an event takes one wake-up
//! from the engine's socket to the client's, and what an engine has written at once is read at once.

use std::{
    collections::{HashMap, VecDeque},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::Full;
use hyper::{
    body::Incoming,
    client::conn::http1::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{net::TcpStream, time::Instant};

/// An idle connection is not used again after this; engines close theirs after some time, too.
const IDLE: Duration = Duration::from_secs(30);

type Io = http1::Connection<TokioIo<TcpStream>, Full<Bytes>>;

/// Idle connections by `host:port`.
#[derive(Debug, Default)]
pub(super) struct Pool {
    idle: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    by_authority: HashMap<Box<str>, VecDeque<Idle>>,
    swept: Option<Instant>,
}

#[derive(Debug)]
struct Idle {
    connection: Box<Connection>,
    since: Instant,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Connection {
    sender: SendRequest<Full<Bytes>>,
    io: Io,
}

/// Why a call brought no answer.
#[derive(Debug)]
pub(super) enum Failed {
    /// The connection was over before anything was sent.
    Unsent(Box<Request<Full<Bytes>>>),
    /// It broke.
    Broken(hyper::Error),
}

/// The body of an answer. At its end the connection goes back to the pool; dropped before, it is closed, which is how an
/// engine is told that nobody waits.
#[derive(Debug)]
pub struct Body {
    incoming: Incoming,
    connection: Option<Box<Connection>>,
    pool: Arc<Pool>,
    authority: Box<str>,
}

impl Pool {
    /// An idle connection that is still open.
    pub(super) fn take(&self, authority: &str) -> Option<Box<Connection>> {
        loop {
            let Idle { mut connection, since } =
                self.idle.lock().by_authority.get_mut(authority)?.pop_back()?;
            if since.elapsed() < IDLE && connection.is_open() {
                return Some(connection);
            }
        }
    }

    fn put(&self, authority: &str, connection: Box<Connection>) {
        let since = Instant::now();
        let mut places = self.idle.lock();
        places.sweep(since);
        let place = match places.by_authority.get_mut(authority) {
            Some(place) => place,
            None => places.by_authority.entry(authority.into()).or_default(),
        };
        place.push_back(Idle { connection, since });
    }
}

impl Places {
    /// Closes what was idle for too long, everywhere: nobody comes back for the connections of a worker that left.
    fn sweep(&mut self, now: Instant) {
        if self.swept.is_some_and(|swept| now.saturating_duration_since(swept) < IDLE) {
            return;
        }
        self.swept = Some(now);
        self.by_authority.retain(|_, place| {
            place.retain(|idle| now.saturating_duration_since(idle.since) < IDLE);
            !place.is_empty()
        });
    }
}

impl Connection {
    /// Connects; no Nagle.
    pub(super) async fn open(authority: &str) -> std::io::Result<Box<Self>> {
        let stream = TcpStream::connect(authority).await?;
        stream.set_nodelay(true)?;
        let (sender, io) = http1::handshake(TokioIo::new(stream)).await.map_err(std::io::Error::other)?;
        Ok(Box::new(Self { sender, io }))
    }

    /// Whether the engine has closed an idle connection meanwhile.
    fn is_open(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        Pin::new(&mut self.io).poll(&mut cx).is_pending() && self.sender.is_ready()
    }

    /// Sends a request and waits for the head of its answer.
    pub(super) async fn call(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Failed> {
        let mut answer = std::pin::pin!(self.sender.try_send_request(request));
        let (io, mut over) = (&mut self.io, false);
        let outcome = std::future::poll_fn(|cx| {
            // The connection first: it is what brings the answer on.
            over = over || Pin::new(&mut *io).poll(cx).is_ready();
            answer.as_mut().poll(cx)
        });
        outcome.await.map_err(|mut error| match error.take_message() {
            Some(request) => Failed::Unsent(Box::new(request)),
            None => Failed::Broken(error.into_error()),
        })
    }
}

impl Body {
    pub(super) fn new(
        incoming: Incoming,
        connection: Box<Connection>,
        pool: Arc<Pool>,
        authority: &str,
    ) -> Self {
        Self { incoming, connection: Some(connection), pool, authority: authority.into() }
    }

    /// Whether nothing more will come.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.incoming.is_end_stream()
    }

    /// The answer is over: the connection can serve another request.
    fn give_back(&mut self, cx: &mut Context<'_>) {
        let Some(mut connection) = self.connection.take() else { return };
        if Pin::new(&mut connection.io).poll(cx).is_pending() && connection.sender.is_ready() {
            self.pool.put(&self.authority, connection);
        }
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        loop {
            let frame = match Pin::new(&mut this.incoming).poll_frame(cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    let Some(connection) = this.connection.as_mut() else { return Poll::Pending };
                    if Pin::new(&mut connection.io).poll(cx).is_ready() {
                        // It is over, for good or bad: what it left behind says which.
                        this.connection = None;
                        continue;
                    }
                    std::task::ready!(Pin::new(&mut this.incoming).poll_frame(cx))
                }
            };
            if frame.is_none() {
                this.give_back(cx);
            }
            return Poll::Ready(frame);
        }
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        // A body that was read to its declared length has no further frame to ask for.
        if self.incoming.is_end_stream() {
            self.give_back(&mut Context::from_waker(Waker::noop()));
        }
    }
}
