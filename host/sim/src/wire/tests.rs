//! Compares the vLLM format with bytes recorded from vLLM 0.32 on CPU.

use super::*;

fn meta(chat: bool, id: &str) -> Meta {
    Meta {
        api: if chat { Api::Chat } else { Api::Completions },
        chat,
        id: id.to_owned(),
        item_ids: Vec::new(),
        created: 1_795_234_019,
        model: "\"tiny\"".to_owned(),
        fingerprint: "45ac2359".to_owned(),
        include_usage: true,
        continuous_usage: false,
        token_ids: false,
        batch: false,
        prompts: vec![Prompt::of_tokens(vec![5, 6, 7, 8])],
        n: 1,
    }
}

fn step(text: &'static str, token: u32, finish: Option<Finish>) -> Step {
    Step { index: 0, text, token: Some(token), finish, completion: 1, cached: 0, params: None }
}

fn vllm() -> &'static dyn Shape {
    Dialect::Vllm.shape()
}

#[test]
fn chat_chunks_are_vllms() {
    let mut meta = meta(true, "chatcmpl-96718d8a8de6aaed");
    assert_eq!(
        vllm().open(&meta, 0, None),
        [
            r#"{"id":"chatcmpl-96718d8a8de6aaed","object":"chat.completion.chunk","created":1795234019,"model":"tiny","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}"#
        ]
    );
    assert_eq!(
        vllm().step(&meta, &step(" keyword", 1, None), true, None),
        [
            r#"{"id":"chatcmpl-96718d8a8de6aaed","object":"chat.completion.chunk","created":1795234019,"model":"tiny","choices":[{"index":0,"delta":{"content":" keyword"},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#
        ]
    );
    assert_eq!(
        vllm().step(&meta, &step(" keyword", 1, Some(Finish::Length)), false, None),
        [
            r#"{"id":"chatcmpl-96718d8a8de6aaed","object":"chat.completion.chunk","created":1795234019,"model":"tiny","choices":[{"index":0,"delta":{"content":" keyword"},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}]}"#
        ]
    );
    let usage = Usage { prompt: 332, completion: 4, cached: 320, created_cache: 0 };
    assert_eq!(
        vllm().usage(&meta, usage),
        r#"{"id":"chatcmpl-96718d8a8de6aaed","object":"chat.completion.chunk","created":1795234019,"model":"tiny","choices":[],"usage":{"prompt_tokens":332,"total_tokens":336,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":320,"created_cache_tokens":0}},"system_fingerprint":"vllm-0.32.0-45ac2359"}"#
    );
    meta.include_usage = false;
    meta.id = "chatcmpl-bed62f08f72779e6".to_owned();
    assert_eq!(
        vllm().step(&meta, &step(" libraries", 1, Some(Finish::Length)), false, None),
        [
            r#"{"id":"chatcmpl-bed62f08f72779e6","object":"chat.completion.chunk","created":1795234019,"model":"tiny","choices":[{"index":0,"delta":{"content":" libraries"},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],"system_fingerprint":"vllm-0.32.0-45ac2359"}"#
        ]
    );
}

#[test]
fn completion_chunks_are_vllms() {
    let mut meta = meta(false, "cmpl-bd3d27f576c3e332");
    (meta.token_ids, meta.include_usage) = (true, false);
    assert_eq!(
        vllm().step(&meta, &step("cle", 2176, None), true, None),
        [
            r#"{"id":"cmpl-bd3d27f576c3e332","object":"text_completion","created":1795234019,"model":"tiny","choices":[{"index":0,"text":"cle","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[5,6,7,8],"token_ids":[2176]}]}"#
        ]
    );
    assert_eq!(
        vllm().step(&meta, &step("St", 1570, Some(Finish::Length)), false, None),
        [
            r#"{"id":"cmpl-bd3d27f576c3e332","object":"text_completion","created":1795234019,"model":"tiny","choices":[{"index":0,"text":"St","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":null,"token_ids":[1570]}],"system_fingerprint":"vllm-0.32.0-45ac2359"}"#
        ]
    );
    (meta.token_ids, meta.include_usage, meta.id) = (false, true, "cmpl-af3944ea777a7cad".to_owned());
    let usage = Usage { prompt: 3, completion: 3, cached: 0, created_cache: 0 };
    assert_eq!(
        vllm().step(&meta, &step("45", 1, Some(Finish::Length)), false, Some(usage)),
        [
            r#"{"id":"cmpl-af3944ea777a7cad","object":"text_completion","created":1795234019,"model":"tiny","choices":[{"index":0,"text":"45","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":null,"token_ids":null}],"usage":{"prompt_tokens":3,"total_tokens":6,"completion_tokens":3}}"#
        ]
    );
    assert_eq!(
        vllm().usage(&meta, usage),
        r#"{"id":"cmpl-af3944ea777a7cad","object":"text_completion","created":1795234019,"model":"tiny","choices":[],"usage":{"prompt_tokens":3,"total_tokens":6,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":0}},"system_fingerprint":"vllm-0.32.0-45ac2359"}"#
    );
}

#[test]
fn whole_answers_are_vllms() {
    let choice =
        |text: &str| Choice { text: text.to_owned(), finish: Some(Finish::Length), ..Choice::default() };
    let usage = Usage { prompt: 332, completion: 4, cached: 0, created_cache: 320 };
    assert_eq!(
        vllm().whole(&meta(true, "chatcmpl-my-req-1"), &[choice("mb keyword Me keyword")], usage, None),
        r#"{"id":"chatcmpl-my-req-1","object":"chat.completion","created":1795234019,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"mb keyword Me keyword","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-45ac2359","usage":{"prompt_tokens":332,"total_tokens":336,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":320,"multimodal_tokens":null},"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#
    );
    let usage = Usage { prompt: 289, completion: 1, cached: 0, created_cache: 288 };
    assert_eq!(
        vllm().whole(&meta(false, "cmpl-pd-1"), &[choice("tring")], usage, Some(r#"{"a":1}"#)),
        r#"{"id":"cmpl-pd-1","object":"text_completion","created":1795234019,"model":"tiny","choices":[{"index":0,"text":"tring","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-45ac2359","usage":{"prompt_tokens":289,"total_tokens":290,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":null,"multimodal_tokens":null},"completion_tokens_details":null},"kv_transfer_params":{"a":1},"ec_transfer_params":null,"metrics":null}"#
    );
}

#[test]
fn errors_are_vllms() {
    assert_eq!(
        vllm().error(&Failure::engine_dead()),
        r#"{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}"#
    );
    assert_eq!(
        vllm().error(&Failure::transfer()),
        r#"{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}"#
    );
    assert_eq!(
        vllm().error(
            &Failure::not_found("The model `nope` does not exist. Valid aliases: tiny.").with_param("model")
        ),
        r#"{"error":{"message":"The model `nope` does not exist. Valid aliases: tiny.","type":"NotFoundError","param":"model","code":404}}"#
    );
}

#[test]
fn every_shape_is_json() {
    for dialect in [Dialect::Vllm, Dialect::Sglang, Dialect::Openai] {
        for chat in [true, false] {
            let (shape, meta) = (dialect.shape(), meta(chat, "x"));
            let usage = Usage { prompt: 3, completion: 3, cached: 0, created_cache: 0 };
            let choices = [Choice::default(), Choice { index: 1, ..Choice::default() }];
            let mut all = shape.open(&meta, 0, Some(usage));
            all.push(shape.usage(&meta, usage));
            all.extend(shape.step(&meta, &step(" x", 1, Some(Finish::Stop)), true, Some(usage)));
            all.push(shape.whole(&meta, &choices, usage, None));
            all.push(shape.error(&Failure::bad("say \"why\"").with_param("n")));
            all.push(shape.error_event(&Failure::transfer()));
            for text in all {
                serde_json::from_str::<serde_json::Value>(&text)
                    .unwrap_or_else(|error| panic!("{error}: {text}"));
            }
        }
    }
}

#[test]
fn outputs_of_generate_are_sglangs() {
    let shape = Dialect::Sglang.shape_of(Api::Generate);
    let mut meta = Meta { api: Api::Generate, ..meta(false, "x") };
    let mut said = Choice::default();
    said.add(&step(" a", 5, None));
    let event = r#"{"text":" a","output_ids":[5],"meta_info":{"id":"x","finish_reason":null,"prompt_tokens":4,"weight_version":"default","num_retractions":0,"reasoning_tokens":0,"completion_tokens":1,"cached_tokens":0,"dp_rank":null}}"#;
    assert_eq!(shape.repeat(&meta, &said).as_deref(), Some(event));
    assert_eq!(shape.whole(&meta, &[said.clone()], Usage::default(), None), event);
    meta.batch = true;
    assert_eq!(shape.whole(&meta, &[said.clone()], Usage::default(), None), format!("[{event}]"));
    assert!(shape.repeat(&meta, &said).unwrap().ends_with(r#"},"index":0}"#));
    assert_eq!(shape.error(&Failure::bad("say \"why\"")), r#"{"error":{"message":"say \"why\""}}"#);
    let error = serde_json::from_str::<serde_json::Value>(&shape.error_event(&Failure::transfer())).unwrap();
    let finish = &error["meta_info"]["finish_reason"];
    assert_eq!((&finish["type"], &finish["status_code"]), (&"abort".into(), &500.into()));
}
