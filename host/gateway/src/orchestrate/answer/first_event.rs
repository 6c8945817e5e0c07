//! The beginning of an answer to a request for a stream: whether it is one, and whether its first event is an
//! error, which can still have a status of its own, or be tried elsewhere.

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use pointsman_orchestration::Event;

use crate::{
    budget::Share,
    openai::{
        endpoint::{Endpoint, Format},
        request::Request,
        responses::is_in_background,
        seen,
        sse::{self, Seen},
    },
    orchestrate::{Drive, failure::refusals::Refusals},
    upstream::{self, Body, CallError, PauseLimits, Silence},
};

/// What the head of an answer begins.
pub(crate) enum Head {
    /// A stream, which is passed on to the client.
    Stream(Response<Body>),
    /// A stream whose first event is an error, or which broke before its first event; or a whole answer.
    Over(Event),
    /// An answer that does not say that it is a stream.
    NoStream(Response<Body>),
}

impl Drive {
    /// Checks the head of a stream, and its first event if that came with the head.
    pub(crate) fn take_head(&mut self, mut head: Response<Body>) -> Head {
        let is_stream = sse::is_stream(content_type(&head));
        // Audio has no type in common. An error about it is JSON.
        let is_audio = self.request.endpoint == Endpoint::Speech && !is_json(content_type(&head));
        if !is_stream && !is_audio {
            return Head::NoStream(head);
        }
        let passes_bytes = self.request.endpoint.streams_bytes();
        let begin = sse::without_mark(head.body_mut().peek());
        if !passes_bytes && first_events(sse::whole_events(begin)).next().is_some_and(is_garbage) {
            return Head::Over(self.answer_failed(not_an_event()));
        }
        let first_event = sse::first_event(begin).filter(|_| !passes_bytes);
        let has_event = first_event.is_some();
        let whole = first_event.filter(|event| event.ends_with(b"\n"));
        let seen = match whole.map(|event| look_at_first(self.request.endpoint, event)).transpose() {
            Ok(seen) => seen,
            Err(error) => return Head::Over(self.answer_failed(error)),
        };
        let waits =
            whole.zip(seen.as_ref()).is_some_and(|(event, seen)| may_wait(&self.request, event, seen, true));
        // What comes with an event that is held back decides.
        let beginning = seen.map(|seen| Beginning::of(&self.request, sse::whole_events(begin), Some(seen)));
        let has_output = beginning.as_ref().is_some_and(|beginning| beginning.has_output);
        let has_answer = beginning.as_ref().is_some_and(|beginning| beginning.has_answer);
        let has_nothing = !has_event || waits && !has_answer;
        let mut failure = beginning.and_then(|beginning| beginning.outcome.err());
        // Comments before it do not count.
        if failure.is_none() && has_nothing {
            failure = head.body_mut().failed_at_once().map(CallError::from);
        }
        if let Some(error) = failure {
            let began = has_output || error.began();
            return Head::Over(self.note_failed_leg(self.answering(), error, began));
        }
        self.accepted(self.legs.answering());
        // Other workers, which failed before, do not matter any more.
        let run = &mut self.runs.answering;
        (run.failure, run.refusals) = (None, Refusals::default());
        // So that the relay does not judge the first events a second time.
        self.began_with_head = has_answer.then_some(has_output);
        Head::Stream(head)
    }

    /// Takes an answer that does not say that it is a stream. Its first bytes tell: some servers, and proxies
    /// before them, lose the content type. Otherwise it is a whole answer, which is the client's unless it
    /// has the beginning of a stream: some servers ignore `stream` for some requests.
    pub(crate) async fn no_stream(&mut self, mut head: Response<Body>) -> Head {
        let drain_end = self.state.drain_end.clone();
        let limit = self.state.settings.leg_timeouts.head;
        let silence = Silence { what: "first event of the stream", key: "head", limit };
        let begins = upstream::with_time_limit(silence, begins_as_stream(head.body_mut()));
        let no_events = || CallError::Protocol("the stream has no events".to_owned());
        match drain_end.or_at(self.deadline, begins).await.unwrap_or_else(|| Err(no_events())) {
            Ok(true) => {
                let stream = HeaderValue::from_static("text/event-stream");
                head.headers_mut().insert(header::CONTENT_TYPE, stream);
                return self.take_head(head);
            }
            Ok(false) => {}
            Err(error) => return Head::Over(self.answer_failed(error)),
        }
        let other = no_event_stream(content_type(&head));
        let pause = self.state.settings.leg_timeouts.pause();
        let mut held = self.body_share();
        let read = drain_end.or_at(self.deadline, read_json(head, pause, &mut held)).await;
        let is_taken = !self.legs.awaits_rest() && !self.wants_ids();
        Head::Over(match read.unwrap_or_else(|| Err(no_events())) {
            Ok(Some(whole)) if is_taken => self.answered_whole(whole, held),
            Ok(_) => self.answer_failed(other),
            Err(error) => self.answer_failed(error),
        })
    }
}

/// Looks at the first event of a stream.
///
/// # Errors
/// The error that the event is. A chat or completion that ends with it has no choice, and a message nothing.
fn look_at_first(endpoint: Endpoint, event: &[u8]) -> Result<Seen, CallError> {
    let format = endpoint.format();
    let mut seen = seen::event(format, event);
    if endpoint == Endpoint::Messages {
        // A later event may have a stop reason.
        seen.failed_end = None;
    }
    // The name may stand behind the data.
    seen.error |= !format.is_named() && sse::name(event) == Some(b"error");
    let error = error_in(&seen, event).or_else(|| overload_of_response(format, event));
    error.or_else(|| if seen.done { without_anything(endpoint) } else { None }).map_or(Ok(seen), Err)
}

/// What the first events of a stream say.
pub(crate) struct Beginning {
    /// Whether there is an event with data.
    pub(crate) has_events: bool,
    /// Whether an event has more than what is held back.
    pub(crate) has_answer: bool,
    /// Whether an event came that engines send with their first output.
    pub(crate) has_output: bool,
    /// The error that one of them is, or bytes that are not an event.
    pub(crate) outcome: Result<(), CallError>,
}

impl Beginning {
    /// Looks at complete events, up to the first one that has a part of the answer. `first`: what is known of
    /// the first one.
    pub(crate) fn of(request: &Request, events: &[u8], mut first: Option<Seen>) -> Self {
        let mut beginning = Self { has_events: false, has_answer: false, has_output: false, outcome: Ok(()) };
        let mut earlier: Option<Seen> = None;
        for event in first_events(events) {
            let known = first.take().map(Ok);
            let seen = match known.unwrap_or_else(|| look_at_whole(request.endpoint, event)) {
                Ok(seen) => seen,
                // A prompt may be all that was to be computed: its usage says so.
                Err(_)
                    if sse::is_done(event) && earlier.as_ref().is_some_and(|seen| seen.usage.is_some()) =>
                {
                    beginning.has_answer = true;
                    break;
                }
                Err(error) => {
                    beginning.outcome = Err(error);
                    break;
                }
            };
            beginning.has_output |= comes_with_output(request.endpoint, event);
            beginning.has_answer = !may_wait(request, event, &seen, earlier.is_none());
            (beginning.has_events, earlier) = (true, Some(seen));
            if beginning.has_answer {
                break;
            }
        }
        beginning
    }
}

/// Returns whether an event at the beginning waits for the next one. A response in the background goes on
/// without its client, who needs the id.
fn may_wait(request: &Request, event: &[u8], seen: &Seen, is_first: bool) -> bool {
    match request.endpoint {
        Endpoint::ChatCompletions => is_first && has_only_role(seen),
        Endpoint::Responses | Endpoint::Messages => {
            seen::is_announcement(event) && !seen.finish && !is_in_background(request)
        }
        _ => false,
    }
}

/// Whether engines send an event, which is not an error, only with their first output. So they do with the
/// role of a chat and the beginning of a message. They announce a response before they generate anything.
fn comes_with_output(endpoint: Endpoint, event: &[u8]) -> bool {
    endpoint != Endpoint::Responses || !seen::is_announcement(event)
}

/// Whether an event of a chat has neither a token nor the end of the answer.
fn has_only_role(seen: &Seen) -> bool {
    !(seen.token || seen.finish || seen.done)
}

/// Looks at one of the first events, which is complete.
///
/// # Errors
/// Those of [`look_at_first`], or it is not an event.
fn look_at_whole(endpoint: Endpoint, event: &[u8]) -> Result<Seen, CallError> {
    if is_garbage(event) { Err(not_an_event()) } else { look_at_first(endpoint, event) }
}

/// The first ones of complete events by which a stream is judged: with data, or bytes that are not an event.
fn first_events(events: &[u8]) -> impl Iterator<Item = &[u8]> {
    let all = sse::events(events).filter_map(|place| events.get(place));
    all.filter(|event| is_garbage(event) || sse::has_data(event))
}

fn is_garbage(event: &[u8]) -> bool {
    !sse::is_event(event)
}

/// Returns the error of bytes between events that are not one.
pub(crate) fn not_an_event() -> CallError {
    CallError::Protocol("the stream contains bytes that are not an event".to_owned())
}

/// Returns the error of an answer that should be a stream, and has another content type.
pub(super) fn no_event_stream(content_type: &[u8]) -> CallError {
    let shown: String = String::from_utf8_lossy(content_type).chars().take(60).collect();
    CallError::Protocol(format!("expected text/event-stream, got content type `{shown}`"))
}

/// Returns the error of a stream that ends before any part of an answer, if it is one.
fn without_anything(endpoint: Endpoint) -> Option<CallError> {
    match endpoint {
        Endpoint::ChatCompletions | Endpoint::Completions => {
            Some(CallError::Protocol("the stream ended before any choice".to_owned()))
        }
        Endpoint::Messages => Some(CallError::GaveUp(seen::GIVEN_UP)),
        _ => None,
    }
}

/// Returns the error that an event is, if it is one: by its content, by its name, or by a finish reason with
/// which the engine gave the request up.
pub(crate) fn error_in(seen: &Seen, event: &[u8]) -> Option<CallError> {
    if let Some(end) = seen.failed_end {
        return Some(CallError::GaveUp(end));
    }
    seen.error.then(|| CallError::of_error_body(json_of(event)))
}

/// Returns the JSON of an event, or of a whole answer, which may be a list.
fn json_of(event: &[u8]) -> &[u8] {
    let body = sse::without_mark(event).trim_ascii_start();
    if body.starts_with(b"[") {
        return body;
    }
    Some(sse::object(event)).filter(|object| !object.is_empty()).unwrap_or_else(|| sse::data(event))
}

/// Returns the error of a response that failed because its engine has too much to do (Responses API). Other
/// failures are the client's.
pub(crate) fn overload_of_response(format: Format, answer: &[u8]) -> Option<CallError> {
    let json = if format == Format::Responses { sse::object(answer) } else { return None };
    let error = seen::failed_response(json)?;
    let error = CallError::of_error_body(format!(r#"{{"error":{error}}}"#).as_bytes());
    error.refusal().is_some().then_some(error)
}

/// Waits for the first bytes of a body. Returns whether they begin a stream of events.
pub(super) async fn begins_as_stream(body: &mut Body) -> Result<bool, CallError> {
    let knows = |bytes: &[u8]| sse::begins_as_stream(bytes).is_some();
    std::future::poll_fn(|cx| body.poll_peek(cx, knows)).await;
    Ok(sse::begins_as_stream(body.peek()) == Some(true))
}

pub(super) fn content_type<B>(head: &Response<B>) -> &[u8] {
    head.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default()
}

/// Returns whether a content type says JSON.
pub(crate) fn is_json(content_type: &[u8]) -> bool {
    content_type.to_ascii_lowercase().starts_with(b"application/json")
}

/// Returns whether a content type says JSON, or nothing.
pub(super) fn may_be_json(content_type: &[u8]) -> bool {
    let kind = content_type.to_ascii_lowercase();
    kind.is_empty() || is_json(&kind) || kind.starts_with(b"text/plain")
}

/// Reads an answer that should have been a stream, if it is JSON.
async fn read_json(
    head: Response<Body>,
    pause: PauseLimits,
    held: &mut Share,
) -> Result<Option<Response<Bytes>>, CallError> {
    if !may_be_json(content_type(&head)) {
        return Ok(None);
    }
    let (head, body) = head.into_parts();
    let body = upstream::collect(body, Some(pause), Some(held)).await?;
    if sse::look(&body).error {
        return Err(CallError::of_error_body(&body));
    }
    Ok(Some(Response::from_parts(head, body)))
}
