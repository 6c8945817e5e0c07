//! One HTTP call to an engine: pooled HTTP/1.1 connections, no Nagle, errors that say whether anything was sent.
//!
//! Knows addresses and bytes; what the bytes mean is the connectors' and what a failure means is the legs'.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};

use crate::openai::sse::{self, Splitter};

mod body;
mod chunked;
mod connection;
mod pool;
#[cfg(test)]
mod tests;
mod wire;

pub(crate) use body::Body;
use connection::{Connection, Failed};
use pool::Pool;
pub(crate) use wire::WireError;

/// Largest body that is read whole: a non-streaming answer, a prefill answer, an error.
const MAX_BODY: usize = 64 * 1024 * 1024;
/// How much of an engine's own error text is carried into ours.
const MAX_TEXT: usize = 2_000;

/// Headers of a leg besides content type and length.
pub(crate) type LegHeaders = Vec<(HeaderName, HeaderValue)>;

/// The pooled client for all workers.
#[derive(Clone, Debug)]
pub struct Upstream {
    pool: Arc<Pool>,
    connect_timeout: Duration,
}

/// A call that brought no usable answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No connection: no byte of the request was sent.
    #[error("connect failed: {0}")]
    Connect(String),
    /// The connection broke, before or within the answer.
    #[error("connection broke: {0}")]
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
    /// The answer is not what the protocol promises.
    #[error("protocol: {0}")]
    Protocol(String),
}

impl Upstream {
    /// A client whose connects end after `connect_timeout`.
    #[must_use]
    pub fn new(connect_timeout: Duration) -> Self {
        Self { pool: Arc::default(), connect_timeout }
    }

    /// Returns the same client, with the same connections, whose connects end after `connect_timeout`.
    #[must_use]
    pub fn with_connect_timeout(&self, connect_timeout: Duration) -> Self {
        Self { connect_timeout, ..self.clone() }
    }

    /// Sends a JSON body and waits for the head of a success answer.
    ///
    /// # Errors
    /// [`CallError`]; an error status is read whole and is one too.
    pub async fn head(
        &self,
        url: &str,
        headers: &LegHeaders,
        body: Bytes,
    ) -> Result<Response<Body>, CallError> {
        let rest = url.strip_prefix("http://").unwrap_or(url);
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let head = wire::request(authority, path, headers, body.len());
        let head = head.ok_or_else(|| CallError::Protocol("the worker's address is no URL".to_owned()))?;
        let response = self.call(authority, &head, &body).await?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
        let body = collect(response.into_body()).await?;
        Err(CallError::Status { status, content_type, body })
    }

    /// One call, over an idle connection if there is one. An idle one that turns out to be closed has taken nothing, and
    /// the call is made over another.
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
                Err(Failed::Unsent) => return Err(CallError::Connect("closed at once".to_owned())),
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
    pub async fn whole(
        &self,
        url: &str,
        headers: &LegHeaders,
        body: Bytes,
    ) -> Result<Response<Bytes>, CallError> {
        let (head, body) = self.head(url, headers, body).await?.into_parts();
        Ok(Response::from_parts(head, collect(body).await?))
    }

    /// Sends a JSON body and reads the answer to its end without keeping it, but for whether it is one: a prefill that
    /// answered nonsense did not prefill, and its decode would wait for minutes.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn drained(&self, url: &str, headers: &LegHeaders, body: Bytes) -> Result<(), CallError> {
        let response = self.head(url, headers, body).await?;
        let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
        let content_type = content_type.as_ref().map(HeaderValue::as_bytes).unwrap_or_default();
        if content_type.starts_with(b"text/event-stream") {
            return drain_events(response.into_body()).await;
        }
        let whole = collect(response.into_body()).await?;
        let sound = content_type.starts_with(b"application/json")
            && whole.starts_with(b"{")
            && !sse::look(&whole).error;
        if sound { Ok(()) } else { Err(CallError::Protocol(format!("no answer: {}", text(&whole)))) }
    }
}

impl CallError {
    /// Whether another worker may do better.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Broken(_) | Self::Protocol(_) => true,
            Self::Status { status, .. } => {
                status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS
            }
        }
    }

    /// Whether it speaks against the worker. An engine that says that it has enough to do works; a refusal is the request's
    /// own fault.
    #[must_use]
    pub fn is_fault(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Broken(_) | Self::Protocol(_) => true,
            Self::Status { status, .. } => status.is_server_error(),
        }
    }

    /// Whether some byte of the request may have reached the engine.
    #[must_use]
    pub fn sent(&self) -> bool {
        !matches!(self, Self::Connect(_))
    }

    /// Stable metric label.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Broken(_) => "broken",
            Self::Status { status, .. } if status.is_client_error() => "status_4xx",
            Self::Status { .. } => "status_5xx",
            Self::Protocol(_) => "protocol",
        }
    }
}

async fn drain_events(mut body: Body) -> Result<(), CallError> {
    let (mut splitter, mut done) = (Splitter::default(), false);
    while body.read(splitter.room()).await? {
        let whole = splitter.whole().map_err(|error| CallError::Protocol(error.to_string()))?;
        let events = splitter.first(whole);
        for event in sse::events(events).filter_map(|place| events.get(place)) {
            let seen = sse::look(event);
            if seen.error || !sse::is_event(event) {
                return Err(CallError::Protocol(text(event)));
            }
            done |= seen.done;
        }
        splitter.pass(whole);
    }
    if done { Ok(()) } else { Err(CallError::Broken("the stream ended before its end".to_owned())) }
}

async fn collect(mut body: Body) -> Result<Bytes, CallError> {
    let mut whole = Vec::new();
    while body.read(&mut whole).await? {
        if whole.len() > MAX_BODY {
            return Err(CallError::Broken("length limit exceeded".to_owned()));
        }
    }
    Ok(whole.into())
}

impl From<WireError> for CallError {
    /// It names no address, so the text may go to a client (A5).
    fn from(error: WireError) -> Self {
        Self::Broken(error.to_string())
    }
}

fn text(body: &[u8]) -> String {
    let end = body.len().min(MAX_TEXT);
    String::from_utf8_lossy(body.get(..end).unwrap_or_default()).into_owned()
}
