//! Accepts connections and serves HTTP/1.1 on them, for clients and for operators.

use std::time::Duration;

use axum::Router;
use hyper::{Request, body::Incoming, service::Service as _};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    accept_errors::AcceptErrors,
    first_byte::{RequestClock, TimedStream},
};

/// Pause after a failed accept: connections that end in it free their file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Accepts connections until `stop` is cancelled, then lets the open ones finish their request.
pub(crate) async fn serve(listener: TcpListener, routes: Router, stop: CancellationToken) {
    let connections = TaskTracker::new();
    let mut errors = AcceptErrors::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((stream, _)) => {
                connections.spawn(serve_connection(stream, routes.clone(), stop.clone()));
            }
            Err(error) => {
                errors.note(&error);
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn serve_connection(stream: TcpStream, routes: Router, stop: CancellationToken) {
    // Without Nagle's algorithm an event does not wait for the acknowledgement of the event before it.
    let _ = stream.set_nodelay(true);
    let clock = RequestClock::default();
    let io = TokioIo::new(TimedStream::new(stream, clock.clone()));
    let routes = TowerToHyperService::new(routes);
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(clock.take());
        routes.call(request)
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).pipeline_flush(true);
    let connection = builder.serve_connection(io, service);
    tokio::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => drop(ended),
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}
