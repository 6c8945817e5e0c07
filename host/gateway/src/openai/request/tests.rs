use super::*;

fn parse(endpoint: Endpoint, body: &'static str) -> Result<Arc<Request>, RequestError> {
    read(endpoint, body.to_owned())
}

fn read(endpoint: Endpoint, body: String) -> Result<Arc<Request>, RequestError> {
    Request::parse(endpoint, &HeaderMap::new(), body.into(), &HintTrust::Trusted.into())
}

#[test]
fn a1_fields_default_and_a_minimal_body_parses() {
    let request =
        parse(Endpoint::ChatCompletions, r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#)
            .unwrap();
    assert_eq!((request.stream, request.n, request.max_tokens, request.prompts), (false, 1, None, 1));
    // A1.3
    assert_eq!((request.include_usage, request.token_ids.is_none()), (false, true));
    assert_eq!(request.prompt(), r#"[{"role":"user","content":"hi"}]"#);
    // A1.2
    assert_eq!(request.hints, Hints::default());
    let canary = parse(Endpoint::Completions, r#"{"model":"m","prompt":[1]}"#).unwrap();
    assert_eq!(canary.token_ids, Some(vec![1]));
    let rest = (canary.stream, canary.include_usage, canary.n, canary.max_tokens, canary.prompts);
    // A1.2
    assert_eq!((rest, &canary.hints), ((false, false, 1, None, 1), &Hints::default()));
}

#[test]
fn a1_prompts_of_every_shape_are_told_apart() {
    let shape = |prompt: &str| {
        let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
        let request = read(Endpoint::Completions, body).unwrap();
        (request.prompts, request.token_ids.clone())
    };
    assert_eq!(shape(r#""text""#), (1, None));
    assert_eq!(shape("[1,2,3]"), (1, Some(vec![1, 2, 3])));
    assert_eq!(shape(r#"["a","b"]"#), (2, None));
    assert_eq!(shape("[[1],[2],[3]]"), (3, None));
    // A1.18
    assert_eq!(shape(r#"["text"]"#), (1, None));
    assert_eq!(shape(" [ [1, 2] ] "), (1, Some(vec![1, 2])));
    assert_eq!(shape("[[]]"), (1, Some(Vec::new())));
    assert_eq!(shape(r#"[["a","b"]]"#), (1, None));
}

#[test]
fn a1_a_list_of_one_prompt_is_measured_as_that_prompt() {
    let of = |endpoint, key: &str, value: &str| {
        read(endpoint, format!(r#"{{"model":"m","{key}": {value} }}"#)).unwrap()
    };
    let text = format!("\"{}\"", "some text, ".repeat(40));
    let bytes =
        |request: &Request| request.prompt_bytes(4).parts().flat_map(<[u8]>::to_vec).collect::<Vec<u8>>();
    for (endpoint, key) in
        [(Endpoint::Completions, "prompt"), (Endpoint::Generate, "text"), (Endpoint::Embeddings, "input")]
    {
        let (one, list) = (of(endpoint, key, &text), of(endpoint, key, &format!("[ {text}\n]")));
        // A1.18
        assert_eq!((one.prompt(), bytes(&one)), (list.prompt(), bytes(&list)), "{key}");
        assert_eq!((list.prompt(), list.tokenized_bytes()), (text.as_str(), text.len()));
        assert!(list.is_batch() == endpoint.takes_batches() && !one.is_batch(), "engines see a list");
    }
    assert_eq!(of(Endpoint::Generate, "input_ids", "[[7,8]]").token_ids, Some(vec![7, 8]));
    let several = of(Endpoint::Completions, "prompt", r#"["a","b"]"#);
    assert_eq!((several.prompt(), several.prompts), (r#"["a","b"]"#, 2));
    let embeds = of(Endpoint::Generate, "input_embeds", "[[[0.5]]]");
    assert_eq!((embeds.prompt(), &embeds.token_ids), ("[[[0.5]]]", &None));
    let data = format!("\"data:image/png;base64,{}\"", "iVBORw0KGgoA".repeat(1_000));
    let cut =
        [data.clone(), format!("[{data}]")].map(|data| bytes(&of(Endpoint::Completions, "prompt", &data)));
    assert!(cut[0] == cut[1] && cut[0].len() < data.len(), "inline data is cut short in both");
}

#[test]
fn a1_both_caps_on_output_are_read() {
    let cap = |fields: &str| {
        let body = format!(r#"{{"model":"m","messages":[],{fields}}}"#);
        read(Endpoint::ChatCompletions, body).unwrap().max_tokens
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
        (
            r#"{"model":"m","messages":[],"n":0}"#,
            "n: `0` is not a whole number from 1 to 128, the limit of limits.choices",
        ),
    ];
    for (body, expected) in cases {
        assert_eq!(parse(Endpoint::ChatCompletions, body).unwrap_err().to_string(), expected);
    }
    let error =
        parse(Endpoint::ChatCompletions, r#"{"model":"m","messages":[],"stream":"maybe"}"#).unwrap_err();
    assert!(error.to_string().starts_with("stream: `\"maybe\"`: invalid value: string"), "{error}");
}

#[test]
fn a1_prompt_embeds_take_precedence_over_token_ids() {
    let body = r#"{"model":"m","prompt":[1,2,3],"prompt_embeds":"gAJj"}"#;
    let request = parse(Endpoint::Completions, body).unwrap();
    // A1.5
    assert_eq!((request.prompt(), &request.token_ids), (r#""gAJj""#, &None));
    let alone = parse(Endpoint::Completions, r#"{"model":"m","prompt_embeds":"gAJj"}"#).unwrap();
    assert_eq!(alone.prompt(), r#""gAJj""#);
}

#[test]
fn h7_the_tools_and_documents_of_a_chat_are_part_of_what_a_tokenizer_reads() {
    let bytes = |endpoint, body| parse(endpoint, body).unwrap().tokenized_bytes();
    let chat = r#"{"model":"m","messages":[1],"tools":[23],"documents":[456]}"#;
    // H7.8
    assert_eq!(bytes(Endpoint::ChatCompletions, chat), "[1][23][456]".len());
    assert_eq!(bytes(Endpoint::Completions, r#"{"model":"m","prompt":"a","tools":[23]}"#), 3);
}

#[test]
fn a1_an_embeddings_request_without_input_embeds_a_chat() {
    let prompt = |body| parse(Endpoint::Embeddings, body).map(|request| request.prompt().to_owned());
    // A1.15
    assert_eq!(prompt(r#"{"model":"m","messages":[{"role":"user"}]}"#).unwrap(), r#"[{"role":"user"}]"#);
    assert_eq!(prompt(r#"{"model":"m","messages":[1],"input":"x"}"#).unwrap(), "\"x\"");
    let error = prompt(r#"{"model":"m"}"#).unwrap_err().to_string();
    assert_eq!(error, "input: is missing");
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
    // A1.4
    assert!(probe(r#"{"model":"m","prompt":[1],"_HEALTH_CHECK":true}"#));
    assert!(!probe(r#"{"model":"m","prompt":[1]}"#));
}

#[test]
fn i_a_number_of_choices_outside_the_limit_is_named_with_its_value_and_the_limit() {
    for value in [
        "0",
        "129",
        "3000000",
        "4294967295",
        "4294967296",
        "-1",
        "1.5",
        "1e400",
        "1e3",
        "\"300\"",
        "false",
        "[2]",
        "{}",
        "99999999999999999999999999",
    ] {
        for field in ["n", "best_of"] {
            let error =
                read(Endpoint::Completions, format!(r#"{{"model":"m","prompt":"x","{field}":{value}}}"#));
            let expected = format!(
                "{field}: `{value}` is not a whole number from 1 to 128, the limit of limits.choices"
            );
            assert_eq!(error.unwrap_err().to_string(), expected);
        }
    }
    for (value, n) in [("1", 1), ("128", 128), ("1e2", 100), ("2.0", 2), ("null", 1)] {
        let body = format!(r#"{{"model":"m","prompt":"x","n":{value}}}"#);
        assert_eq!(read(Endpoint::Completions, body).unwrap().n, n);
    }
}

#[test]
fn the_last_of_several_numbers_of_choices_counts_however_its_key_is_escaped() {
    let n = |fields: &str| read(Endpoint::Completions, format!(r#"{{"model":"m","prompt":"x",{fields}}}"#));
    assert_eq!(n(r#""n":4294967295,"n":2"#).unwrap().n, 2);
    let error = n(r#""n":2,"\u006e":4294967295"#).unwrap_err();
    assert!(error.to_string().starts_with("n: `4294967295` is not a whole number"), "{error}");
}

#[test]
fn i_the_sizes_of_a_batch_are_limited() {
    let batch = |prompts: usize, n: u32| {
        let list = vec!["\"p\""; prompts].join(",");
        let request = read(Endpoint::Completions, format!(r#"{{"model":"m","prompt":[{list}],"n":{n}}}"#));
        request.map(|request| request.items()).map_err(|error| error.to_string())
    };
    assert_eq!(batch(2_048, 2), Ok(4_096));
    let error = batch(2_049, 1).unwrap_err();
    let expected = "prompt: 2049 prompts are more than 2048, the limit of limits.prompts; split the batch";
    assert_eq!(error, expected);
    let error = batch(33, 128).unwrap_err();
    assert_eq!(
        error,
        "n: `128` choices of 33 prompts are 4224 sequences, more than 4096, the limit of limits.sequences; ask for \
         fewer choices or split the batch"
    );
    // Lists of token ids and mixed lists count, too.
    for prompts in ["[1],".repeat(3_000), "1,\"x\",".repeat(1_500)] {
        let body = format!(r#"{{"model":"m","prompt":[{}]}}"#, prompts.trim_end_matches(','));
        let error = read(Endpoint::Completions, body).unwrap_err().to_string();
        assert!(error.starts_with("prompt: 3000 prompts"), "{error}");
    }
}

#[test]
fn i_lists_trees_and_names_are_limited() {
    let chat = |fields: &str| {
        let request = read(Endpoint::ChatCompletions, format!(r#"{{"model":"m","messages":[],{fields}}}"#));
        request.map(drop).map_err(|error| error.to_string())
    };
    let list = |count: usize| vec!["1"; count].join(",");
    assert_eq!(chat(&format!(r#""stop":[{}]"#, list(128))), Ok(()));
    let error = chat(&format!(r#""stop":[{}]"#, list(129))).unwrap_err();
    assert_eq!(error, "stop: 129 elements are more than the limit of 128; send fewer");
    let error = chat(&format!(r#""tools":[{{"x":[{}]}}]"#, list(300_000))).unwrap_err();
    assert_eq!(error, "tools: 300003 JSON values are more than the limit of 262144; send fewer");
    let error =
        read(Endpoint::ChatCompletions, format!(r#"{{"model":"{}","messages":[]}}"#, "m".repeat(513)));
    assert_eq!(
        error.unwrap_err().to_string(),
        "model: a text of 513 bytes is longer than the limit of 512; send a shorter one"
    );
    let error = read(
        Endpoint::ChatCompletions,
        format!(r#"{{"model":"m","messages":{}1{}}}"#, "[".repeat(101), "]".repeat(101)),
    );
    assert_eq!(
        error.unwrap_err().to_string(),
        "body: lists and objects are nested more than 100 deep; send a flatter one"
    );
}

#[test]
fn i_an_error_does_not_repeat_a_long_value() {
    let long = "x".repeat(100_000);
    let error =
        read(Endpoint::ChatCompletions, format!(r#"{{"model":"m","messages":[],"stream":"{long}"}}"#));
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("stream: `\"xxx") && error.len() < 1_000, "{}", error.len());
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(3_000))]
    /// Whatever a body says, parsing ends without a panic, and a request stays within the limits.
    #[test]
    fn any_body_is_a_request_within_the_limits_or_an_error(
        fields in proptest::collection::vec((
            proptest::sample::select(vec![
                "n", "\\u006e", "best_of", "prompt", "messages", "input", "model", "stream", "stop", "max_tokens", "tools", "nvext",
                "cache_salt", "stream_options", "_HEALTH_CHECK", "prompt_embeds", "text", "input_ids", "input_embeds",
                "sampling_params", "lora_path",
            ]),
            proptest::sample::select(vec![
                "0", "1", "7", "128", "129", "-1", "1.0", "1e400", "4294967295", "4294967296", "\"a\"", "\"\"", "null", "true",
                "[]", "{}", "[1,2]", "[\"a\",\"b\"]", "[[1],[2,3]]", "[1e400]", "[-1]", "[1,\"a\"]", "[null]",
                "{\"include_usage\":1}", "{\"dp_rank\":-1}", "{\"required_taints\":[\"a\"]}",
                "{\"n\":2,\"max_new_tokens\":-1}", "[{\"n\":2},{}]", "[{\"n\":4294967295}]", "[[[0.5]],[[0.5]]]",
                "{\"priority\":1e39}", "{\"preferred_taints\":{\"a\":1e300}}", "{\"token_data\":[4294967296]}",
            ]),
        ), 0..8),
        endpoint in proptest::sample::select(vec![
            Endpoint::ChatCompletions, Endpoint::Completions, Endpoint::Embeddings, Endpoint::Tokenize("/tokenize"),
            Endpoint::Generate,
        ]),
    ) {
        let fields: Vec<String> = fields.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
        let body = format!("{{{}}}", fields.join(","));
        match read(endpoint, body.clone()) {
            Ok(request) => {
                proptest::prop_assert!(request.n <= 128 && request.n >= 1);
                proptest::prop_assert!(request.items() <= 4_096 && request.items() >= 1, "{body}");
                proptest::prop_assert!(request.hints.priority.is_finite());
            }
            Err(error) => proptest::prop_assert!(!error.field.is_empty() && error.problem.len() < 2_000),
        }
    }
}
