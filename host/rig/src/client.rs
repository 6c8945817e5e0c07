//! HTTP client of every command: whole answers, streams of events with arrival times, verdicts on both.
//!
//! It is hyper's pooled client. A command that measures latency reads the clock here, in its own process.

use std::{borrow::Cow, collections::VecDeque, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::legacy::{Client as Pooled, connect::HttpConnector},
    rt::TokioExecutor,
};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject as _},
};
use sse::Splitter;
use tokio::time::{Instant, timeout};

pub use self::outcome::{Outcome, judge};

mod outcome;

/// Path of the endpoint that most commands call.
pub const CHAT: &str = "/v1/chat/completions";
/// Longest wait for a whole answer. No command sends a request that takes longer.
pub const LIMIT: Duration = Duration::from_secs(60);

type Plain = Pooled<HttpConnector, Full<Bytes>>;
type Secure = Pooled<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// Connections with or without TLS. Those without do not pay for it.
#[derive(Clone, Debug)]
enum Pool {
    Plain(Plain),
    Secure(Secure),
}

/// Client of one address. Clones share its connections.
#[derive(Clone, Debug)]
pub struct Client {
    pool: Pool,
    base: String,
}

/// The received part of an answer, complete or not.
#[derive(Clone, Debug, Default)]
pub struct Received {
    /// When the request was sent.
    pub sent: Option<Instant>,
    /// Status; 0 before the head.
    pub status: u16,
    /// From sending the request to the first token.
    pub ttft: Option<Duration>,
    /// Bytes of the body.
    pub body: Vec<u8>,
}

/// How a streamed chat completion went.
#[derive(Clone, Debug, Default)]
pub struct Streamed {
    /// From sending the request to the first token.
    pub ttft: Option<Duration>,
    /// Events with and without a token.
    pub events: u32,
    /// The stream consists of valid events, has no error, and ended with `[DONE]`.
    pub complete: bool,
    /// The status, event or error that prevented that.
    pub problem: Option<String>,
}

/// Body of an answer that is read in pieces. Dropping it closes the connection.
#[derive(Debug)]
pub struct Streaming {
    /// Status of the answer.
    pub status: StatusCode,
    /// Its header.
    pub headers: HeaderMap,
    body: Incoming,
    splitter: Splitter,
    /// Whole events that were not returned yet.
    events: VecDeque<String>,
}

impl Client {
    /// Creates a client of `host:port`.
    pub fn new(address: &str) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let pool = Pool::Plain(Pooled::builder(TokioExecutor::new()).build(connector));
        Self { pool, base: format!("http://{address}") }
    }

    /// Creates a client of `host:port` with TLS, which trusts the authority of a PEM file. It speaks
    /// HTTP/1.1.
    pub fn secure(address: &str, authority: &Path) -> anyhow::Result<Self> {
        let config = trusting(authority)?;
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let connector = HttpsConnector::from((connector, config));
        let pool = Pool::Secure(Pooled::builder(TokioExecutor::new()).build(connector));
        Ok(Self { pool, base: format!("https://{address}") })
    }

    /// Sends GET and returns the body of a 200.
    pub async fn get(&self, path: &str) -> anyhow::Result<String> {
        self.success_text(Method::GET, path, Bytes::new()).await
    }

    /// Sends POST with JSON and returns the body of a 200.
    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> anyhow::Result<String> {
        self.success_text(Method::POST, path, body.into()).await
    }

    /// Sends GET and parses the body of a 200.
    pub async fn json(&self, path: &str) -> anyhow::Result<serde_json::Value> {
        let body = self.get(path).await?;
        serde_json::from_str(&body)
            .with_context(|| format!("GET {path} answered text that is not JSON: {body}"))
    }

    async fn success_text(&self, method: Method, path: &str, body: Bytes) -> anyhow::Result<String> {
        let (status, text) = self.text(method.clone(), path, body).await?;
        if status != StatusCode::OK {
            bail!("{method} {path} answered {status}: {text}");
        }
        Ok(text)
    }

    async fn text(&self, method: Method, path: &str, body: Bytes) -> anyhow::Result<(StatusCode, String)> {
        let exchange = async {
            let (parts, body) = self.send(method, path, &[], body).await?.into_parts();
            let text = String::from_utf8(body.collect().await?.to_bytes().to_vec())?;
            Ok((parts.status, text))
        };
        timeout(LIMIT, exchange)
            .await
            .with_context(|| format!("no whole answer of {path} within {LIMIT:?}"))?
    }

    /// Sends a request with JSON, and returns once the head of the answer arrived.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Response<Incoming>> {
        let headers = [&[("content-type", "application/json")], headers].concat();
        self.send_with(method, path, &headers, body).await
    }

    /// Sends a request with these headers only, and returns once the head of the answer arrived.
    pub async fn send_with(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body))?;
        let answer = match &self.pool {
            Pool::Plain(pool) => pool.request(request).await,
            Pool::Secure(pool) => pool.request(request).await,
        };
        answer.with_context(|| format!("could not send a request to {}{path}", self.base))
    }

    /// Sends POST and returns the answer as a stream of events.
    pub async fn stream(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> anyhow::Result<Streaming> {
        Ok(self.send(Method::POST, path, headers, body.into()).await?.into())
    }

    /// Sends POST and reads the answer to its end. What arrived is in `received` also after an error, and
    /// when this is dropped. `each` is called with each piece of the body.
    pub async fn read(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
        received: &mut Received,
        mut each: impl FnMut(&[u8]),
    ) -> anyhow::Result<()> {
        let sent = Instant::now();
        received.sent = Some(sent);
        let mut answer = self.stream(path, headers, body).await?;
        received.status = answer.status.as_u16();
        while let Some(piece) = answer.piece().await? {
            each(&piece);
            received.body.extend_from_slice(&piece);
            if received.ttft.is_none() && received.has_token() {
                received.ttft = Some(sent.elapsed());
            }
        }
        Ok(())
    }

    /// Sends a streaming chat completion and reads it to its end. Every failure is in the result.
    pub async fn stream_chat(&self, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Streamed {
        let mut received = Received::default();
        let read = timeout(LIMIT, self.read(CHAT, headers, body, &mut received, |_| ())).await;
        let problem = match read {
            Err(_) => Some(format!("the stream did not end within {LIMIT:?}")),
            Ok(Err(error)) => Some(format!("{error:#}")),
            Ok(Ok(())) => match received.judge(true) {
                Outcome::Streamed => None,
                Outcome::Neither(problem) => Some(problem),
                _ => Some(format!("{}: {}", received.status, received.text())),
            },
        };
        let events = sse::events(&received.body).count();
        Streamed {
            ttft: received.ttft,
            events: u32::try_from(events).unwrap_or(u32::MAX),
            complete: problem.is_none(),
            problem,
        }
    }

    /// Sends POST and judges the answer to its last byte.
    pub async fn outcome(&self, path: &str, body: impl Into<Bytes>, stream: bool) -> Outcome {
        match self.text(Method::POST, path, body.into()).await {
            Ok((status, text)) => judge(status.is_success(), &text, stream),
            Err(error) => Outcome::Neither(format!("{error:#}")),
        }
    }
}

/// Settings of a TLS client that trusts the authority of a PEM file.
///
/// # Errors
/// The file cannot be read.
pub fn trusting(authority: &Path) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(authority).with_context(|| authority.display().to_string())?)?;
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

impl Received {
    /// The body as text.
    pub fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.body)
    }

    /// Judges a whole answer.
    pub fn judge(&self, stream: bool) -> Outcome {
        judge((200..300).contains(&self.status), &self.text(), stream)
    }

    fn has_token(&self) -> bool {
        let text = self.text();
        text.split("\"content\":\"").skip(1).any(|rest| !rest.is_empty() && !rest.starts_with('"'))
    }
}

impl From<Response<Incoming>> for Streaming {
    fn from(answer: Response<Incoming>) -> Self {
        let (parts, body) = answer.into_parts();
        let (status, headers) = (parts.status, parts.headers);
        Self { status, headers, body, splitter: Splitter::default(), events: VecDeque::new() }
    }
}

impl Streaming {
    /// Returns the next event without its blank line, or `None` at the end of the stream.
    ///
    /// # Errors
    /// The connection broke, or ended within an event.
    pub async fn next(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            match self.piece().await? {
                Some(piece) => self.split(&piece)?,
                None if self.splitter.rest() == 0 => return Ok(None),
                None => bail!("the stream ended within an event"),
            }
        }
    }

    /// A keep-alive of the gateway, a line of one space, counts as an event.
    fn split(&mut self, mut piece: &[u8]) -> anyhow::Result<()> {
        while self.splitter.rest() == 0
            && let Some(rest) = piece.strip_prefix(b" \n")
        {
            self.events.push_back(" ".to_owned());
            piece = rest;
        }
        self.splitter.room().extend_from_slice(piece);
        let whole = self.splitter.whole()?;
        let bytes = self.splitter.first(whole);
        for event in sse::events(bytes).filter_map(|place| bytes.get(place)) {
            let mut event = std::str::from_utf8(event)?;
            while let Some(rest) = event.strip_prefix(" \n") {
                self.events.push_back(" ".to_owned());
                event = rest;
            }
            let event = event.trim_end();
            if !event.is_empty() {
                self.events.push_back(event.to_owned());
            }
        }
        self.splitter.discard(whole);
        Ok(())
    }

    /// Returns the bytes that arrived next, usually one chunk, or `None` at the end of the body.
    pub async fn piece(&mut self) -> anyhow::Result<Option<Bytes>> {
        while let Some(frame) = self.body.frame().await {
            if let Ok(data) = frame?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// Returns the remaining bytes as text.
    pub async fn rest(mut self) -> anyhow::Result<String> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece().await? {
            all.extend_from_slice(&piece);
        }
        Ok(String::from_utf8_lossy(&all).into_owned())
    }
}
