//! Takes copies of requests, HTTP/1.1 and HTTP/2 without TLS, and calls of Envoy's `ext_proc` filter.
//!
//! Every copy is answered with 200 as soon as its body has come: nobody reads the answer, but a mirror may
//! wait for it. A body beyond a bound is discarded as it comes. To close its connection instead would make
//! nginx count a failure, and send no copies for a while.

use std::{convert::Infallible, future::pending, sync::Arc};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::{
    HeaderMap, Method, Request, Response,
    body::{Body as _, Incoming},
    header,
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{Duration, Instant, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::codegen::Service as _;

use super::{
    counts::{Counts, Missed},
    ext_proc::{self, Answers},
    request::{Arrived, Endpoint, Measure},
};

/// Open connections. Further ones are closed at once.
const MAX_CONNECTIONS: usize = 512;
/// Requests of an HTTP/2 connection at the same time.
const MAX_STREAMS: u32 = 256;
/// Size of a request's head, bytes.
const MAX_HEAD: usize = 64 * 1024;
/// Bytes of bodies that a peer may send on a stream and on a connection of HTTP/2 before they are read.
const WINDOW: u32 = 64 * 1024;
/// How long the first request's head of a connection may take. hyper's detection of the version has no limit.
const FIRST_HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a further head may take, and the pause before it.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a body may take.
pub(super) const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait after a failed accept: the process has run out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A copy whose body is complete. Its memory is returned when it is dropped.
#[derive(Debug)]
pub(super) struct Copied {
    pub(super) number: u64,
    pub(super) arrived: Arrived,
    pub(super) body: Bytes,
    _memory: Option<OwnedSemaphorePermit>,
}

/// Bounds of bodies, and where complete ones go.
#[derive(Debug)]
pub(super) struct Intake {
    pub(super) counts: Arc<Counts>,
    pub(super) measure: Arc<Measure>,
    /// Longest body, bytes.
    pub(super) max_body: usize,
    /// A permit for each byte of the bodies that are being read or wait.
    pub(super) memory: Arc<Semaphore>,
    /// Complete copies; full when the writer is slow.
    pub(super) queue: mpsc::Sender<Copied>,
    pub(super) answers: Arc<Answers>,
    /// Start of the observation.
    pub(super) start: Instant,
}

/// A body that is being read.
#[derive(Debug, Default)]
pub(super) struct Body {
    bytes: BytesMut,
    memory: Option<OwnedSemaphorePermit>,
}

impl Body {
    /// Reserves memory for this many bytes in all.
    fn reserve(&mut self, intake: &Intake, total: usize) -> Result<(), Missed> {
        if total > intake.max_body {
            return Err(Missed::TooLarge);
        }
        let reserved = self.memory.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let missing = u32::try_from(total.saturating_sub(reserved)).map_err(|_| Missed::TooLarge)?;
        let more = Arc::clone(&intake.memory).try_acquire_many_owned(missing).map_err(|_| Missed::Memory)?;
        match &mut self.memory {
            Some(memory) => memory.merge(more),
            None => self.memory = Some(more),
        }
        Ok(())
    }

    /// Adds bytes within the bounds.
    pub(super) fn add(&mut self, intake: &Intake, bytes: &[u8]) -> Result<(), Missed> {
        self.reserve(intake, self.bytes.len() + bytes.len())?;
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Returns the copy of which this is the whole body.
    pub(super) fn copied(self, number: u64, arrived: Arrived) -> Copied {
        Copied { number, arrived, body: self.bytes.freeze(), _memory: self.memory }
    }
}

/// Whether the body behind these headers is not compressed.
pub(super) fn is_readable(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_ENCODING).is_none_or(|coding| coding == "identity")
}

impl Intake {
    /// Accepts connections until `stop`.
    pub(super) async fn run(
        self: Arc<Self>,
        listener: TcpListener,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
            let Ok((stream, _)) = accepted else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                self.counts.refuse_connection();
                continue;
            };
            let (intake, stop) = (Arc::clone(&self), stop.clone());
            tasks.spawn(async move {
                let _place = place;
                stop.run_until_cancelled(intake.connection(stream)).await;
            });
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let first_head = CancellationToken::new();
        let has_begun = first_head.clone();
        let calls = ext_proc::service(Arc::clone(&self));
        let service = service_fn(move |request: Request<Incoming>| {
            has_begun.cancel();
            let (intake, mut calls) = (Arc::clone(&self), calls.clone());
            async move {
                if ext_proc::is_call(request.uri().path()) {
                    return calls.call(request).await;
                }
                intake.take(request).await;
                Ok::<_, Infallible>(Response::new(tonic::body::Body::empty()))
            }
        });
        let builder = builder();
        let is_silent = async {
            if timeout(FIRST_HEAD_TIMEOUT, first_head.cancelled()).await.is_ok() {
                pending::<()>().await;
            }
        };
        tokio::select! {
            ended = builder.serve_connection(TokioIo::new(stream), service) => {
                if let Err(error) = ended {
                    tracing::debug!(error, "connection of a mirror ended");
                }
            }
            () = is_silent => tracing::debug!("connection of a mirror closed, no request came"),
        }
    }

    async fn take(&self, request: Request<Incoming>) {
        let endpoint = Endpoint::of(request.uri().path()).filter(|_| request.method() == Method::POST);
        let arrived = endpoint.map(|endpoint| {
            let head = self.measure.head(self.start.elapsed(), endpoint, request.headers());
            (self.counts.arrive(), head)
        });
        let is_readable = is_readable(request.headers());
        let mut body = request.into_body();
        let taken = timeout(BODY_TIMEOUT, async {
            let taken = match &arrived {
                Some(_) if is_readable => self.body(&mut body).await,
                _ => Err(Missed::Unreadable),
            };
            if taken.is_err() {
                // Without the rest, the connection would be closed.
                while let Some(Ok(_)) = body.frame().await {}
            }
            taken
        });
        let taken = taken.await.unwrap_or(Err(Missed::Incomplete));
        let Some((number, arrived)) = arrived else { return };
        match taken {
            Ok(body) => {
                self.send(body.copied(number, arrived));
            }
            Err(why) => self.counts.miss(why),
        }
    }

    /// Gives a copy to the writer. Returns false when that is too slow; the copy is then counted as missed.
    pub(super) fn send(&self, copied: Copied) -> bool {
        let is_sent = self.queue.try_send(copied).is_ok();
        if !is_sent {
            self.counts.miss(Missed::Busy);
        }
        is_sent
    }

    /// Reads a body within the bounds.
    async fn body(&self, body: &mut Incoming) -> Result<Body, Missed> {
        let mut taken = Body::default();
        taken.reserve(self, usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX))?;
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| Missed::Incomplete)?.into_data() else { continue };
            taken.add(self, &data)?;
        }
        Ok(taken)
    }
}

/// Returns what serves a connection of either version.
fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(MAX_HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
        .keep_alive_interval(HEAD_TIMEOUT);
    builder
}
