//! Requests that are sent again because the registry was busy.

use std::time::Duration;

use reqwest::{
    RequestBuilder, Response, StatusCode,
    header::{HeaderMap, RETRY_AFTER},
};
use tokio::time::Instant;

use super::{super::error::RegistryError, Reader};

/// Times that a request is sent.
const MAX_TRIES: usize = 3;
/// Pause before the second try, unless the answer names one. The next pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Answers of a registry, or of a proxy before it, that is busy or restarts.
const BUSY: [StatusCode; 4] = [
    StatusCode::TOO_MANY_REQUESTS,
    StatusCode::BAD_GATEWAY,
    StatusCode::SERVICE_UNAVAILABLE,
    StatusCode::GATEWAY_TIMEOUT,
];

impl Reader {
    /// Sends a request, and sends it again while the answer is that of a busy registry. Returns such an
    /// answer after the last try, and when the pause would be too long.
    pub(in super::super) async fn send(
        &self,
        call: &str,
        request: impl Fn() -> RequestBuilder,
    ) -> Result<Response, RegistryError> {
        let (before, mut pause) = (self.progress.position(), FIRST_PAUSE);
        for _ in 1..MAX_TRIES {
            let answer = self.head(call, request().send()).await?;
            let wait = asked_pause(answer.headers()).unwrap_or(pause);
            let left = self.deadline.saturating_duration_since(Instant::now());
            if !BUSY.contains(&answer.status()) || wait >= left.min(self.idle) {
                return Ok(answer);
            }
            drop(answer);
            self.progress.set_position(before);
            tokio::time::sleep(wait).await;
            pause *= 2;
        }
        self.head(call, request().send()).await
    }
}

/// Returns the pause that an answer asks for in seconds.
fn asked_pause(headers: &HeaderMap) -> Option<Duration> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}
