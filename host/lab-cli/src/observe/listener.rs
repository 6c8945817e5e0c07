//! Connections of the router in place, HTTP/1.1 and HTTP/2 without TLS: copies of requests, and calls of
//! Envoy's `ext_proc` filter.

use std::{convert::Infallible, future::pending, sync::Arc};

use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{Duration, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{body::Body, codegen::Service as _};

use super::{ext_proc, intake::Intake};

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
/// How long to wait after a failed accept: the process has run out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections until `stop`.
pub(super) async fn run(
    intake: Arc<Intake>,
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
            intake.counts.refuse_connection();
            continue;
        };
        let (intake, stop) = (Arc::clone(&intake), stop.clone());
        tasks.spawn(async move {
            let _place = place;
            stop.run_until_cancelled(connection(intake, stream)).await;
        });
    }
}

async fn connection(intake: Arc<Intake>, stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let first_head = CancellationToken::new();
    let has_begun = first_head.clone();
    let calls = ext_proc::service(Arc::clone(&intake));
    let service = service_fn(move |request: Request<Incoming>| {
        has_begun.cancel();
        let (intake, mut calls) = (Arc::clone(&intake), calls.clone());
        async move {
            if ext_proc::is_call(request.uri().path()) {
                return calls.call(request).await;
            }
            intake.take(request).await;
            Ok::<_, Infallible>(Response::new(Body::empty()))
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
        () = is_silent => tracing::debug!("connection of a mirror closed without a request"),
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
