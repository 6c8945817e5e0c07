//! Reads the prefill answer of a bootstrap pair, which carries no handoff, to learn whether prefill
//! succeeded and how much of the prompt was cached.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use pointsman_workers::LogLimit;

use super::first_event::{begins_as_stream, error_in, may_be_json};
use crate::{
    budget::Share,
    openai::{
        generate,
        request::Endpoint,
        results::missing_list,
        seen,
        sse::{self, Seen, Splitter},
    },
    upstream::{self, Body, CallError, PauseLimits, Silence},
};

/// How long the end of a body may take after the end mark.
const END_GRACE: Duration = Duration::from_millis(200);

/// Reads a prefill answer to its end. `limits` are those of each pause of the engine. Returns an answer that
/// is not a stream. Large answers and events count in `held`.
///
/// # Errors
/// [`CallError`], also for an answer that is not one: then nothing was prefilled, and the decode leg would
/// wait for it until its own timeout.
pub(crate) async fn drain_prefill(
    response: Response<Body>,
    endpoint: Endpoint,
    limits: PauseLimits,
    held: &mut Share,
) -> Result<Option<Bytes>, CallError> {
    let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
    let content_type = content_type.as_ref().map(HeaderValue::as_bytes).unwrap_or_default();
    let mut body = response.into_body();
    let silence = Silence { what: "prefill answer", key: "event_idle", limit: limits.idle };
    if sse::is_stream(content_type) || upstream::with_time_limit(silence, begins_as_stream(&mut body)).await?
    {
        return drain_events(body, endpoint, limits, held).await.map(|()| None);
    }
    let whole = upstream::collect(body, Some(limits), Some(held)).await?;
    let is_generate = endpoint == Endpoint::Generate;
    let seen = match endpoint {
        Endpoint::Generate => generate::whole(1, &whole),
        Endpoint::Messages => seen::in_whole_answer(false, &whole),
        _ => sse::look(&whole),
    };
    if let Some(error) = error_of(endpoint, &seen, &whole, &whole) {
        return Err(error);
    }
    let body = sse::without_mark(&whole).trim_ascii_start();
    let begin = body.first();
    let is_value = begin == Some(&b'{') || is_generate && begin == Some(&b'[');
    let is_whole = match missing_list(endpoint, body) {
        Ok(missing) => missing.is_none(),
        // Python writes `NaN`.
        Err(_) => sse::is_closed(body),
    };
    if !may_be_json(content_type) || !is_value || !is_whole {
        return Err(not_an_answer(&whole));
    }
    Ok(Some(whole))
}

/// Returns the error that an answer to a prefill is, or an event of one. An output of `/generate` that
/// somebody aborted, and a response that failed, are answers for a client, but nothing was prefilled.
fn error_of(endpoint: Endpoint, seen: &Seen, answer: &[u8], json: &[u8]) -> Option<CallError> {
    let aborted = || endpoint == Endpoint::Generate && generate::was_aborted(json);
    let failed = || endpoint == Endpoint::Responses && seen::failed_response(json).is_some();
    let gave_up = || if failed() { Some("failed") } else { aborted().then_some("abort") };
    error_in(seen, answer).or_else(|| gave_up().map(CallError::GaveUp))
}

/// Reads events up to the end mark. The rest of the body does not matter.
async fn drain_events(
    mut body: Body,
    endpoint: Endpoint,
    limits: PauseLimits,
    held: &mut Share,
) -> Result<(), CallError> {
    let (mut splitter, mut finished) = (Splitter::default(), false);
    let format = endpoint.format();
    while upstream::read_within(&mut body, splitter.room(), Some(limits)).await? {
        let whole = splitter.whole().map_err(|error| CallError::Protocol(error.to_string()))?;
        let events = splitter.first(whole);
        for event in sse::events(events).filter_map(|place| events.get(place)) {
            let seen = seen::event(format, event);
            if let Some(error) = error_of(endpoint, &seen, event, sse::object(event)) {
                return Err(error);
            }
            if !sse::is_event(event) {
                return Err(not_an_answer(event));
            }
            finished |= seen.finish;
            if seen.done {
                // Most engines end the body at once; then the connection can serve another call.
                let _ = tokio::time::timeout(END_GRACE, body.read(&mut Vec::new())).await;
                return Ok(());
            }
        }
        splitter.discard(whole);
        let buffered = splitter.room().capacity();
        upstream::wait_for_room(&mut body, held, |held| held.hold_events(buffered)).await?;
    }
    // The last blank line, or the end mark, may be missing.
    if finished || sse::is_done(splitter.first(splitter.rest())) {
        return Ok(());
    }
    Err(CallError::Broken("the stream ended before `[DONE]`".to_owned()))
}

/// Returns the error of bytes that are not an answer. They may be output for the client or its handoff, so
/// only the log has them.
fn not_an_answer(body: &[u8]) -> CallError {
    static LINES: LogLimit = LogLimit::new(Duration::from_secs(1));
    if let Some(suppressed) = LINES.due() {
        tracing::warn!(answer = upstream::text(body), suppressed, "prefill answer is not valid");
    }
    CallError::Protocol(format!("the prefill answer is not valid: {} bytes, which the log has", body.len()))
}
