//! HTTP client for tests: reads whole replies, or server-sent events one by one.

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

/// Client of one address; it reuses connections.
#[derive(Clone, Debug)]
pub struct Client {
    http: Legacy<HttpConnector, Full<Bytes>>,
    base: String,
}

/// A reply that was read to its end.
#[derive(Clone, Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: StatusCode,
    /// Response headers.
    pub headers: HeaderMap,
    /// Response body.
    pub body: Bytes,
}

/// A reply that is read event by event. Dropping it closes the connection.
#[derive(Debug)]
pub struct Stream {
    /// HTTP status.
    pub status: StatusCode,
    /// Response headers.
    pub headers: HeaderMap,
    body: Incoming,
    buffer: BytesMut,
}

impl Client {
    /// Creates a client of `address`.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self {
            http: Legacy::builder(TokioExecutor::new()).build(connector),
            base: format!("http://{address}"),
        }
    }

    /// Sends GET.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn get(&self, path: &str) -> anyhow::Result<Reply> {
        let request = Request::builder().method(Method::GET).uri(format!("{}{path}", self.base));
        self.whole(request.body(Full::default())?).await
    }

    /// Sends GET with headers.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> anyhow::Result<Reply> {
        let mut request = self.request(path, headers, Bytes::new())?;
        *request.method_mut() = Method::GET;
        self.whole(request).await
    }

    /// Sends GET and returns the reply as a stream of events.
    ///
    /// # Errors
    /// The connection broke before the head.
    pub async fn events(&self, path: &str, headers: &[(&str, &str)]) -> anyhow::Result<Stream> {
        let mut request = self.request(path, headers, Bytes::new())?;
        *request.method_mut() = Method::GET;
        let (parts, body) = self.http.request(request).await?.into_parts();
        Ok(Stream { status: parts.status, headers: parts.headers, body, buffer: BytesMut::new() })
    }

    /// Sends DELETE.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn delete(&self, path: &str) -> anyhow::Result<Reply> {
        let request = Request::builder().method(Method::DELETE).uri(format!("{}{path}", self.base));
        self.whole(request.body(Full::default())?).await
    }

    /// Sends POST and reads the whole reply.
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

    /// Sends POST with a content type and reads the whole reply.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn post_as(
        &self,
        content_type: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> anyhow::Result<Reply> {
        let mut request = self.request(path, headers, body.into())?;
        request.headers_mut().insert("content-type", content_type.parse()?);
        self.whole(request).await
    }

    /// Sends a request without a body and reads the whole reply.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> anyhow::Result<Reply> {
        let mut request = self.request(path, headers, Bytes::new())?;
        *request.method_mut() = method.parse()?;
        self.whole(request).await
    }

    /// Sends PUT and reads the whole reply.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn put(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> anyhow::Result<Reply> {
        let mut request = self.request(path, headers, body.into())?;
        *request.method_mut() = Method::PUT;
        self.whole(request).await
    }

    /// Sends POST and returns the reply as a stream of events.
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
    /// Parses the body as JSON.
    ///
    /// # Errors
    /// The body is not JSON; the error quotes it.
    pub fn json(&self) -> anyhow::Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| String::from_utf8_lossy(&self.body).into_owned())
    }

    /// Returns `error.code` of the body, or an empty string.
    #[must_use]
    pub fn code(&self) -> String {
        let json = self.json().unwrap_or_default();
        json.pointer("/error/code").and_then(Value::as_str).unwrap_or_default().to_owned()
    }
}

impl Stream {
    /// Returns the data of the next event, or `None` at the end of the stream.
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

    /// Reads all events to the end of the stream.
    ///
    /// # Errors
    /// Same as [`Stream::next`].
    pub async fn all(mut self) -> anyhow::Result<Vec<String>> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await? {
            events.push(event);
        }
        Ok(events)
    }
}

/// Concatenates the text of a chat's or completion's events.
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
