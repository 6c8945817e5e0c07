//! Why the bytes of an engine are not an answer.

/// An answer that is not HTTP, or not whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    /// The head cannot be read.
    #[error("the head of the engine's answer is not HTTP/1.1: {0}")]
    Head(&'static str),
    /// A chunk cannot be read.
    #[error("the engine's answer has an invalid chunk")]
    Chunk,
    /// The connection ended within the answer.
    #[error("the engine closed the connection within its answer")]
    Cut,
    /// The engine ended the connection with an alert of TLS.
    #[error("{0}")]
    Refused(String),
    /// TLS failed.
    #[error("{0}")]
    Tls(String),
    /// The connection failed.
    #[error("{0}")]
    Io(std::io::ErrorKind),
}
