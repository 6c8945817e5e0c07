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
    let delta = |delta: &str| look(&format!("data: {{\"type\":\"message_delta\",\"delta\":{delta}}}\n\n"));
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
    let usage =
        |items: &[String]| in_whole_answer(false, format!("[{}]", items.join(",")).as_bytes()).usage.unwrap();
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
