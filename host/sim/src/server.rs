//! Accepts connections with TCP_NODELAY, serves them with hyper, and resets them on request. It handles
//! sockets but not requests.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body};
use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::Service as _;

/// Connection of a request, as an extension of the request.
#[derive(Clone, Debug)]
pub(crate) struct Conn {
    reset: CancellationToken,
    tasks: TaskTracker,
}

/// Signals that end a server.
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

    /// Runs the tasks of an upgraded connection, until the connection is reset.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let reset = self.reset.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = work => {}
                () = reset.cancelled() => {}
            }
        });
    }
}

/// Accepts connections until the server is stopped.
pub(crate) async fn serve(listener: TcpListener, router: Router, tasks: TaskTracker, stop: Stop) {
    loop {
        let accepted = tokio::select! {
            () = stop.gently.cancelled() => return,
            () = stop.now.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                tasks.spawn(connection(stream, router.clone(), stop.clone(), tasks.clone()));
            }
            Err(error) => {
                // The process has probably run out of file descriptors: wait until some are closed.
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, router: Router, stop: Stop, tasks: TaskTracker) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let reset = stop.now.child_token();
    let conn = Conn { reset: reset.clone(), tasks };
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(conn.clone());
        let mut router = router.clone();
        async move { Ok::<_, Infallible>(call(&mut router, request.map(Body::new)).await) }
    });
    let socket = ResettableSocket { stream, reset: reset.clone() };
    let mut serving = http1::Builder::new()
        // Keep idle connections open: the gateway's pool decides when to close them.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(socket), service)
        .with_upgrades();
    // Dropping the connection closes its socket.
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
    if let Some(Err(error)) = ended {
        tracing::debug!(%error, "connection ended");
    }
}

/// A socket that ends with RST instead of FIN when it was reset.
struct ResettableSocket {
    stream: TcpStream,
    reset: CancellationToken,
}

impl Drop for ResettableSocket {
    fn drop(&mut self) {
        if self.reset.is_cancelled()
            && let Err(error) = self.stream.set_zero_linger()
        {
            tracing::debug!(%error, "cannot reset connection");
        }
    }
}

impl AsyncRead for ResettableSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for ResettableSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

async fn call(router: &mut Router, request: Request<Body>) -> axum::response::Response {
    match router.call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}
