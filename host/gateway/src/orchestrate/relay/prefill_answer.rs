//! An answer that ended within prefill [C8]: returned unchanged, or as events to a client that asked for a
//! stream.

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use pointsman_workers::Leg;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{openai::request::Endpoint, openai::seen, orchestrate::Drive};

/// Turns the prefill leg's answer into the client's.
pub(crate) fn prefill_answer(drive: &mut Drive, answer: Response<Bytes>) -> Response<Bytes> {
    let seen = seen::in_whole_answer(drive.request.is_chat(), answer.body());
    if let Some(usage) = seen.usage.filter(|_| drive.rest.is_none()) {
        drive.account.usage(usage);
    }
    drive.account.output(0, Instant::now());
    let body = drive.without_private_fields(Leg::Prefill, answer.into_body());
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

/// A whole answer as the events of a stream.
#[expect(clippy::indexing_slicing, reason = "indexing a JSON value answers null")]
fn as_events(endpoint: Endpoint, body: &[u8], include_usage: bool) -> String {
    let whole: Value = serde_json::from_slice(body).unwrap_or_default();
    if endpoint == Endpoint::Messages {
        return message_events(&whole);
    }
    let object = match endpoint {
        Endpoint::ChatCompletions => "chat.completion.chunk",
        _ => "text_completion",
    };
    let chunk = |choices: Value| {
        let (id, created, model) = (&whole["id"], &whole["created"], &whole["model"]);
        let mut chunk =
            json!({ "id": id, "object": object, "created": created, "model": model, "choices": choices });
        if let Some(fingerprint) = whole.get("system_fingerprint") {
            chunk["system_fingerprint"] = fingerprint.clone();
        }
        chunk
    };
    let choices = whole["choices"].as_array().map_or(&[][..], Vec::as_slice);
    let choices: Vec<Value> = choices
        .iter()
        .map(|choice| match endpoint {
            Endpoint::ChatCompletions => json!({
                "index": choice["index"], "delta": delta(&choice["message"]), "logprobs": choice["logprobs"],
                "finish_reason": choice["finish_reason"],
            }),
            _ => choice.clone(),
        })
        .collect();
    let mut events = format!("data: {}\n\n", chunk(Value::from(choices)));
    if include_usage {
        let mut usage = chunk(json!([]));
        if let Some(fields) = usage.as_object_mut() {
            fields.insert("usage".to_owned(), whole["usage"].clone());
        }
        events.push_str(&format!("data: {usage}\n\n"));
    }
    events.push_str("data: [DONE]\n\n");
    events
}

/// A chat's message as the only delta of its stream, in which tool calls are numbered.
fn delta(message: &Value) -> Value {
    let mut delta = message.clone();
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
        let (empty, delta) = match block["type"].as_str() {
            Some("text") => (
                json!({ "type": "text", "text": "" }),
                json!({ "type": "text_delta", "text": block["text"] }),
            ),
            Some("thinking") => (
                json!({ "type": "thinking", "thinking": "" }),
                json!({ "type": "thinking_delta", "thinking": block["thinking"] }),
            ),
            _ => (
                json!({ "type": block["type"], "id": block["id"], "name": block["name"], "input": {} }),
                json!({ "type": "input_json_delta", "partial_json": block["input"].to_string() }),
            ),
        };
        events += &event(json!({ "type": "content_block_start", "index": index, "content_block": empty }));
        events += &event(json!({ "type": "content_block_delta", "index": index, "delta": delta }));
        events += &event(json!({ "type": "content_block_stop", "index": index }));
    }
    let delta = json!({ "stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"] });
    events += &event(json!({ "type": "message_delta", "delta": delta, "usage": usage }));
    events + &event(json!({ "type": "message_stop" }))
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
}
