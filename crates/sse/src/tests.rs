use proptest::prelude::*;
use serde_json::Value;

use super::*;

/// The body of a recorded HTTP response, chunk framing taken off.
fn recorded(text: &'static str) -> Vec<u8> {
    let (_, mut rest) = text.split_once("\r\n\r\n").or(text.split_once("\n\n")).unwrap();
    let mut body = Vec::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        if size == 0 {
            break;
        }
        body.extend_from_slice(&after.as_bytes()[..size]);
        rest = &after[size + 2..];
    }
    body
}

fn captures() -> Vec<Vec<u8>> {
    let sglang: [&[u8]; 3] = [
        include_bytes!("../fixtures/sglang-0.5.23/chat-stream.txt"),
        include_bytes!("../fixtures/sglang-0.5.23/completion-stream.txt"),
        include_bytes!("../fixtures/sglang-0.5.23/batch-stream.txt"),
    ];
    let vllm = [
        include_str!("../fixtures/vllm-0.32/chat-stream-usage.http"),
        include_str!("../fixtures/vllm-0.32/chat-stream-nousage.http"),
        include_str!("../fixtures/vllm-0.32/completion-stream-contusage.http"),
        include_str!("../fixtures/vllm-0.32/completion-stream-tokenids.http"),
        include_str!("../fixtures/vllm-0.32/completion-stream-usage.http"),
    ]
    .map(recorded);
    vllm.into_iter().chain(sglang.map(<[u8]>::to_vec)).collect()
}

/// Returns what a JSON parser finds in an event, for comparison.
fn reference(event: &[u8]) -> Seen {
    let text = std::str::from_utf8(event).unwrap().trim();
    let data = text.strip_prefix("data:").unwrap_or(text).trim();
    if data == "[DONE]" {
        return Seen { done: true, ..Seen::default() };
    }
    let Ok(json) = serde_json::from_str::<Value>(data) else { return Seen::default() };
    let choices = json["choices"].as_array().cloned().unwrap_or_default();
    let filled = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
    let ids =
        choices.iter().filter_map(|choice| choice["token_ids"].as_array()).map(Vec::len).reduce(|a, b| a + b);
    let text = choices.iter().any(|choice| filled(&choice["text"]) || filled(&choice["delta"]["content"]));
    let tokens = ids.map_or(u32::from(text), |ids| ids as u32);
    let count = |value: &Value| value.as_u64().map(|count| count as u32);
    Seen {
        done: false,
        token: text || tokens > 0,
        tokens,
        finish: choices.iter().any(|choice| choice["finish_reason"].is_string()),
        error: json["error"].is_object() && json["choices"].is_null(),
        usage: json["usage"].is_object().then(|| Usage {
            prompt_tokens: count(&json["usage"]["prompt_tokens"]).unwrap_or(0),
            completion_tokens: count(&json["usage"]["completion_tokens"]),
            cached_tokens: count(&json["usage"]["prompt_tokens_details"]["cached_tokens"]),
        }),
        failed_end: None,
        cached_at: None,
        may_have_private_fields: false,
    }
}

fn plain(mut seen: Seen) -> Seen {
    (seen.cached_at, seen.may_have_private_fields) = (None, false);
    seen
}

#[test]
fn recorded_streams_are_seen_as_a_parser_sees_them() {
    let captures = captures();
    let batch = captures.len() - 1;
    for (place, body) in captures.into_iter().enumerate() {
        let all: Vec<Seen> = events(&body).map(|event| look(&body[event])).collect();
        let expected: Vec<Seen> = events(&body).map(|event| reference(&body[event])).collect();
        assert_eq!(all.iter().cloned().map(plain).collect::<Vec<_>>(), expected);
        assert!(all.last().unwrap().done);
        // The last stream answers a list of two prompts.
        let choices = if place == batch { 2 } else { 1 };
        assert_eq!(all.iter().filter(|seen| seen.finish).count(), choices);
    }
}

#[test]
fn the_first_event_of_a_chat_is_no_token() {
    let body = &captures()[0];
    let all: Vec<Seen> = events(body).map(|event| look(&body[event])).collect();
    assert_eq!((all[0].token, all[1].token, all[1].tokens), (false, true, 1));
    let usage = all.iter().find_map(|seen| seen.usage).unwrap();
    assert_eq!(usage, Usage { prompt_tokens: 332, completion_tokens: Some(4), cached_tokens: Some(320) });
}

#[test]
fn places_of_the_edits_are_exact() {
    let event = br#"data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":  320}},"kv_transfer_params":{"a":"}"},"x":1}"#;
    let seen = look(event);
    assert_eq!(&event[seen.cached_at.unwrap()], b"320");
}

#[test]
fn a_field_of_the_handoff_is_seen_wherever_it_stands() {
    let fields = ["kv_transfer_params", "ec_transfer_params", "disaggregated_params"];
    for field in fields.into_iter().chain(["prompt_token_ids", "prompt_token_ids_b64"]) {
        for value in ["{\"a\":\"}\"}", "[]", "1", "\"\""] {
            let event = format!("data: {{\"{field}\":null,\"choices\":[{{\"{field}\": {value}}}]}}\n\n");
            assert!(
                look(event.as_bytes()).may_have_private_fields && has_handoff(event.as_bytes()),
                "{event}"
            );
            let body = format!("{{\"a\":[{{\"{field}\" \n: {value}}}]}}");
            assert!(look(body.as_bytes()).may_have_private_fields, "{body}");
        }
        for event in [
            format!("data: {{\"{field}\":null}}\n\n"),
            format!("data: {{\"a\":\"\\\"{field}\\\":{{}}\"}}\n\n"),
            format!("data: {{\"{field}_of\":1}}\n\n"),
        ] {
            assert!(
                !look(event.as_bytes()).may_have_private_fields && !has_handoff(event.as_bytes()),
                "{event}"
            );
        }
    }
}

#[test]
fn only_the_finish_reason_of_a_choice_counts() {
    for (choice, finish, failed_end) in [
        (r#""finish_reason":"stop","message":{"a":{"finish_reason":"abort"}}"#, true, None),
        (r#""message":{"a":[{"finish_reason":"error"}]},"finish_reason":"timeout""#, true, Some("timeout")),
        (r#""delta":{"finish_reason":"abort"},"finish_reason":null"#, false, None),
        (r#""x":[],"finish_reason":"""#, false, None),
    ] {
        let body = format!(
            r#"{{"a":[{{"finish_reason":"abort"}}],"choices":[{{{choice}}}],"b":[{{"finish_reason":"error"}}]}}"#
        );
        for event in [format!("data: {body}\n\n"), format!("event: x\ndata: {body}\n\n"), body.clone()] {
            let seen = look(event.as_bytes());
            assert_eq!((seen.finish, seen.failed_end), (finish, failed_end), "{event}");
        }
        assert_eq!(look_at_body(body.as_bytes(), "").0.failed_end, failed_end, "{body}");
    }
    let lines = "data: {\"choices\":[\ndata: {\"finish_reason\":\"abort\"}]}\n\n";
    assert_eq!(look(lines.as_bytes()).failed_end, Some("abort"));
}

#[test]
fn text_cannot_fake_what_is_looked_for() {
    let text = r#"say "finish_reason":"stop", "usage":{"prompt_tokens":7} and "error":{ or data: [DONE]"#;
    let event = serde_json::json!({"choices":[{"delta":{"content":text},"finish_reason":null}]});
    let seen = look(format!("data: {event}\n\n").as_bytes());
    assert_eq!(seen, Seen { token: true, tokens: 1, ..Seen::default() });
}

#[test]
fn a_finish_reason_may_say_that_the_server_gave_up() {
    for (reason, failed_end) in [
        ("\"abort\"", Some("abort")),
        (" \"timeout\"", Some("timeout")),
        ("\"aborted\"", None),
        ("\"stop\"", None),
        ("null", None),
    ] {
        let event = format!("data: {{\"choices\":[{{\"text\":\"\",\"finish_reason\":{reason}}}]}}\n\n");
        let seen = look(event.as_bytes());
        assert_eq!((seen.finish, seen.failed_end), (reason != "null", failed_end), "{event}");
    }
}

#[test]
fn i_an_error_event_is_seen() {
    assert!(look(b"data: {\"error\": {\"message\":\"x\"}}\n\n").error);
    assert!(!look(b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"error\":null}\n\n").error);
}

#[test]
fn i_an_error_is_seen_without_choices_and_in_its_older_form() {
    for error in [
        r#"{"error":"x","choices":[ ]}"#,
        r#"{"choices":null,"error":{"message":"x"}}"#,
        r#"{"object": "error","message":"x","code":400}"#,
    ] {
        assert!(
            look(format!("data: {error}\n\n").as_bytes()).error && look(error.as_bytes()).error,
            "{error}"
        );
    }
    let answer = r#"{"object":"error","choices":[{"delta":{"content":"a"}}]}"#;
    assert!(!look(answer.as_bytes()).error && !look(br#"{"object":"errors"}"#).error);
}

#[test]
fn i3_an_answer_with_nan_is_whole_unless_it_was_cut() {
    let whole = br#"{"choices":[{"text":"a \"} b\\","logprob":-Infinity,"x":[NaN]}]} "#;
    // I3.14
    assert!(is_closed(whole) && look_at_body(whole, "choices").1);
    for length in 0..whole.len() - 1 {
        assert!(!is_closed(&whole[..length]) && !look_at_body(&whole[..length], "choices").1, "{length}");
    }
    for broken in [r#"{"a":[}"#, "{}{", "{}{}", r#"{"a":1}x"#, "{]", "]", "x", ""] {
        assert!(!is_closed(broken.as_bytes()), "{broken}");
    }
}

#[test]
fn i3_only_a_list_at_the_top_level_makes_a_body_whole() {
    let is_whole = |body: &str| look_at_body(body.as_bytes(), "choices").1;
    // I3.20
    for body in [
        r#"{"choices":[]}"#,
        "\u{feff}\n{\"a\":{\"b\":[1]},\"choices\": [NaN]}\n",
        r#"{"choices":1,"choices":[]}"#,
    ] {
        assert!(is_whole(body), "{body}");
    }
    for body in [
        "{}",
        r#"{"choices":null}"#,
        r#"{"a":{"choices":[]}}"#,
        r#"[{"choices":[]}]"#,
        r#"{"choice":[],"echoices":[]}"#,
        r#"{"a":"\"choices\":[]"}"#,
        r#"{"a":["choices",[]]}"#,
        // The caller asks a parser.
        r#"{"\u0063hoices":[]}"#,
        r#"{"choices":[]}{}"#,
    ] {
        assert!(!is_whole(body), "{body}");
    }
}

#[test]
fn an_empty_event_is_a_keep_alive() {
    for event in ["data:\n\n", "data: \r\n\r\n", "data: \ndata:\n\n", "data: ping\n\n", "data:keep-alive\r\r"]
    {
        let event = event.as_bytes();
        assert!(is_empty(event) && is_event(event) && !has_data(event), "{event:?}");
    }
    for event in [
        "data: {}\n\n",
        "data: 1\n\n",
        ": x\n\n",
        "\n\n",
        "id: 1\ndata:\n\n",
        "data: \ndata: {}\n\n",
        "data: pings\n\n",
    ] {
        assert!(!is_empty(event.as_bytes()), "{event:?}");
    }
}

#[test]
fn a_stream_is_told_by_its_first_bytes() {
    for stream in ["data: {}", "\u{feff}\r\nevent: x", ":", "  id:1", "retry: 1\n"] {
        assert_eq!(begins_as_stream(stream.as_bytes()), Some(true), "{stream:?}");
        // No beginning of it says something else.
        let shorter = (0..stream.len()).map(|end| begins_as_stream(&stream.as_bytes()[..end]));
        assert!(shorter.into_iter().all(|begin| begin != Some(false)), "{stream:?}");
    }
    for other in ["{", "[", "<html>", "dat{", "data", "eventually", "\u{feff}{"] {
        assert_eq!(begins_as_stream(other.as_bytes()), (other != "data").then_some(false), "{other:?}");
    }
    assert_eq!(data(b"event: error\ndata: out of blocks\n\n"), b"out of blocks");
    assert_eq!(data(b": x\n\n"), b"");
}

#[test]
fn a_last_event_without_a_blank_line_can_be_ended() {
    for last in ["data: [DONE]", "data: [DONE]\n", "data: [DONE]\r\n", "data: [DONE]\r"] {
        let mut splitter = Splitter::default();
        splitter.room().extend_from_slice(format!("data: {{}}\n\n{last}").as_bytes());
        let whole = splitter.whole().unwrap();
        splitter.discard(whole);
        splitter.end();
        let whole = splitter.whole().unwrap();
        assert!(is_done(splitter.first(whole)) && whole == splitter.rest(), "{last:?}");
    }
}

#[test]
fn only_data_is_looked_at() {
    let error = r#"{"error":{"code":429}}"#;
    for other in [
        format!(": {error}\n\n"),
        format!("id: 1\n: {error}\n\n"),
        format!("id: {error}\r\n\r\n"),
        format!(": {error}\rdata: {{\"choices\":[]}}\r\r"),
        format!("data: {{\"id\":1}}\n: {error}\n\n"),
    ] {
        assert_eq!(look(other.as_bytes()), Seen::default(), "{other:?}");
    }
    for failed in [
        format!(": {{\"choices\":[]}}\ndata: {error}\n\n"),
        format!("id: 1\r\ndata:{error}\r\n: }}\r\n\r\n"),
        format!("\u{feff}data: {error}\n\n"),
        format!("\n {error}"),
    ] {
        assert!(look(failed.as_bytes()).error, "{failed:?}");
        assert_eq!(object(failed.as_bytes()), error.as_bytes());
    }
    // A body may have several lines. Ranges count from the start of the whole event.
    assert!(look(b"{\n  \"error\": {\n    \"code\": 429\n  }\n}").error);
    let event = b": x\ndata: {\"usage\":{\"cached_tokens\":17}}\n\n";
    assert_eq!(&event[look(event).cached_at.unwrap()], b"17");
}

#[test]
fn fields_lines_and_marks_are_read_as_the_standard_has_them() {
    for done in [
        "data: [DONE]\n\n",
        "data:[DONE]\r\r",
        "event: end\ndata: [DONE]\n\n",
        "id: 1\r\ndata: [DONE]\r\n\r\n",
    ] {
        assert!(look(done.as_bytes()).done && is_event(done.as_bytes()), "{done:?}");
    }
    for other in ["data: {\"a\":\"data: [DONE]\"}\n\n", ": data: [DONE]\n\n", "id: [DONE]\n\n"] {
        assert!(!look(other.as_bytes()).done, "{other:?}");
    }
    for stream in ["Text/Event-Stream", "text/event-stream; charset=utf-8", " text/event-stream ;x"] {
        assert!(is_stream(stream.as_bytes()), "{stream:?}");
    }
    assert!(!is_stream(b"text/event-stream2") && !is_stream(b"application/json"));
    assert_eq!(object(b"data: {\"error\":{}}\n\n"), b"{\"error\":{}}");
    assert_eq!(object(b"data: x\n\n"), b"");
}

#[test]
fn a_mark_at_the_start_is_dropped_wherever_it_is_cut() {
    for step in 1..6 {
        let (mut splitter, mut passed) = (Splitter::default(), Vec::new());
        for piece in "\u{feff}data: {}\n\n\u{feff}".as_bytes().chunks(step) {
            splitter.room().extend_from_slice(piece);
            let whole = splitter.whole().unwrap();
            passed.extend_from_slice(splitter.first(whole));
            splitter.discard(whole);
        }
        assert_eq!((passed.as_slice(), splitter.rest()), (b"data: {}\n\n".as_slice(), 3), "{step}");
    }
}

#[test]
fn an_event_without_end_is_bounded() {
    let mut splitter = Splitter::default();
    let megabyte = vec![b'x'; 1 << 20];
    let mut push = |_| {
        splitter.room().extend_from_slice(&megabyte);
        splitter.whole()
    };
    assert_eq!((0..20).map(&mut push).find(Result::is_err), Some(Err(Oversized)));
}

#[test]
fn garbage_is_told_from_events() {
    for event in ["data: {}\n\n", ": ping\n\n", " \ndata: {}\n\n", "event: x\ndata: 1\n\n", "\n\n"] {
        assert!(is_event(event.as_bytes()), "{event:?}");
    }
    // The last one is an event that an engine cut short.
    for garbage in ["<html>\n\n", "\u{0}\n\n", "{\"a\":1}\n\n", "data: {\"id\":\"cmpl-\n\n"] {
        assert!(!is_event(garbage.as_bytes()), "{garbage:?}");
    }
}

proptest! {
    #[test]
    fn any_cutting_gives_the_same_events(
        which in 0_usize..5,
        cuts in proptest::collection::vec(1_usize..90, 1..60),
        end in prop_oneof![Just("\n"), Just("\r\n"), Just("\r")],
    ) {
        let body = String::from_utf8(captures()[which].clone()).unwrap().replace('\n', end).into_bytes();
        let (mut splitter, mut passed, mut at) = (Splitter::default(), Vec::new(), 0);
        let mut cuts = cuts.into_iter().cycle();
        while at < body.len() {
            let end = (at + cuts.next().unwrap()).min(body.len());
            splitter.room().extend_from_slice(&body[at..end]);
            let whole = splitter.whole().unwrap();
            let events = splitter.first(whole);
            prop_assert!(events.is_empty() || events.ends_with(b"\n") || events.ends_with(b"\r"));
            passed.extend_from_slice(events);
            splitter.discard(whole);
            at = end;
        }
        prop_assert_eq!(splitter.rest(), 0);
        prop_assert_eq!(passed, body);
    }

    #[test]
    fn generated_events_are_seen_as_a_parser_sees_them(
        text in "[ -~\\n\u{e9}\"\\\\]{0,30}",
        ids in proptest::option::of(proptest::collection::vec(any::<u16>(), 0..4)),
        finish in proptest::option::of("stop|length"),
        completion in any::<bool>(),
        usage in proptest::option::of((0_u32..9999, 0_u32..999, proptest::option::of(0_u32..999))),
        cut in any::<proptest::sample::Index>(),
    ) {
        let mut choice = serde_json::json!({"index":0,"finish_reason":finish,"token_ids":ids});
        if completion { choice["text"] = text.into(); } else { choice["delta"] = serde_json::json!({"content":text}); }
        let usage = usage.map(|(p, c, cached)| serde_json::json!({"prompt_tokens":p,"completion_tokens":c,"prompt_tokens_details":{"cached_tokens":cached}}));
        let body = serde_json::json!({"choices":[choice],"usage":usage}).to_string();
        let event = format!("data: {body}\n\n");
        prop_assert_eq!(plain(look(event.as_bytes())), reference(event.as_bytes()));
        let (seen, is_whole) = look_at_body(body.as_bytes(), "choices");
        prop_assert_eq!((plain(seen), is_whole), (reference(event.as_bytes()), true));
        prop_assert!(!is_closed(&body.as_bytes()[..cut.index(body.len())]));
    }

    #[test]
    fn the_type_of_data_is_that_of_its_top_level(
        before in "[ -~\\n\"\\\\]{0,20}", kind in proptest::option::of("[a-z._]{0,12}"), is_nested in any::<bool>(),
    ) {
        let other = serde_json::json!([{"type": before}, before]);
        let mut data = serde_json::json!({"a": other, "b": "type", "response": {"type": "x", "c": [other]}});
        if is_nested { data = serde_json::json!({"a": before, "item": data}); }
        if let Some(kind) = &kind { data["type"] = kind.as_str().into(); }
        let text = data.to_string();
        let event = format!("data: {text}\n\n");
        prop_assert_eq!(type_of(event.as_bytes()), kind.as_deref().map(str::as_bytes));
    }

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = look(&bytes);
        let _ = type_of(&bytes);
        let _ = events(&bytes).count();
        let mut splitter = Splitter::default();
        splitter.room().extend_from_slice(&bytes);
        let whole = splitter.whole().unwrap();
        splitter.discard(whole);
        prop_assert_eq!(splitter.rest(), bytes.len() - whole);
    }
}

#[test]
fn an_event_that_has_not_ended_is_not_a_whole_one() {
    for (bytes, whole) in [
        ("", ""),
        ("data: 1\n", ""),
        ("data: 1\n\n", "data: 1\n\n"),
        ("data: 1\r\n\r\ndata: 2\r\n", "data: 1\r\n\r\n"),
        (": a\n\ndata: 1\n\ndat", ": a\n\ndata: 1\n\n"),
    ] {
        assert_eq!(whole_events(bytes.as_bytes()), whole.as_bytes(), "{bytes:?}");
    }
}
