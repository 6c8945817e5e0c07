//! An engine or a gateway that is measured through the OpenAI API.

use anyhow::Context as _;
use pointsman_http_client::{Setup, whole};
use pointsman_lab::calibrate::Sample;
use pointsman_workers::tls_problem;
use reqwest::{
    Client, RequestBuilder, Response, StatusCode, Url,
    header::{self, HeaderValue},
};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, json};
use sse::Splitter;
use tokio::time::{Duration, Instant};

/// Maximum size of an answer that is not streamed, bytes.
const MAX_BODY: usize = 8 * 1024 * 1024;
/// Maximum length of the server's text in an error message, characters.
const MAX_TEXT: usize = 300;
/// Maximum time of a question about facts.
const FACTS_TIMEOUT: Duration = Duration::from_secs(10);

/// A server with the OpenAI API.
#[derive(Debug)]
pub(super) struct Target {
    http: Client,
    url: String,
    /// Name of the environment variable with the API key, for messages.
    key_name: String,
}

/// Reason for which a request gave no measurement.
#[derive(Debug, thiserror::Error)]
pub(super) enum TargetError {
    #[error("{0}: not the address of an HTTP server; expected http://HOST:PORT or https://HOST:PORT")]
    Address(String),
    #[error("{0}: cannot be reached: {1}; check the address, and that the server runs")]
    Unreachable(String, String),
    #[error("{0}: answered {1}; set the environment variable {2} to a valid API key")]
    Unauthorized(String, StatusCode, String),
    #[error("{0}: answered {1} to a request with a prompt of token ids: {2}")]
    Status(String, StatusCode, String),
    #[error("{0}: answered without a stream, although `stream` was set: token times cannot be measured")]
    NotStreaming(String),
    #[error("{0}: sent an error within the stream: {1}")]
    InStream(String, String),
    #[error("{0}: sent no usage with token counts, although `stream_options.include_usage` was set")]
    NoUsage(String),
    #[error("{0}: the stream ended without a token")]
    NoToken(String),
    #[error("{0}: the connection failed within the answer: {1}")]
    Broken(String, String),
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<IgnoredAny>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Clone, Copy, Deserialize)]
struct Usage {
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: u32,
    prompt_tokens_details: Option<Details>,
}

#[derive(Clone, Copy, Deserialize)]
struct Details {
    cached_tokens: Option<u32>,
}

/// Times of a stream's tokens.
#[derive(Default)]
struct Seen {
    first: Option<Instant>,
    last: Option<Instant>,
    usage: Option<Usage>,
}

impl Target {
    /// Creates a client for the server at `url`. The value of the environment variable `key_name` goes into
    /// the `Authorization` header.
    pub(super) fn new(url: &str, key_name: &str, mut setup: Setup) -> anyhow::Result<Self> {
        let url = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let parsed = url.parse::<Url>().ok();
        if !parsed.is_some_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host()) {
            return Err(TargetError::Address(url).into());
        }
        if let Some(key) = std::env::var(key_name).ok().filter(|key| !key.is_empty()) {
            let mut value = HeaderValue::try_from(format!("Bearer {key}"))
                .with_context(|| format!("{key_name} has characters that no header may have"))?;
            value.set_sensitive(true);
            setup.headers.insert(header::AUTHORIZATION, value);
        }
        let http = Setup { connect_timeout: FACTS_TIMEOUT, ..setup }.build()?;
        Ok(Self { http, url, key_name: key_name.to_owned() })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Reads a document. Returns `None` when the server has no document at this path.
    pub(super) async fn get(&self, path: &str) -> Result<Option<Vec<u8>>, TargetError> {
        let answer = async {
            let response = self.send(self.http.get(format!("{}{path}", self.url))).await?;
            let status = response.status();
            let body = whole(response, MAX_BODY).await;
            let body = body.map_err(|error| TargetError::Broken(self.url.clone(), error.to_string()))?;
            Ok((status, body))
        };
        let (status, body) = match tokio::time::timeout(FACTS_TIMEOUT, answer).await {
            Ok(answer) => answer?,
            Err(_) => {
                let problem = format!("no answer to GET {path} within {FACTS_TIMEOUT:?}");
                return Err(TargetError::Unreachable(self.url.clone(), problem));
            }
        };
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(TargetError::Unauthorized(self.url.clone(), status, self.key_name.clone()))
            }
            status => Ok(status.is_success().then_some(body)),
        }
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, TargetError> {
        let sent = request.send().await;
        sent.map_err(|error| TargetError::Unreachable(self.url.clone(), with_cause(&error)))
    }

    /// Sends a prompt of token ids and measures the times of its tokens. `start` is time 0 of the sample.
    pub(super) async fn measure(
        &self,
        model: &str,
        prompt: &[u32],
        osl: u32,
        start: Instant,
    ) -> Result<Sample, TargetError> {
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": osl, "ignore_eos": true, "temperature": 0,
            "stream": true, "stream_options": {"include_usage": true},
        });
        let request = self.http.post(format!("{}/v1/completions", self.url));
        let request = request.header(header::CONTENT_TYPE, "application/json").body(body.to_string());
        let sent = Instant::now();
        let response = self.send(request).await?;
        let response = self.checked(response).await?;
        let seen = self.read(response).await?;
        let (Some(first), Some(last)) = (seen.first, seen.last) else {
            return Err(TargetError::NoToken(self.url.clone()));
        };
        let usage = seen.usage.ok_or_else(|| TargetError::NoUsage(self.url.clone()))?;
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        Ok(Sample {
            at_ms: milliseconds(sent - start),
            isl: usage.prompt_tokens,
            cached: usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0),
            osl: usage.completion_tokens.max(1),
            ttft_ms: milliseconds(first - sent),
            e2e_ms: milliseconds(last - sent),
        })
    }

    /// Returns an answer that streams events. Any other answer is an error.
    async fn checked(&self, response: Response) -> Result<Response, TargetError> {
        let status = response.status();
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            return Err(TargetError::Unauthorized(self.url.clone(), status, self.key_name.clone()));
        }
        if !status.is_success() {
            let body = whole(response, MAX_BODY).await.unwrap_or_default();
            return Err(TargetError::Status(self.url.clone(), status, beginning(&body)));
        }
        let content_type = response.headers().get(header::CONTENT_TYPE);
        if !content_type.is_some_and(|value| sse::is_stream(value.as_bytes())) {
            return Err(TargetError::NotStreaming(self.url.clone()));
        }
        Ok(response)
    }

    async fn read(&self, mut response: Response) -> Result<Seen, TargetError> {
        let broken = |problem: String| TargetError::Broken(self.url.clone(), problem);
        let (mut seen, mut splitter) = (Seen::default(), Splitter::default());
        while let Some(data) = response.chunk().await.map_err(|error| broken(with_cause(&error)))? {
            let now = Instant::now();
            splitter.room().extend_from_slice(&data);
            let whole = splitter.whole().map_err(|error| broken(error.to_string()))?;
            let bytes = splitter.first(whole);
            for event in sse::events(bytes).filter_map(|place| bytes.get(place)) {
                self.event(event, now, &mut seen)?;
            }
            splitter.discard(whole);
        }
        Ok(seen)
    }

    fn event(&self, event: &[u8], now: Instant, seen: &mut Seen) -> Result<(), TargetError> {
        let object = sse::object(event);
        if sse::is_done(event) || object.is_empty() {
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_slice(object).map_err(|error| {
            TargetError::Broken(self.url.clone(), format!("an event is not JSON: {error}"))
        })?;
        if let Some(error) = chunk.error.filter(|error| !error.is_null()) {
            return Err(TargetError::InStream(self.url.clone(), beginning(error.to_string().as_bytes())));
        }
        if !chunk.choices.is_empty() {
            seen.first.get_or_insert(now);
            seen.last = Some(now);
        }
        seen.usage = chunk.usage.or(seen.usage);
        Ok(())
    }
}

fn beginning(body: &[u8]) -> String {
    String::from_utf8_lossy(body).chars().take(MAX_TEXT).collect()
}

/// Formats an error with its innermost cause, which says what happened.
fn with_cause(error: &(dyn std::error::Error + 'static)) -> String {
    if let Some(problem) = tls_problem(error) {
        return problem;
    }
    let mut innermost = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    innermost.to_string()
}
