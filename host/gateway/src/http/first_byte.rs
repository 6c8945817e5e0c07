//! When the first byte of a request arrived. Time to first token, duration and deadline count from there.
//!
//! The HTTP server hands over a request when its head is complete. A connection therefore notes the first
//! read after its last write, which is the first byte of the next request.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::http::Extensions;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::Instant,
};

/// When the first byte of a request arrived; an extension of the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstByte(Instant);

/// The first read of a connection after its last write.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestClock(Arc<Mutex<Option<Instant>>>);

/// A client's socket that keeps its [`RequestClock`].
#[derive(Debug)]
pub(super) struct TimedStream {
    stream: TcpStream,
    clock: RequestClock,
}

impl FirstByte {
    /// Returns when the first byte of a request arrived.
    pub(super) fn of(extensions: &Extensions) -> Instant {
        extensions.get::<Self>().map_or_else(Instant::now, |first| first.0)
    }
}

impl RequestClock {
    /// Ends the measurement for a request whose head is complete. Pipelined requests have no read of their
    /// own and count from now.
    pub(super) fn take(&self) -> FirstByte {
        FirstByte(self.0.lock().take().unwrap_or_else(Instant::now))
    }

    fn read(&self) {
        self.0.lock().get_or_insert_with(Instant::now);
    }

    fn written(&self) {
        *self.0.lock() = None;
    }
}

impl TimedStream {
    pub(super) fn new(stream: TcpStream, clock: RequestClock) -> Self {
        Self { stream, clock }
    }

    fn note_write(&self, outcome: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if matches!(outcome, Poll::Ready(Ok(_))) {
            self.clock.written();
        }
        outcome
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.clock.read();
        }
        outcome
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.note_write(outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.note_write(outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_read_after_a_write_counts() {
        let clock = RequestClock::default();
        clock.read();
        let first = Instant::now();
        tokio::time::advance(Duration::from_secs(1)).await;
        clock.read();
        assert_eq!(clock.take().0, first, "bytes of the same head");
        clock.read();
        clock.written();
        tokio::time::advance(Duration::from_secs(1)).await;
        clock.read();
        assert_eq!(clock.take().0, Instant::now(), "the body of the request before does not count");
        assert_eq!(clock.take().0, Instant::now(), "a pipelined request");
    }
}
