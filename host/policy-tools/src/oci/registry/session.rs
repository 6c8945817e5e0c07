//! Requests to one repository, with authentication, redirects and errors.

use std::fmt;

use bytes::Bytes;
use reqwest::{
    Method, RequestBuilder, Response, StatusCode, Url,
    header::{AUTHORIZATION, CONTENT_LENGTH, HeaderName, HeaderValue, LOCATION},
};
use serde::Deserialize;

use super::{
    auth::{self, Authorization},
    body::Reader,
    connect::{Connection, shown},
    credentials::Credentials,
    error::{RegistryError, clean},
};
use crate::place::Reference;

/// Longest chain of redirects that is followed.
const MAX_REDIRECTS: usize = 5;

/// Rights that a token must have.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scope {
    Pull,
    PullPush,
}

impl Scope {
    fn actions(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::PullPush => "pull,push",
        }
    }
}

/// A request, which may be sent again after authentication.
pub(super) struct Call {
    method: Method,
    url: Url,
    header: Option<(HeaderName, HeaderValue)>,
    body: Option<Bytes>,
}

impl Call {
    pub(super) fn new(method: Method, url: Url) -> Self {
        Self { method, url, header: None, body: None }
    }

    pub(super) fn with_header(self, name: HeaderName, value: HeaderValue) -> Self {
        Self { header: Some((name, value)), ..self }
    }

    pub(super) fn with_body(self, body: Bytes) -> Self {
        Self { body: Some(body), ..self }
    }

    fn is_read(&self) -> bool {
        matches!(self.method, Method::GET | Method::HEAD)
    }

    /// Returns whether it gives a manifest its tag.
    fn is_tagging(&self) -> bool {
        self.method == Method::PUT && self.url.path().contains("/manifests/")
    }

    /// Returns where the same request is to be sent, if the answer says so.
    fn redirected<'a>(&self, answer: &'a Response) -> Option<&'a HeaderValue> {
        let status = answer.status();
        let keeps_method = [StatusCode::TEMPORARY_REDIRECT, StatusCode::PERMANENT_REDIRECT].contains(&status);
        let moved = if self.is_read() { status.is_redirection() } else { keeps_method };
        answer.headers().get(LOCATION).filter(|_| moved)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, shown(&self.url))
    }
}

/// Requests to one repository.
pub(super) struct Session<'a> {
    connection: Connection,
    reference: &'a Reference,
    scope: Scope,
    credentials: Credentials,
    authorization: Option<Authorization>,
    reader: Reader,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        connection: Connection,
        reference: &'a Reference,
        scope: Scope,
        credentials: Credentials,
        reader: Reader,
    ) -> Self {
        Self { connection, reference, scope, credentials, authorization: None, reader }
    }

    pub(super) fn reader(&self) -> &Reader {
        &self.reader
    }

    /// Returns the URL of something in the repository.
    pub(super) fn url(&self, path: &str) -> Result<Url, RegistryError> {
        let path = format!("/v2/{}/{path}", self.reference.repository);
        self.connection.origin.join(&path).map_err(|error| {
            RegistryError::new(format!("{path} is not the path of a URL: {error}"), "check the reference")
        })
    }

    pub(super) fn manifest_url(&self) -> Result<Url, RegistryError> {
        self.url(&format!("manifests/{}", self.reference.manifest()))
    }

    /// Resolves a URL that the registry names.
    pub(super) fn resolve(&self, base: &Url, location: &HeaderValue) -> Result<Url, RegistryError> {
        let url = location.to_str().ok().and_then(|location| base.join(location).ok());
        let url = url.ok_or_else(|| {
            let location = clean(&String::from_utf8_lossy(location.as_bytes()));
            RegistryError::new(
                format!("the registry sends its client to \"{location}\", which is not a URL"),
                "check that the host is an OCI registry",
            )
        })?;
        self.connection.check(url)
    }

    /// Sends a request; authenticates and sends it again if the registry asks for that.
    pub(super) async fn send(&mut self, call: &Call) -> Result<Response, RegistryError> {
        let answer = self.follow(call).await?;
        if answer.status() != StatusCode::UNAUTHORIZED || !self.connection.is_registry(answer.url()) {
            return Ok(answer);
        }
        let Some(challenge) = auth::Challenge::find(answer.headers()) else {
            return Ok(answer);
        };
        drop(answer);
        let scope = format!("repository:{}:{}", self.reference.repository, self.scope.actions());
        let authorization =
            auth::authorize(&self.connection, &self.reader, challenge, &scope, &self.credentials).await?;
        self.authorization = Some(authorization);
        self.follow(call).await
    }

    async fn follow(&self, call: &Call) -> Result<Response, RegistryError> {
        let mut url = call.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let text = format!("{} {}", call.method, shown(&url));
            let answer = self.reader.send(&text, || self.request(call, &url)).await?;
            let Some(location) = call.redirected(&answer) else { return Ok(answer) };
            let next = self.resolve(&url, location)?;
            // Content for the registry goes to no other host.
            if !call.is_read() && !self.connection.is_registry(&next) {
                return Ok(answer);
            }
            url = next;
        }
        Err(RegistryError::new(
            format!("{call} was redirected more than {MAX_REDIRECTS} times"),
            "check the registry's external URL and its storage",
        ))
    }

    fn request(&self, call: &Call, url: &Url) -> RequestBuilder {
        let mut request = self.connection.client.request(call.method.clone(), url.clone());
        if let Some((name, value)) = &call.header {
            request = request.header(name, value);
        }
        if let Some(body) = &call.body {
            request = request.header(CONTENT_LENGTH, body.len());
            if !body.is_empty() {
                request = request.body(self.reader.upload(body));
            }
        }
        match &self.authorization {
            Some(authorization) if self.connection.is_registry(url) => {
                request.header(AUTHORIZATION, authorization)
            }
            _ => request,
        }
    }

    /// Describes an answer that refuses the request.
    pub(super) async fn refused(&self, call: &Call, answer: Response) -> RegistryError {
        let status = answer.status();
        let elsewhere = call.redirected(&answer).and_then(|to| answer.url().join(to.to_str().ok()?).ok());
        let text = reason(&self.reader.read_error(answer).await);
        let advice = match elsewhere {
            Some(url) => format!(
                "the registry sends its clients to {}: name that host",
                clean(&url.origin().ascii_serialization())
            ),
            None => self.advice(call, status, &text),
        };
        let text = if text.is_empty() { text } else { format!(": {text}") };
        RegistryError::new(format!("{call} was answered with {status}{text}"), advice)
    }

    fn advice(&self, call: &Call, status: StatusCode, text: &str) -> String {
        let host = &self.reference.registry;
        let is_tag_fixed = matches!(status.as_u16(), 405 | 409 | 412) || text.contains("immutable");
        match status.as_u16() {
            _ if call.is_tagging() && is_tag_fixed => {
                "if the tag exists and the registry does not let it move, push another tag".to_owned()
            }
            400 if self.connection.origin.scheme() == "http" => {
                "check that the host is an OCI registry; if it speaks TLS, use its name or --tls-ca"
                    .to_owned()
            }
            401 | 403 => format!(
                "log in with `docker login {host}` as a user who may {} this repository; {}",
                self.scope.actions().replace(',', " and "),
                self.credentials.source()
            ),
            404 => "check the repository and the tag".to_owned(),
            413 => "raise the limit on uploads of the registry or of the proxy before it".to_owned(),
            429 => "wait, and try again".to_owned(),
            500.. => "try again later, and look at the registry's log".to_owned(),
            _ => "check that the host is an OCI registry".to_owned(),
        }
    }
}

/// Returns the reason in the body of an error: `CODE: message` of the distribution specification, or the
/// text.
fn reason(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Envelope {
        errors: Vec<Reason>,
    }
    #[derive(Deserialize)]
    struct Reason {
        code: String,
        #[serde(default)]
        message: String,
    }
    match serde_json::from_slice::<Envelope>(body).map(|envelope| envelope.errors) {
        Ok(errors) => {
            let reasons = errors.iter().take(3).map(|Reason { code, message }| format!("{code}: {message}"));
            clean(&reasons.collect::<Vec<_>>().join(", "))
        }
        Err(_) => clean(&String::from_utf8_lossy(body)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_an_error_is_its_code_and_message_or_its_text() {
        let body = br#"{"errors":[{"code":"DENIED","message":"no\n","detail":null},{"code":"X"}]}"#;
        assert_eq!(reason(body), "DENIED: no\\n, X:");
        assert_eq!(reason(b"<html>busy</html>\n"), "<html>busy</html>");
        assert_eq!(reason(b""), "");
    }
}
