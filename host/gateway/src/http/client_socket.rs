//! A client's socket: ends a client that does not read its answer or leaves before it, and lingers after the
//! last answer so that unread bytes of the client do not turn it into a reset.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Once,
    task::{Context, Poll, ready},
};

use futures_util::FutureExt as _;
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::TcpStream,
    time::{Duration, Instant, Sleep},
};

use crate::orchestrate::client::connection::ClientConnection;

/// Bytes that may wait for one client. The HTTP server stops at a fraction of it, except for the answers to
/// pipelined requests whose bodies it does not read.
pub(super) const MAX_UNSENT: usize = 256 * 1024;
/// How long bytes are discarded after the last answer.
const LINGER: Duration = Duration::from_secs(2);
/// Size of one read while bytes are discarded.
const DISCARD: usize = 4 * 1024;

/// The first bytes of HTTP/2.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n";
/// Frames of HTTP/2 that refuse it: empty SETTINGS, and GOAWAY with the error `HTTP_1_1_REQUIRED`.
const HTTP_1_1_REQUIRED: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0d";

#[derive(Debug)]
pub(super) struct ClientSocket {
    stream: TcpStream,
    connection: ClientConnection,
    /// How long the client may accept no byte.
    write_timeout: Duration,
    /// Whether the daemon stops. Connections then close without lingering.
    stopping: tokio_util::sync::CancellationToken,
    /// Ends a blocked write, or the linger. Made when the first of them begins.
    timer: Option<Pin<Box<Sleep>>>,
    state: State,
    /// Whether the next bytes are the first ones, and must not be those of HTTP/2.
    expects_http1: bool,
    /// Whether the HTTP server waits for bytes, so that it is woken by their end, too.
    awaits_bytes: bool,
    /// Whether the kernel may hold bytes of which the runtime no longer says so.
    has_unread: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The kernel accepts writes.
    Open,
    /// A write waits for the client, and the timer runs.
    Blocked { since: Instant, end: Instant },
    /// The write side is closed, and the timer runs.
    Lingering,
}

impl ClientSocket {
    pub(super) fn new(
        stream: TcpStream,
        connection: ClientConnection,
        write_timeout: Duration,
        stopping: tokio_util::sync::CancellationToken,
    ) -> Self {
        Self {
            stream,
            connection,
            write_timeout,
            stopping,
            timer: None,
            state: State::Open,
            expects_http1: false,
            awaits_bytes: false,
            has_unread: false,
        }
    }

    /// Has HTTP/2 refused: without TLS, clients speak HTTP/1.1.
    pub(super) fn with_http1_only(self) -> Self {
        Self { expects_http1: true, ..self }
    }

    /// Tells a client that begins with HTTP/2 that it must not. The HTTP server then ends the connection.
    fn refuse_http2(&self, first: &[u8]) {
        static LOGGED: Once = Once::new();
        if !first.starts_with(HTTP2_PREFACE) {
            return;
        }
        // Nothing was written before, so that the socket takes them.
        let _ = self.stream.try_write(HTTP_1_1_REQUIRED);
        LOGGED.call_once(|| {
            tracing::info!(
                "client refused: it speaks HTTP/2 without TLS; use HTTP/1.1, or set [server.tls] for HTTP/2"
            );
        });
    }

    /// Waits for the first byte, and leaves it to be read; `None` when the client closed.
    pub(super) async fn peek(&self) -> io::Result<Option<u8>> {
        let mut byte = [0];
        let length = self.stream.peek(&mut byte).await?;
        Ok(byte.first().copied().filter(|_| length > 0))
    }

    /// Records bytes of requests, without those of TLS.
    pub(super) fn received(&self, bytes: &[u8]) {
        // The HTTP server skips the ends of lines before a request.
        if bytes.iter().any(|byte| !matches!(byte, b'\r' | b'\n')) {
            self.connection.read();
        }
    }

    /// Records whether the HTTP server waits for bytes, so that it is woken by their end, too.
    pub(super) fn set_awaits_bytes(&mut self, awaits: bool) {
        self.awaits_bytes = awaits;
    }

    /// Records a write of `length` bytes, which are all that wait for the client.
    fn after_write(
        &mut self,
        cx: &mut Context<'_>,
        length: usize,
        outcome: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match outcome {
            Poll::Ready(Ok(written)) => {
                self.connection.written();
                if matches!(self.state, State::Blocked { .. }) {
                    // The next blocked write gets the whole time again.
                    self.state = State::Open;
                }
                if written == length && self.connection.is_blocked() {
                    self.connection.set_blocked(false);
                }
                Poll::Ready(Ok(written))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                if length > MAX_UNSENT {
                    return Poll::Ready(Err(self.too_slow("too many answers are unread")));
                }
                self.poll_blocked(cx).map(Err)
            }
        }
    }

    /// Waits for the end of the time that the client has to read.
    fn poll_blocked(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let (since, end) = if let State::Blocked { since, end } = self.state {
            (since, end)
        } else {
            self.connection.set_blocked(true);
            let since = Instant::now();
            let end = since + self.write_timeout;
            let end = self.connection.deadline().map_or(end, |deadline| end.min(deadline));
            self.state = State::Blocked { since, end };
            (since, end)
        };
        ready!(self.connection.poll_unread(cx, &mut self.timer, since, end));
        Poll::Ready(self.too_slow("the client did not read in time"))
    }

    /// Ends a client that does not read. Bytes that wait in the kernel are discarded, too.
    pub(super) fn too_slow(&mut self, problem: &'static str) -> io::Error {
        self.connection.set_too_slow();
        let _ = self.stream.set_zero_linger();
        io::Error::new(io::ErrorKind::TimedOut, problem)
    }

    /// Reads bytes.
    fn poll_receive(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.has_unread {
            let room = buffer.initialize_unfilled();
            match io::Read::read(&mut &*SockRef::from(&self.stream), room) {
                Ok(read) => {
                    // Less than fits is all that there was. Later bytes, and the end, are told again.
                    self.has_unread = read > 0 && read == room.len();
                    buffer.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.has_unread = false,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }

    /// Looks whether the client has closed its sending side before it has its answer (I7.6).
    ///
    /// While the HTTP server holds bytes behind the request, it does not read. It would therefore never see
    /// the end of the connection, however long the answer takes. It flushes each time that it is polled, so
    /// that it asks here.
    fn look_for_end(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.awaits_bytes || !self.connection.is_answering() {
            return Ok(());
        }
        while let Poll::Ready(ready) = self.stream.poll_read_ready(cx) {
            ready?;
            let ready = self.stream.ready(Interest::READABLE).now_or_never().transpose()?;
            if ready.is_some_and(|ready| ready.is_read_closed()) {
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the client left"));
            }
            // Only bytes arrived. They stay in the kernel, and what comes next wakes this task.
            self.has_unread = true;
            let seen = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
            let _ = self.stream.try_io(Interest::READABLE, seen);
        }
        Ok(())
    }

    fn start_timer(&mut self, until: Instant) {
        match &mut self.timer {
            Some(timer) => timer.as_mut().reset(until),
            None => self.timer = Some(Box::pin(tokio::time::sleep_until(until))),
        }
    }

    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.timer.as_mut().map_or(Poll::Ready(()), |timer| timer.as_mut().poll(cx))
    }

    /// Discards what the client still sends, until it closes or the time is over.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut space = [std::mem::MaybeUninit::<u8>::uninit(); DISCARD];
        loop {
            if self.stopping.is_cancelled() || self.poll_timer(cx).is_ready() {
                return Poll::Ready(());
            }
            let mut buffer = ReadBuf::uninit(&mut space);
            match ready!(self.poll_receive(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                _ => return Poll::Ready(()),
            }
        }
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = self.poll_receive(cx, buffer);
        self.awaits_bytes = outcome.is_pending();
        if buffer.filled().len() > before && std::mem::take(&mut self.expects_http1) {
            self.refuse_http2(buffer.filled().get(before..).unwrap_or_default());
        }
        outcome
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.after_write(cx, bytes.len(), outcome)
    }

    /// Writes the records that TLS has ready. The HTTP server joins its bytes itself.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.after_write(cx, slices.iter().map(|slice| slice.len()).sum(), outcome)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.look_for_end(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.state != State::Lingering {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
            self.state = State::Lingering;
            self.start_timer(Instant::now() + LINGER);
        }
        self.poll_linger(cx).map(Ok)
    }
}
