use super::*;

/// An event as SGLang 0.5.23 writes it.
fn event_of(text: &str, finish: &str, completion: u32) -> String {
    format!(
        r#"data: {{"text":"{text}","output_ids":[1,2],"meta_info":{{"id":"x","finish_reason":{finish},"prompt_tokens":9,"weight_version":"default","num_retractions":0,"output_token_logprobs":[[-0.1,5,"\"prompt_tokens\":"]],"reasoning_tokens":0,"completion_tokens":{completion},"cached_tokens":8,"dp_rank":null}}}}

"#
    )
}

fn look(event: &str) -> Seen {
    super::event(event.as_bytes())
}

#[test]
fn i1_an_event_has_the_counts_of_its_meta_info() {
    let seen = look(&event_of("a", "null", 3));
    let usage = Usage { prompt_tokens: 9, completion_tokens: Some(3), cached_tokens: Some(8) };
    assert_eq!(
        (seen.token, seen.tokens, seen.finish, seen.error, seen.usage),
        (true, 1, false, false, Some(usage))
    );
    // A token may have no text, or not yet.
    assert!(look(&event_of("", "null", 1)).token);
    assert!(!look(&event_of("", "null", 0)).token);
    assert!(look(&event_of("a", r#"{"type":"length","length":3}"#, 3)).finish);
    assert!(look("data: [DONE]\n\n").done);
    // Engines that do not detokenize write no text.
    let ids = r#"data: {"output_ids":[1],"meta_info":{"id":"x","finish_reason":null,"prompt_tokens":1,"completion_tokens":1}}"#;
    assert_eq!(look(ids).usage.unwrap().cached_tokens, None);
}

#[test]
fn i1_text_that_looks_like_keys_is_not_read() {
    for text in [
        r#"\"meta_info\":{\"finish_reason\":\"x\",\"completion_tokens\":77}"#,
        r#"\"error\":{\"message\":\"x\"}"#,
        r"[DONE]",
        r#"abort, \"type\":\"abort\",\"status_code\":500"#,
    ] {
        let seen = look(&event_of(text, r#"{"type":"stop","matched":2}"#, 3));
        assert_eq!((seen.error, seen.done, seen.finish), (false, false, true), "{text}");
        assert_eq!(seen.usage.unwrap().completion_tokens, Some(3), "{text}");
    }
}

#[test]
fn i1_an_abort_with_a_status_is_an_error_and_one_without_is_an_end() {
    let abort = |status: &str| {
        let finish = format!(r#"{{"type":"abort","message":"m","status_code":{status},"err_type":null}}"#);
        let event = event_of("a", &finish, 3);
        (look(&event).error, look(&event).finish, was_aborted(sse::object(event.as_bytes())))
    };
    assert_eq!(abort("503"), (true, true, true));
    assert_eq!(abort("null"), (false, true, true));
    assert!(look("data: {\"error\":{\"message\":\"x\",\"code\":400,\"retryable\":false}}\n\n").error);
    assert!(!was_aborted(br#"{"text":"abort","meta_info":{"finish_reason":{"type":"stop","matched":2}}}"#));
    assert!(was_aborted(br#"[{"meta_info":{}},{"meta_info":{"finish_reason":{"type":"abort"}}}]"#));
}

#[test]
fn f4_the_usage_of_a_batch_is_the_sum_and_each_prompt_counts_once() {
    let usage = |prompt, completion, cached| {
        Some(Usage { prompt_tokens: prompt, completion_tokens: Some(completion), cached_tokens: cached })
    };
    let output = |completion| {
        let event = event_of("a", r#"{"type":"length","length":3}"#, completion);
        String::from_utf8_lossy(sse::object(event.as_bytes())).into_owned()
    };
    assert_eq!(whole(1, output(3).as_bytes()).usage, usage(9, 3, Some(8)));
    let list = format!("[{},{}]", output(3), output(5));
    assert_eq!(whole(1, list.as_bytes()).usage, usage(18, 8, Some(16)));
    assert_eq!(whole(2, list.as_bytes()).usage, usage(9, 8, Some(8)));
    assert_eq!(whole(1, b"[]"), Seen::default());
    assert!(whole(1, br#"{"error":{"message":"x"}}"#).error);
    assert!(whole(1, br#"{"object":"error","message":"x","code":503}"#).error);

    let mut totals = Totals::default();
    let mut note = |finish: &str, completion| {
        let mut seen = look(&event_of("a", finish, completion));
        totals.note(&mut seen, 2, 1);
        seen.usage
    };
    let end = r#"{"type":"length","length":3}"#;
    assert_eq!((note("null", 1), note(end, 3), note("null", 4)), (None, None, None));
    assert_eq!(note(end, 5), usage(18, 8, Some(16)));
}

#[test]
fn a1_the_adapter_is_a_text_and_a_list_names_none() {
    let adapter = |value: &str| {
        let body = JsonBody::parse(format!(r#"{{"lora_path":{value}}}"#).into()).unwrap();
        super::adapter(&body).map_err(|error| error.to_string())
    };
    // A1.12
    assert_eq!(adapter(r#""fr""#), Ok(Some("fr".to_owned())));
    for none in ["null", r#"["fr",null]"#] {
        assert_eq!(adapter(none), Ok(None));
    }
    assert!(
        adapter(&format!("\"{}\"", "x".repeat(513))).unwrap_err().starts_with("lora_path: a text of 513")
    );
}
