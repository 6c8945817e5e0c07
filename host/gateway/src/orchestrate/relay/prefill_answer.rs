//! An answer that ended within prefill [C8]: returned unchanged, or as events to a client that asked for a
//! stream.

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use pointsman_workers::Leg;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::{openai::request::Endpoint, openai::seen, orchestrate::Drive};

/// Turns the prefill leg's answer into the client's.
pub(crate) fn prefill_answer(drive: &mut Drive, answer: Response<Bytes>) -> Response<Bytes> {
    let seen = seen::in_whole_answer(drive.request.is_chat(), answer.body());
    if let Some(usage) = seen.usage.filter(|_| drive.rest.is_none()) {
        drive.account.usage(drive.within_context(Leg::Prefill, usage));
    }
    drive.account.output(0, Instant::now());
    let body = answer.into_body();
    let body = drive.without_private_fields(Leg::Prefill, &body).map_or(body, Bytes::from);
    if !drive.request.stream {
        let mut response = Response::new(body);
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        return response;
    }
    let events = as_events(drive.request.endpoint, &body, drive.request.include_usage);
    let mut response = Response::new(Bytes::from(events));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    response
}

/// A whole answer as the events of a stream. The first one has its choices, and whatever else the client
/// asked for.
fn as_events(endpoint: Endpoint, body: &[u8], include_usage: bool) -> String {
    if endpoint == Endpoint::Messages {
        return message_events(&serde_json::from_slice(body).unwrap_or_default());
    }
    let mut first: Map<String, Value> = serde_json::from_slice(body).unwrap_or_default();
    let object = match endpoint {
        Endpoint::ChatCompletions => "chat.completion.chunk",
        _ => "text_completion",
    };
    first.insert("object".to_owned(), object.into());
    let usage = first.remove("usage");
    let is_of_each = |key: &str| matches!(key, "id" | "object" | "created" | "model" | "system_fingerprint");
    let of_each = first.iter().filter(|(key, _)| is_of_each(key));
    let mut last: Map<String, Value> = of_each.map(|(key, value)| (key.clone(), value.clone())).collect();
    last.extend([("choices".to_owned(), json!([])), ("usage".to_owned(), usage.into())]);
    let choices = first.entry("choices").or_insert_with(|| json!([])).as_array_mut();
    for choice in choices.into_iter().flatten().filter_map(Value::as_object_mut) {
        if let Some(message) = choice.remove("message") {
            choice.insert("delta".to_owned(), delta(message));
        }
    }
    let mut events = format!("data: {}\n\n", Value::from(first));
    if include_usage {
        events.push_str(&format!("data: {}\n\n", Value::from(last)));
    }
    events.push_str("data: [DONE]\n\n");
    events
}

/// A chat's message as the only delta of its stream, in which tool calls are numbered.
fn delta(mut delta: Value) -> Value {
    let Some(calls) = delta.get_mut("tool_calls").and_then(Value::as_array_mut) else { return delta };
    for (index, call) in calls.iter_mut().filter_map(Value::as_object_mut).enumerate() {
        call.insert("index".to_owned(), Value::from(index));
    }
    if calls.is_empty()
        && let Some(fields) = delta.as_object_mut()
    {
        fields.remove("tool_calls");
    }
    delta
}

/// A whole message as the events of a stream.
#[expect(clippy::indexing_slicing, reason = "indexing a JSON value answers null")]
fn message_events(whole: &Value) -> String {
    let event = |data: Value| {
        let name = data["type"].as_str().unwrap_or_default();
        format!("event: {name}\ndata: {data}\n\n")
    };
    let usage = &whole["usage"];
    let started = json!({
        "id": whole["id"], "type": "message", "role": "assistant", "content": [], "model": whole["model"],
        "stop_reason": null, "stop_sequence": null,
        "usage": { "input_tokens": usage["input_tokens"], "output_tokens": 0 },
    });
    let mut events = event(json!({ "type": "message_start", "message": started }));
    for (index, block) in whole["content"].as_array().into_iter().flatten().enumerate() {
        let (start, deltas) = in_parts(block.clone());
        events += &event(json!({ "type": "content_block_start", "index": index, "content_block": start }));
        for delta in deltas {
            events += &event(json!({ "type": "content_block_delta", "index": index, "delta": delta }));
        }
        events += &event(json!({ "type": "content_block_stop", "index": index }));
    }
    let delta = json!({ "stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"] });
    events += &event(json!({ "type": "message_delta", "delta": delta, "usage": usage }));
    events + &event(json!({ "type": "message_stop" }))
}

/// Splits a content block into its beginning and the deltas that complete it. A block of another kind than
/// those that a stream sends in pieces has no deltas (C8.8).
fn in_parts(mut block: Value) -> (Value, Vec<Value>) {
    let kind = block.get("type").and_then(Value::as_str).unwrap_or_default();
    let pieces: &[(&str, &str, &str)] = match kind {
        "text" => &[("text", "text_delta", "text")],
        "thinking" => {
            &[("thinking", "thinking_delta", "thinking"), ("signature", "signature_delta", "signature")]
        }
        _ if kind.ends_with("tool_use") => &[("input", "input_json_delta", "partial_json")],
        _ => &[],
    };
    let mut deltas = Vec::new();
    for (key, delta, key_of_delta) in pieces {
        let piece = match block.get_mut(key) {
            Some(Value::String(text)) => std::mem::take(text),
            Some(input @ Value::Object(_)) => std::mem::replace(input, json!({})).to_string(),
            _ => continue,
        };
        deltas.push(json!({ "type": delta, *key_of_delta: piece }));
    }
    (block, deltas)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c8_a_whole_answer_becomes_chunks_with_usage_when_asked() {
        let body = br#"{"id":"x","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#;
        let text = as_events(Endpoint::ChatCompletions, body, true);
        let events: Vec<&str> = text.split_terminator("\n\n").collect();
        assert_eq!(events.len(), 3);
        let first: Value = serde_json::from_str(events[0].strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(first["object"], "chat.completion.chunk");
        assert_eq!(
            (&first["choices"][0]["delta"]["content"], &first["choices"][0]["finish_reason"]),
            (&json!("a"), &json!("stop"))
        );
        // C8.4
        assert!(events[1].contains("\"usage\":{") && events[2] == "data: [DONE]");
        assert_eq!(as_events(Endpoint::Completions, body, false).matches("data: ").count(), 2);
    }

    #[test]
    fn c8_the_chunk_of_a_whole_answer_has_all_that_the_client_asked_for() {
        let body = br#"{"id":"x","object":"chat.completion","created":1,"model":"m","prompt_token_ids":[5],"more":2,"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop","stop_reason":7,"token_ids":[6],"other":[]}],"usage":{}}"#;
        let text = as_events(Endpoint::ChatCompletions, body, false);
        let first = text.strip_prefix("data: ").and_then(|text| text.split_once("\n\n")).unwrap().0;
        // C8.7
        assert_eq!(
            serde_json::from_str::<Value>(first).unwrap(),
            json!({"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "prompt_token_ids": [5],
                "more": 2, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop",
                "stop_reason": 7, "token_ids": [6], "other": []}]})
        );
    }
}
