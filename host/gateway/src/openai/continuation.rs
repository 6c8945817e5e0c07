//! Which streams may be continued by another engine when theirs failed, and the request for the rest (I14).
//!
//! The fields of a request are a list of what is allowed: a field that is not known here may mean anything.

use std::sync::Arc;

use json_splice::{Edit, JsonBody};
use serde::Deserialize;

use crate::{
    budget::{Budget, Share},
    openai::{
        body_bytes::reserve,
        chunk::Reason,
        lax::WholeNumber,
        request::{Endpoint, Request},
        reserved::RESERVED_FIELDS,
        transcript::{Delivered, StopRules},
    },
};

mod exact;

pub(crate) use exact::Origin;

/// When a field does not stand in the way.
enum Allowed {
    /// With any value.
    Any,
    /// With one of these values.
    Only(&'static [&'static str]),
    /// With this number.
    Number(f64),
    /// Without a value.
    Never,
}

use Allowed::{Any, Never, Number, Only};

/// Fields, when they are allowed, and the reason when they are not. null is allowed for each of them.
const FIELDS: &[(&str, Allowed, Reason)] = &[
    ("model", Any, ""),
    ("messages", Any, ""),
    ("prompt", Any, ""),
    ("stream", Any, ""),
    ("stream_options", Any, ""),
    ("max_tokens", Any, ""),
    ("max_completion_tokens", Any, ""),
    ("min_tokens", Any, ""),
    ("temperature", Any, ""),
    ("top_p", Any, ""),
    ("top_k", Any, ""),
    ("min_p", Any, ""),
    ("ignore_eos", Any, ""),
    ("stop", Any, ""),
    ("stop_token_ids", Any, ""),
    ("include_stop_str_in_output", Any, ""),
    ("logit_bias", Any, ""),
    ("user", Any, ""),
    ("metadata", Any, ""),
    ("priority", Any, ""),
    ("cache_salt", Any, ""),
    ("service_tier", Any, ""),
    ("prompt_cache_key", Any, ""),
    ("safety_identifier", Any, ""),
    ("parallel_tool_calls", Any, ""),
    // Only with a temperature of 0, see below.
    ("seed", Any, ""),
    ("n", Only(&["1"]), "choices"),
    ("best_of", Only(&["1"]), "choices"),
    ("use_beam_search", Only(&["false"]), "choices"),
    ("echo", Only(&["false"]), "echo"),
    ("suffix", Never, "suffix"),
    ("logprobs", Only(&["false"]), "logprobs"),
    ("top_logprobs", Only(&["0"]), "logprobs"),
    ("prompt_logprobs", Never, "logprobs"),
    ("return_token_ids", Only(&["false"]), "token_ids"),
    ("return_tokens_as_token_ids", Only(&["false"]), "token_ids"),
    ("tools", Only(&["[]"]), "tools"),
    ("tool_choice", Only(&["\"none\""]), "tools"),
    ("functions", Only(&["[]"]), "tools"),
    ("function_call", Only(&["\"none\""]), "tools"),
    ("response_format", Only(&["{\"type\":\"text\"}", "{\"type\": \"text\"}"]), "structured_output"),
    ("structured_outputs", Never, "structured_output"),
    ("guided_json", Never, "structured_output"),
    ("guided_regex", Never, "structured_output"),
    ("guided_choice", Never, "structured_output"),
    ("guided_grammar", Never, "structured_output"),
    ("ebnf", Never, "structured_output"),
    ("regex", Never, "structured_output"),
    ("json_schema", Never, "structured_output"),
    ("frequency_penalty", Number(0.0), "penalties"),
    ("presence_penalty", Number(0.0), "penalties"),
    ("repetition_penalty", Number(1.0), "penalties"),
    ("bad_words", Only(&["[]"]), "bad_words"),
    ("reasoning_effort", Never, "reasoning"),
    ("thinking_token_budget", Never, "reasoning"),
    ("include_reasoning", Never, "reasoning"),
    ("chat_template_kwargs", Only(&["{}"]), "template"),
    ("chat_template", Never, "template"),
    ("add_generation_prompt", Only(&["true"]), "template"),
    ("continue_final_message", Only(&["false"]), "template"),
    ("skip_special_tokens", Only(&["true"]), "special_tokens"),
    ("modalities", Only(&["[\"text\"]"]), "audio"),
    ("audio", Never, "audio"),
    ("store", Only(&["false"]), "stored"),
    ("prompt_embeds", Never, "prompt_embeds"),
];

/// The reason of a stream whose request for the rest finds no room among the bodies in flight.
pub(crate) const NO_ROOM: Reason = "body_bytes_in_flight";

/// From what the rest of an answer may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// From its text only, and why.
    Text(Reason),
    /// From its token ids.
    Exact(StopRules),
}

/// The request for the rest of an answer.
#[derive(Debug)]
pub(crate) struct Rest {
    pub(crate) request: Arc<Request>,
    /// The tokens that it begins from; or why it begins from text.
    pub(crate) origin: Result<Origin, Reason>,
    /// Its part of the bytes that bodies may take.
    _held: Share,
}

/// Decides before a stream begins whether it may be continued, and from what. `exact`: its model asks for
/// token ids. The answer may still stand in the way.
///
/// # Errors
/// No stream of this request can be continued.
pub(crate) fn form_of(request: &Request, exact: bool) -> Result<Form, Reason> {
    if let Some(reason) = refuses(request) {
        return Err(reason);
    }
    Ok(match exact {
        false => Form::Text("text"),
        // The rest of a sampled answer is another one in any case.
        true if !is_greedy(&request.body) => Form::Text("sampled"),
        true => Form::Exact(exact::stop_rules(&request.body)),
    })
}

/// Returns why the stream of this request is not continued; `None` if it may be.
fn refuses(request: &Request) -> Option<Reason> {
    if !request.is_chat() {
        return Some("endpoint");
    }
    let body = &request.body;
    if let Some(reason) = body.keys().find_map(|key| refuses_field(key, body.get(key).unwrap_or("null"))) {
        return Some(reason);
    }
    if body.get("seed").is_some_and(|seed| seed != "null") && !is_greedy(body) {
        return Some("seed");
    }
    match request.endpoint {
        Endpoint::ChatCompletions => refuses_messages(body),
        _ if !body.get("prompt").unwrap_or_default().starts_with('"') => Some("prompt_is_not_a_text"),
        // Engines cut a completion without a limit after a number of tokens of their own.
        _ if !has_value(body, "max_tokens") && !has_value(body, "max_completion_tokens") => {
            Some("no_max_tokens")
        }
        _ => None,
    }
}

fn refuses_field(key: &str, value: &str) -> Option<Reason> {
    if value == "null" {
        return None;
    }
    let Some((_, allowed, reason)) = FIELDS.iter().find(|(name, ..)| *name == key) else {
        // The gateway removes reserved fields.
        let is_reserved = RESERVED_FIELDS.iter().any(|reserved| reserved.eq_ignore_ascii_case(key));
        return (!is_reserved).then_some("other_field");
    };
    let is_allowed = match allowed {
        Any => true,
        Only(values) => values.contains(&value),
        Number(wanted) => value.parse::<f64>().is_ok_and(|given| given == *wanted),
        Never => false,
    };
    (!is_allowed).then_some(*reason)
}

/// The answer becomes the last message: a conversation that ends with one of the assistant's has no place for
/// it. Only the last message is read, because the others may be large.
fn refuses_messages(body: &JsonBody) -> Option<Reason> {
    #[derive(Deserialize)]
    struct Message {
        #[serde(default)]
        role: String,
    }
    let Some(last) = last_message(body) else { return Some("messages") };
    memchr::memmem::find(last.as_bytes(), b"assistant")?;
    match serde_json::from_str::<Message>(last) {
        Ok(message) => (message.role == "assistant").then_some("last_message"),
        Err(_) => Some("messages"),
    }
}

/// Returns the JSON of the last message; `None` for an empty list, or if the parser did not note where it is.
fn last_message(body: &JsonBody) -> Option<&str> {
    let (ends, messages) = (body.object_ends("messages"), body.get("messages")?);
    let (last, others) = ends.split_last()?;
    let start = others.last().map_or(1, |end| *end as usize);
    let is_known = body.counts("messages").items == ends.len();
    let text = messages.get(start..*last as usize).filter(|_| is_known)?;
    Some(text.trim_start_matches(|byte: char| byte == ',' || byte.is_ascii_whitespace()))
}

/// Returns the request for the rest of an answer. It counts in `bodies`, the bytes of all bodies.
///
/// # Errors
/// The stream cannot be continued, or not without a risk.
pub(crate) fn rest_of(
    request: &Request,
    delivered: &Delivered<'_>,
    bodies: &Arc<Budget>,
) -> Result<Rest, Reason> {
    if let Some(reason) = refuses(request) {
        return Err(reason);
    }
    let quoted = format!("\"{}\"", delivered.json);
    let text: String = serde_json::from_str(&quoted).map_err(|_| "not_text")?;
    match text.chars().last() {
        None => return Err("no_text"),
        Some(char::REPLACEMENT_CHARACTER) => return Err("within_a_character"),
        Some(_) => {}
    }
    let from_text = refuses_text(request, &text, delivered.held_back);
    let exact = delivered.ids.and_then(|ids| exact::origin(request, &ids, &text, from_text.is_none()));
    let kept = exact.as_ref().map_or(delivered.tokens, |origin| origin.kept);
    if let (Err(_), Some(reason)) = (&exact, from_text) {
        return Err(reason);
    }
    let body = &request.body;
    let mut edit = within_limits(body, kept)?;
    if request.endpoint == Endpoint::ChatCompletions {
        if from_text.is_none() && exact.as_ref().map_or(true, |origin| origin.or_text) {
            edit = edit
                .set("messages", with_message(body, &quoted)?)
                .set("add_generation_prompt", "false")
                .set("continue_final_message", "true");
        }
    } else {
        let prompt = match &exact {
            Ok(origin) => origin.ids.to_string(),
            Err(_) => with_text(body, delivered.json)?,
        };
        edit = edit.set("prompt", prompt);
    }
    let body = JsonBody::parse(edit.finish()).map_err(|_| "not_text")?;
    let ids = exact.as_ref().map_or(0, |origin| origin.ids.len());
    let mut held = bodies.share();
    reserve(&mut held, body.bytes().len() + ids).map_err(|_| NO_ROOM)?;
    Ok(Rest { request: request.with_body(body), origin: exact, _held: held })
}

/// The limits of a body, less the tokens that the client has.
fn within_limits(body: &JsonBody, tokens: u32) -> Result<Edit<'_>, Reason> {
    let left = |key| left_of(body, key, tokens);
    let (max_tokens, completion_tokens) = (left("max_tokens")?, left("max_completion_tokens")?);
    let min_tokens = number(body, "min_tokens").map(|min| (min - f64::from(tokens)).max(0.0));
    let limits = [
        ("max_tokens", max_tokens),
        ("max_completion_tokens", completion_tokens),
        ("min_tokens", min_tokens.map(|min| min.to_string())),
    ];
    Ok(limits.into_iter().fold(body.edit(), |edit, (key, value)| match value {
        Some(value) => edit.set(key, value),
        None => edit,
    }))
}

/// The messages with what was delivered as the last one.
fn with_message(body: &JsonBody, quoted: &str) -> Result<String, Reason> {
    let messages = body.get("messages").and_then(|messages| messages.strip_suffix(']')).ok_or("messages")?;
    Ok(format!("{messages},{{\"role\":\"assistant\",\"content\":{quoted}}}]"))
}

/// The prompt with what was delivered after it.
fn with_text(body: &JsonBody, json: &str) -> Result<String, Reason> {
    let prompt = body.get("prompt").and_then(|prompt| prompt.strip_suffix('"'));
    Ok(format!("{}{json}\"", prompt.ok_or("prompt_is_not_a_text")?))
}

/// Whether what the client has of the text keeps the rest from beginning with it.
fn refuses_text(request: &Request, text: &str, held_back: bool) -> Option<Reason> {
    // Templates and engines may trim a message, and the engine would write the space again.
    if request.endpoint == Endpoint::ChatCompletions && text.ends_with(char::is_whitespace) {
        return Some("ends_with_a_space");
    }
    let stop = stop_strings(&request.body);
    // An engine looks for stop strings in its own output only.
    if stop.iter().any(|stop| ends_within(text, stop)) {
        return Some("within_a_stop_string");
    }
    // The engine holds back what may be the beginning of a stop string: the tokens of the text that was sent
    // are not known.
    (held_back && !stop.is_empty()).then_some("held_back_text")
}

/// Whether `text` ends with a beginning of `stop`.
fn ends_within(text: &str, stop: &str) -> bool {
    let begins = stop.char_indices().skip(1).map(|(end, _)| end);
    begins.filter_map(|end| stop.get(..end)).any(|begin| text.ends_with(begin))
}

fn stop_strings(body: &JsonBody) -> Vec<String> {
    let one = body.read::<String>("stop").ok().flatten().map(|stop| vec![stop]);
    one.or_else(|| body.read("stop").ok().flatten()).unwrap_or_default()
}

/// Returns what is left of a limit of tokens, if the request has it.
fn left_of(body: &JsonBody, key: &str, used: u32) -> Result<Option<String>, Reason> {
    let Ok(limit) = body.read::<WholeNumber>(key) else { return Err("other_field") };
    match limit.map(|WholeNumber(limit)| limit.saturating_sub(used)) {
        Some(0) => Err("nothing_is_left"),
        left => Ok(left.map(|left| left.to_string())),
    }
}

fn has_value(body: &JsonBody, key: &str) -> bool {
    body.get(key).is_some_and(|value| value != "null")
}

fn is_greedy(body: &JsonBody) -> bool {
    number(body, "temperature") == Some(0.0)
}

fn number(body: &JsonBody, key: &str) -> Option<f64> {
    body.get(key)?.parse().ok()
}

#[cfg(test)]
mod tests;
