use std::sync::Arc;

use http::HeaderMap;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{openai::hints::HintTrust, openai::request::Endpoint};

fn spec(flag: &str) -> WorkerSpec {
    WorkerSpec::parse_flag(flag).unwrap()
}

fn request(endpoint: Endpoint, body: &str) -> Arc<Request> {
    Request::parse(
        endpoint,
        &HeaderMap::new(),
        Bytes::copy_from_slice(body.as_bytes()),
        &HintTrust::Trusted.into(),
    )
    .unwrap()
}

fn context<'a>(prefill: &'a WorkerSpec, decode: &'a WorkerSpec, handoff: Option<&'a str>) -> LegContext<'a> {
    LegContext {
        token: RequestToken([0xab; 16]),
        endpoint: None,
        prefill: Some(Target { spec: prefill, rank: DpRank(1) }),
        decode: Some(Target { spec: decode, rank: DpRank(0) }),
        engine_id: Some("engine-7"),
        rooms: &[4_611_686_018_427_387_904, 5],
        handoff,
        ids: TokenIds::default(),
        usage: false,
        parent: None,
    }
}

fn value(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

const NIXL: &str = "role=prefill,engine=vllm,url=http://10.0.0.1:8000";
const SGLANG: &str = "role=prefill,engine=sglang,url=http://10.0.0.1:30000";
const CHAT: &str = r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true},"max_tokens":50,"max_completion_tokens":60,"logprobs":true,"top_logprobs":2,"logprob_token_ids":[1],"kv_transfer_params":{"do_remote_prefill":true},"rid":"mine","nvext":{},"custom":[1.0]}"#;

#[test]
fn a5_what_belongs_to_the_handoff_is_stripped_on_every_leg() {
    for flag in [NIXL, SGLANG, "role=aggregated,engine=openai,url=http://a:1"] {
        let worker = spec(flag);
        let request = request(Endpoint::ChatCompletions, CHAT);
        let body = connector_for(&worker).single(&request, &context(&worker, &worker, None));
        let body = value(&body);
        assert!(body.get("kv_transfer_params").is_none() && body.get("nvext").is_none(), "{body}");
        assert_ne!(body["rid"], "mine");
        assert_eq!(body["custom"], json!([1.0]), "unknown fields pass");
    }
}

#[test]
fn c1_c7a_a_nixl_prefill_is_never_streamed_and_asks_for_one_token() {
    let worker = spec(NIXL);
    let request = request(Endpoint::ChatCompletions, CHAT);
    let body = connector_for(&worker).prefill(&request, &context(&worker, &worker, None));
    // C1.1, C1.5, C7a.1
    assert_eq!(
        value(&body),
        json!({"model":"m","messages":[],"stream":false,"max_tokens":1,"max_completion_tokens":1,"min_tokens":1,
               "logprobs":true,"top_logprobs":2,"logprob_token_ids":[1],"custom":[1.0],"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}})
    );
}

#[test]
fn c1_a_nixl_decode_gets_the_original_back_with_the_parameters_verbatim() {
    let worker = spec(NIXL);
    let request = request(Endpoint::ChatCompletions, CHAT);
    let parameters = r#"{"remote_block_ids":[[1,  2]],"odd":1e2}"#;
    let body = connector_for(&worker).decode(&request, &context(&worker, &worker, Some(parameters)));
    let text = std::str::from_utf8(&body).unwrap();
    // C1.3, C7.2, D1.4
    assert!(
        text.contains(parameters) && text.contains(r#""max_tokens":50,"max_completion_tokens":60"#),
        "{text}"
    );
    assert!(text.contains(r#""stream":true"#));
}

#[test]
fn l1_a_leg_that_answers_asks_for_usage_in_the_place_of_the_client_s_options() {
    let options = r#"{"include_usage":false,"continuous_usage_stats":true}"#;
    let body = format!(r#"{{"model":"m","prompt":"x","stream":true,"stream_options":{options}}}"#);
    for flag in [NIXL, SGLANG] {
        let worker = spec(flag);
        let (connector, request) = (connector_for(&worker), request(Endpoint::Completions, &body));
        let context = LegContext { usage: true, ..context(&worker, &worker, Some("{}")) };
        for body in [connector.single(&request, &context), connector.decode(&request, &context)] {
            // L1.10
            assert_eq!(value(&body)["stream_options"], json!({"include_usage":true}));
        }
    }
}

#[test]
fn e1_a_handoff_is_consumed_by_a_decode_of_one_token() {
    let worker = spec(NIXL);
    let request = request(
        Endpoint::Completions,
        r#"{"model":"m","prompt":"x","stream":true,"max_tokens":9,"min_tokens":4}"#,
    );
    let body =
        connector_for(&worker).decode_one_token(&request, &context(&worker, &worker, Some(r#"{"a":1}"#)));
    // E1.3
    assert_eq!(
        value(&body),
        json!({"model":"m","prompt":"x","stream":false,"max_tokens":1,"min_tokens":1,"kv_transfer_params":{"a":1}})
    );
}

#[test]
fn c7_the_parameters_of_a_real_engine_are_read_and_stay_opaque() {
    let recorded = include_bytes!("../../../../tests/fixtures/pd/prefill-response.json");
    let answer = connector_for(&spec(NIXL)).read_prefill(recorded);
    let PrefillAnswer::Handoff { parameters, prompt } = answer else { panic!("{answer:?}") };
    // C7.4
    assert_eq!(prompt, PromptUsage { tokens: 289, cached_tokens: Some(0), created_tokens: None });
    // C7.2
    assert_eq!(value(parameters.as_bytes()), value(recorded)["kv_transfer_params"]);
    // Decode gets the parameters that the recorded decode request carried.
    let sent = value(include_bytes!("../../../../tests/fixtures/pd/decode-request.json"));
    assert_eq!(value(parameters.as_bytes()), sent["kv_transfer_params"]);
    // A later version says more, and all of it is passed on.
    let later = include_bytes!("../../../../tests/fixtures/engines/vllm-0.33/prefill-response.json");
    let answer = connector_for(&spec(NIXL)).read_prefill(later);
    let PrefillAnswer::Handoff { parameters, .. } = answer else { panic!("{answer:?}") };
    // C7.2
    assert_eq!(value(parameters.as_bytes()), value(later)["kv_transfer_params"]);
}

#[test]
fn c7_missing_data_and_missing_parameters_are_two_errors() {
    let read = |body: &str| connector_for(&spec(NIXL)).read_prefill(body.as_bytes());
    assert!(matches!(read("<html>"), PrefillAnswer::MissingData(_)));
    assert_eq!(read(r#"{"choices":[]}"#), PrefillAnswer::MissingData("no choices".into()));
    // C7.5
    assert_eq!(read(r#"{"choices":[{"finish_reason":"length"}]}"#), PrefillAnswer::MissingParameters);
    let null = r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":null}"#;
    assert_eq!(read(null), PrefillAnswer::MissingParameters);
}

#[test]
fn c8_an_end_of_sequence_in_prefill_is_the_whole_answer() {
    let body = r#"{"choices":[{"finish_reason":"stop"}],"kv_transfer_params":null}"#;
    assert_eq!(connector_for(&spec(NIXL)).read_prefill(body.as_bytes()), PrefillAnswer::WasAll);
}

#[test]
fn c7a_incomplete_parameters_are_never_a_handoff() {
    let mut recorded = value(include_bytes!("../../../../tests/fixtures/pd/prefill-response.json"));
    for field in ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"] {
        let whole = recorded.clone();
        recorded["kv_transfer_params"][field] = Value::Null;
        let answer = connector_for(&spec(NIXL)).read_prefill(recorded.to_string().as_bytes());
        // C7a.2
        assert_eq!(answer, PrefillAnswer::Incomplete(field));
        recorded = whole;
    }
    let read = |recorded: &Value| connector_for(&spec(NIXL)).read_prefill(recorded.to_string().as_bytes());
    for field in ["remote_block_ids", "remote_engine_id", "remote_host", "remote_port"] {
        let mut lacks = recorded.clone();
        lacks["kv_transfer_params"].as_object_mut().unwrap().remove(field);
        // C7a.2
        assert_eq!(read(&lacks), PrefillAnswer::Incomplete(field));
    }
    let mut older = recorded.clone();
    older["kv_transfer_params"].as_object_mut().unwrap().retain(|name, _| {
        ["remote_block_ids", "remote_engine_id", "remote_host", "remote_port"].contains(&name.as_str())
    });
    // C7a.6
    assert!(matches!(read(&older), PrefillAnswer::Handoff { .. }));
    older["kv_transfer_params"]["remote_block_ids"] = json!([]);
    // C7b.3
    assert_eq!(read(&older), PrefillAnswer::Nothing);
    older["kv_transfer_params"]["remote_host"] = Value::Null;
    assert_eq!(read(&older), PrefillAnswer::Incomplete("remote_host"));
}

#[test]
fn c6_an_sglang_pair_carries_the_same_bootstrap_address_and_room() {
    let prefill = spec("role=prefill,engine=sglang,url=http://10.0.0.1:30000,bootstrap_port=8998,dp_size=2");
    let decode = spec("role=decode,engine=sglang,url=http://10.0.0.2:30000,dp_size=4");
    let request = request(
        Endpoint::ChatCompletions,
        r#"{"model":"m","messages":[],"max_tokens":7,"bootstrap_room":1}"#,
    );
    let context = context(&prefill, &decode, None);
    let (p, d) = (
        connector_for(&prefill).prefill(&request, &context),
        connector_for(&decode).decode(&request, &context),
    );
    let rid = "ab".repeat(16);
    let shared = json!({"model":"m","messages":[],"max_tokens":7,"bootstrap_host":"10.0.0.1","bootstrap_port":8998,
        "bootstrap_room":4_611_686_018_427_387_904_u64,"rid":rid});
    let with = |more: Value| {
        let mut all = shared.clone();
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    // C6.1
    assert_eq!(value(&p), with(json!({"routed_dp_rank":1})));
    // D1.1, D1.2
    assert_eq!(value(&d), with(json!({"routed_dp_rank":0,"disagg_prefill_dp_rank":1})));
}

#[test]
fn c6_an_unset_bootstrap_port_is_null_and_a_batch_has_arrays() {
    let worker = spec("role=prefill,engine=sglang,url=http://h:1");
    let batch = request(Endpoint::Completions, r#"{"model":"m","prompt":["a","b"]}"#);
    let body = value(&connector_for(&worker).prefill(&batch, &context(&worker, &worker, None)));
    // C6.3
    assert_eq!(body["bootstrap_host"], json!(["h", "h"]));
    assert_eq!(body["bootstrap_port"], json!([null, null]));
    assert_eq!(body["bootstrap_room"], json!([4_611_686_018_427_387_904_u64, 5]));
}

#[test]
fn requests_with_several_consumers_are_not_split_for_vllm() {
    let worker = spec(NIXL);
    let reason = |body: &str| connector_for(&worker).unsplittable(&request(Endpoint::Completions, body));
    assert_eq!(reason(r#"{"model":"m","prompt":"a"}"#), None);
    assert_eq!(reason(r#"{"model":"m","prompt":"a","n":2}"#), Some("n"));
    assert_eq!(reason(r#"{"model":"m","prompt":["a","b"]}"#), Some("list_of_prompts"));
    let embeds =
        |prompt: &str| reason(&format!(r#"{{"model":"m","prompt":{prompt},"prompt_embeds":"gAJj"}}"#));
    assert_eq!((reason(r#"{"model":"m","prompt_embeds":"gAJj"}"#), embeds("null")), (None, None));
    // C7b.5
    for prompt in ["\"a\"", "\"\"", "[\"a\"]", "[1, 2]"] {
        assert_eq!(embeds(prompt), Some("list_of_prompts"), "{prompt}");
    }
    assert_eq!(reason(r#"{"model":"m","prompt":"a","echo":true}"#), Some("echo"));
    assert_eq!(
        reason(r#"{"model":"m","prompt":"a","echo":false,"prompt_logprobs":0}"#),
        Some("prompt_logprobs")
    );
}

#[test]
fn c7b_what_decode_refuses_is_not_split_for_vllm() {
    let reason = |endpoint, fields: &str| {
        let body = format!(r#"{{"model":"m","messages":[],"prompt":"a","input":"a",{fields}}}"#);
        connector_for(&spec(NIXL)).unsplittable(&request(endpoint, &body)).is_some()
    };
    let (chat, completion) = (Endpoint::ChatCompletions, Endpoint::Completions);
    let (message, response) = (Endpoint::Messages, Endpoint::Responses);
    for (endpoint, fields, expected) in [
        (chat, r#""max_tokens":0"#, true),
        (chat, r#""max_tokens":9,"max_completion_tokens":0"#, true),
        (chat, r#""max_tokens":0,"max_completion_tokens":9"#, false),
        (completion, r#""max_tokens":"0""#, true),
        (message, r#""max_tokens":0"#, true),
        (response, r#""max_output_tokens":0"#, true),
        (chat, r#""max_tokens":null"#, false),
        (chat, r#""max_tokens":4,"min_tokens":5"#, true),
        (chat, r#""max_completion_tokens":4,"min_tokens":5"#, true),
        (chat, r#""max_tokens":5,"min_tokens":5"#, false),
        (chat, r#""min_tokens":5"#, false),
        (chat, r#""min_tokens":-1"#, true),
        (chat, r#""min_tokens":null"#, true),
        (message, r#""max_tokens":4,"min_tokens":5"#, false),
        (chat, r#""stream_options":{"include_usage":false}"#, true),
        (chat, r#""stream":true,"stream_options":{"include_usage":true}"#, false),
        (chat, r#""stream_options":{}"#, false),
        (chat, r#""stream_options":null"#, false),
        (message, r#""stream_options":{"include_usage":true}"#, false),
    ] {
        // C7b.7
        assert_eq!(reason(endpoint, fields), expected, "{endpoint:?} {fields}");
    }
}

#[test]
fn legs_carry_the_token_the_rank_and_the_worker_s_key() {
    let worker = spec("role=decode,engine=vllm,url=http://h:1,dp_size=2,api_key=sk-1");
    let context = LegContext { token: RequestToken([1; 16]), ..context(&worker, &worker, None) };
    let headers = leg_headers(&context, Target { spec: &worker, rank: DpRank(1) }, None);
    let get =
        |name: &str| headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.to_str().unwrap());
    assert_eq!(get("x-request-id"), Some("01".repeat(16).as_str()));
    assert_eq!((get("x-data-parallel-rank"), get("authorization")), (Some("1"), Some("Bearer sk-1")));
    let plain = spec(NIXL);
    assert_eq!(leg_headers(&context, Target { spec: &plain, rank: DpRank(0) }, None).len(), 1);
}

#[test]
fn c9_a_handoff_result_with_bootstrap_fields_is_a_bootstrap() {
    let worker = spec(NIXL);
    let result = r#"{"bootstrap_host":"10.0.0.9","bootstrap_port":8998,"bootstrap_room":77}"#;
    let answer = format!(r#"{{"choices":[{{"finish_reason":"length"}}],"kv_transfer_params":{result}}}"#);
    let PrefillAnswer::Handoff { parameters, .. } = connector_for(&worker).read_prefill(answer.as_bytes())
    else {
        panic!("refused")
    };
    let request = request(Endpoint::ChatCompletions, r#"{"model":"m","messages":[]}"#);
    let body = connector_for(&worker).decode(&request, &context(&worker, &worker, Some(&parameters)));
    let expected = json!({"model":"m","messages":[],"bootstrap_host":"10.0.0.9","bootstrap_port":8998,"bootstrap_room":77});
    // C9.1
    assert_eq!(value(&body), expected);
}

#[test]
fn c6_mooncake_legs_share_a_transfer_id_and_decode_names_the_prefill_engine() {
    let flag = "role=prefill,engine=vllm,transport=mooncake,url=http://10.0.0.1:8000,bootstrap_port=8998";
    let (prefill, decode) =
        (spec(flag), spec("role=decode,engine=vllm,transport=mooncake,url=http://10.0.0.2:8000"));
    let request =
        request(Endpoint::Completions, r#"{"model":"m","prompt":"p","stream":true,"max_tokens":9}"#);
    let context = context(&prefill, &decode, None);
    let connector = connector_for(&prefill);
    assert_eq!(connector.handoff(), Some(HandoffKind::Bootstrap));
    // C6.2: vLLM without a bootstrap address
    assert_eq!(connector_for(&spec(NIXL)).handoff(), Some(HandoffKind::Completed));
    let id = format!("xfer-{}", "ab".repeat(16));
    assert_eq!(
        value(&connector.prefill(&request, &context)),
        json!({"model":"m","prompt":"p","stream":false,"max_tokens":1,"min_tokens":1,
               "kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":id}})
    );
    assert_eq!(
        value(&connector.decode(&request, &context)),
        json!({"model":"m","prompt":"p","stream":true,"max_tokens":9,"kv_transfer_params":{
            "do_remote_decode":false,"do_remote_prefill":true,"transfer_id":id,
            "remote_engine_id":"engine-7","remote_bootstrap_addr":"http://10.0.0.1:8998"}})
    );
}

#[test]
fn c7_the_end_of_a_mooncake_prefill_is_read_whatever_its_usage() {
    let mooncake = connector_for(&spec(&format!("{NIXL},transport=mooncake,bootstrap_port=8998")));
    for usage in ["[]", r#"{"cache_read_input_tokens":-1}"#, "null"] {
        let answer = format!(r#"{{"type":"message","stop_reason":"end_turn","usage":{usage}}}"#);
        // C7.10, C8.6
        assert!(mooncake.ended_in_prefill(answer.as_bytes()), "{usage}");
    }
}

#[test]
fn a5_p2p_nccl_names_both_workers_in_the_request_id_of_both_legs() {
    let worker = |role: &str, host: u8| {
        spec(&format!(
            "role={role},engine=vllm,transport=p2p_nccl,url=http://10.0.0.{host}:1,kv_addr=10.0.0.{host}:14579"
        ))
    };
    let (prefill, decode) = (worker("prefill", 1), worker("decode", 2));
    let context = context(&prefill, &decode, None);
    let connector = connector_for(&prefill);
    assert_eq!(connector.handoff(), Some(HandoffKind::Addressed));
    let plain = request(Endpoint::Completions, r#"{"model":"m","prompt":"p"}"#);
    assert_eq!(connector.id_detail(&plain), Some(IdDetail::Addresses));
    let expected = format!("___prefill_addr_10.0.0.1:14579___decode_addr_10.0.0.2:14579_{}", "ab".repeat(16));
    for target in [context.prefill, context.decode] {
        let headers = leg_headers(&context, target.unwrap(), None);
        assert_eq!(headers[0].1.to_str().unwrap(), expected);
    }
    let request = request(Endpoint::Completions, r#"{"model":"m","prompt":"p","max_tokens":9}"#);
    assert_eq!(
        value(&connector.prefill(&request, &context)),
        json!({"model":"m","prompt":"p","max_tokens":1,"stream":false,"min_tokens":1})
    );
    assert_eq!(
        value(&connector.decode(&request, &context)),
        json!({"model":"m","prompt":"p","max_tokens":9})
    );
}

#[test]
fn c7_trtllm_generation_gets_the_ids_and_the_context_s_parameters() {
    let worker = spec("role=prefill,engine=trtllm,url=http://10.0.0.1:8000");
    let connector = connector_for(&worker);
    let chat =
        request(Endpoint::ChatCompletions, r#"{"model":"m","messages":[],"stream":true,"max_tokens":9}"#);
    let asked = connector.prefill(&chat, &context(&worker, &worker, None));
    assert_eq!(
        value(&asked),
        json!({"model":"m","messages":[],"stream":false,"max_tokens":9,
               "disaggregated_params":{"request_type":"context_only","disagg_request_id":4_611_686_018_427_387_904_u64}})
    );
    let answer = r#"{"choices":[{"finish_reason":"length","disaggregated_params":{"request_type":"context_only","ctx_request_id":5,"opaque_state":"x1"}}],"prompt_token_ids":[1, 2,3],"usage":{"prompt_tokens_details":{"cached_tokens":2}}}"#;
    let PrefillAnswer::Handoff { parameters, prompt } = connector.read_prefill(answer.as_bytes()) else {
        panic!("refused")
    };
    assert_eq!(prompt.cached_tokens, Some(2));
    let handed = context(&worker, &worker, Some(&parameters));
    let params = json!({"request_type":"generation_only","ctx_request_id":5,"opaque_state":"x1"});
    assert_eq!(
        value(&connector.decode(&chat, &handed)),
        json!({"model":"m","messages":[],"stream":true,"max_tokens":9,"prompt_token_ids":[1,2,3],"disaggregated_params":params})
    );
    let completion = request(Endpoint::Completions, r#"{"model":"m","prompt":"p","max_tokens":9}"#);
    assert_eq!(
        value(&connector.decode(&completion, &handed)),
        json!({"model":"m","prompt":[1,2,3],"max_tokens":9,"disaggregated_params":params})
    );
    let reason = |endpoint, field: &str| {
        let body = format!(r#"{{"model":"m","messages":[],"prompt":"p",{field}}}"#);
        connector.unsplittable(&request(endpoint, &body))
    };
    for (endpoint, field, expected) in [
        (Endpoint::Completions, r#""echo":true"#, Some("echo")),
        (Endpoint::Completions, r#""echo":false,"return_context_logits":"no""#, None),
        (Endpoint::Completions, r#""return_context_logits":true"#, Some("return_context_logits")),
        (Endpoint::ChatCompletions, r#""echo":true"#, None),
    ] {
        // C7.7
        assert_eq!(reason(endpoint, field), expected, "{field}");
    }
    let read = |body: &str| connector.read_prefill(body.as_bytes());
    assert_eq!(read(r#"{"choices":[{"finish_reason":"stop"}]}"#), PrefillAnswer::WasAll);
    assert_eq!(read(r#"{"choices":[{"finish_reason":"length"}]}"#), PrefillAnswer::MissingParameters);
    let no_id = r#"{"choices":[{"finish_reason":"not_finished","disaggregated_params":{"a":1}}]}"#;
    // C7a.8
    assert_eq!(read(no_id), PrefillAnswer::Incomplete("ctx_request_id"));
    let odd = r#"{"choices":[{"disaggregated_params": { "ctx_request_id" : 18446744073709551621 ,"x": 1e2}}],"prompt_token_ids":[ ],"prompt_token_ids_b64":"AQ=="}"#;
    let PrefillAnswer::Handoff { parameters, .. } = read(odd) else { panic!("refused") };
    let sent = connector.decode(&chat, &context(&worker, &worker, Some(&parameters)));
    let text = std::str::from_utf8(&sent).unwrap();
    // C7.2
    assert!(text.contains("18446744073709551621") && text.contains("1e2"), "{text}");
    let sent = value(&sent);
    // C7.8
    assert_eq!((sent.get("prompt_token_ids"), &sent["prompt_token_ids_b64"]), (None, &json!("AQ==")));
}

#[test]
fn c1_trtllm_never_gets_two_caps_on_output_tokens() {
    let worker = spec("role=prefill,engine=trtllm,url=http://10.0.0.1:8000");
    let connector = connector_for(&worker);
    let handed = r#"{"disaggregated_params":{"ctx_request_id":5},"prompt_token_ids":[1]}"#;
    let context = context(&worker, &worker, Some(handed));
    let caps = |body: &Bytes| {
        let body = value(body);
        (body.get("max_tokens").cloned(), body.get("max_completion_tokens").cloned())
    };
    let (chat, text) = (Endpoint::ChatCompletions, Endpoint::Completions);
    let cases = [
        (chat, r#""max_tokens":7"#, (Some(json!(7)), None)),
        (chat, r#""max_completion_tokens":9"#, (None, Some(json!(9)))),
        (chat, r#""max_tokens":7,"max_completion_tokens":9"#, (None, Some(json!(9)))),
        (chat, r#""max_tokens":7,"max_completion_tokens":null"#, (Some(json!(7)), None)),
        (text, r#""max_tokens":7,"max_completion_tokens":9"#, (Some(json!(7)), None)),
    ];
    for (endpoint, keys, expected) in cases {
        let body = format!(r#"{{"model":"m","messages":[],"prompt":"p","min_tokens":4,{keys}}}"#);
        let request = request(endpoint, &body);
        let legs = [
            connector.prefill(&request, &context),
            connector.decode(&request, &context),
            connector.single(&request, &context),
        ];
        for leg in &legs {
            // C1.4
            assert_eq!(caps(leg), expected, "{body}");
        }
        let consumed = connector.decode_one_token(&request, &context);
        // E1.3
        assert_eq!(caps(&consumed), (Some(json!(1)), None), "{body}");
        assert_eq!(value(&consumed)["min_tokens"], 1);
    }
}

#[test]
fn c6_an_sglang_batch_is_aborted_by_the_id_of_each_item() {
    let connector = connector_for(&spec(SGLANG));
    let token = RequestToken([0xab; 16]);
    let rids = |endpoint, body: &str| -> Vec<Value> {
        let abort = connector.abort(&request(endpoint, body), token).unwrap();
        abort.bodies.iter().map(|body| value(body)["rid"].clone()).collect()
    };
    let completion =
        |prompt: &str| rids(Endpoint::Completions, &format!(r#"{{"model":"m","prompt":{prompt}}}"#));
    // E2.5
    assert_eq!(completion(r#"["a","b"]"#), [format!("{token}_0"), format!("{token}_1")]);
    assert_eq!(completion("[[1,2]]"), [format!("{token}_0")], "a list of one prompt is a batch, too");
    let generate = |prompt: &str| rids(Endpoint::Generate, &format!(r#"{{"model":"m",{prompt}}}"#));
    assert_eq!(generate(r#""text":["a","b"]"#), [format!("{token}_0"), format!("{token}_1")]);
    assert_eq!(generate(r#""text":null,"input_ids":[[1,2]]"#), [format!("{token}_0")]);
    for prompt in
        [r#""text":"a","input_ids":[[1]]"#, r#""input_ids":[1,2]"#, r#""input_embeds":[[0.5],[0.25]]"#]
    {
        assert_eq!(generate(prompt), [token.to_string()], "{prompt}");
    }
    for prompt in [r#""a""#, "[1,2]"] {
        assert_eq!(completion(prompt), [token.to_string()]);
    }
    let chat = r#"{"model":"m","messages":[{"role":"user","content":["a","b"]}]}"#;
    assert_eq!(rids(Endpoint::ChatCompletions, chat), [token.to_string()]);
}

#[test]
fn e2_a_list_of_inputs_has_a_list_of_ids_for_sglang() {
    let worker = spec("role=aggregated,engine=sglang,url=http://h:1");
    let (connector, token) = (connector_for(&worker), RequestToken([0xab; 16]));
    let ids = |count: usize| json!((0..count).map(|item| format!("{token}_{item}")).collect::<Vec<_>>());
    for (input, id) in [
        (r#""a""#, json!(token.to_string())),
        ("[1,2]", json!(token.to_string())),
        (r#"["a"]"#, ids(1)),
        ("[[1,2]]", ids(1)),
        (r#"["a","b"]"#, ids(2)),
        ("[[1,2],[3]]", ids(2)),
        (r#"[{"text":"a"},{"image":"b"},{"text":"c"}]"#, ids(3)),
    ] {
        for (endpoint, key) in [
            (Endpoint::Embeddings, "input"),
            (Endpoint::Classify("/v1/classify"), "input"),
            (Endpoint::Classify("/classify"), "text"),
        ] {
            if key == "text" && input.contains('{') {
                continue;
            }
            let request = request(endpoint, &format!(r#"{{"model":"m","{key}":{input}}}"#));
            let context = context(&worker, &worker, None);
            let sent = value(&connector.single(&request, &context));
            // E2.9
            assert_eq!(sent["rid"], id, "{endpoint:?} {input}");
            let aborts = connector.abort(&request, token).unwrap().bodies;
            let aborted: Vec<Value> = aborts.iter().map(|body| value(body)["rid"].clone()).collect();
            assert_eq!(
                connector.id_detail(&request).is_some(),
                id.is_array(),
                "clients see no number of an item"
            );
            // E2.9
            assert_eq!(json!(aborted), if id.is_array() { id.clone() } else { json!([id]) }, "{input}");
        }
    }
}

#[test]
fn several_choices_are_not_split_for_sglang() {
    let connector = connector_for(&spec(SGLANG));
    let reason = |endpoint, body: &str| connector.unsplittable(&request(endpoint, body));
    // C6.9
    assert_eq!(reason(Endpoint::ChatCompletions, r#"{"model":"m","messages":[],"n":2}"#), Some("n"));
    assert_eq!(reason(Endpoint::Completions, r#"{"model":"m","prompt":["a","b"],"n":2}"#), Some("n"));
    assert_eq!(reason(Endpoint::Completions, r#"{"model":"m","prompt":["a","b"],"n":1}"#), None);
    let generate =
        |fields: &str| reason(Endpoint::Generate, &format!(r#"{{"model":"m","text":["a","b"],{fields}}}"#));
    // C9.3
    assert_eq!(generate(r#""sampling_params":{"n":2}"#), Some("n"));
    assert_eq!(generate(r#""return_logprob":true,"logprob_start_len":0"#), Some("logprob_start_len"));
    for fields in [
        r#""n":2"#,
        r#""return_logprob":true"#,
        r#""return_logprob":true,"logprob_start_len":-1"#,
        r#""return_logprob":false,"logprob_start_len":0"#,
        r#""return_hidden_states":false,"return_routed_experts":null,"token_ids_logprob":null"#,
    ] {
        assert_eq!(generate(fields), None, "{fields}");
    }
    for (fields, expected) in [
        (r#""return_logprob":true,"logprob_start_len":[-1,null]"#, None),
        (r#""return_logprob":[false,false],"logprob_start_len":[0,0]"#, None),
        (r#""return_logprob":[true,false],"logprob_start_len":[-1,0]"#, Some("logprob_start_len")),
        (r#""return_hidden_states":[false, false]"#, None),
        (r#""return_hidden_states":[false,true]"#, Some("return_hidden_states")),
        (r#""token_ids_logprob":[null,[]]"#, None),
        (r#""token_ids_logprob":[0]"#, Some("token_ids_logprob")),
        (r#""token_ids_logprob":[[],[0]]"#, Some("token_ids_logprob")),
    ] {
        // C9.6
        assert_eq!(generate(fields), expected, "{fields}");
    }
    for field in ["return_hidden_states", "return_routed_experts", "return_indexer_topk"] {
        assert_eq!(generate(&format!(r#""{field}":true"#)), Some(field));
        let chat = format!(r#"{{"model":"m","messages":[],"{field}":true}}"#);
        // C9.3
        assert_eq!(reason(Endpoint::ChatCompletions, &chat), Some(field));
    }
    let completion =
        |fields: &str| reason(Endpoint::Completions, &format!(r#"{{"model":"m","prompt":"a",{fields}}}"#));
    // C9.3
    assert_eq!(completion(r#""echo":true,"logprobs":1"#), Some("echo"));
    for fields in [r#""echo":true"#, r#""echo":true,"logprobs":0"#, r#""echo":false,"logprobs":1"#] {
        assert_eq!(completion(fields), None, "{fields}");
    }
}

#[test]
fn e1_the_id_of_a_message_and_of_a_response_is_where_sglang_reads_it() {
    let (worker, connector) = (spec(SGLANG), connector_for(&spec(SGLANG)));
    for endpoint in [Endpoint::Messages, Endpoint::Responses, Endpoint::ChatCompletions] {
        let request = request(endpoint, r#"{"model":"m","messages":[],"input":"a","max_tokens":1}"#);
        let context = LegContext { endpoint: Some(endpoint), ..context(&worker, &worker, None) };
        let headers = connector.headers(&context, context.prefill.unwrap());
        let body = value(&connector.decode(&request, &context));
        let id = match endpoint {
            Endpoint::Messages => headers[0].1.to_str().unwrap(),
            Endpoint::Responses => body["request_id"].as_str().unwrap(),
            _ => body["rid"].as_str().unwrap(),
        };
        assert_eq!(headers.len(), usize::from(endpoint == Endpoint::Messages));
        let abort = connector.abort(&request, context.token).unwrap();
        // E1.4
        assert_eq!(value(&abort.bodies[0])["rid"], id, "{endpoint:?}");
        let alone = value(&connector.single(&request, &context));
        // E2.3: a request that is not split, too.
        let field = if endpoint == Endpoint::Responses { "request_id" } else { "rid" };
        assert!(endpoint == Endpoint::Messages || alone[field] == id, "{endpoint:?}: {alone}");
    }
}

#[test]
fn d1_sglang_gets_the_rank_of_a_message_as_a_header() {
    let worker = spec(&format!("{SGLANG},dp_size=2"));
    let rank = |endpoint, rank| {
        let target = Target { spec: &worker, rank: DpRank(rank) };
        let context = LegContext { endpoint: Some(endpoint), ..context(&worker, &worker, None) };
        let headers = connector_for(&worker).headers(&context, target);
        let rank = headers.iter().find(|(name, _)| name == "x-data-parallel-rank");
        rank.map(|(_, value)| value.to_str().unwrap().to_owned())
    };
    // D1.6
    assert_eq!([0, 1].map(|one| rank(Endpoint::Messages, one).unwrap()), ["0", "1"]);
    assert_eq!(rank(Endpoint::ChatCompletions, 1), None);
}

#[test]
fn c9_an_sglang_pair_gets_at_most_128_log_probabilities_of_a_token() {
    let connector = connector_for(&spec(SGLANG));
    let reason = |endpoint, fields: &str| {
        let body = format!(r#"{{"model":"m","messages":[],"prompt":"a","text":"a",{fields}}}"#);
        connector.unsplittable(&request(endpoint, &body))
    };
    let (chat, completion, generate) = (Endpoint::ChatCompletions, Endpoint::Completions, Endpoint::Generate);
    for (endpoint, fields, expected) in [
        (chat, r#""logprobs":true,"top_logprobs":129"#, Some("top_logprobs")),
        (chat, r#""logprobs":true,"top_logprobs":128"#, None),
        (chat, r#""logprobs":false,"top_logprobs":129"#, None),
        (chat, r#""logprobs":true"#, None),
        // Pydantic reads these as 129.
        (chat, r#""logprobs":true,"top_logprobs":"+129""#, Some("top_logprobs")),
        (chat, r#""logprobs":true,"top_logprobs":"1_29""#, Some("top_logprobs")),
        (completion, r#""logprobs":true"#, None),
        (generate, r#""return_logprob":true,"top_logprobs_num":[1,"+129"]"#, Some("top_logprobs_num")),
        (completion, r#""logprobs":"129.0""#, Some("logprobs")),
        (completion, r#""logprobs":128"#, None),
        (generate, r#""return_logprob":true,"top_logprobs_num":129"#, Some("top_logprobs_num")),
        (generate, r#""return_logprob":[true],"top_logprobs_num":[null,129]"#, Some("top_logprobs_num")),
        (generate, r#""return_logprob":true,"top_logprobs_num":[1,128]"#, None),
        (generate, r#""top_logprobs_num":129"#, None),
    ] {
        // C9.5
        assert_eq!(reason(endpoint, fields), expected, "{fields}");
    }
}

proptest! {
    #[test]
    fn c6_rooms_fit_63_bits_and_tell_the_rank(x in any::<u64>(), size in 1_u32..5_000, rank in 0_u32..5_000) {
        let rank = rank % size;
        let room = room(x, size, DpRank(rank));
        // C6.4
        prop_assert!((1 << 42..=i64::MAX as u64).contains(&room));
        // C6.5
        prop_assert_eq!(room % u64::from(size), u64::from(rank));
    }
}

#[test]
fn c6_the_first_and_the_last_room_of_a_rank_are_within_the_bounds() {
    for (size, rank) in [(1, 0), (2, 0), (2, 1), (4_096, 4_095)] {
        let quotients =
            (i64::MAX as u64 - u64::from(rank)) / u64::from(size) - (1_u64 << 42) / u64::from(size);
        let [first, last] = [0, quotients - 1].map(|x| room(x, size, DpRank(rank)));
        // C6.4: never 0, which an SGLang engine takes for "nothing has arrived"
        assert!(first >= 1 << 42 && first < (1 << 42) + u64::from(size), "{size} {rank}: {first}");
        assert!(
            last <= i64::MAX as u64 && last > i64::MAX as u64 - 3 * u64::from(size),
            "{size} {rank}: {last}"
        );
    }
}

#[test]
fn c6_rooms_are_fresh() {
    let many: std::collections::HashSet<u64> = (0..1_000).flat_map(|_| rooms(2, 1, DpRank(0))).collect();
    assert_eq!(many.len(), 2_000);
    let mut eighths = [0_u32; 8];
    many.iter().for_each(|room| eighths[(room >> 60) as usize] += 1);
    // C6.4: uniform
    assert!(eighths.iter().all(|count| (180..320).contains(count)), "{eighths:?}");
}
