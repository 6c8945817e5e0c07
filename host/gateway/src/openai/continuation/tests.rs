use bytes::Bytes;
use http::HeaderMap;
use serde_json::{Value, json};

use super::*;
use crate::openai::{
    hints::HintTrust,
    transcript::{DeliveredIds, Names, Start},
};

const NAMES: fn() -> Names =
    || Names { id: "\"a\"".to_owned(), created: "1".to_owned(), model: "\"tiny\"".to_owned() };

fn request(endpoint: Endpoint, body: &Value) -> Arc<Request> {
    let rules = HintTrust::Trusted.into();
    Request::parse(endpoint, &HeaderMap::new(), Bytes::from(body.to_string()), &rules).unwrap()
}

/// A streamed chat with further fields.
fn chat(more: Value) -> Arc<Request> {
    request(Endpoint::ChatCompletions, &with(chat_body(), more))
}

fn chat_body() -> Value {
    json!({"model": "tiny", "stream": true, "messages": [{"role": "user", "content": "say \"a\""}]})
}

fn completion(more: Value) -> Arc<Request> {
    let body = json!({"model": "tiny", "stream": true, "prompt": "once \"upon\"", "max_tokens": 20});
    request(Endpoint::Completions, &with(body, more))
}

fn with(mut body: Value, more: Value) -> Value {
    let (Value::Object(fields), Value::Object(more)) = (&mut body, more) else { panic!("objects") };
    fields.extend(more);
    body
}

fn rest(request: &Request, text: &str, tokens: u32) -> Result<Value, Reason> {
    rest_with(request, text, tokens, false)
}

fn rest_with(request: &Request, text: &str, tokens: u32, held_back: bool) -> Result<Value, Reason> {
    let quoted = Value::from(text).to_string();
    let names = NAMES();
    let json = &quoted[1..quoted.len() - 1];
    let delivered =
        Delivered { json, tokens, held_back, prompt_tokens: None, names: &names, ids: Err("text") };
    rest_of(request, &delivered, &Budget::new(usize::MAX))
        .map(|rest| serde_json::from_slice(rest.request.body.bytes()).unwrap())
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table with a row for each field")]
fn i14_only_requests_whose_rest_is_surely_the_same_are_continued() {
    let table = [
        (json!({}), None),
        (json!({"temperature": 0.7, "top_p": 0.9, "stop": ["END"], "max_tokens": 9, "min_tokens": 3}), None),
        (json!({"stream_options": {"include_usage": true}, "user": "u", "nvext": {"annotations": []}}), None),
        (
            json!({"n": 1, "logprobs": false, "tools": [], "frequency_penalty": 0, "repetition_penalty": 1.0}),
            None,
        ),
        (json!({"n": null, "seed": null, "tools": null, "response_format": null, "who_knows": null}), None),
        (json!({"seed": 7, "temperature": 0}), None),
        (json!({"response_format": {"type": "text"}}), None),
        (json!({"seed": 7}), Some("seed")),
        (json!({"seed": 7, "temperature": 0.1}), Some("seed")),
        (json!({"n": 2}), Some("choices")),
        (json!({"logprobs": true}), Some("logprobs")),
        (json!({"logprobs": true, "top_logprobs": 2}), Some("logprobs")),
        (json!({"prompt_logprobs": 1}), Some("logprobs")),
        (json!({"tools": [{"type": "function", "function": {"name": "f"}}]}), Some("tools")),
        (json!({"tool_choice": "auto"}), Some("tools")),
        (json!({"response_format": {"type": "json_object"}}), Some("structured_output")),
        (json!({"structured_outputs": {"regex": "a"}}), Some("structured_output")),
        (json!({"guided_json": {}}), Some("structured_output")),
        (json!({"frequency_penalty": 0.1}), Some("penalties")),
        (json!({"presence_penalty": -1}), Some("penalties")),
        (json!({"repetition_penalty": 1.1}), Some("penalties")),
        (json!({"bad_words": ["x"]}), Some("bad_words")),
        (json!({"reasoning_effort": "high"}), Some("reasoning")),
        (json!({"thinking_token_budget": 5}), Some("reasoning")),
        (json!({"chat_template_kwargs": {"enable_thinking": true}}), Some("template")),
        (json!({"add_generation_prompt": false}), Some("template")),
        (json!({"continue_final_message": true}), Some("template")),
        (json!({"skip_special_tokens": false}), Some("special_tokens")),
        (json!({"modalities": ["text", "audio"]}), Some("audio")),
        (json!({"audio": {"voice": "x"}}), Some("audio")),
        (json!({"store": true}), Some("stored")),
        (json!({"return_token_ids": true}), Some("token_ids")),
        (json!({"who_knows": 1}), Some("other_field")),
        (json!({"vllm_xargs": {"a": 1}}), Some("other_field")),
        (json!({"messages": []}), Some("messages")),
        (json!({"messages": [{"role": "assistant", "content": "a"}]}), Some("last_message")),
    ];
    for (more, expected) in table {
        // I14.1, I14.2
        assert_eq!(refuses(&chat(more.clone())), expected, "{more}");
    }
    let table = [
        (json!({}), None),
        (json!({"echo": false, "suffix": null, "best_of": 1, "logprobs": null}), None),
        (json!({"echo": true}), Some("echo")),
        (json!({"suffix": "x"}), Some("suffix")),
        (json!({"best_of": 2}), Some("choices")),
        (json!({"logprobs": 0}), Some("logprobs")),
        (json!({"max_tokens": null}), Some("no_max_tokens")),
        (json!({"prompt": [1, 2]}), Some("prompt_is_not_a_text")),
        (json!({"prompt": ["one"]}), Some("prompt_is_not_a_text")),
    ];
    for (more, expected) in table {
        assert_eq!(refuses(&completion(more.clone())), expected, "{more}");
    }
    let message = json!({"model": "tiny", "stream": true, "max_tokens": 5, "messages": []});
    assert_eq!(refuses(&request(Endpoint::Messages, &message)), Some("endpoint"));
    let response = json!({"model": "tiny", "stream": true, "input": "x"});
    assert_eq!(refuses(&request(Endpoint::Responses, &response)), Some("endpoint"));
}

#[test]
fn i14_the_rest_of_a_chat_continues_its_last_message_within_the_limits() {
    let limits =
        json!({"max_tokens": 20, "max_completion_tokens": 10, "min_tokens": 5, "kv_transfer_params": {}});
    // I14.6
    assert_eq!(
        rest(&chat(limits), "two\n\"words\"", 3).unwrap(),
        json!({
            "model": "tiny", "stream": true, "max_tokens": 17, "max_completion_tokens": 7, "min_tokens": 2,
            "messages": [
                {"role": "user", "content": "say \"a\""}, {"role": "assistant", "content": "two\n\"words\""},
            ],
            "add_generation_prompt": false, "continue_final_message": true, "kv_transfer_params": {},
        })
    );
    let few = rest(&chat(json!({"min_tokens": 2})), "a b c", 3).unwrap();
    assert_eq!((&few["min_tokens"], &few["max_tokens"]), (&json!(0), &Value::Null));
    assert_eq!(rest(&chat(json!({"max_tokens": 3})), "a b c", 3), Err("nothing_is_left"));
}

#[test]
fn i14_the_rest_of_a_completion_has_the_text_behind_its_prompt() {
    let body = rest(&completion(json!({})), " a\\time", 4).unwrap();
    assert_eq!((&body["prompt"], &body["max_tokens"]), (&json!("once \"upon\" a\\time"), &json!(16)));
    assert_eq!(body.get("continue_final_message"), None);
    // A completion has no template that trims.
    assert!(rest(&completion(json!({})), "a\n", 2).is_ok());
}

#[test]
fn i14_a_text_that_cannot_be_continued_surely_is_not() {
    let stop = json!({"stop": ["END", "\n\n"]});
    let table = [
        ("", "no_text"),
        ("a ", "ends_with_a_space"),
        ("a\n", "ends_with_a_space"),
        ("a\u{fffd}", "within_a_character"),
        ("the EN", "within_a_stop_string"),
        ("the E", "within_a_stop_string"),
    ];
    for (text, expected) in table {
        assert_eq!(rest(&chat(stop.clone()), text, 2), Err(expected), "{text:?}");
    }
    assert!(rest(&chat(stop.clone()), "the BEND", 2).is_ok(), "not a beginning");
    assert_eq!(rest(&completion(json!({"stop": "\n\n"})), "a\n", 2), Err("within_a_stop_string"));
    // Tokens without a text: the engine may hold a text back for the stop string.
    assert_eq!(rest_with(&chat(stop), "a b", 2, true), Err("held_back_text"));
    assert!(rest_with(&chat(json!({})), "a b", 2, true).is_ok());
}

/// The rest of an answer of the tokens 1, 2 and 3 to the prompt 7, 8.
fn exact_rest(
    request: &Request,
    text: &str,
    start: Start,
) -> Result<(Value, Result<Origin, Reason>), Reason> {
    let quoted = Value::from(text).to_string();
    let names = NAMES();
    let json = &quoted[1..quoted.len() - 1];
    let ids = Ok(DeliveredIds { prompt: &[7, 8], output: &[1, 2, 3], start });
    let held_back = start.kept < 3;
    let delivered = Delivered { json, tokens: 3, held_back, prompt_tokens: Some(2), names: &names, ids };
    let rest = rest_of(request, &delivered, &Budget::new(usize::MAX))?;
    Ok((serde_json::from_slice(rest.request.body.bytes()).unwrap(), rest.origin))
}

const ALL: Start = Start { kept: 3, again: 0 };

#[test]
fn i14_the_rest_begins_from_token_ids_where_they_are_known() {
    let (body, origin) = exact_rest(&completion(json!({"min_tokens": 9})), "abc", ALL).unwrap();
    // I14.12
    assert_eq!(body["prompt"], json!([7, 8, 1, 2, 3]));
    assert_eq!((&body["max_tokens"], &body["min_tokens"]), (&json!(17), &json!(6)));
    let origin = origin.unwrap();
    assert_eq!((&*origin.ids, origin.tokens, origin.kept, &*origin.again), ("[7,8,1,2,3]", 5, 3, ""));
    assert!(!origin.or_text);
    // A part of the text is generated again.
    let (body, origin) =
        exact_rest(&completion(json!({"stop": "xyz"})), "aäc", Start { kept: 1, again: 2 }).unwrap();
    assert_eq!((&body["prompt"], &body["max_tokens"]), (&json!([7, 8, 1]), &json!(19)));
    assert_eq!(origin.unwrap().again, "äc");
    // A chat has its text, too, for engines that ignore ids, where it may be continued so.
    let (body, origin) = exact_rest(&chat(json!({"max_tokens": 9})), "abc", ALL).unwrap();
    assert!(origin.unwrap().or_text);
    assert_eq!((body["messages"].as_array().unwrap().len(), &body["max_tokens"]), (2, &json!(6)));
    for (more, text, start) in [
        (json!({}), "abc ", ALL),
        (json!({"stop": ["cd"]}), "abc", ALL),
        (json!({}), "abc", Start { kept: 2, again: 0 }),
        (json!({}), "abc", Start { kept: 3, again: 1 }),
    ] {
        let (body, origin) = exact_rest(&chat(more.clone()), text, start).unwrap();
        assert!(!origin.unwrap().or_text, "{more} {text:?}");
        assert_eq!(body["messages"].as_array().unwrap().len(), 1, "{more} {text:?}");
        assert_eq!(body.get("continue_final_message"), None);
    }
    assert_eq!(exact_rest(&chat(json!({})), "a\u{fffd}", ALL).unwrap_err(), "within_a_character");
    assert_eq!(exact_rest(&chat(json!({"max_tokens": 3})), "abc", ALL).unwrap_err(), "nothing_is_left");
    let again = Start { kept: 2, again: 0 };
    assert!(exact_rest(&chat(json!({"max_tokens": 3})), "abc", again).is_ok(), "a token is generated again");
}

#[test]
fn i14_ids_do_not_stand_for_images() {
    let image = json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]);
    let message = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let (body, origin) = exact_rest(&chat(message(image)), "abc", ALL).unwrap();
    // I14.12
    assert_eq!(origin.unwrap_err(), "not_text_only");
    assert_eq!(body["continue_final_message"], json!(true));
    let parts = json!([{"type": "text", "text": "a"}]);
    assert!(exact_rest(&chat(message(parts)), "abc", ALL).unwrap().1.is_ok());
}

#[test]
fn i14_ids_are_asked_for_where_they_decide_the_rest() {
    let greedy = json!({"temperature": 0, "stop": ["ab", "äöü"]});
    let rules = StopRules { overlap: 2, sent_at_once: false };
    // I14.12
    assert_eq!(form_of(&chat(greedy.clone()), true), Ok(Form::Exact(rules)));
    assert_eq!(form_of(&chat(greedy), false), Ok(Form::Text("text")));
    let at_once = json!({"temperature": 0.0, "stop": "ab", "include_stop_str_in_output": true});
    let rules = StopRules { overlap: 1, sent_at_once: true };
    assert_eq!(form_of(&completion(at_once), true), Ok(Form::Exact(rules)));
    for more in [json!({}), json!({"temperature": 0.1}), json!({"temperature": null})] {
        assert_eq!(form_of(&chat(more), true), Ok(Form::Text("sampled")));
    }
    assert_eq!(form_of(&chat(json!({"temperature": 0, "n": 2})), true), Err("choices"));
}

#[test]
fn i14_only_the_last_message_is_read() {
    let refused = |messages: &str| {
        let body = format!(r#"{{"model":"m","stream":true,"messages":{messages}}}"#);
        let rules = HintTrust::Trusted.into();
        let body = Bytes::from(body);
        let request = Request::parse(Endpoint::ChatCompletions, &HeaderMap::new(), body, &rules).unwrap();
        refuses(&request)
    };
    let user = r#"{"role":"user","content":"the assistant"}"#;
    // I14.1
    assert_eq!(refused(&format!("[{user}]")), None);
    assert_eq!(refused(&format!("[ {user} , {{\"role\" : \"assistant\"}} ]")), Some("last_message"));
    assert_eq!(refused(&format!("[{{\"role\":\"assistant\"}},\n{user}]")), None);
    assert_eq!(refused(&format!("[{user},7]")), Some("messages"));
    assert_eq!(refused(&format!("[{}]", vec![user; 4_097].join(","))), Some("messages"));
}
