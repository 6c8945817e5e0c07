//! HTTP client for tests: reads whole replies, or server-sent events one by one.

use std::net::SocketAddr;

use anyhow::Context as _;
use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use http_body_util::BodyExt as _;
use pointsman_rig::client::{Client as Rig, Streaming};
use serde_json::Value;

const JSON: (&str, &str) = ("content-type", "application/json");

/// Client of one address; it reuses connections.
#[derive(Clone, Debug)]
pub struct Client(Rig);

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
    events: Streaming,
}

impl Client {
    /// Creates a client of `address`.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        Self(Rig::new(&address.to_string()))
    }

    /// Sends GET.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn get(&self, path: &str) -> anyhow::Result<Reply> {
        self.whole(Method::GET, path, &[], Bytes::new()).await
    }

    /// Sends GET with headers.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> anyhow::Result<Reply> {
        self.whole(Method::GET, path, &with(JSON, headers), Bytes::new()).await
    }

    /// Sends GET and returns the reply as a stream of events.
    ///
    /// # Errors
    /// The connection broke before the head.
    pub async fn events(&self, path: &str, headers: &[(&str, &str)]) -> anyhow::Result<Stream> {
        self.begun(Method::GET, path, headers, Bytes::new()).await
    }

    /// Sends DELETE.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn delete(&self, path: &str) -> anyhow::Result<Reply> {
        self.whole(Method::DELETE, path, &[], Bytes::new()).await
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
        self.whole(Method::POST, path, &with(JSON, headers), body.into()).await
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
        self.whole(Method::POST, path, &with(("content-type", content_type), headers), body.into()).await
    }

    /// Sends a request without a body and reads the whole reply.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> anyhow::Result<Reply> {
        self.whole(method.parse()?, path, &with(JSON, headers), Bytes::new()).await
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
        self.whole(Method::PUT, path, &with(JSON, headers), body.into()).await
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
        self.begun(Method::POST, path, headers, body.into()).await
    }

    async fn begun(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Stream> {
        let events = Streaming::from(self.0.send(method, path, headers, body).await?);
        Ok(Stream { status: events.status, headers: events.headers.clone(), events })
    }

    async fn whole(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Reply> {
        let (parts, body) = self.0.send_with(method, path, headers, body).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Reply { status: parts.status, headers: parts.headers, body })
    }
}

fn with<'a>(one: (&'a str, &'a str), headers: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [&[one], headers].concat()
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
        let event = self.events.next().await?;
        Ok(event.map(|event| event.strip_prefix("data: ").map_or(event.clone(), str::to_owned)))
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
