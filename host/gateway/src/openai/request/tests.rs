use super::*;

fn parse(endpoint: Endpoint, body: &'static str) -> Result<Arc<Request>, RequestError> {
    Request::parse(endpoint, &HeaderMap::new(), Bytes::from_static(body.as_bytes()), HintTrust::Trusted)
}

#[test]
fn a1_fields_default_and_a_minimal_body_parses() {
    let request =
        parse(Endpoint::ChatCompletions, r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#)
            .unwrap();
    assert_eq!((request.stream, request.n, request.max_tokens, request.prompts), (false, 1, None, 1));
    assert_eq!((request.include_usage, request.token_ids.is_none()), (false, true));
    assert_eq!(request.prompt(), r#"[{"role":"user","content":"hi"}]"#);
}

#[test]
fn a1_prompts_of_every_shape_are_told_apart() {
    let shape = |prompt: &str| {
        let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
        let request =
            Request::parse(Endpoint::Completions, &HeaderMap::new(), body.into(), HintTrust::Trusted)
                .unwrap();
        (request.prompts, request.token_ids.clone())
    };
    assert_eq!(shape(r#""text""#), (1, None));
    assert_eq!(shape("[1,2,3]"), (1, Some(vec![1, 2, 3])));
    assert_eq!(shape(r#"["a","b"]"#), (2, None));
    assert_eq!(shape("[[1],[2],[3]]"), (3, None));
}

#[test]
fn a1_both_caps_on_output_are_read() {
    let cap = |fields: &str| {
        let body = format!(r#"{{"model":"m","messages":[],{fields}}}"#);
        Request::parse(Endpoint::ChatCompletions, &HeaderMap::new(), body.into(), HintTrust::Trusted)
            .unwrap()
            .max_tokens
    };
    assert_eq!(cap(r#""max_tokens":5"#), Some(5));
    assert_eq!(cap(r#""max_tokens":5,"max_completion_tokens":9"#), Some(9));
}

#[test]
fn i_bad_fields_are_named_with_their_value() {
    let cases = [
        (
            "[]",
            "body: the body is not a JSON object: invalid type: sequence, expected an object at line 1 column 0",
        ),
        (r#"{"messages":[]}"#, "model: is missing"),
        (r#"{"model":"m"}"#, "messages: is missing"),
        (r#"{"model":"m","messages":[],"n":0}"#, "n: `0` choices were asked for"),
    ];
    for (body, expected) in cases {
        assert_eq!(parse(Endpoint::ChatCompletions, body).unwrap_err().to_string(), expected);
    }
    let error =
        parse(Endpoint::ChatCompletions, r#"{"model":"m","messages":[],"stream":"yes"}"#).unwrap_err();
    assert!(error.to_string().starts_with("stream: `\"yes\"`: invalid type: string"), "{error}");
}

#[test]
fn a1_prompt_embeds_take_precedence_over_token_ids() {
    let body = r#"{"model":"m","prompt":[1,2,3],"prompt_embeds":"gAJj"}"#;
    let request = parse(Endpoint::Completions, body).unwrap();
    assert_eq!((request.prompt(), &request.token_ids), (r#""gAJj""#, &None));
    let alone = parse(Endpoint::Completions, r#"{"model":"m","prompt_embeds":"gAJj"}"#).unwrap();
    assert_eq!(alone.prompt(), r#""gAJj""#);
}

#[test]
fn a1_a_list_of_token_lists_to_embed_is_a_batch() {
    let body = r#"{"model":"m","input":[[1,2],[3]],"dimensions":8,"encoding_format":"float","stream":true}"#;
    let request = parse(Endpoint::Embeddings, body).unwrap();
    assert_eq!((request.prompts, request.stream, request.endpoint.splits()), (2, false, false));
}

#[test]
fn a1_a_probe_is_told_by_its_flag_and_absent_when_false() {
    let probe = |body: &'static str| parse(Endpoint::Completions, body).unwrap().hints.probe;
    assert!(probe(r#"{"model":"m","prompt":[1],"_HEALTH_CHECK":true}"#));
    assert!(!probe(r#"{"model":"m","prompt":[1]}"#));
}
