//! Accepts connections with TCP_NODELAY, serves them with hyper, and resets them on request. Knows sockets,
//! not requests.

use std::{convert::Infallible, time::Duration};

use axum::{Router, body::Body};
use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::Service as _;

/// Connection of a request, as an extension of the request.
#[derive(Clone, Debug)]
pub(crate) struct Conn {
    reset: CancellationToken,
}

/// How a server ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop {
    /// Accepts no new connections and finishes current requests.
    pub(crate) gently: CancellationToken,
    /// Resets all connections.
    pub(crate) now: CancellationToken,
}

impl Conn {
    /// Resets the connection, so that the client gets ECONNRESET.
    pub(crate) fn reset(&self) {
        self.reset.cancel();
    }
}

/// Accepts connections until it is stopped.
pub(crate) async fn serve(listener: TcpListener, router: Router, tasks: TaskTracker, stop: Stop) {
    loop {
        let accepted = tokio::select! {
            () = stop.gently.cancelled() => return,
            () = stop.now.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                tasks.spawn(connection(stream, router.clone(), stop.clone()));
            }
            Err(error) => {
                // Probably out of file descriptors: wait for some to be closed.
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, router: Router, stop: Stop) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let reset = stop.now.child_token();
    let conn = Conn { reset: reset.clone() };
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(conn.clone());
        let mut router = router.clone();
        async move { Ok::<_, Infallible>(call(&mut router, request.map(Body::new)).await) }
    });
    let mut serving = http1::Builder::new()
        // Keep idle connections open: the gateway's pool decides when to close them.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), service);
    let ended = tokio::select! {
        ended = &mut serving => Some(ended),
        () = reset.cancelled() => None,
        () = stop.gently.cancelled() => {
            std::pin::Pin::new(&mut serving).graceful_shutdown();
            tokio::select! {
                ended = &mut serving => Some(ended),
                () = reset.cancelled() => None,
            }
        }
    };
    match ended {
        Some(Ok(())) => {}
        Some(Err(error)) => tracing::debug!(%error, "connection ended"),
        None => {
            let stream = serving.into_parts().io.into_inner();
            // Closing with a linger time of zero sends RST instead of FIN.
            if let Err(error) = stream.set_zero_linger() {
                tracing::debug!(%error, "cannot reset connection");
            }
        }
    }
}

async fn call(router: &mut Router, request: Request<Body>) -> axum::response::Response {
    match router.call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}
