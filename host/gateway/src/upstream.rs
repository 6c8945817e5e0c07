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
use serde_json::json;

mod back_pressure;
mod body;
mod call_context;
mod call_error;
mod content_coding;
mod convert;
mod destination;
mod error_body;
mod pause;
mod pool;
mod retry_advice;
mod room;
mod stream;
#[cfg(test)]
mod tests;
mod upgrade;
mod via;

pub(crate) use back_pressure::whole_seconds;
use body::ObservedCall;
pub(crate) use body::{Body, collect, read_within, wait_for_room};
pub(crate) use call_context::CallContext;
pub(crate) use call_error::CallError;
#[cfg(feature = "ext-proc")]
pub(crate) use content_coding::content_coding;
pub(crate) use destination::Destination;
use destination::Parts;
pub(crate) use pause::{EVENT_IDLE_MAX, HeadWait, PauseLimits, REQUEST, Silence};
pub(crate) use pool::{ConnectionPool, METADATA};
pub(crate) use retry_advice::{RetryAdvice, SHOULD_RETRY};
pub(crate) use room::RoomWait;
use stream::EngineStream;
pub(crate) use upgrade::UpgradedCall;
use via::USER_AGENT;
pub(crate) use via::{Looped, MAX_HOPS, Via, own_via};

/// Maximum size of the body of an error status, bytes. Of a larger one only the beginning is passed on.
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
        let mut content_type = response.headers().get(header::CONTENT_TYPE).cloned();
        let retry = RetryAdvice::of(response.headers());
        let mut body = Box::pin(beginning(response.into_body())).await?;
        if body.len() > MAX_ERROR_BODY {
            (content_type, body) = (Some(HeaderValue::from_static("application/json")), cut(status, &body));
        }
        Err(CallError::Status { status, content_type, retry, body, in_body: false })
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

/// Reads the body of an error status. One that is too large is not read further.
async fn beginning(mut body: Body) -> Result<Bytes, CallError> {
    let mut text = Vec::new();
    while text.len() <= MAX_ERROR_BODY && body.read(&mut text).await? {}
    Ok(text.into())
}

/// Returns a valid body that quotes the beginning of one that is too large. Clients of OpenAI's and of
/// Anthropic's API can read it.
fn cut(status: StatusCode, body: &[u8]) -> Bytes {
    let begins = text(body);
    let begins = begins.trim_end_matches(char::REPLACEMENT_CHARACTER);
    let message =
        format!("the engine's error has more than {MAX_ERROR_BODY} bytes, and begins with: {begins}");
    let kind = if status.is_client_error() { "invalid_request_error" } else { "api_error" };
    let error = json!({ "message": message, "type": kind, "param": null, "code": status.as_u16() });
    json!({ "type": "error", "error": error }).to_string().into()
}

/// Returns the beginning of a body as text, for an error message.
pub(crate) fn text(body: &[u8]) -> String {
    let end = body.len().min(MAX_TEXT);
    String::from_utf8_lossy(body.get(..end).unwrap_or_default()).into_owned()
}
