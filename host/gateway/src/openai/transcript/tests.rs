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

fn noted(events: &[String]) -> Box<Transcript> {
    let mut transcript = Transcript::new(true);
    events.iter().for_each(|event| transcript.note(event.as_bytes()));
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
    let known = transcript.text_of_known(text("x").as_bytes()).map(<[u8]>::to_vec);
    assert_eq!(known, Some(b"x".to_vec()));
    assert_eq!(transcript.text_of_known(text("\\\"},\\\"x").as_bytes()), None);
}

#[test]
fn completions_ids_and_usage_are_read() {
    let piece = |text: &str, ids: &str, output: u32| {
        event(
            &format!("\"text\":\"{text}\",\"finish_reason\":null,\"token_ids\":{ids}"),
            &format!(",\"usage\":{{\"prompt_tokens\":9,\"completion_tokens\":{output}}}"),
        )
    };
    let mut transcript = Transcript::new(false);
    transcript.note(piece("ab", "[1,2]", 2).as_bytes());
    transcript.note(piece("cd", "[3,4]", 4).as_bytes());
    let delivered = transcript.delivered().unwrap();
    assert_eq!((delivered.json, delivered.tokens, delivered.prompt_tokens), ("abcd", 4, Some(9)));
    let mut transcript = Transcript::new(false);
    for event in ["\"text\":\"ab\",\"token_ids\":[1,2]", "\"text\":\"c\",\"token_ids\":null"] {
        transcript.note(self::event(event, "").as_bytes());
    }
    assert_eq!(transcript.delivered().unwrap().tokens, 3);
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
