//! Facts about an event or a whole answer, for every endpoint. Unnamed events are looked at by [`sse`]; this
//! adds the named events of the Responses and Messages APIs, and whole answers of every kind.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::openai::{
    endpoint::Format,
    generate,
    sse::{self, Seen, Usage},
};

#[cfg(test)]
mod tests;

/// Finish reason of a message that its engine gave up. vLLM writes a `stop_reason` of null then.
pub(crate) const GIVEN_UP: &str = "abort";

/// The parts of a named event's data, and of a whole answer, that matter here.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ReportedFields<'a> {
    object: Option<&'a str>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    choices: Option<&'a RawValue>,
    usage: Option<Counts>,
    /// An object of the Messages API, or the text of an error.
    #[serde(borrow)]
    message: Option<&'a RawValue>,
    response: Option<Inner>,
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
    #[serde(rename = "type")]
    kind: Option<&'a str>,
    /// Why a message ended.
    stop_reason: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Inner {
    usage: Option<Counts>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Delta<'a> {
    /// `None` if it is missing, and `null` has a text, too.
    #[serde(borrow, deserialize_with = "some")]
    stop_reason: Option<&'a RawValue>,
}

/// Reads a field that is there; `null` has a text, too.
pub(crate) fn some<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<&'de RawValue>, D::Error> {
    Deserialize::deserialize(value).map(Some)
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Counts {
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    input_tokens: Option<u32>,
    output_tokens: Option<u32>,
    total_tokens: Option<u32>,
    /// Of an item of a list: others have it in the details.
    cached_tokens: Option<u32>,
    cache_read_input_tokens: Option<u32>,
    cache_creation_input_tokens: Option<u32>,
    prompt_tokens_details: Option<Details>,
    input_tokens_details: Option<Details>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Details {
    cached_tokens: Option<u32>,
}

/// Looks at one event of a stream.
#[must_use]
pub(crate) fn event(format: Format, event: &[u8]) -> Seen {
    let mut seen = match format {
        Format::OpenAi => sse::look(event),
        Format::Generate => generate::event(event),
        Format::Transcript => transcript(event),
        Format::Responses | Format::Anthropic => {
            let seen = named(event);
            // Engines write these fields into the event of a whole message or response.
            let may_have_private_fields = !seen.token && sse::has_handoff(event);
            return Seen { may_have_private_fields, ..seen };
        }
    };
    // Almost every event begins with its data.
    seen.error |= !event.starts_with(b"data:") && sse::name(event) == Some(b"error");
    seen
}

/// Looks at a whole answer.
#[must_use]
pub(crate) fn in_whole_answer(is_chat: bool, body: &[u8]) -> Seen {
    of_whole_answer(is_chat, body, sse::look(body))
}

/// Adds to what [`sse::look`] sees in a whole answer what depends on the level of a key.
pub(crate) fn of_whole_answer(is_chat: bool, body: &[u8], seen: Seen) -> Seen {
    if is_chat {
        return seen;
    }
    // Fields of documents and of tool calls may be called `error`, too: only the top level counts.
    let Ok(reported) = serde_json::from_slice::<ReportedFields<'_>>(body) else {
        let usage = seen.usage.or_else(|| usage_of_items(body));
        return Seen { error: false, failed_end: None, usage, ..seen };
    };
    // A response with status `failed` is a complete answer, and not an error of the engine.
    let is_error = match reported.object {
        Some("response") => false,
        Some("error") => true,
        _ => reported.error.is_some_and(is_something),
    };
    // So does a finish reason outside of choices.
    let failed_end = seen.failed_end.filter(|_| reported.choices.is_some());
    // vLLM knows no stop reason of a message that it gave up.
    let lacks_reason = reported.kind == Some("message") && reported.stop_reason.is_none();
    let failed_end = failed_end.or(lacks_reason.then_some(GIVEN_UP));
    let usage = reported.usage.and_then(Counts::usage);
    Seen { error: is_error, failed_end, usage, cached_at: None, ..seen }
}

/// Returns whether a whole answer is an error. Almost none has the key, so that is looked for first, and for
/// escapes, with which the key could be written.
#[must_use]
pub(crate) fn is_error(is_chat: bool, body: &[u8]) -> bool {
    static SIGNS: LazyLock<[Finder<'static>; 2]> = LazyLock::new(|| ["error\"", r"\u"].map(Finder::new));
    SIGNS.iter().any(|sign| sign.find(body).is_some()) && in_whole_answer(is_chat, body).error
}

/// Returns the error of a response that failed: of an event's data, or of a whole answer of `/v1/responses`.
#[must_use]
pub(crate) fn failed_response(json: &[u8]) -> Option<&str> {
    memchr::memmem::find(json, br#""failed""#)?;
    let (_, response) = response(json)?;
    let error = response.error.filter(|error| response.status == Some("failed") && is_something(error));
    error.map(RawValue::get)
}

/// Returns the id of the response that an event's data or a whole answer of `/v1/responses` is about.
#[must_use]
pub(crate) fn response_id(json: &[u8]) -> Option<&str> {
    let (is_event, response) = response(json)?;
    response.id.filter(|_| is_event || response.object == Some("response"))
}

/// Returns the response that an event is about, and that it is one, or else the whole answer.
fn response(json: &[u8]) -> Option<(bool, Response<'_>)> {
    let whole: Response<'_> = serde_json::from_slice(json).ok()?;
    let of_event = whole.response.and_then(|response| serde_json::from_str(response.get()).ok());
    Some((of_event.is_some(), of_event.unwrap_or(whole)))
}

/// The parts of a response, or of an event about one, that name it and say how it ended.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Response<'a> {
    object: Option<&'a str>,
    id: Option<&'a str>,
    status: Option<&'a str>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    response: Option<&'a RawValue>,
}

/// Looks at an event of a transcript. Those of OpenAI's form have a type, others are chunks.
fn transcript(event: &[u8]) -> Seen {
    match kind(event) {
        b"transcript.text.delta" => one_token(),
        b"transcript.text.done" => {
            Seen { done: true, finish: true, usage: usage(reported(event)), ..Seen::default() }
        }
        _ => sse::look(event),
    }
}

/// Returns the name of an event, or the type that its data names.
fn kind(event: &[u8]) -> &[u8] {
    let name = sse::name(event).filter(|name| !name.is_empty());
    name.or_else(|| sse::type_of(event)).unwrap_or_default()
}

/// Returns whether a named event only announces an answer, or keeps the connection: engines send it before
/// they know whether they will generate anything.
#[must_use]
pub(crate) fn is_announcement(event: &[u8]) -> bool {
    matches!(
        kind(event),
        b"response.created" | b"response.in_progress" | b"message_start" | b"message_delta" | b"ping"
    )
}

fn reported(event: &[u8]) -> ReportedFields<'_> {
    serde_json::from_slice(sse::object(event)).unwrap_or_default()
}

fn named(event: &[u8]) -> Seen {
    let name = kind(event);
    let reported = || reported(event);
    match name {
        b"content_block_delta" => one_token(),
        b"message_start" => Seen { usage: usage(reported()), ..Seen::default() },
        b"message_delta" => {
            let reported = reported();
            let reason = reported.delta.as_ref().and_then(|delta| delta.stop_reason.map(RawValue::get));
            let failed_end = reason.filter(|reason| *reason == "null").map(|_| GIVEN_UP);
            let finish = reason.is_some() && failed_end.is_none();
            Seen { finish, failed_end, usage: usage(reported), ..Seen::default() }
        }
        b"message_stop" => Seen { done: true, ..Seen::default() },
        b"response.completed" | b"response.incomplete" | b"response.failed" | b"response.cancelled" => {
            Seen { done: true, finish: true, usage: usage(reported()), ..Seen::default() }
        }
        b"error" => Seen { error: true, ..Seen::default() },
        _ if name.starts_with(b"response.") && name.ends_with(b".delta") => one_token(),
        b"" if sse::is_done(event) => Seen { done: true, ..Seen::default() },
        b"" => {
            let reported = reported();
            let error = reported.error.is_some_and(is_something) || reported.object == Some("error");
            Seen { error, ..Seen::default() }
        }
        _ => Seen::default(),
    }
}

fn one_token() -> Seen {
    Seen { token: true, tokens: 1, ..Seen::default() }
}

fn usage(reported: ReportedFields<'_>) -> Option<Usage> {
    let of = |inner: Option<Inner>| inner.and_then(|inner| inner.usage);
    let message = || reported.message.and_then(|message| serde_json::from_str(message.get()).ok());
    reported.usage.or_else(|| of(message())).or(of(reported.response))?.usage()
}

fn is_something(value: &RawValue) -> bool {
    value.get().starts_with(['{', '"'])
}

impl Counts {
    /// `None` when it counts something else, such as seconds.
    fn usage(self) -> Option<Usage> {
        // In the Messages API cached tokens are not among the input tokens.
        let cached = [self.cache_read_input_tokens, self.cache_creation_input_tokens];
        let whole_input = |input: u32| cached.into_iter().flatten().fold(input, u32::saturating_add);
        let prompt_tokens = self.prompt_tokens.or(self.input_tokens.map(whole_input));
        let completion_tokens = self.completion_tokens.or(self.output_tokens);
        // Rerankings of Jina and of older vLLM have the total only.
        let rest = |total: u32| total.saturating_sub(completion_tokens.unwrap_or(0));
        let prompt_tokens = prompt_tokens.or(self.total_tokens.map(rest));
        prompt_tokens.or(completion_tokens)?;
        let details = self.prompt_tokens_details.or(self.input_tokens_details).unwrap_or_default();
        Some(Usage {
            prompt_tokens: prompt_tokens.unwrap_or(0),
            completion_tokens,
            cached_tokens: self.cache_read_input_tokens.or(self.cached_tokens).or(details.cached_tokens),
        })
    }
}

/// An item of a list of answers. SGLang reports the usage of a reranking with each document.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Item {
    meta_info: Option<Counts>,
}

/// Returns the usage of a list, if each item has one: the sums of their numbers.
fn usage_of_items(body: &[u8]) -> Option<Usage> {
    let items: Vec<Item> = serde_json::from_slice(body).ok()?;
    let usages: Option<Vec<Usage>> = items.into_iter().map(|item| item.meta_info?.usage()).collect();
    let either = |left: Option<u32>, right: Option<u32>| {
        left.or(right).map(|_| left.unwrap_or(0).saturating_add(right.unwrap_or(0)))
    };
    let add = |sum: Usage, one: Usage| Usage {
        prompt_tokens: sum.prompt_tokens.saturating_add(one.prompt_tokens),
        completion_tokens: either(sum.completion_tokens, one.completion_tokens),
        cached_tokens: either(sum.cached_tokens, one.cached_tokens),
    };
    usages?.into_iter().reduce(add)
}
