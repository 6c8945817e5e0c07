//! The bytes of a connection to an engine: the socket itself, or TLS on it.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use pointsman_workers::{EngineTls, server_name, tls_problem};
use rustls::ClientConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::destination::{Destination, Parts};

/// A connection to an engine.
#[derive(Debug)]
pub(super) enum EngineStream {
    /// Without TLS.
    Plain(TcpStream),
    /// With TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

/// With what an engine was verified.
#[derive(Debug)]
pub(super) struct Verified {
    config: Arc<ClientConfig>,
    server_name: Option<Arc<str>>,
}

impl EngineStream {
    /// Connects; no Nagle.
    pub(super) async fn open(
        to: &Destination,
        parts: Parts<'_>,
        tls: &EngineTls,
    ) -> io::Result<(Self, Option<Verified>)> {
        let stream = TcpStream::connect(parts.authority).await?;
        stream.set_nodelay(true)?;
        if !parts.has_tls {
            return Ok((Self::Plain(stream), None));
        }
        let config = tls.config().map_err(io::Error::other)?;
        let name = server_name(parts.host(), to.server_name.as_deref()).map_err(io::Error::other)?;
        let connected = TlsConnector::from(config.clone()).connect(name, stream).await;
        let stream = connected.map_err(|error| match tls_problem(&error) {
            Some(problem) => io::Error::other(problem),
            None => error,
        })?;
        let verified = Verified { config, server_name: to.server_name.clone() };
        Ok((Self::Tls(Box::new(stream)), Some(verified)))
    }
}

impl Verified {
    /// Whether a new connection to `to` would be verified with the same.
    pub(super) fn is_current(&self, to: &Destination, tls: &EngineTls) -> bool {
        self.server_name == to.server_name && tls.is_current(&self.config)
    }
}

impl AsyncRead for EngineStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for EngineStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
