//! Reads the prefill answer of a bootstrap pair, which carries no handoff, to learn whether prefill
//! succeeded and how much of the prompt was cached.

use std::time::Duration;

use http::{HeaderValue, Response, header};

use super::first_event::{begins_as_stream, may_be_json};
use crate::{
    connectors::{ended_with, failed_end},
    openai::{
        generate,
        request::Endpoint,
        seen,
        sse::{self, Splitter},
    },
    upstream::{self, Body, CallError, PauseLimits, Silence},
};

/// How long the end of a body may take after the end mark.
const END_GRACE: Duration = Duration::from_millis(200);

/// Reads a prefill answer to its end without keeping it. `limits` are those of each pause of the engine.
/// Returns the cached prompt tokens that a whole answer reports.
///
/// # Errors
/// [`CallError`], also for an answer that is not one: then nothing was prefilled, and the decode leg would
/// wait for it until its own timeout.
pub(super) async fn drain_prefill(
    response: Response<Body>,
    endpoint: Endpoint,
    limits: PauseLimits,
) -> Result<Option<u32>, CallError> {
    let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
    let content_type = content_type.as_ref().map(HeaderValue::as_bytes).unwrap_or_default();
    let mut body = response.into_body();
    let silence = Silence { what: "prefill answer", key: "event_idle", limit: limits.idle };
    if sse::is_stream(content_type) || upstream::with_time_limit(silence, begins_as_stream(&mut body)).await?
    {
        return drain_events(body, endpoint, limits).await.map(|()| None);
    }
    let whole = upstream::collect(body, Some(limits)).await?;
    let is_generate = endpoint == Endpoint::Generate;
    if is_generate && generate::whole(1, &whole).error || !is_generate && sse::look(&whole).error {
        return Err(CallError::of_error_body(&whole));
    }
    let begin = whole.trim_ascii_start().first();
    let is_answer = begin == Some(&b'{') || is_generate && begin == Some(&b'[');
    if !may_be_json(content_type) || !is_answer {
        return Err(not_an_answer(&whole));
    }
    if let Some(end) = end_of(endpoint, &whole) {
        return Err(CallError::Protocol(ended_with(&end)));
    }
    Ok(seen::in_whole_answer(false, &whole).usage.and_then(|usage| usage.cached_tokens))
}

/// Returns the finish reason of a prefill that its engine gave up.
fn end_of(endpoint: Endpoint, json: &[u8]) -> Option<String> {
    if endpoint == Endpoint::Generate { generate::failed_end(json) } else { failed_end(json) }
}

/// Reads events up to the end mark. The rest of the body does not matter.
async fn drain_events(mut body: Body, endpoint: Endpoint, limits: PauseLimits) -> Result<(), CallError> {
    let (mut splitter, mut finished) = (Splitter::default(), false);
    while upstream::read_within(&mut body, splitter.room(), Some(limits)).await? {
        let whole = splitter.whole().map_err(|error| CallError::Protocol(error.to_string()))?;
        let events = splitter.first(whole);
        for event in sse::events(events).filter_map(|place| events.get(place)) {
            let seen = if endpoint == Endpoint::Generate {
                seen::event(endpoint.format(), event)
            } else {
                sse::look(event)
            };
            if seen.error {
                return Err(CallError::of_error_body(sse::object(event)));
            }
            if !sse::is_event(event) {
                return Err(not_an_answer(event));
            }
            if let Some(end) = end_of(endpoint, sse::object(event)).filter(|_| seen.finish) {
                return Err(CallError::Protocol(ended_with(&end)));
            }
            finished |= seen.finish;
            if seen.done {
                // Most engines end the body at once; then the connection can serve another call.
                let _ = tokio::time::timeout(END_GRACE, body.read(&mut Vec::new())).await;
                return Ok(());
            }
        }
        splitter.discard(whole);
    }
    // The last blank line, or the end mark, may be missing.
    if finished || sse::is_done(splitter.first(splitter.rest())) {
        return Ok(());
    }
    Err(CallError::Broken("the stream ended before `[DONE]`".to_owned()))
}

fn not_an_answer(body: &[u8]) -> CallError {
    CallError::Protocol(format!("the prefill answer is not valid: {}", upstream::text(body)))
}
