use super::*;

const BILLED: &str = "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;";

fn parse(body: &str) -> JsonBody {
    JsonBody::parse(bytes::Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

fn joined(bytes: &PromptBytes<'_>) -> Vec<u8> {
    bytes.parts().collect::<Vec<_>>().concat()
}

fn chat(body: &str) -> String {
    String::from_utf8_lossy(&joined(&PromptBytes::of_chat(&parse(body), ["system", "messages"], 4)))
        .into_owned()
}

/// The message with this content part after a text.
fn with_part(part: &str) -> String {
    format!(r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":"a"}},{part}]}}]}}"#)
}

#[test]
fn h5_a_chat_has_the_bytes_of_everything_that_its_template_writes_in_the_order_of_the_template() {
    let plain = r#"{"messages":[1],"max_tokens":3}"#;
    // H5.6
    assert_eq!(chat(plain), "[1]");
    for empty in [r#""tools":null"#, r#""tools":[],"documents":[],"chat_template_kwargs":{}"#] {
        assert_eq!(chat(&format!(r#"{{{empty},"messages":[1]}}"#)), "[1]");
    }
    let all = r#"{"messages":[1],"system":"s","documents":[2],"chat_template_kwargs":{"k":1},"tools":[3]}"#;
    assert_eq!(chat(all), r#"[3][2]"s"[1]{"k":1}"#);
    // Templates that know an effort write it into the first message.
    let of = |fields: &str| {
        joined(&PromptBytes::of_chat(&parse(&format!(r#"{{"messages":[1],{fields}}}"#)), ["messages"], 4))
    };
    let low = of(r#""tools":[3],"reasoning_effort":"low""#);
    assert_eq!((low.len(), &low[8..]), (14, b"[3][1]".as_slice()));
    assert_ne!(low[..8], of(r#""reasoning_effort":"high""#)[..8]);
    let argument = of(r#""reasoning_effort":null,"chat_template_kwargs":{"reasoning_effort":"low"}"#);
    assert_eq!((&argument[..8], &argument[8..11]), (&low[..8], b"[1]".as_slice()));
    let of_text = PromptBytes::of_text(&parse(all), ["documents"], 4).count();
    assert_eq!(of_text, 3, "a prompt that is not a chat has its own fields only");
    let templates = ["a".repeat(9_000), "b".to_owned()].map(|template| {
        let body = parse(&format!(r#"{{"chat_template":"{template}","messages":[1]}}"#));
        joined(&PromptBytes::of_chat(&body, ["messages"], 4))
    });
    assert_eq!(templates.each_ref().map(Vec::len), [11, 11], "a template is not rendered");
    assert_ne!(templates[0], templates[1]);
}

#[test]
fn h5_the_line_of_claude_code_is_left_out_wherever_a_system_prompt_is() {
    for (body, expected) in [
        (
            format!(
                r#"{{"system":[{{"type":"text","text":"{BILLED}"}},{{"type":"text","text":"s"}}],"messages":[]}}"#
            ),
            r#"[{"type":"text","text":""},{"type":"text","text":"s"}]"#,
        ),
        (format!(r#"{{"system":"{BILLED}\nYou are","messages":[]}}"#), r#""\nYou are""#),
        (
            format!(r#"{{"messages":[{{"role":"system","content":"{BILLED}\nYou are"}}]}}"#),
            r#"[{"role":"system","content":"\nYou are"}]"#,
        ),
    ] {
        // H5.7
        assert_eq!(chat(&body), expected);
    }
    let later =
        format!(r#"{{"messages":[{{"content":"{} \"x-anthropic-billing-header"}}]}}"#, "x".repeat(300));
    assert!(chat(&later).ends_with("billing-header\"}]"), "a line later in a prompt is text");
}

#[test]
fn h5_inline_data_counts_as_1024_tokens_at_most_and_differs_in_its_first_bytes() {
    let data = "iVBORw0KGgoA/+9=".repeat(1_000);
    for (part, head) in [
        (
            r#"{"type":"image_url","image_url":{"url":"data:image/png;base64,DATA"}}"#,
            "data:image/png;base64,",
        ),
        (
            r#"{"type":"image_url","image_url":{"url":"data:image\/png;base64,\/DATA"}}"#,
            r"data:image\/png;base64,\/",
        ),
        (r#"{"type":"input_audio","input_audio":{"format":"wav","data": "DATA"}}"#, ""),
        (r#"{"type":"image","source":{"type":"base64","media_type":"image/png","data" : "DATA"}}"#, ""),
        (r#"{"type":"file","file":{"file_data":"DATA"}}"#, ""),
        (r#"{"type":"image_embeds","image_embeds":"DATA"}"#, ""),
    ] {
        let body = |data: &str| parse(&with_part(&part.replace("DATA", data)));
        let bytes = |data: &str| joined(&PromptBytes::of_chat(&body(data), ["messages"], 4));
        let (none, one, other) = (bytes(""), bytes(&data), bytes(&(data.clone() + "B")));
        // H5.8
        assert_eq!(one.len() - none.len() + head.len(), 4 * MEDIA_TOKENS, "{part}");
        assert_eq!(one, bytes(&data));
        let before = with_part(part).find(&format!("{head}DATA")).unwrap() - r#"{"messages":"#.len();
        let same = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
        assert!((before..before + DIGEST).contains(&same), "{part}: {same} of {before}");
        assert!(one.ends_with(b"}]}]") && other.len() == one.len());
    }
}

#[test]
fn h5_what_is_short_or_text_counts_in_full() {
    let part = |data: &str| with_part(&format!(r#"{{"type":"image","source":{{"data":"{data}"}}}}"#));
    let counted = |body: &str| chat(body).len() + r#"{"messages":}"#.len();
    let icon = part(&"A".repeat(4 * MEDIA_TOKENS));
    let prose = part(&"a text in a field of this name ".repeat(400));
    let url = with_part(&format!(r#"{{"url":"data:text/plain,{}"}}"#, "A".repeat(9_000)));
    let word = with_part(&format!(r#"{{"type":"text","text":"{}"}}"#, "A".repeat(9_000)));
    for body in [icon, prose, url, word] {
        // H5.8
        assert_eq!(counted(&body), body.len());
    }
    // Cohere's list of images.
    let image = format!(r#""data:image/png;base64,{}""#, "A".repeat(9_000));
    let body = parse(&format!(r#"{{"images":[{image},{image}]}}"#));
    // H5.8
    assert_eq!(PromptBytes::of_text(&body, ["images"], 4).count(), 2 * (4 * MEDIA_TOKENS + 2) + 3);
}
