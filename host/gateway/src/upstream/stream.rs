//! The bytes of a connection to an engine: the socket itself, or TLS on it.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http1_client::{Transport, WireError};
use pointsman_workers::{EngineTls, is_tls_alert, server_name, tls_problem};
use rustls::ClientConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::either::Either;

use super::destination::{Destination, Parts};

/// A connection to an engine: without TLS, or with it.
#[derive(Debug)]
pub(super) struct EngineStream {
    bytes: Either<TcpStream, Box<TlsStream<TcpStream>>>,
    /// With what the engine was verified; `None` without TLS.
    verified: Option<Verified>,
}

/// With what an engine was verified.
#[derive(Debug)]
struct Verified {
    config: Arc<ClientConfig>,
    server_name: Option<Arc<str>>,
}

impl EngineStream {
    /// Connects; no Nagle.
    pub(super) async fn open(to: &Destination, parts: Parts<'_>, tls: &EngineTls) -> io::Result<Self> {
        let stream = TcpStream::connect(parts.authority).await?;
        stream.set_nodelay(true)?;
        if !parts.has_tls {
            return Ok(Self { bytes: Either::Left(stream), verified: None });
        }
        let config = tls.config().map_err(io::Error::other)?;
        let name = server_name(parts.host(), to.server_name.as_deref()).map_err(io::Error::other)?;
        let connected = TlsConnector::from(config.clone()).connect(name, stream).await;
        let stream = connected.map_err(|error| match tls_problem(&error) {
            Some(problem) => io::Error::other(problem),
            None => error,
        })?;
        let verified = Verified { config, server_name: to.server_name.clone() };
        Ok(Self { bytes: Either::Right(Box::new(stream)), verified: Some(verified) })
    }

    /// Returns whether a new connection to `to` would be verified with the same.
    pub(super) fn is_current(&self, to: &Destination, tls: &EngineTls) -> bool {
        let same =
            |verified: &Verified| verified.server_name == to.server_name && tls.is_current(&verified.config);
        self.verified.as_ref().is_none_or(same)
    }
}

impl Transport for EngineStream {
    /// Classifies a failed read or write. The text names no address.
    fn error(error: &io::Error) -> WireError {
        match tls_problem(error) {
            Some(problem) if is_tls_alert(error) => WireError::Refused(problem),
            Some(problem) => WireError::Transport(problem),
            None => WireError::of(error),
        }
    }
}

impl AsyncRead for EngineStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.bytes).poll_read(cx, buffer)
    }
}

impl AsyncWrite for EngineStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.bytes).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.bytes).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.bytes.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.bytes).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.bytes).poll_shutdown(cx)
    }
}
