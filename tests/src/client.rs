//! A small HTTP client that gives whole replies, or events one by one.

use std::net::SocketAddr;

use anyhow::Context as _;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client as Legacy, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;

/// A client of one address.
#[derive(Clone, Debug)]
pub struct Client {
    http: Legacy<HttpConnector, Full<Bytes>>,
    base: String,
}

/// A whole reply.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Status.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

/// A reply that streams. Dropping it closes the connection.
#[derive(Debug)]
pub struct Stream {
    /// Status.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    body: Incoming,
    buffer: BytesMut,
}

impl Client {
    /// A client of `address`.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self {
            http: Legacy::builder(TokioExecutor::new()).build(connector),
            base: format!("http://{address}"),
        }
    }

    /// GETs a path.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn get(&self, path: &str) -> anyhow::Result<Reply> {
        let request = Request::builder().method(Method::GET).uri(format!("{}{path}", self.base));
        self.whole(request.body(Full::default())?).await
    }

    /// GETs a path with headers.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> anyhow::Result<Reply> {
        let mut request = self.request(path, headers, Bytes::new())?;
        *request.method_mut() = Method::GET;
        self.whole(request).await
    }

    /// GETs a path and reads the reply event by event.
    ///
    /// # Errors
    /// The connection broke before the head.
    pub async fn events(&self, path: &str, headers: &[(&str, &str)]) -> anyhow::Result<Stream> {
        let mut request = self.request(path, headers, Bytes::new())?;
        *request.method_mut() = Method::GET;
        let (parts, body) = self.http.request(request).await?.into_parts();
        Ok(Stream { status: parts.status, headers: parts.headers, body, buffer: BytesMut::new() })
    }

    /// DELETEs a path.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn delete(&self, path: &str) -> anyhow::Result<Reply> {
        let request = Request::builder().method(Method::DELETE).uri(format!("{}{path}", self.base));
        self.whole(request.body(Full::default())?).await
    }

    /// POSTs a body and reads the whole reply.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn post(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> anyhow::Result<Reply> {
        self.whole(self.request(path, headers, body.into())?).await
    }

    /// POSTs a body and reads the reply event by event.
    ///
    /// # Errors
    /// The connection broke before the head.
    pub async fn stream(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> anyhow::Result<Stream> {
        let response = self.http.request(self.request(path, headers, body.into())?).await?;
        let (parts, body) = response.into_parts();
        Ok(Stream { status: parts.status, headers: parts.headers, body, buffer: BytesMut::new() })
    }

    fn request(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Request<Full<Bytes>>> {
        let mut request = Request::builder().method(Method::POST).uri(format!("{}{path}", self.base));
        request = request.header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Ok(request.body(Full::new(body))?)
    }

    async fn whole(&self, request: Request<Full<Bytes>>) -> anyhow::Result<Reply> {
        let (parts, body) = self.http.request(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Reply { status: parts.status, headers: parts.headers, body })
    }
}

impl Reply {
    /// The body as JSON.
    ///
    /// # Errors
    /// It is none.
    pub fn json(&self) -> anyhow::Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| String::from_utf8_lossy(&self.body).into_owned())
    }

    /// The code of an error body.
    #[must_use]
    pub fn code(&self) -> String {
        let json = self.json().unwrap_or_default();
        json.pointer("/error/code").and_then(Value::as_str).unwrap_or_default().to_owned()
    }
}

impl Stream {
    /// The data of the next event; `None` at the end.
    ///
    /// # Errors
    /// The connection broke, or ended within an event.
    pub async fn next(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event = self.buffer.split_to(end + 2);
                let text = std::str::from_utf8(&event)?.trim_end();
                return Ok(Some(text.strip_prefix("data: ").unwrap_or(text).to_owned()));
            }
            match self.body.frame().await {
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                None if self.buffer.is_empty() => return Ok(None),
                None => anyhow::bail!("the stream ended within an event: {:?}", self.buffer),
            }
        }
    }

    /// All events to the end.
    ///
    /// # Errors
    /// As [`Stream::next`].
    pub async fn all(mut self) -> anyhow::Result<Vec<String>> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await? {
            events.push(event);
        }
        Ok(events)
    }
}

/// The text that a chat's or completion's events carry.
#[must_use]
pub fn text_of(events: &[String]) -> String {
    let one = |event: &String| {
        let json: Value = serde_json::from_str(event).ok()?;
        let choice = json.pointer("/choices/0")?;
        let text = choice.pointer("/delta/content").or(choice.get("text"))?;
        text.as_str().map(str::to_owned)
    };
    events.iter().filter_map(one).collect()
}
