//! Why a call has no answer.

use std::io;

/// An answer that is not HTTP, or not whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The head cannot be read.
    #[error("the head of the answer is not HTTP/1.1: {0}")]
    Head(&'static str),
    /// The head is longer than this limit, bytes.
    #[error("the head of the answer has more than {0} bytes")]
    LongHead(usize),
    /// A chunk cannot be read.
    #[error("the answer has an invalid chunk")]
    Chunk,
    /// The connection ended within the answer.
    #[error("the server closed the connection within its answer")]
    Cut,
    /// The server ended the connection at the transport layer, for example with a TLS alert.
    #[error("{0}")]
    Refused(String),
    /// The transport layer failed.
    #[error("{0}")]
    Transport(String),
    /// The connection failed.
    #[error("{0}")]
    Io(io::ErrorKind),
}

/// Reason why a call failed before the head of its answer. `E` is the reason why the connection failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError<E> {
    /// The connection could not be opened.
    #[error(transparent)]
    Connect(E),
    /// The server closed a new connection before a byte was sent.
    #[error("the server closed the connection before it took the request")]
    Unsent,
    /// The server refused the connection when the first call was already sent.
    #[error("{0}")]
    Refused(String),
    /// The server closed a reused connection, and a new one could not be opened.
    #[error("{closed}; then: {connect}")]
    NotAgain {
        /// Why the reused connection ended.
        closed: WireError,
        /// Why there is no new one.
        connect: E,
    },
    /// The server closed a reused connection at once and without a byte of an answer. It may not have read
    /// the request.
    #[error("the server closed a kept connection when the request was sent: {0}")]
    Closed(WireError),
    /// The connection failed after bytes were sent, or the answer cannot be read.
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl WireError {
    /// Returns what a failed read or write of a socket means.
    #[must_use]
    pub fn of(error: &io::Error) -> Self {
        match error.kind() {
            // A transport without its end: somebody may have cut the answer.
            io::ErrorKind::UnexpectedEof => Self::Cut,
            kind => Self::Io(kind),
        }
    }
}
