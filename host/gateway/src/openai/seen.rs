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

/// Finish reason of a message that its engine gave up. vLLM writes a `stop_reason` of null then.
const GIVEN_UP: &str = "abort";

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
    let outer: Response<'_> = serde_json::from_slice(json).ok()?;
    let inner = outer.response.and_then(|response| serde_json::from_str(response.get()).ok());
    let response: Response<'_> = inner.unwrap_or(outer);
    let error = response.error.filter(|error| response.status == Some("failed") && is_something(error));
    error.map(RawValue::get)
}

/// The parts of a response, or of an event about one, that say how it ended.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Response<'a> {
    status: Option<&'a str>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    response: Option<&'a RawValue>,
}

/// Returns the id of the response that an event's data or a whole answer of `/v1/responses` is about.
#[must_use]
pub(crate) fn response_id(json: &[u8]) -> Option<&str> {
    let named: Named<'_> = serde_json::from_slice(json).ok()?;
    let own = named.id.filter(|_| named.object == Some("response"));
    own.or(named.response.and_then(|response| response.id))
}

/// The parts of an event, or of a whole answer, that name a response.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Named<'a> {
    object: Option<&'a str>,
    id: Option<&'a str>,
    #[serde(borrow)]
    response: Option<ResponseId<'a>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ResponseId<'a> {
    id: Option<&'a str>,
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
    matches!(kind(event), b"response.created" | b"response.in_progress" | b"message_start" | b"ping")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_events_are_told_apart_by_their_name_or_type() {
        let look = |event: &str| named(event.as_bytes());
        let delta = r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}"#;
        assert_eq!(look(&format!("event: content_block_delta\ndata: {delta}\n\n")).tokens, 1);
        assert_eq!(look(&format!("data: {delta}\n\n")).tokens, 1);
        let stop = look(
            "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\
             \"usage\":{\"input_tokens\":7,\"output_tokens\":3}}\n\n",
        );
        let usage = Usage { prompt_tokens: 7, completion_tokens: Some(3), cached_tokens: None };
        assert_eq!((stop.finish, stop.usage, stop.done), (true, Some(usage), false));
        let delta =
            |delta: &str| look(&format!("data: {{\"type\":\"message_delta\",\"delta\":{delta}}}\n\n"));
        let given_up = delta(r#"{"stop_reason":null}"#);
        // I3.16
        assert_eq!((given_up.finish, given_up.failed_end), (false, Some("abort")));
        // It only counts tokens.
        assert_eq!(delta("{}"), Seen::default());
        assert!(look("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n").done);
        let done = look(
            "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"error\":null,\
             \"usage\":{\"input_tokens\":7,\"output_tokens\":3,\"input_tokens_details\":{\"cached_tokens\":2}}}}\n\n",
        );
        assert_eq!(done.usage.unwrap().cached_tokens, Some(2));
        assert!(done.done && !done.error);
        assert!(look("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"x\"}}\n\n").error);
        assert!(look("data: {\"error\":{\"message\":\"x\"}}\n\n").error);
        assert_eq!(look(": {\"error\":{\"message\":\"x\"}}\n\n"), Seen::default());
        assert!(look("data: [DONE]\n\n").done);
        assert_eq!(look("event: ping\ndata: {\"type\":\"ping\"}\n\n"), Seen::default());
        assert_eq!(look("event: response.output_text.delta\ndata: {\"delta\":\"a\"}\n\n").tokens, 1);
    }

    #[test]
    fn i12_a_response_is_named_by_its_answer_and_its_first_event() {
        let id = |json: &'static str| response_id(json.as_bytes());
        assert_eq!(id(r#"{"object":"response","id":"resp_1","output":[]}"#), Some("resp_1"));
        let created = r#"{"type":"response.created","response":{"id":"resp_2","object":"response"}}"#;
        assert_eq!(id(created), Some("resp_2"));
        for other in [r#"{"object":"chat.completion","id":"x"}"#, r#"{"response":null}"#, "[]", "", "{"] {
            assert_eq!(id(other), None, "{other}");
        }
    }

    #[test]
    fn a_failed_response_has_an_error() {
        let failed = r#"{"object":"response","status":"failed","error":{"code":"server_error"}}"#;
        let event = format!(r#"{{"type":"response.failed","response":{failed}}}"#);
        for json in [failed, &event] {
            assert_eq!(failed_response(json.as_bytes()), Some(r#"{"code":"server_error"}"#));
        }
        for other in
            [r#"{"status":"failed","error":null}"#, r#"{"status":"ok","error":{"a":"failed"}}"#, "\"failed\""]
        {
            assert_eq!(failed_response(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn a_whole_answer_is_an_error_by_its_top_level_only() {
        let error = |body: &str| in_whole_answer(false, body.as_bytes()).error;
        assert!(error(r#"{"type":"error","error":{"type":"x","message":"y"}}"#));
        assert!(!error(r#"{"content":[{"type":"tool_use","input":{"error":{"a":1}}}]}"#));
        assert!(!error(r#"{"object":"response","status":"failed","error":{"code":"x"}}"#));
        assert!(!error(r#"[{"score":1,"document":{"error":"x"}}]"#));
        assert!(!error(r#"{"error":null}"#));
        assert!(error(r#"{"object":"error","message":"x","code":400}"#));
    }

    #[test]
    fn a_prefill_answer_is_an_error_when_a_whole_answer_is() {
        for body in [
            r#"{"error":{"message":"x"}}"#,
            r#"{"error" : "x"}"#,
            r#"{"\u0065rror":"x"}"#,
            r#"{"type":"error","error":{"type":"x","message":"y"}}"#,
            r#"{"error":null,"choices":[]}"#,
            r#"{"error":"x","choices":null}"#,
            r#"{"object":"error","message":"x","code":400}"#,
            r#"{"object":"text_completion","choices":[{"text":"x"}]}"#,
            r#"{"choices":[{"message":{"content":"\"error\":1"}}]}"#,
            r#"{"choices":[]}"#,
            "",
        ] {
            for is_chat in [false, true] {
                assert_eq!(
                    is_error(is_chat, body.as_bytes()),
                    in_whole_answer(is_chat, body.as_bytes()).error,
                    "{body}"
                );
            }
        }
    }

    #[test]
    fn usage_is_read_in_every_spelling_and_seconds_are_no_tokens() {
        let usage = |usage: &str| in_whole_answer(false, format!(r#"{{"usage":{usage}}}"#).as_bytes()).usage;
        assert_eq!(usage(r#"{"prompt_tokens":4,"total_tokens":4}"#).unwrap().prompt_tokens, 4);
        let read = usage(r#"{"input_tokens":4,"output_tokens":2,"cache_read_input_tokens":3}"#).unwrap();
        // I6.9
        assert_eq!((read.prompt_tokens, read.completion_tokens, read.cached_tokens), (7, Some(2), Some(3)));
        assert_eq!(usage(r#"{"type":"duration","seconds":3}"#), None);
        let read = usage(r#"{"output_tokens":2,"total_tokens":6}"#).unwrap();
        // L1.13
        assert_eq!((read.prompt_tokens, read.completion_tokens), (4, Some(2)));
    }

    #[test]
    fn l1_the_usage_of_a_list_is_the_sum_of_that_of_its_items() {
        let item = |counts: &str| format!(r#"{{"index":0,"score":1.0,"meta_info":{{{counts}}}}}"#);
        let usage = |items: &[String]| {
            in_whole_answer(false, format!("[{}]", items.join(",")).as_bytes()).usage.unwrap()
        };
        let all = r#""prompt_tokens":400,"completion_tokens":1,"cached_tokens":300"#;
        let some = r#""prompt_tokens":200,"cached_tokens":100"#;
        let sums = Usage { prompt_tokens: 1_000, completion_tokens: Some(2), cached_tokens: Some(700) };
        // L1.13
        assert_eq!(usage(&[item(all), item(some), item(all)]), sums);
        let prompt = item(r#""prompt_tokens":5"#);
        let only = Usage { prompt_tokens: 10, completion_tokens: None, cached_tokens: None };
        // L1.13
        assert_eq!(usage(&[prompt.clone(), prompt]), only);
    }
}
