//! One connection to a server: a request goes out, and the head of its answer comes in.
//!
//! It has no task and no buffers. The future that waits for the answer polls the socket and reads into a
//! buffer that all connections of a thread share. An event costs one wake-up between the two sockets, and an
//! idle stream no memory.

use std::{
    cell::RefCell,
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, Waker},
};

use http::HeaderName;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

use crate::{
    WireError,
    wire::{self, Head},
};

/// Size of the shared read buffer, bytes. The bytes of one read are buffered for a client that does not read,
/// so a read is no larger than one write to the client.
const READ_BUFFER: usize = 16 * 1024;

thread_local! {
    static READ: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_BUFFER].into_boxed_slice());
}

/// The bytes of a connection: a socket, or TLS on one.
pub trait Transport: AsyncRead + AsyncWrite + Unpin {
    /// Returns what a failed read or write means.
    #[must_use]
    fn error(error: &io::Error) -> WireError {
        WireError::of(error)
    }
}

impl Transport for TcpStream {}

/// Is told of the bytes of an answer as they come.
pub trait Observer {
    /// The body is about to be read.
    fn before_read(&mut self) {}

    /// Bytes of the body arrived.
    fn on_bytes(&self) {}
}

/// Observes nothing.
impl Observer for () {}

/// One connection.
#[derive(Debug)]
pub struct Connection<S, O = ()> {
    stream: S,
    /// Key of the connection in the pool.
    pub(crate) origin: Box<str>,
    /// The server has answered a call.
    answered: bool,
    /// Observes the answer that is being read. It is here and not in the body, which is moved.
    pub(crate) observer: Option<O>,
}

/// The head of an answer, and the bytes of its body that arrived with it.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) head: Head,
    pub(crate) early: Vec<u8>,
}

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The connection was closed before a byte was sent.
    Unsent,
    /// The server refused the connection when the first call was already sent: with TLS, that is when it has
    /// seen the client's certificate.
    Refused(String),
    /// The connection ended when bytes were sent, and before one of the answer arrived.
    Closed(WireError),
    /// The connection failed within the answer, or the answer cannot be read.
    Broken(WireError),
}

impl Failed {
    /// Returns what an error means if the bytes `came` of an answer arrived before it.
    fn of(error: WireError, came: &[u8]) -> Self {
        let is_end = matches!(error, WireError::Cut | WireError::Io(_));
        if is_end && came.is_empty() { Self::Closed(error) } else { Self::Broken(error) }
    }
}

impl<S: Transport, O> Connection<S, O> {
    /// Returns the connection of a stream to `origin`, which is its key in a pool.
    #[must_use]
    pub fn new(stream: S, origin: &str) -> Box<Self> {
        Box::new(Self { stream, origin: origin.into(), answered: false, observer: None })
    }

    /// The bytes, for another protocol.
    #[must_use]
    pub fn into_stream(self) -> S {
        self.stream
    }

    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }

    /// Returns whether an idle connection can be used: no byte and no end of stream has arrived on it.
    pub(crate) fn is_open(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        self.poll_read(&mut cx, |_| ()).is_pending()
    }

    /// Passes the bytes that have arrived to `take`; an empty slice means the end of the connection.
    pub(crate) fn poll_read<T>(
        &mut self,
        cx: &mut Context<'_>,
        consume: impl FnOnce(&[u8]) -> T,
    ) -> Poll<Result<T, WireError>> {
        READ.with_borrow_mut(|buffer| {
            let mut read = ReadBuf::new(buffer);
            let outcome = std::task::ready!(Pin::new(&mut self.stream).poll_read(cx, &mut read));
            Poll::Ready(outcome.map(|()| consume(read.filled())).map_err(|error| S::error(&error)))
        })
    }

    /// Sends a request and waits for the head of its answer. A server may answer before it has read the
    /// whole request: then the rest is not sent, and the connection is not used again.
    pub(crate) async fn call(
        &mut self,
        head: &[u8],
        body: &[u8],
        kept: &[HeaderName],
    ) -> Result<Answered, Failed> {
        let (mut sent, mut came) = (0, Vec::new());
        std::future::poll_fn(|cx| {
            let written = self.poll_write(cx, head, body, &mut sent);
            loop {
                let taken = match self.poll_read(cx, |bytes| take_head(&mut came, bytes, kept)) {
                    Poll::Pending => break,
                    Poll::Ready(outcome) => outcome.and_then(|taken| taken),
                };
                match taken {
                    Ok(None) => {}
                    Ok(Some(mut answered)) => {
                        answered.head.keep &= matches!(written, Ok(true));
                        self.answered = true;
                        return Poll::Ready(Ok(answered));
                    }
                    Err(WireError::Refused(problem)) if !self.answered => {
                        return Poll::Ready(Err(Failed::Refused(problem)));
                    }
                    Err(_) if sent == 0 => return Poll::Ready(Err(Failed::Unsent)),
                    Err(error) => return Poll::Ready(Err(Failed::of(error, &came))),
                }
            }
            match written {
                Err(_) if sent == 0 => Poll::Ready(Err(Failed::Unsent)),
                Err(error) => Poll::Ready(Err(Failed::of(S::error(&error), &came))),
                Ok(_) => Poll::Pending,
            }
        })
        .await
    }

    /// Writes as much of the request as the socket takes. Returns whether it took all.
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        head: &[u8],
        body: &[u8],
        sent: &mut usize,
    ) -> io::Result<bool> {
        while *sent < head.len() + body.len() {
            let rest_of_head = head.get(*sent..).unwrap_or_default();
            let rest_of_body = body.get(sent.saturating_sub(head.len())..).unwrap_or_default();
            let slices = [IoSlice::new(rest_of_head), IoSlice::new(rest_of_body)];
            match Pin::new(&mut self.stream).poll_write_vectored(cx, &slices) {
                Poll::Pending => return Ok(false),
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(written)) => *sent += written,
                Poll::Ready(Err(error)) => return Err(error),
            }
        }
        // TLS takes bytes that the socket does not.
        match Pin::new(&mut self.stream).poll_flush(cx) {
            Poll::Pending => Ok(false),
            Poll::Ready(flushed) => flushed.map(|()| true),
        }
    }
}

/// Parses a head from the bytes that have arrived; `None` while it is incomplete. `came` keeps earlier bytes.
fn take_head(came: &mut Vec<u8>, bytes: &[u8], kept: &[HeaderName]) -> Result<Option<Answered>, WireError> {
    if bytes.is_empty() {
        return Err(WireError::Cut);
    }
    // A head almost always arrives in one read, and is parsed without a copy.
    let whole = if came.is_empty() {
        bytes
    } else {
        came.extend_from_slice(bytes);
        // Only a line feed ends a head: one that comes byte by byte is not parsed for each of them.
        if came.len() <= wire::MAX_HEAD && !bytes.contains(&b'\n') {
            return Ok(None);
        }
        came.as_slice()
    };
    if let Some((head, taken)) = wire::response(whole, kept)? {
        let early = whole.get(taken..).unwrap_or_default().to_vec();
        return Ok(Some(Answered { head, early }));
    }
    if came.is_empty() {
        came.extend_from_slice(bytes);
    }
    Ok(None)
}
