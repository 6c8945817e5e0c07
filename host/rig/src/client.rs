//! HTTP client of every command: whole answers, streams of events with arrival times, verdicts on both.
//!
//! It is hyper's pooled client. A command that measures latency reads the clock here, in its own process.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
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
use tokio::time::{Instant, timeout};

pub use self::{
    events::EventSplitter,
    outcome::{Outcome, judge},
};

mod events;
mod outcome;

/// Path of the endpoint that most commands call.
pub const CHAT: &str = "/v1/chat/completions";
/// Longest wait for a whole answer. No command sends a request that takes longer.
const LIMIT: Duration = Duration::from_secs(60);

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

/// How a streamed chat completion went.
#[derive(Clone, Debug, Default)]
pub struct Streamed {
    /// From sending the request to the first token.
    pub ttft: Option<Duration>,
    /// Events with and without a token.
    pub events: u32,
    /// The stream ended with `[DONE]` and contained no error event.
    pub complete: bool,
    /// The status, event or error that prevented that.
    pub problem: Option<String>,
}

/// Body of an answer that is read in pieces. Dropping it closes the connection.
#[derive(Debug)]
pub struct Streaming {
    /// Status of the answer.
    pub status: StatusCode,
    body: Incoming,
    splitter: EventSplitter,
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
        let mut roots = RootCertStore::empty();
        roots.add(
            CertificateDer::from_pem_file(authority).with_context(|| authority.display().to_string())?,
        )?;
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let config = builder.with_root_certificates(roots).with_no_client_auth();
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let connector = HttpsConnector::from((connector, config));
        let pool = Pool::Secure(Pooled::builder(TokioExecutor::new()).build(connector));
        Ok(Self { pool, base: format!("https://{address}") })
    }

    /// Sends GET and returns the body of a 200.
    pub async fn get(&self, path: &str) -> anyhow::Result<String> {
        self.whole(Method::GET, path, Bytes::new()).await
    }

    /// Sends POST with JSON and returns the body of a 200.
    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> anyhow::Result<String> {
        self.whole(Method::POST, path, body.into()).await
    }

    /// Sends GET and parses the body of a 200.
    pub async fn json(&self, path: &str) -> anyhow::Result<serde_json::Value> {
        let body = self.get(path).await?;
        serde_json::from_str(&body)
            .with_context(|| format!("GET {path} answered text that is not JSON: {body}"))
    }

    async fn whole(&self, method: Method, path: &str, body: Bytes) -> anyhow::Result<String> {
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

    /// Sends a request and returns once the head of the answer arrived.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        request = request.header(header::CONTENT_TYPE, "application/json");
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
        let answer = self.send(Method::POST, path, headers, body.into()).await?;
        let (parts, body) = answer.into_parts();
        Ok(Streaming { status: parts.status, body, splitter: EventSplitter::default() })
    }

    /// Sends a streaming chat completion and reads it to its end. Every failure is in the result.
    pub async fn stream_chat(&self, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Streamed {
        let mut seen = Streamed::default();
        let read = timeout(LIMIT, self.read_chat(headers, body.into(), &mut seen)).await;
        let read = read.unwrap_or_else(|_| Err(anyhow::anyhow!("the stream did not end within {LIMIT:?}")));
        if let Err(error) = read {
            seen.problem.get_or_insert_with(|| format!("{error:#}"));
        }
        seen.complete &= seen.problem.is_none();
        seen
    }

    async fn read_chat(
        &self,
        headers: &[(&str, &str)],
        body: Bytes,
        seen: &mut Streamed,
    ) -> anyhow::Result<()> {
        let started = Instant::now();
        let mut stream = self.stream(CHAT, headers, body).await?;
        if stream.status != StatusCode::OK {
            let status = stream.status;
            bail!("{status}: {}", stream.rest().await?);
        }
        while let Some(event) = stream.next().await? {
            seen.events += 1;
            if event.contains("\"content\":\"") && !event.contains("\"content\":\"\"") {
                seen.ttft.get_or_insert(started.elapsed());
            }
            seen.complete |= event.contains("[DONE]");
            if event.contains("{\"error\"") {
                bail!("{event}");
            }
        }
        if !seen.complete {
            bail!("the stream ended without [DONE]");
        }
        Ok(())
    }

    /// Sends POST and judges the answer to its last byte.
    pub async fn outcome(&self, path: &str, body: impl Into<Bytes>, stream: bool) -> Outcome {
        match self.text(Method::POST, path, body.into()).await {
            Ok((status, text)) => judge(status.is_success(), &text, stream),
            Err(error) => Outcome::Neither(format!("{error:#}")),
        }
    }
}

impl Streaming {
    /// Returns the next event, or `None` at the end of the stream.
    pub async fn next(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            if let Some(event) = self.splitter.event() {
                return Ok(Some(event));
            }
            match self.piece().await? {
                Some(piece) => self.splitter.push(&piece),
                None => return Ok(None),
            }
        }
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
