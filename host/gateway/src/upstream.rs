//! Calls to engines over the HTTP/1.1 client of the crate `http1-client`: TLS, limits of times and sizes,
//! errors that say whether anything was sent.
//!
//! Knows addresses and bytes. The connectors know what the bytes mean, and the leg state machine what a
//! failure means.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode, header};
use http1_client::{Connection, Delivery, WireError, wire};
use pointsman_workers::{LogLimit, is_local_shortage};

mod back_pressure;
mod body;
mod call_context;
mod content_coding;
mod convert;
mod destination;
mod error_body;
mod pause;
mod pool;
mod stream;
#[cfg(test)]
mod tests;
mod upgrade;
mod via;

pub(crate) use back_pressure::{retry_after_of, whole_seconds};
use body::ObservedCall;
pub(crate) use body::{Body, collect, read_within};
pub(crate) use call_context::CallContext;
pub(crate) use destination::Destination;
use destination::Parts;
pub(crate) use pause::{EVENT_IDLE_MAX, HeadWait, PauseLimits, REQUEST, Silence};
pub(crate) use pool::{ConnectionPool, METADATA};
use stream::EngineStream;
pub(crate) use upgrade::UpgradedCall;
use via::USER_AGENT;
pub(crate) use via::{Looped, MAX_HOPS, Via, own_via};

/// Maximum size of the body of an error status, bytes. The rest is not read.
const MAX_ERROR_BODY: usize = 1024 * 1024;
/// Maximum length of an engine's own text in an error message, bytes.
const MAX_TEXT: usize = 2_000;

/// Headers of a leg besides content type and length.
pub(crate) type LegHeaders = Vec<(HeaderName, HeaderValue)>;

/// A client for calls to workers, on the connections of one runtime.
#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    pool: ConnectionPool,
    connect_timeout: Duration,
    answer_bytes: usize,
    delivery: Delivery,
    /// Whether answers may be vectors in binary.
    is_for_vectors: bool,
    /// Header of a request that passed other gateways before.
    via: Option<Arc<Via>>,
}

/// A call without a usable answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    /// No connection: no byte of the request was sent.
    #[error("connect failed: {0}")]
    Connect(String),
    /// This host has no descriptor, port or memory left for a connection. The worker is not at fault.
    #[error("no connection can be opened: {0}")]
    Shortage(String),
    /// The engine closed a kept connection as the request came, and sent no byte of an answer.
    #[error("connection failed: {0}")]
    Closed(String),
    /// The connection failed before or within the answer.
    #[error("connection failed: {0}")]
    Broken(String),
    /// The engine was silent for too long.
    #[error("{0}")]
    Timeout(Silence),
    /// Health checks found that the engine does not answer while a request waited for it.
    #[error("the engine answers neither requests nor health checks")]
    Down,
    /// An answer with an error status, or one that is an error although its status is 200.
    #[error("status {status}: {}", text(body))]
    Status {
        status: StatusCode,
        /// Content type of the answer.
        content_type: Option<HeaderValue>,
        /// When the engine wants to be asked again.
        retry_after: Option<HeaderValue>,
        body: Bytes,
        /// Whether the error was in the body of an answer that said 200.
        in_body: bool,
    },
    /// The answer violates the engine's protocol.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// The answer is larger than the gateway reads. The engine works, and others would answer the same.
    #[error("the answer is too large: {0}")]
    TooLarge(String),
    /// The bodies in flight leave no room for the answer: they reach this many bytes.
    #[error("the bodies in flight reach {0} bytes, the limit of limits.body_bytes_in_flight")]
    NoRoom(usize),
    /// The engine gave the request up: it ended its answer with this finish reason, such as `abort`.
    #[error("the engine ended its answer with the finish reason `{0}`")]
    GaveUp(&'static str),
    /// The engine does not say that it began from the token ids that it got. It works; others may take them.
    #[error("the rest does not begin from the token ids; vLLM has to take prompt_token_ids")]
    OtherPrompt,
}

impl Upstream {
    /// Returns a client that uses and refills `pool`, gives up connecting after `connect_timeout`, and reads
    /// at most `answer_bytes` of an answer as a whole.
    #[must_use]
    pub(crate) fn new(pool: ConnectionPool, connect_timeout: Duration, answer_bytes: usize) -> Self {
        let delivery = Delivery::Repeatable;
        Self { pool, connect_timeout, answer_bytes, delivery, is_for_vectors: false, via: None }
    }

    /// Returns a client for requests that no engine may get twice, such as those with a handoff.
    #[must_use]
    pub(crate) fn at_most_once(&self) -> Self {
        let is_new = self.delivery == Delivery::NewConnection;
        Self { delivery: if is_new { self.delivery } else { Delivery::AtMostOnce }, ..self.clone() }
    }

    /// Returns a client for answers that may be vectors in binary. Their heads say where each vector begins,
    /// and one that is too long is not the engine's fault.
    #[must_use]
    pub(crate) fn for_vectors(&self) -> Self {
        Self { is_for_vectors: true, ..self.clone() }
    }

    /// From now on, uses no kept connection.
    pub(crate) fn use_new_connections(&mut self) {
        self.delivery = Delivery::NewConnection;
    }

    /// Sends a JSON body and waits for the head of a success answer.
    ///
    /// # Errors
    /// Same as [`Self::send`].
    pub(crate) fn head<'a>(
        &'a self,
        to: &'a Destination,
        headers: &'a LegHeaders,
        body: Bytes,
    ) -> impl Future<Output = Result<Response<Body>, CallError>> + 'a {
        self.send(&Method::POST, to, headers, body)
    }

    /// Sends a request, with a JSON body unless that is empty, and waits for the head of a success answer.
    ///
    /// # Errors
    /// [`CallError`]. An error status is one, with its whole body.
    pub(crate) async fn send(
        &self,
        method: &Method,
        to: &Destination,
        headers: &LegHeaders,
        body: Bytes,
    ) -> Result<Response<Body>, CallError> {
        let parts = to.parts();
        let all = headers.iter().chain([self.via(), &USER_AGENT]);
        let head = wire::request(method, parts.authority, parts.path, all, body.len());
        let head =
            head.ok_or_else(|| CallError::Protocol("the worker's address is not a valid URL".to_owned()))?;
        let response = self.call((to, &parts), &head, &body).await?;
        content_coding::refuse(response.headers())?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        if !status.is_client_error() && !status.is_server_error() {
            let hint = if status.is_redirection() { ": the worker's url is not where it serves" } else { "" };
            return Err(CallError::Protocol(format!("unexpected status {}{hint}", status.as_u16())));
        }
        let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
        let retry_after = retry_after_of(response.headers());
        let body = Box::pin(beginning(response.into_body())).await?;
        Err(CallError::Status { status, content_type, retry_after, body, in_body: false })
    }

    /// Makes one call, over an idle connection if there is one. Closes a pooled connection whose peer, files
    /// of certificates or name are not those in force now.
    async fn call(
        &self,
        (to, parts): (&Destination, &Parts<'_>),
        head: &[u8],
        body: &[u8],
    ) -> Result<Response<Body>, CallError> {
        let is_current = |stream: &EngineStream| stream.is_current(to, &self.pool.context.tls);
        let connect = || self.connect(to, *parts);
        let called =
            self.pool.idle.call(parts.origin, (head, body), self.delivery, is_current, connect).await;
        match called {
            Err(http1_client::CallError::Wire(WireError::LongHead(limit))) if self.is_for_vectors => {
                Err(CallError::TooLarge(format!(
                    "its head has more than {limit} bytes; ask for less at once, or vectors as `bytes_only`"
                )))
            }
            called => Ok(called?.map(|body| Body::new(body, self.answer_bytes))),
        }
    }

    /// Connects; with TLS, its handshake counts.
    async fn connect(
        &self,
        to: &Destination,
        parts: Parts<'_>,
    ) -> Result<Box<Connection<EngineStream, ObservedCall>>, CallError> {
        let open = EngineStream::open(to, parts, &self.pool.context);
        match tokio::time::timeout(self.connect_timeout, open).await {
            Ok(Ok(stream)) => Ok(Connection::new(stream, parts.origin)),
            Ok(Err(error)) if is_local_shortage(&error) => Err(shortage(&error)),
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
        to: &Destination,
        headers: &LegHeaders,
        body: Bytes,
    ) -> Result<Response<Bytes>, CallError> {
        let (head, body) = self.head(to, headers, body).await?.into_parts();
        Ok(Response::from_parts(head, collect(body, None, None).await?))
    }
}

impl CallError {
    /// Returns whether the engine broke while it handled the request. An engine that is overloaded refuses a
    /// request and stays usable.
    #[must_use]
    pub(crate) fn breaks_engine(&self) -> bool {
        match self {
            Self::Broken(_) | Self::Protocol(_) | Self::Timeout(_) | Self::Down | Self::GaveUp(_) => true,
            Self::Connect(_)
            | Self::Shortage(_)
            | Self::Closed(_)
            | Self::OtherPrompt
            | Self::NoRoom(_)
            | Self::TooLarge(_) => false,
            Self::Status { .. } => !self.is_refusal() && self.refusal().is_none(),
        }
    }

    /// Returns whether the engine answered, though not with what a leg needs.
    pub(crate) fn has_answered(&self) -> bool {
        use CallError::{GaveUp, NoRoom, Protocol, Status, TooLarge};
        matches!(self, Status { .. } | Protocol(_) | TooLarge(_) | NoRoom(_) | GaveUp(_))
    }

    /// Returns whether the worker made progress up to the limit that ended the call: it works.
    #[must_use]
    pub(crate) fn is_of_slow_worker(&self) -> bool {
        matches!(self, Self::Timeout(silence) if silence.worker_made_progress())
    }

    /// Like [`Self::breaks_engine`], or the engine may have broken on a request that it did not answer.
    #[must_use]
    pub(crate) fn may_break_engine(&self) -> bool {
        self.breaks_engine() || matches!(self, Self::Closed(_))
    }

    /// Returns whether another engine that fails in the same way makes the request itself suspect: the
    /// connection ended, a kept one too, or the status is 5xx.
    #[must_use]
    pub(crate) fn is_suspicious(&self) -> bool {
        matches!(self, Self::Closed(_) | Self::Broken(_))
            || (self.breaks_engine() && matches!(self, Self::Status { .. }))
    }

    /// Returns whether another worker is tried.
    #[must_use]
    pub(crate) fn retryable(&self) -> bool {
        match self {
            Self::Connect(_)
            | Self::Shortage(_)
            | Self::Closed(_)
            | Self::Broken(_)
            | Self::Protocol(_)
            | Self::GaveUp(_)
            | Self::OtherPrompt
            | Self::Timeout(_)
            | Self::Down => true,
            Self::TooLarge(_) | Self::NoRoom(_) => false,
            Self::Status { .. } => !self.is_refusal() || self.refusal().is_some(),
        }
    }

    /// Returns whether a refusal may be about the worker and not about the request: it has unloaded the model
    /// or the adapter (404), has another key (401, 407), takes its client for gone (499), or is a gateway
    /// that the request passed before (508).
    #[must_use]
    pub(crate) fn is_of_worker(&self) -> bool {
        matches!(self, Self::Status { status, .. } if matches!(status.as_u16(), 401 | 404 | 407 | 499 | 508))
    }

    /// Returns whether the engine refused the request as the client's error. Engines answer 501 to what their
    /// model or endpoint cannot do, and gateways 508 to what they got before.
    #[must_use]
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Status { status, .. }
            if status.is_client_error()
                || matches!(*status, StatusCode::NOT_IMPLEMENTED | StatusCode::LOOP_DETECTED))
    }

    /// Returns whether it counts as a failure of the worker. An overloaded engine works, and a refused
    /// request is the client's error.
    #[must_use]
    pub(crate) fn is_fault(&self) -> bool {
        matches!(self, Self::Connect(_)) || self.breaks_engine()
    }

    /// Returns whether the engine may have begun to work on the request. It has not when no byte reached it,
    /// or when its answer was a refusal.
    #[must_use]
    pub(crate) fn began(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Shortage(_) => false,
            // 499: the client left, perhaps after the engine began.
            Self::Status { status, in_body, .. } => {
                *in_body || status.as_u16() == 499 || !(self.is_refusal() || self.refusal().is_some())
            }
            Self::Closed(_)
            | Self::Broken(_)
            | Self::Protocol(_)
            | Self::TooLarge(_)
            | Self::NoRoom(_)
            | Self::GaveUp(_)
            | Self::OtherPrompt
            | Self::Timeout(_)
            | Self::Down => true,
        }
    }

    /// Stable metric label.
    #[must_use]
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Shortage(_) => "shortage",
            Self::Closed(_) => "closed",
            Self::Broken(_) => "broken",
            Self::Timeout(_) => "timeout",
            Self::Down => "down",
            Self::Status { .. } if self.refusal().is_some() => "overloaded",
            Self::Status { .. } if self.is_refusal() => "status_4xx",
            Self::Status { .. } => "status_5xx",
            Self::Protocol(_) | Self::OtherPrompt => "protocol",
            Self::TooLarge(_) => "too_large",
            Self::NoRoom(_) => "no_room",
            Self::GaveUp(_) => "gave_up",
        }
    }
}

/// Logs, at most once a second, that this host has run out of descriptors or ports.
fn shortage(error: &std::io::Error) -> CallError {
    static LINES: LogLimit = LogLimit::new(Duration::from_secs(1));
    if let Some(suppressed) = LINES.due() {
        tracing::error!(%error, suppressed, "connect failed: raise the file descriptor limit (ulimit -n)");
    }
    CallError::Shortage(error.to_string())
}

/// Limits the time of a call.
///
/// # Errors
/// The error of the call, or [`CallError::Timeout`].
pub(crate) async fn with_time_limit<T>(
    silence: Silence,
    call: impl Future<Output = Result<T, CallError>>,
) -> Result<T, CallError> {
    tokio::time::timeout(silence.limit, call).await.unwrap_or(Err(CallError::Timeout(silence)))
}

/// Reads the body of an error status, or as much of it as a message needs.
async fn beginning(mut body: Body) -> Result<Bytes, CallError> {
    let mut text = Vec::new();
    while text.len() <= MAX_ERROR_BODY && body.read(&mut text).await? {}
    text.truncate(MAX_ERROR_BODY);
    Ok(text.into())
}

/// Returns the beginning of a body as text, for an error message.
pub(crate) fn text(body: &[u8]) -> String {
    let end = body.len().min(MAX_TEXT);
    String::from_utf8_lossy(body.get(..end).unwrap_or_default()).into_owned()
}
