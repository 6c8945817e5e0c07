//! Named events and whole answers of the Messages and Responses APIs, as vLLM and SGLang write them.

use serde_json::{Value, json};

use super::{Choice, Meta, Shape, Usage};
use crate::{
    engine::{Finish, Step},
    failure::Failure,
};

/// `/v1/messages`.
pub(super) struct Messages;
/// `/v1/responses`.
pub(super) struct Responses;

impl Shape for Messages {
    fn open(&self, meta: &Meta, _: u32, usage: Option<Usage>) -> Vec<String> {
        let usage = json!({ "input_tokens": usage.unwrap_or_default().prompt, "output_tokens": 0 });
        let message = json!({
            "id": meta.id, "type": "message", "role": "assistant", "content": [], "model": meta.model_name(),
            "stop_reason": null, "stop_sequence": null, "usage": usage,
        });
        vec![event("message_start", json!({ "message": message }))]
    }

    fn step(&self, _: &Meta, step: &Step, first: bool, _: Option<Usage>) -> Vec<String> {
        let block = json!({ "index": 0, "content_block": { "type": "text", "text": "" } });
        let start = first.then(|| event("content_block_start", block));
        let delta = json!({ "index": 0, "delta": { "type": "text_delta", "text": step.text } });
        let delta = step.token.map(|_| event("content_block_delta", delta));
        start.into_iter().chain(delta).collect()
    }

    fn usage(&self, _: &Meta, _: Usage) -> String {
        String::new()
    }

    fn close(&self, _: &Meta, usage: Usage, said: &Choice) -> Vec<String> {
        let delta = json!({ "stop_reason": stop_reason(said.finish), "stop_sequence": null });
        vec![
            event("content_block_stop", json!({ "index": 0 })),
            event("message_delta", json!({ "delta": delta, "usage": tokens(usage) })),
            event("message_stop", json!({})),
        ]
    }

    fn whole(&self, meta: &Meta, choices: &[Choice], usage: Usage, params: Option<&str>) -> String {
        let said = choices.first().cloned().unwrap_or_default();
        let message = json!({
            "id": meta.id, "type": "message", "role": "assistant",
            "content": [{ "type": "text", "text": said.text }], "model": meta.model_name(),
            "stop_reason": stop_reason(said.finish), "usage": tokens(usage),
        });
        handing_over(message, params)
    }

    fn error(&self, failure: &Failure) -> String {
        json!({ "type": "error", "error": { "type": failure.kind, "message": failure.message } }).to_string()
    }

    fn frame(&self, data: &str) -> String {
        named(data)
    }
}

impl Shape for Responses {
    fn open(&self, meta: &Meta, _: u32, _: Option<Usage>) -> Vec<String> {
        let item = json!({
            "id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": [],
        });
        let part = json!({ "type": "output_text", "text": "", "annotations": [], "logprobs": [] });
        vec![
            event("response.created", json!({ "response": response(meta, "in_progress", None, None) })),
            event("response.in_progress", json!({ "response": response(meta, "in_progress", None, None) })),
            event("response.output_item.added", json!({ "output_index": 0, "item": item })),
            event("response.content_part.added", of_part(json!({ "part": part }))),
        ]
    }

    fn step(&self, _: &Meta, step: &Step, _: bool, _: Option<Usage>) -> Vec<String> {
        let delta = json!({ "delta": step.text, "logprobs": [] });
        step.token.map(|_| event("response.output_text.delta", of_part(delta))).into_iter().collect()
    }

    fn usage(&self, _: &Meta, _: Usage) -> String {
        String::new()
    }

    fn close(&self, meta: &Meta, usage: Usage, said: &Choice) -> Vec<String> {
        let (status, name) = status(said.finish);
        vec![
            event("response.output_text.done", of_part(json!({ "text": said.text, "logprobs": [] }))),
            event("response.content_part.done", of_part(json!({ "part": text(said) }))),
            event("response.output_item.done", json!({ "output_index": 0, "item": item(said) })),
            event(name, json!({ "response": response(meta, status, Some(said), Some(usage)) })),
        ]
    }

    fn whole(&self, meta: &Meta, choices: &[Choice], usage: Usage, params: Option<&str>) -> String {
        let said = choices.first().cloned().unwrap_or_default();
        handing_over(response(meta, status(said.finish).0, Some(&said), Some(usage)), params)
    }

    fn error(&self, failure: &Failure) -> String {
        let Failure { status, kind, message, param, .. } = failure;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": status } }).to_string()
    }

    fn frame(&self, data: &str) -> String {
        named(data)
    }
}

/// Returns an event's data: the type, then the fields.
fn event(name: &str, fields: Value) -> String {
    let rest = fields.to_string();
    let rest = rest.strip_prefix('{').filter(|rest| *rest != "}");
    match rest {
        Some(rest) => format!(r#"{{"type":"{name}",{rest}"#),
        None => format!(r#"{{"type":"{name}"}}"#),
    }
}

/// Returns the bytes of an event, whose data begins with its type.
fn named(data: &str) -> String {
    let name = data.strip_prefix(r#"{"type":""#).and_then(|rest| rest.split('"').next()).unwrap_or("error");
    format!("event: {name}\ndata: {data}\n\n")
}

/// Returns an answer with the parameters of its handoff, if it has one.
fn handing_over(mut answer: Value, params: Option<&str>) -> String {
    let params: Value = params.and_then(|params| serde_json::from_str(params).ok()).unwrap_or_default();
    if let (Some(answer), false) = (answer.as_object_mut(), params.is_null()) {
        answer.insert("kv_transfer_params".to_owned(), params);
    }
    answer.to_string()
}

fn stop_reason(finish: Option<Finish>) -> &'static str {
    if finish == Some(Finish::Length) { "max_tokens" } else { "end_turn" }
}

fn status(finish: Option<Finish>) -> (&'static str, &'static str) {
    if finish == Some(Finish::Length) {
        ("incomplete", "response.incomplete")
    } else {
        ("completed", "response.completed")
    }
}

fn tokens(usage: Usage) -> Value {
    json!({ "input_tokens": usage.prompt, "output_tokens": usage.completion })
}

/// Adds the fields that every event of a part contains.
fn of_part(mut fields: Value) -> Value {
    if let Some(fields) = fields.as_object_mut() {
        let place = [("item_id", json!("msg_1")), ("output_index", json!(0)), ("content_index", json!(0))];
        fields.extend(place.map(|(key, value)| (key.to_owned(), value)));
        fields.insert("sequence_number".to_owned(), json!(0));
    }
    fields
}

fn text(said: &Choice) -> Value {
    json!({ "type": "output_text", "text": said.text, "annotations": [], "logprobs": null })
}

fn item(said: &Choice) -> Value {
    json!({
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text(said)],
    })
}

fn response(meta: &Meta, status: &str, said: Option<&Choice>, usage: Option<Usage>) -> Value {
    let output: Vec<Value> = said.map(item).into_iter().collect();
    let usage = usage.map(|usage| {
        json!({
            "input_tokens": usage.prompt, "input_tokens_details": { "cached_tokens": usage.cached },
            "output_tokens": usage.completion, "output_tokens_details": { "reasoning_tokens": 0 },
            "total_tokens": usage.total(),
        })
    });
    json!({
        "id": meta.id, "object": "response", "created_at": meta.created, "status": status,
        "model": meta.model_name(), "output": output, "usage": usage, "error": null,
        "incomplete_details": if status == "incomplete" { json!({ "reason": "max_output_tokens" }) } else { json!(null) },
        "parallel_tool_calls": true, "tool_choice": "auto", "tools": [], "temperature": 1.0, "top_p": 1.0,
        "background": false, "truncation": "disabled",
    })
}
