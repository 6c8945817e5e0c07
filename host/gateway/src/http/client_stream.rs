//! A client's connection as the HTTP server uses it: the socket itself, or TLS on it.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::server::TlsStream;

use super::client_socket::{ClientSocket, MAX_UNSENT};

/// A client's connection. The bounds of [`ClientSocket`] hold below TLS: it sees the bytes that the client
/// takes.
#[derive(Debug)]
pub(super) enum ClientStream {
    /// Without TLS.
    Plain(ClientSocket),
    /// With TLS.
    Tls(Box<TlsStream<ClientSocket>>),
}

impl ClientStream {
    /// Returns whether the handshake of TLS agreed on HTTP/2.
    pub(super) fn speaks_http2(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(stream) => stream.get_ref().1.alpn_protocol() == Some(b"h2"),
        }
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let (outcome, socket) = match &mut *self {
            Self::Plain(socket) => (Pin::new(&mut *socket).poll_read(cx, buffer), socket),
            Self::Tls(stream) => {
                let outcome = Pin::new(&mut *stream).poll_read(cx, buffer);
                let socket = stream.get_mut().0;
                // TLS reads the socket until nothing is left, also when it returns bytes.
                socket.set_awaits_bytes(outcome.is_pending());
                (outcome, socket)
            }
        };
        socket.received(buffer.filled().get(before..).unwrap_or_default());
        outcome
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(socket) => Pin::new(socket).poll_write(cx, bytes),
            Self::Tls(stream) => {
                let written = Pin::new(&mut *stream).poll_write(cx, bytes);
                if written.is_pending() && bytes.len() > MAX_UNSENT {
                    return Poll::Ready(Err(stream.get_mut().0.too_slow("too many answers are unread")));
                }
                written
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
