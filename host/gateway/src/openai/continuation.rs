//! Which streams may be continued by another engine when theirs failed, and the request for the rest (I14).
//!
//! The fields of a request are a list of what is allowed: a field that is not known here may mean anything.

use std::sync::Arc;

use json_splice::JsonBody;
use serde::Deserialize;

use crate::openai::{
    chunk::Reason,
    request::{Endpoint, Request},
    reserved::RESERVED_FIELDS,
    transcript::Delivered,
};

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

/// Returns why the streams of this request are not continued; `None` if they may be. The answer so far may
/// still stand in the way.
pub(crate) fn refuses(request: &Request) -> Option<Reason> {
    if !request.is_chat() {
        return Some("endpoint");
    }
    if !request.stream {
        return Some("not_streamed");
    }
    let body = &request.body;
    if let Some(reason) = body.keys().find_map(|key| refuses_field(key, body.get(key).unwrap_or("null"))) {
        return Some(reason);
    }
    let is_greedy = number(body, "temperature") == Some(0.0);
    if body.get("seed").is_some_and(|seed| seed != "null") && !is_greedy {
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
    // The gateway removes reserved fields.
    if value == "null" || RESERVED_FIELDS.iter().any(|reserved| reserved.eq_ignore_ascii_case(key)) {
        return None;
    }
    let Some((_, allowed, reason)) = FIELDS.iter().find(|(name, ..)| *name == key) else {
        return Some("other_field");
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
/// it.
fn refuses_messages(body: &JsonBody) -> Option<Reason> {
    #[derive(Deserialize)]
    struct Message {
        #[serde(default)]
        role: String,
    }
    let Ok(Some(messages)) = body.read::<Vec<Message>>("messages") else { return Some("messages") };
    match messages.last() {
        None => Some("messages"),
        Some(last) if last.role == "assistant" => Some("last_message"),
        Some(_) => None,
    }
}

/// Returns the request for the rest of an answer.
///
/// # Errors
/// The stream cannot be continued, or not without a risk.
pub(crate) fn rest_of(request: &Request, delivered: &Delivered<'_>) -> Result<Arc<Request>, Reason> {
    if let Some(reason) = refuses(request) {
        return Err(reason);
    }
    let quoted = format!("\"{}\"", delivered.json);
    let text: String = serde_json::from_str(&quoted).map_err(|_| "not_text")?;
    refuses_text(request, &text)?;
    if delivered.held_back && !stop_strings(&request.body).is_empty() {
        // The engine holds back what may be the beginning of a stop string: the tokens of the text that was
        // sent are not known.
        return Err("held_back_text");
    }
    let body = &request.body;
    let left = |key| left_of(body, key, delivered.tokens);
    let (tokens, completion_tokens) = (left("max_tokens")?, left("max_completion_tokens")?);
    let min_tokens = number(body, "min_tokens").map(|min| (min - f64::from(delivered.tokens)).max(0.0));
    let limits = [
        ("max_tokens", tokens),
        ("max_completion_tokens", completion_tokens),
        ("min_tokens", min_tokens.map(|min| min.to_string())),
    ];
    let edit = limits.into_iter().fold(body.edit(), |edit, (key, value)| match value {
        Some(value) => edit.set(key, value),
        None => edit,
    });
    let edited = if request.endpoint == Endpoint::ChatCompletions {
        let messages =
            body.get("messages").and_then(|messages| messages.strip_suffix(']')).ok_or("messages")?;
        edit.set("messages", format!("{messages},{{\"role\":\"assistant\",\"content\":{quoted}}}]"))
            .set("add_generation_prompt", "false")
            .set("continue_final_message", "true")
            .finish()
    } else {
        let prompt = body.get("prompt").and_then(|prompt| prompt.strip_suffix('"'));
        let prompt = prompt.ok_or("prompt_is_not_a_text")?;
        edit.set("prompt", format!("{prompt}{}\"", delivered.json)).finish()
    };
    let body = JsonBody::parse(edited).map_err(|_| "not_text")?;
    Ok(request.with_body(body))
}

/// Whether what the client has of the text stands in the way.
fn refuses_text(request: &Request, text: &str) -> Result<(), Reason> {
    let Some(last) = text.chars().last() else { return Err("no_text") };
    if last == char::REPLACEMENT_CHARACTER {
        return Err("within_a_character");
    }
    // Templates and engines may trim a message, and the engine would write the space again.
    if request.endpoint == Endpoint::ChatCompletions && last.is_whitespace() {
        return Err("ends_with_a_space");
    }
    // An engine looks for stop strings in its own output only.
    if stop_strings(&request.body).iter().any(|stop| ends_within(text, stop)) {
        return Err("within_a_stop_string");
    }
    Ok(())
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
    let Ok(limit) = body.read::<u32>(key) else { return Err("other_field") };
    match limit.map(|limit| limit.saturating_sub(used)) {
        Some(0) => Err("nothing_is_left"),
        left => Ok(left.map(|left| left.to_string())),
    }
}

fn has_value(body: &JsonBody, key: &str) -> bool {
    body.get(key).is_some_and(|value| value != "null")
}

fn number(body: &JsonBody, key: &str) -> Option<f64> {
    body.get(key)?.parse().ok()
}

#[cfg(test)]
mod tests;
