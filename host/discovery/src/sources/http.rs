//! The HTTP client of sources: connections with limits of time, bodies with limits of size, lines of a
//! stream.

use std::{path::PathBuf, time::Duration};

use pointsman_http_client::{Pem, Roots, Setup, SetupError, whole, with_causes};
use reqwest::{Client, RequestBuilder, Response, StatusCode, header::RETRY_AFTER};
use tokio::time::Instant;

use super::blocking::BlockingCall;

/// First pause after a failure.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause after failures.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Longest pause that a server may ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);
/// A watch that lasted this long stood.
const STEADY: Duration = Duration::from_secs(5);
/// Largest file with a token or a password, bytes.
pub(super) const MAX_TOKEN: u64 = 64 * 1024;
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

/// Pauses that double while no watch stands. A list that succeeds does not shorten them: a server may refuse
/// every watch, and whole lists are expensive for it.
#[derive(Debug)]
pub(super) struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Self(FIRST_PAUSE)
    }
}

impl Pauses {
    /// Waits before the next request, at least as long as the server asked for.
    pub(super) async fn wait(&mut self, asked: Option<Duration>) {
        tokio::time::sleep(self.next(asked)).await;
    }

    fn next(&mut self, asked: Option<Duration>) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(MAX_PAUSE);
        pause.max(asked.unwrap_or_default().min(MAX_RETRY_AFTER))
    }

    /// Notes a watch that began at `begun` and has ended. Pauses begin anew if it stood.
    pub(super) fn watched(&mut self, begun: Instant, had_events: bool) {
        if had_events || begun.elapsed() >= STEADY {
            *self = Self::default();
        }
    }
}

/// Why a source cannot be read.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) problem: String,
    /// How long the server asks to wait.
    pub(super) retry_after: Option<Duration>,
}

impl From<String> for Failure {
    fn from(problem: String) -> Self {
        Self { problem, retry_after: None }
    }
}

/// Creates clients.
#[derive(Debug, Default)]
pub(super) struct Clients(BlockingCall<Result<Client, SetupError>>);

impl Clients {
    /// Creates a client for `url`, with the certificates that the files have now.
    ///
    /// # Errors
    /// A file cannot be read within `limit`, or is not PEM.
    pub(super) async fn make(&self, tls: &TlsFiles, url: &str, limit: Duration) -> Result<Client, String> {
        let (tls, url) = (tls.clone(), url.to_owned());
        let client = self.0.run(limit, move || client(&tls, &url)).await;
        client
            .map_err(|problem| format!("reading certificates: {problem}"))?
            .map_err(|error| error.to_string())
    }
}

pub(super) fn client(tls: &TlsFiles, url: &str) -> Result<Client, SetupError> {
    let read = |path: &PathBuf| Pem::read(path.display().to_string(), path);
    let roots = match &tls.ca {
        Some(path) => Roots::Only(read(path)?),
        None => Roots::of(url),
    };
    let identity = match &tls.client {
        Some((certificate, key)) => Some((read(certificate)?, read(key)?)),
        None => None,
    };
    Setup { roots, identity, ..Setup::default() }.build()
}

/// Sends a request and returns the response's head.
///
/// # Errors
/// No answer within `limit`.
pub(super) async fn send(request: RequestBuilder, limit: Duration) -> Result<Response, String> {
    match tokio::time::timeout(limit, request.send()).await {
        Ok(sent) => sent.map_err(|error| with_causes(&error)),
        Err(_) => Err(format!("no answer within {limit:?}")),
    }
}

/// Reads a body of at most `most` bytes.
///
/// # Errors
/// It is longer, or not complete within `limit`.
pub(super) async fn body(response: Response, most: usize, limit: Duration) -> Result<Vec<u8>, String> {
    match tokio::time::timeout(limit, whole(response, most)).await {
        Ok(body) => body.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no whole answer within {limit:?}")),
    }
}

/// Describes an answer that is not a success.
pub(super) async fn refusal(response: Response, limit: Duration) -> Failure {
    let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    let (status, url) = (response.status(), response.url().path().to_owned());
    let body = body(response, 64 * 1024, limit).await.unwrap_or_default();
    let text = String::from_utf8_lossy(body.get(..MAX_SHOWN).unwrap_or(&body)).replace('\n', " ");
    let advice = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "; check the credentials and the permissions",
        _ => "",
    };
    let problem = format!("{url}: status {}{advice}: {text}", status.as_u16());
    Failure { problem, retry_after: retry_after.map(Duration::from_secs) }
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
    pub(super) async fn read_more(&mut self) -> Result<bool, String> {
        self.buffer.drain(..self.used);
        self.used = 0;
        let Some(chunk) = self.response.chunk().await.map_err(|error| with_causes(&error))? else {
            return Ok(false);
        };
        if self.buffer.len() + chunk.len() > self.most {
            return Err(format!("the answer has more than {} bytes", self.most));
        }
        self.buffer.extend_from_slice(&chunk);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn p3_pauses_grow_until_a_watch_stood_and_are_as_long_as_asked() {
        let mut pauses = Pauses::default();
        let begun = Instant::now();
        // P3.4
        let first = pauses.next(None);
        for _ in 0..10 {
            pauses.watched(begun, false);
            pauses.next(None);
        }
        assert_eq!((first, pauses.next(None)), (FIRST_PAUSE, MAX_PAUSE));
        // P3.5
        assert_eq!(pauses.next(Some(Duration::from_secs(20))), Duration::from_secs(20));
        assert_eq!(pauses.next(Some(Duration::MAX)), MAX_RETRY_AFTER);
        // P3.4
        pauses.watched(begun, true);
        assert_eq!(pauses.next(Some(Duration::ZERO)), FIRST_PAUSE);
        tokio::time::advance(STEADY).await;
        pauses.watched(begun, false);
        assert_eq!(pauses.next(None), FIRST_PAUSE);
    }
}
