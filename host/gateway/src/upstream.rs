//! One HTTP call to an engine: pooled HTTP/1.1 connections, no Nagle, errors that say whether anything was sent.
//!
//! Knows addresses and bytes; what the bytes mean is the connectors' and what a failure means is the legs'.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};

use crate::sse::{self, Splitter};

mod pool;

pub use pool::Body;
use pool::{Connection, Failed, Pool};

/// Largest body that is read whole: a non-streaming answer, a prefill answer, an error.
const MAX_BODY: usize = 64 * 1024 * 1024;
/// How much of an engine's own error text is carried into ours.
const MAX_TEXT: usize = 2_000;

/// Headers of a leg besides content type and length.
pub type LegHeaders = Vec<(HeaderName, HeaderValue)>;

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
        let mut request = Request::builder().method(Method::POST).uri(path);
        request = request.header(header::HOST, authority).header(header::CONTENT_TYPE, "application/json");
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request =
            request.body(Full::new(body)).map_err(|error| CallError::Protocol(error.to_string()))?;
        let response = self.call(authority, request).await?;
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
    async fn call(
        &self,
        authority: &str,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<Body>, CallError> {
        loop {
            let idle = self.pool.take(authority);
            let fresh = idle.is_none();
            let mut connection = match idle {
                Some(connection) => connection,
                None => self.connect(authority).await?,
            };
            match connection.call(request).await {
                Ok(response) => {
                    let wrap = |incoming| Body::new(incoming, connection, self.pool.clone(), authority);
                    return Ok(response.map(wrap));
                }
                Err(Failed::Unsent(unsent)) if !fresh => request = *unsent,
                Err(Failed::Unsent(_)) => return Err(CallError::Connect("closed at once".to_owned())),
                Err(Failed::Broken(error)) => return Err(CallError::Broken(causes(&error))),
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
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| CallError::Broken(causes(&error)))?;
        let Ok(data) = frame.into_data() else { continue };
        let events = splitter.push(data).map_err(|error| CallError::Protocol(error.to_string()))?;
        for event in events.iter().flat_map(|events| sse::events(events).map(|place| events.slice(place))) {
            let seen = sse::look(&event);
            if seen.error || !sse::is_event(&event) {
                return Err(CallError::Protocol(text(&event)));
            }
            done |= seen.done;
        }
    }
    if done { Ok(()) } else { Err(CallError::Broken("the stream ended before its end".to_owned())) }
}

async fn collect(body: Body) -> Result<Bytes, CallError> {
    if body.is_empty() {
        return Ok(Bytes::new());
    }
    match Limited::new(body, MAX_BODY).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) => Err(CallError::Broken(error.to_string())),
    }
}

/// An error with its causes. hyper names no address in them, so the text may go to a client (A5).
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(": ");
        text.push_str(&next.to_string());
        cause = next.source();
    }
    text
}

fn text(body: &Bytes) -> String {
    let end = body.len().min(MAX_TEXT);
    String::from_utf8_lossy(body.get(..end).unwrap_or_default()).into_owned()
}
