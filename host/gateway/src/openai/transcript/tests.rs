use super::*;

fn event(choice: &str, more: &str) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":7,\"model\":\"tiny\",\
         \"choices\":[{{\"index\":0,{choice}}}]{more}}}\n\n"
    )
}

/// A chunk with a text, as vLLM writes it.
fn text(text: &str) -> String {
    event(&format!("\"delta\":{{\"content\":\"{text}\"}},\"logprobs\":null,\"finish_reason\":null"), "")
}

fn role() -> String {
    event(r#""delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null"#, "")
}

/// Notes an event as the relay does.
fn note(transcript: &mut Transcript, event: &str, lists: &Lists) {
    let seen = sse::look(event.as_bytes());
    match transcript.note_known(event.as_bytes(), lists) {
        Some(known) => assert_eq!(known, seen, "{event}"),
        None => transcript.note(event.as_bytes(), &seen, lists),
    }
}

fn begun(is_chat: bool, ids: Result<StopRules, Reason>) -> Box<Transcript> {
    Transcript::new(is_chat, ids, &Budget::new(1 << 20)).unwrap()
}

fn noted(events: &[String]) -> Box<Transcript> {
    let mut transcript = begun(true, Err("text"));
    events.iter().for_each(|event| note(&mut transcript, event, &Lists::default()));
    transcript
}

#[test]
fn a_chat_s_text_and_tokens_are_kept() {
    let events =
        [role(), text("a"), text(" b"), ": ping\n\n".to_owned(), text("\\n\\\"c"), text(""), text("d")];
    let transcript = noted(&events);
    let delivered = transcript.delivered().unwrap();
    assert_eq!((delivered.json, delivered.tokens, delivered.held_back), ("a b\\n\\\"cd", 5, true));
    let expected =
        Names { id: "\"chatcmpl-1\"".to_owned(), created: "7".to_owned(), model: "\"tiny\"".to_owned() };
    assert_eq!(delivered.names, &expected);
    // Everything between the quotes of an event as before is its text; a quote is not.
    let known = transcript.text_of_known(text("x").as_bytes(), &Lists::default()).map(<[u8]>::to_vec);
    assert_eq!(known, Some(b"x".to_vec()));
    assert_eq!(transcript.text_of_known(text("\\\"},\\\"x").as_bytes(), &Lists::default()), None);
}

#[test]
fn events_whose_ends_differ_are_recognised() {
    let timed = |content: &str, end: &str| {
        let choice = format!("\"delta\":{{\"content\":\"{content}\"}},\"finish_reason\":null");
        event(&choice, &format!(",\"t\":\"{end}\""))
    };
    let transcript = noted(&[role(), timed("a", "17"), timed("b", "18"), timed("c", "29"), timed("d", "30")]);
    let delivered = transcript.delivered().unwrap();
    assert_eq!((delivered.json, delivered.tokens), ("abcd", 4));
    let known =
        |event: String| transcript.text_of_known(event.as_bytes(), &Lists::default()).map(<[u8]>::to_vec);
    assert_eq!(known(timed("x", "4567")), Some(b"x".to_vec()));
    assert_eq!(known(timed("x", "4\",\"usage\":{\"prompt_tokens\":9")), None);
    assert_eq!(known(timed("x", "4\",\"choices\":[]")), None);
    assert_eq!(known(timed("x", "4").replace("}\n\n", "}\nevent: error\n\n")), None);
    assert_eq!(known(timed("x", "4\",\"error\":{\"message\":\"no\"}")), None);
    assert_eq!(known(timed("x", "4\",\"kv_transfer_params\":{\"a\":1}")), None);
    assert_eq!(known(timed("\\\"", "4")), None);
    // What differs within the choice is a part of the answer.
    let transcript =
        noted(&[role(), text("a"), event(r#""delta":{"content":"b"},"finish_reason":null"#, "")]);
    assert!(!transcript.end_changes);
}

#[test]
fn an_event_is_looked_at_unless_one_before_differs_in_the_text_only() {
    let with = |content: &str, more: &str| {
        event(&format!("\"delta\":{{\"content\":\"{content}\"}},\"finish_reason\":null"), more)
    };
    // What stands in such an event is edited, or means more than a token.
    for more in
        [",\"kv_transfer_params\":{\"a\":1}", ",\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}"]
    {
        let transcript = noted(&[role(), with("a", more), with("b", more)]);
        assert_eq!(transcript.text_of_known(with("c", more).as_bytes(), &Lists::default()), None, "{more}");
    }
    // `note` compares what is seen in an event that is recognised with what a look sees.
    let listed = ",\"choices_seen\":1,\"token_ids\":[7]";
    let texts = ["a", "b", "", ":", "{", "data: [DONE]", "token_ids", "c"];
    for more in ["", listed] {
        let transcript = noted(&texts.map(|text| with(text, more)));
        assert_eq!(transcript.delivered().unwrap().json, texts.concat());
        assert!(transcript.text_of_known(with("x", more).as_bytes(), &Lists::default()).is_some());
    }
}

#[test]
fn completions_ids_and_usage_are_read() {
    let piece = |text: &str, ids: &str, output: u32| {
        event(
            &format!("\"text\":\"{text}\",\"finish_reason\":null,\"token_ids\":{ids}"),
            &format!(",\"usage\":{{\"prompt_tokens\":9,\"completion_tokens\":{output}}}"),
        )
    };
    let mut transcript = begun(false, Err("text"));
    note(&mut transcript, &piece("ab", "[1,2]", 2), &Lists::default());
    note(&mut transcript, &piece("cd", "[3,4]", 4), &Lists::default());
    let delivered = transcript.delivered().unwrap();
    assert_eq!((delivered.json, delivered.tokens, delivered.prompt_tokens), ("abcd", 4, Some(9)));
    let mut transcript = begun(false, Err("text"));
    for event in ["\"text\":\"ab\",\"token_ids\":[1,2]", "\"text\":\"c\",\"token_ids\":null"] {
        note(&mut transcript, &self::event(event, ""), &Lists::default());
    }
    assert_eq!(transcript.delivered().unwrap().tokens, 3);
}

#[test]
fn after_a_finish_reason_only_tokens_are_counted() {
    let end = event(r#""delta":{"content":"b"},"logprobs":{"content":[]},"finish_reason":"stop""#, "");
    let events = [role(), text("a"), end];
    let delivered = |events: &[String]| {
        let transcript = noted(events);
        let delivered = transcript.delivered().unwrap();
        (delivered.json.to_owned(), delivered.tokens, delivered.prompt_tokens)
    };
    assert_eq!(delivered(&events), ("a".to_owned(), 2, None));
    let usage = ",\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":4}";
    let usage = event("\"index\":0", usage).replace("{\"index\":0,\"index\":0}", "");
    assert_eq!(delivered(&[&events[..], &[usage]].concat()), ("a".to_owned(), 4, Some(9)));
}

#[test]
fn what_is_not_plain_text_of_one_choice_makes_a_transcript_unusable() {
    let long = text(&"x".repeat(MAX_TEXT));
    let table = [
        (event(r#""delta":{"reasoning_content":"hm"}"#, ""), "other_content"),
        (event(r#""delta":{"content":null,"tool_calls":[{"index":0}]}"#, ""), "other_content"),
        (event(r#""delta":{"content":"a"},"logprobs":{"content":[]}"#, ""), "logprobs"),
        (text("a").replace("\"index\":0", "\"index\":1"), "choices"),
        ("data: {\"object\":\"other\"}\n\n".to_owned(), "not_a_chunk"),
        (long, "too_long"),
    ];
    for (event, reason) in table {
        let transcript = noted(&[role(), text("a"), event, text("b")]);
        assert_eq!(transcript.delivered().unwrap_err(), reason);
        assert_eq!(transcript.text.capacity(), 0, "it takes no memory");
    }
    let sglang = event(r#""delta":{"reasoning_content":null,"content":"a","tool_calls":null}"#, "");
    assert_eq!(noted(&[sglang]).delivered().unwrap().json, "a");
    assert_eq!(noted(&[]).delivered().unwrap_err(), "no_text");
}

/// A chunk of a completion with ids, as vLLM writes it.
fn piece(text: &str, prompt: &str, ids: &str) -> String {
    event(
        &format!(
            "\"text\":\"{text}\",\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null,\
             \"prompt_token_ids\":{prompt},\"token_ids\":{ids}"
        ),
        "",
    )
}

fn with_ids(stop: StopRules, events: &[String]) -> Box<Transcript> {
    let mut transcript = begun(false, Ok(stop));
    for event in events {
        note(&mut transcript, event, &Lists::of(event.as_bytes()));
    }
    transcript
}

const NULL: &str = "null";

#[test]
fn i14_token_ids_are_kept_beside_the_text() {
    let events = [
        piece("a", "[7,8,9]", "[1]"),
        piece(" b", NULL, "[22]"),
        piece("\\n", NULL, "[3]"),
        piece("cd", NULL, "[4,5]"),
        piece("", NULL, "[6]"),
    ];
    let transcript = with_ids(StopRules::default(), &events);
    let delivered = transcript.delivered().unwrap();
    assert_eq!((delivered.json, delivered.tokens, delivered.prompt_tokens), ("a b\\ncd", 6, Some(3)));
    let ids = delivered.ids.unwrap();
    assert_eq!((ids.prompt, ids.output), (&[7, 8, 9][..], &[1, 22, 3, 4, 5, 6][..]));
    // I14.12: the last token's text did not come, so its token is generated again.
    assert_eq!(ids.start, Start { kept: 5, again: 0 });
    let known = piece("x", NULL, "[77]");
    let lists = Lists::of(known.as_bytes());
    assert_eq!(transcript.text_of_known(known.as_bytes(), &lists), Some(&b"x"[..]));
    let other = piece("x", NULL, "[77]").replace("\"stop_reason\":null", "\"stop_reason\":7");
    assert_eq!(transcript.text_of_known(other.as_bytes(), &Lists::of(other.as_bytes())), None);
}

#[test]
fn i14_the_rest_begins_far_enough_before_the_end_for_stop_strings() {
    // The engine holds back four characters: the text of a token comes with later ones.
    let ids = |number: u32| format!("[{number}]");
    let held = |texts: &[&str], sent_at_once| {
        let event = |(at, text): (u32, &&str)| piece(text, if at == 0 { "[9]" } else { NULL }, &ids(at));
        let events: Vec<String> = (0_u32..).zip(texts).map(event).collect();
        let transcript = with_ids(StopRules { overlap: 4, sent_at_once }, &events);
        transcript.delivered().unwrap().ids.unwrap().start
    };
    // Tokens of 3, 2, 3, 4 characters: "abc", "de", "fgh", "ijkl".
    // I14.12
    assert_eq!(held(&["", "a", "bcd", "efgh"], false), Start { kept: 3, again: 0 });
    assert_eq!(held(&["", "a", "bcd"], false), Start { kept: 0, again: 4 });
    assert_eq!(held(&["abc", "de", "fgh", "ijkl"], true), Start { kept: 3, again: 4 });
    assert_eq!(held(&["abc", "de", "fgh", "i"], true), Start { kept: 2, again: 4 });
    let events = [piece("", "[9]", "[0]"), piece("aä", NULL, "[1]"), piece("\\u00e4c", NULL, "[2]")];
    let mut transcript = with_ids(StopRules { overlap: 2, sent_at_once: false }, &events);
    let start = transcript.delivered().unwrap().ids.unwrap().start;
    assert_eq!(start, Start { kept: 2, again: 0 });
    transcript.goes_back(start);
    assert_eq!(transcript.delivered().unwrap().ids.unwrap().output, [0, 1]);
    assert_eq!(transcript.delivered().unwrap().tokens, 2);
}

#[test]
fn i14_ids_that_cannot_be_kept_leave_the_text() {
    let many = format!("[{}]", vec!["1"; 128 * 1024].join(","));
    let table = [
        (piece("b", NULL, NULL), "no_token_ids"),
        (piece("b", NULL, "[-1]"), "token_ids"),
        (piece("b", NULL, &many), "too_long"),
    ];
    for (event, reason) in table {
        let known = piece("b", NULL, "[2]");
        let transcript = with_ids(StopRules::default(), &[piece("a", "[7]", "[1]"), known, event]);
        let delivered = transcript.delivered().unwrap();
        assert_eq!((delivered.ids.unwrap_err(), delivered.json), (reason, "abb"));
    }
    let transcript = with_ids(StopRules::default(), &[piece("a", NULL, "[1]")]);
    assert_eq!(transcript.delivered().unwrap().ids.unwrap_err(), "no_token_ids", "those of the prompt");
}

#[test]
fn i14_all_transcripts_together_are_bounded() {
    let memory = Budget::new(3_000);
    let mut one = Transcript::new(true, Err("text"), &memory).unwrap();
    let another = Transcript::new(true, Err("text"), &memory).unwrap();
    // I14.14
    assert!(Transcript::new(true, Err("text"), &memory).is_none());
    drop(another);
    note(&mut one, &role(), &Lists::default());
    for _ in 0..100 {
        note(&mut one, &text("0123456789"), &Lists::default());
    }
    assert_eq!(one.delivered().unwrap().tokens, 100);
    for _ in 0..200 {
        note(&mut one, &text("0123456789"), &Lists::default());
    }
    assert_eq!(one.delivered().unwrap_err(), "memory");
    assert_eq!(memory.used(), 0, "it takes no memory");
}
