use super::*;

fn shown(json: &str, format: ContentFormat) -> String {
    let turns = read(json, format).unwrap();
    let turns: Vec<String> = turns.into_iter().map(|turn| Value::from(&turn).to_string()).collect();
    turns.join("\n")
}

#[test]
fn parts_are_joined_by_lines_or_stay_a_list() {
    let json = r#"[{"role":"user","content":[{"type":"text","text":"a","cache_control":1},"b",{"type":"text","text":null}]}]"#;
    assert_eq!(shown(json, ContentFormat::Text), r"{'role': 'user', 'content': 'a\nb'}");
    assert_eq!(
        shown(json, ContentFormat::Parts),
        "{'role': 'user', 'content': [{'type': 'text', 'text': 'a', 'cache_control': 1}, {'type': 'text', 'text': 'b'}]}"
    );
}

#[test]
fn a_medium_is_told_by_its_type_or_by_its_key() {
    for (part, medium) in [
        (r#"{"type":"image_url","image_url":{"url":"x"}}"#, "image_url"),
        (r#"{"type":"input_audio","input_audio":{}}"#, "input_audio"),
        (r#"{"image_url":"x"}"#, "image_url"),
        (r#"{"type":"text","text":"t","uuid":"1"}"#, "uuid"),
    ] {
        let json = format!(r#"[{{"role":"user","content":[{part}]}}]"#);
        let error = read(&json, ContentFormat::Text).unwrap_err();
        assert_eq!(error, EncodeError::Multimodal(medium.to_owned()));
    }
}

#[test]
fn what_makes_no_sense_is_told() {
    for (json, word) in [
        ("{}", "sequence"),
        (r#"[{"content":"x"}]"#, "role"),
        (r#"[{"role":"user","content":7}]"#, "neither"),
        (r#"[{"role":"user","content":[7]}]"#, "neither"),
        (r#"[{"role":"user","content":[["x"]]}]"#, "neither"),
        (r#"[{"role":"user","content":[{"text":"x"}]}]"#, "no type"),
        (r#"[{"role":"user","content":[{"type":"smell"}]}]"#, "smell"),
    ] {
        let error = read(json, ContentFormat::Text).unwrap_err();
        assert_eq!(error.kind(), "invalid");
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn arguments_become_an_object_whatever_they_are() {
    let called = |arguments: &str| {
        let json = format!(
            r#"[{{"role":"assistant","tool_calls":[{{"type":"function","id":"1","x":2,"function":{{"name":"f"{arguments}}}}}]}}]"#
        );
        shown(&json, ContentFormat::Text)
    };
    let whole = |arguments: &str| {
        format!(
            "{{'role': 'assistant', 'content': '', 'tool_calls': [{{'id': '1', 'function': {{'arguments': {arguments}, 'name': 'f'}}, 'type': 'function'}}]}}"
        )
    };
    assert_eq!(called(r#","arguments":"{\"b\":1,\"a\":2}""#), whole("{'b': 1, 'a': 2}"));
    for empty in [r#","arguments":"[1]""#, r#","arguments":"nope""#, r#","arguments":"""#, ""] {
        assert_eq!(called(empty), whole("{}"));
    }
}

#[test]
fn the_billing_line_of_a_system_prompt_falls_away() {
    let json = r#"[{"role":"system","content":"x-anthropic-billing-header: cch=1\nbe kind"},{"role":"user","content":"x-anthropic-billing-header\nu"}]"#;
    assert_eq!(
        shown(json, ContentFormat::Text),
        "{'role': 'system', 'content': 'be kind'}\n{'role': 'user', 'content': 'x-anthropic-billing-header\\nu'}"
    );
}

#[test]
fn developers_become_one_system_message_at_the_front() {
    let json = r#"[{"role":"user","content":"u"},{"role":"developer","content":"d","tools":[1]},{"role":"system","content":"s"}]"#;
    let turns = without_developer(read(json, ContentFormat::Text).unwrap());
    let turns: Vec<String> = turns.into_iter().map(|turn| Value::from(&turn).to_string()).collect();
    assert_eq!(turns, [r"{'role': 'system', 'content': 'd\n\ns'}", "{'role': 'user', 'content': 'u'}"]);
}
