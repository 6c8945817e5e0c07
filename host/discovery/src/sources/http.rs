//! The HTTP client of sources: connections with limits of time, bodies with limits of size, lines of a
//! stream.

use std::{path::PathBuf, time::Duration};

use reqwest::{Certificate, Client, Identity, RequestBuilder, Response, StatusCode, redirect::Policy};

/// Time limit for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of TCP keepalive probes, which end a connection whose other end is gone.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// First pause after a failure.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause after failures.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Longest part of an error's body in a message, bytes.
const MAX_SHOWN: usize = 300;

/// Files of TLS. Without an authority, those of the system are trusted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Authorities that sign the server's certificate (PEM).
    pub ca: Option<PathBuf>,
    /// Certificate and key of this client (PEM).
    pub client: Option<(PathBuf, PathBuf)>,
}

/// Pauses that double with each failure in a row.
#[derive(Debug)]
pub(super) struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Self(FIRST_PAUSE)
    }
}

impl Pauses {
    /// Waits after a failure.
    pub(super) async fn wait(&mut self) {
        let pause = self.0;
        self.0 = (pause * 2).min(MAX_PAUSE);
        tokio::time::sleep(pause).await;
    }
}

/// Creates a client. It follows no redirect and uses no proxy.
///
/// # Errors
/// A file cannot be read or is not PEM.
pub(super) async fn client(tls: &TlsFiles, plain: bool) -> Result<Client, String> {
    // Only the first call installs the provider; whichever is installed serves.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let read = async |path: &PathBuf| {
        tokio::fs::read(path).await.map_err(|error| format!("reading {}: {error}", path.display()))
    };
    let mut builder = Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_keepalive(KEEPALIVE)
        .redirect(Policy::none())
        .referer(false)
        .no_proxy()
        .user_agent(concat!("pointsman/", env!("CARGO_PKG_VERSION")));
    if let Some(path) = &tls.ca {
        let roots = Certificate::from_pem_bundle(&read(path).await?)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        builder = builder.tls_certs_only(roots);
    } else if plain {
        builder = builder.tls_certs_only([]);
    }
    if let Some((certificate, key)) = &tls.client {
        let mut pem = read(key).await?;
        pem.push(b'\n');
        pem.extend(read(certificate).await?);
        let identity =
            Identity::from_pem(&pem).map_err(|error| format!("{}: {error}", certificate.display()))?;
        builder = builder.identity(identity);
    }
    builder.build().map_err(|error| format!("cannot start the HTTP client: {}", chain(&error)))
}

/// Sends a request and returns the response's head.
///
/// # Errors
/// No answer within `limit`.
pub(super) async fn send(request: RequestBuilder, limit: Duration) -> Result<Response, String> {
    match tokio::time::timeout(limit, request.send()).await {
        Ok(sent) => sent.map_err(|error| chain(&error)),
        Err(_) => Err(format!("no answer within {limit:?}")),
    }
}

/// Reads a body of at most `most` bytes.
///
/// # Errors
/// It is longer, or not complete within `limit`.
pub(super) async fn body(response: Response, most: usize, limit: Duration) -> Result<Vec<u8>, String> {
    let mut lines = Lines::new(response, most);
    let read = async {
        while lines.more().await? {}
        Ok(std::mem::take(&mut lines.buffer))
    };
    tokio::time::timeout(limit, read)
        .await
        .unwrap_or_else(|_| Err(format!("no whole answer within {limit:?}")))
}

/// Describes an answer that is not a success.
pub(super) async fn refusal(response: Response, limit: Duration) -> String {
    let (status, url) = (response.status(), response.url().path().to_owned());
    let body = body(response, 64 * 1024, limit).await.unwrap_or_default();
    let text = String::from_utf8_lossy(body.get(..MAX_SHOWN).unwrap_or(&body)).replace('\n', " ");
    let advice = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "; check the credentials and the permissions",
        _ => "",
    };
    format!("{url}: status {}{advice}: {text}", status.as_u16())
}

/// The lines of a response that does not end.
#[derive(Debug)]
pub(super) struct Lines {
    response: Response,
    buffer: Vec<u8>,
    /// Number of bytes of the buffer that were returned.
    used: usize,
    most: usize,
}

impl Lines {
    /// Reads lines of at most `most` bytes.
    pub(super) fn new(response: Response, most: usize) -> Self {
        Self { response, buffer: Vec::new(), used: 0, most }
    }

    /// Returns the next line that has arrived; `None`: more has to be read.
    pub(super) fn next(&mut self) -> Option<&[u8]> {
        let rest = self.buffer.get(self.used..)?;
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        let start = self.used;
        self.used += end + 1;
        self.buffer.get(start..start + end)
    }

    /// Reads more. Returns whether there is more.
    ///
    /// # Errors
    /// The connection broke, or a line is too long.
    pub(super) async fn more(&mut self) -> Result<bool, String> {
        self.buffer.drain(..self.used);
        self.used = 0;
        let Some(chunk) = self.response.chunk().await.map_err(|error| chain(&error))? else {
            return Ok(false);
        };
        if self.buffer.len() + chunk.len() > self.most {
            return Err(format!("the answer has more than {} bytes", self.most));
        }
        self.buffer.extend_from_slice(&chunk);
        Ok(true)
    }
}

/// An error with its causes, as `anyhow` writes it, which this crate needs for nothing else.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}
