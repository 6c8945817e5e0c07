//! Bodies of requests and answers: with limits, deadlines and progress.

use std::{convert::Infallible, pin::pin, time::Duration};

use bytes::Bytes;
use futures_util::stream;
use indicatif::ProgressBar;
use reqwest::{Body, Response};
use tokio::time::Instant;

use super::error::RegistryError;

mod retry;

/// Bytes of an upload that are handed to the connection at once.
const CHUNK_BYTES: usize = 64 << 10;
/// Largest buffer that is allocated because an answer announces its length.
const MAX_ANNOUNCED_BYTES: u64 = 1 << 20;
/// Largest body of an error that is read.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// Reads and writes bodies, and counts their bytes.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    /// Longest time without progress.
    idle: Duration,
    /// Time at which the whole transfer has to end.
    deadline: Instant,
    progress: ProgressBar,
}

impl Reader {
    pub(super) fn new(idle: Duration, deadline: Instant, progress: ProgressBar) -> Self {
        Self { idle, deadline, progress }
    }

    /// Counts bytes that need not be transferred.
    pub(super) fn skip(&self, bytes: u64) {
        self.progress.inc(bytes);
    }

    /// Returns the body of an upload.
    pub(super) fn upload(&self, content: &Bytes) -> Body {
        let (progress, content) = (self.progress.clone(), content.clone());
        let chunks = (0..content.len()).step_by(CHUNK_BYTES).map(move |start| {
            let chunk = content.slice(start..content.len().min(start + CHUNK_BYTES));
            progress.inc(chunk.len() as u64);
            Ok::<_, Infallible>(chunk)
        });
        Body::wrap_stream(stream::iter(chunks))
    }

    /// Waits for the head of an answer as long as the upload before it makes progress.
    async fn head(
        &self,
        call: &str,
        answer: impl Future<Output = reqwest::Result<Response>>,
    ) -> Result<Response, RegistryError> {
        let mut answer = pin!(answer);
        loop {
            let before = self.progress.position();
            match tokio::time::timeout(self.idle, &mut answer).await {
                Ok(answer) => return answer.map_err(|error| RegistryError::transport(call, error)),
                Err(_) if self.progress.position() == before => return Err(self.late(call)),
                Err(_) => {}
            }
        }
    }

    /// Reads the body of an answer, which must not be larger than the limit.
    pub(super) async fn read(
        &self,
        mut answer: Response,
        call: &str,
        limit: u64,
    ) -> Result<Vec<u8>, RegistryError> {
        let too_large = |what: String| {
            let advice = "check that the host is the registry that you mean, and push the policy again";
            RegistryError::new(format!("the answer to {call} {what}; the limit is {limit}"), advice)
        };
        let announced = answer.content_length().unwrap_or_default();
        if announced > limit {
            return Err(too_large(format!("announces {announced} bytes")));
        }
        let mut content =
            Vec::with_capacity(usize::try_from(announced.min(MAX_ANNOUNCED_BYTES)).unwrap_or(0));
        loop {
            let chunk = tokio::time::timeout(self.idle, answer.chunk()).await;
            let chunk = chunk.map_err(|_| self.late(call))?;
            let Some(chunk) = chunk.map_err(|error| RegistryError::transport(call, error))? else {
                return Ok(content);
            };
            if (content.len() as u64).saturating_add(chunk.len() as u64) > limit {
                return Err(too_large("is larger than expected".to_owned()));
            }
            content.extend_from_slice(&chunk);
            self.progress.inc(chunk.len() as u64);
        }
    }

    /// Reads the beginning of an error's body.
    pub(super) async fn read_error(&self, mut answer: Response) -> Vec<u8> {
        let mut content = Vec::new();
        while let Ok(Ok(Some(chunk))) = tokio::time::timeout(self.idle, answer.chunk()).await {
            let rest = MAX_ERROR_BYTES.saturating_sub(content.len());
            content.extend_from_slice(chunk.get(..rest).unwrap_or(&chunk));
            if content.len() >= MAX_ERROR_BYTES {
                break;
            }
        }
        content
    }

    fn late(&self, call: &str) -> RegistryError {
        let problem = format!("{call} made no progress for {} s", self.idle.as_secs());
        RegistryError::new(problem, "check the network and the registry, and try again")
    }
}
