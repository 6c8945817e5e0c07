//! The HTTP/1.1 client for engines: pooled connections, no Nagle, errors that say whether anything was sent.
//!
//! Knows addresses and bytes. The connectors know what the bytes mean, and the leg state machine what a
//! failure means.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};

mod body;
mod chunked;
mod connection;
mod pool;
#[cfg(test)]
mod tests;
mod wire;
mod wire_error;

pub(crate) use body::Body;
use connection::{Connection, Failed};
pub(crate) use pool::ConnectionPool;
pub(crate) use wire_error::WireError;

/// Limit of a body that is read whole, bytes: an answer that is not streamed, a prefill answer, an error.
const MAX_BODY: usize = 64 * 1024 * 1024;
/// Limit of an engine's own text in an error message, bytes.
const MAX_TEXT: usize = 2_000;

/// Headers of a leg besides content type and length.
pub(crate) type LegHeaders = Vec<(HeaderName, HeaderValue)>;

/// A client for calls to workers, on the connections of one runtime.
#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    pool: ConnectionPool,
    connect_timeout: Duration,
}

/// A call without a usable answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    /// No connection: no byte of the request was sent.
    #[error("connect failed: {0}")]
    Connect(String),
    /// The connection failed before or within the answer.
    #[error("connection failed: {0}")]
    Broken(String),
    /// An answer with an error status.
    #[error("status {status}: {}", text(body))]
    Status {
        /// The engine's status.
        status: StatusCode,
        /// Its content type.
        content_type: Option<HeaderValue>,
        /// Its body.
        body: Bytes,
    },
    /// The answer violates the engine's protocol.
    #[error("protocol violation: {0}")]
    Protocol(String),
}

impl Upstream {
    /// Returns a client that uses and refills `pool`, and gives up connecting after `connect_timeout`.
    #[must_use]
    pub(crate) fn new(pool: ConnectionPool, connect_timeout: Duration) -> Self {
        Self { pool, connect_timeout }
    }

    /// Sends a JSON body and waits for the head of a success answer.
    ///
    /// # Errors
    /// [`CallError`]. An error status is one, with its whole body.
    pub(crate) async fn head(
        &self,
        url: &str,
        headers: &LegHeaders,
        body: Bytes,
    ) -> Result<Response<Body>, CallError> {
        let rest = url.strip_prefix("http://").unwrap_or(url);
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let head = wire::request(authority, path, headers, body.len());
        let head =
            head.ok_or_else(|| CallError::Protocol("the worker's address is not a valid URL".to_owned()))?;
        let response = self.call(authority, &head, &body).await?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
        let body = collect(response.into_body()).await?;
        Err(CallError::Status { status, content_type, body })
    }

    /// Makes one call, over an idle connection if there is one. The engine may have closed an idle
    /// connection: then nothing was sent, and the call is made over another one.
    async fn call(&self, authority: &str, head: &[u8], body: &[u8]) -> Result<Response<Body>, CallError> {
        loop {
            let idle = self.pool.take(authority);
            let fresh = idle.is_none();
            let mut connection = match idle {
                Some(connection) => connection,
                None => self.connect(authority).await?,
            };
            match connection.call(head, body).await {
                Ok(mut answered) => {
                    let mut response = Response::new(());
                    *response.status_mut() = answered.head.status;
                    *response.headers_mut() = std::mem::take(&mut answered.head.headers);
                    let wrap = |()| Body::new(answered, connection, self.pool.clone());
                    return Ok(response.map(wrap));
                }
                Err(Failed::Unsent) if !fresh => {}
                Err(Failed::Unsent) => {
                    return Err(CallError::Connect(
                        "the engine closed the connection before it took the request".to_owned(),
                    ));
                }
                Err(Failed::Broken(error)) => return Err(error.into()),
            }
        }
    }

    async fn connect(&self, authority: &str) -> Result<Box<Connection>, CallError> {
        match tokio::time::timeout(self.connect_timeout, Connection::open(authority)).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(error)) => Err(CallError::Connect(error.to_string())),
            Err(_) => Err(CallError::Connect(format!("no connection within {:?}", self.connect_timeout))),
        }
    }

    /// Sends a JSON body and reads the whole success answer.
    ///
    /// # Errors
    /// [`CallError`].
    pub(crate) async fn whole(
        &self,
        url: &str,
        headers: &LegHeaders,
        body: Bytes,
    ) -> Result<Response<Bytes>, CallError> {
        let (head, body) = self.head(url, headers, body).await?.into_parts();
        Ok(Response::from_parts(head, collect(body).await?))
    }
}

impl CallError {
    /// Whether another worker may succeed.
    #[must_use]
    pub(crate) fn retryable(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Broken(_) | Self::Protocol(_) => true,
            Self::Status { status, .. } => {
                status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS
            }
        }
    }

    /// Whether it counts as a failure of the worker. An overloaded engine works, and a refused request is the
    /// client's error.
    #[must_use]
    pub(crate) fn is_fault(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Broken(_) | Self::Protocol(_) => true,
            Self::Status { status, .. } => status.is_server_error(),
        }
    }

    /// Whether some byte of the request may have reached the engine.
    #[must_use]
    pub(crate) fn sent(&self) -> bool {
        !matches!(self, Self::Connect(_))
    }

    /// Stable metric label.
    #[must_use]
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Broken(_) => "broken",
            Self::Status { status, .. } if status.is_client_error() => "status_4xx",
            Self::Status { .. } => "status_5xx",
            Self::Protocol(_) => "protocol",
        }
    }
}

/// Reads a body whole.
///
/// # Errors
/// [`CallError::Broken`], also when the body is larger than any engine's answer.
pub(crate) async fn collect(mut body: Body) -> Result<Bytes, CallError> {
    let mut whole = Vec::new();
    while body.read(&mut whole).await? {
        if whole.len() > MAX_BODY {
            return Err(CallError::Broken(format!("the body has more than {MAX_BODY} bytes")));
        }
    }
    Ok(whole.into())
}

impl From<WireError> for CallError {
    /// The text contains no address, so a client may see it (A5).
    fn from(error: WireError) -> Self {
        Self::Broken(error.to_string())
    }
}

/// Returns the beginning of a body as text, for an error message.
pub(crate) fn text(body: &[u8]) -> String {
    let end = body.len().min(MAX_TEXT);
    String::from_utf8_lossy(body.get(..end).unwrap_or_default()).into_owned()
}
