//! Reads the prefill answer of a bootstrap pair, which carries no data, only to learn whether prefill
//! succeeded.

use bytes::Bytes;
use http::{HeaderValue, header};

use crate::{
    openai::sse::{self, Splitter},
    upstream::{self, Body, CallError, LegHeaders, Upstream},
};

/// Sends a prefill request and reads its answer to the end without keeping it.
///
/// # Errors
/// [`CallError`], also for an answer that is not one: then nothing was prefilled, and the decode leg would
/// wait for it until its own timeout.
pub(super) async fn drain_prefill(
    upstream: &Upstream,
    url: &str,
    headers: &LegHeaders,
    body: Bytes,
) -> Result<(), CallError> {
    let response = upstream.head(url, headers, body).await?;
    let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
    let content_type = content_type.as_ref().map(HeaderValue::as_bytes).unwrap_or_default();
    if content_type.starts_with(b"text/event-stream") {
        return drain_events(response.into_body()).await;
    }
    let whole = upstream::collect(response.into_body()).await?;
    let valid =
        content_type.starts_with(b"application/json") && whole.starts_with(b"{") && !sse::look(&whole).error;
    if valid { Ok(()) } else { Err(not_an_answer(&whole)) }
}

async fn drain_events(mut body: Body) -> Result<(), CallError> {
    let (mut splitter, mut done) = (Splitter::default(), false);
    while body.read(splitter.room()).await? {
        let whole = splitter.whole().map_err(|error| CallError::Protocol(error.to_string()))?;
        let events = splitter.first(whole);
        for event in sse::events(events).filter_map(|place| events.get(place)) {
            let seen = sse::look(event);
            if seen.error || !sse::is_event(event) {
                return Err(not_an_answer(event));
            }
            done |= seen.done;
        }
        splitter.pass(whole);
    }
    if done { Ok(()) } else { Err(CallError::Broken("the stream ended before `[DONE]`".to_owned())) }
}

fn not_an_answer(body: &[u8]) -> CallError {
    CallError::Protocol(format!("the prefill answer is not valid: {}", upstream::text(body)))
}
