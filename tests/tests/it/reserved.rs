//! Fields of the handoff, which a client cannot send to an engine, nor an engine to a client: on real
//! sockets, with every spelling that JSON allows.

use pointsman_sim::Dialect;
use pointsman_tests::{
    TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{Act, RawEngine, RawRequest, json as json_answer},
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};

/// An engine that answers each POST with the same text.
async fn canned(answer: &'static str) -> RawEngine {
    RawEngine::serving(move |_| vec![Act::Send(json_answer(answer))]).await
}

fn last(engine: &RawEngine) -> RawRequest {
    engine.requests().pop().unwrap()
}

async fn cluster(flags: &[String]) -> TestCluster {
    let specs: Vec<WorkerSpec> = flags.iter().map(|flag| WorkerSpec::parse_flag(flag).unwrap()).collect();
    TestClusterBuilder::new().config(|config| config.workers = specs).start().await
}

const ANSWER: &str = r#"{"id":"x","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,"text":"hi","finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}"#;

/// Every reserved field, by every engine's own name.
const FIELDS: [&str; 30] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "kv_cache_report_mode",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "disaggregated_params",
    "prompt_token_ids_b64",
    "injected_chat_template_kwargs",
    "rid",
    "request_id",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
    "encoder_urls",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "mm_data_mooncake",
    "mm_hashes",
    "mm_content_hashes",
    "kv_hints",
    "kv_router_hint",
    "http_worker_ipc",
    "lora_id",
    "external_trace_header",
    "received_time",
    "nvext",
    "_HEALTH_CHECK",
];

/// Keys that mean `field`: as it is, with escapes, in upper case.
fn spellings(field: &str) -> Vec<String> {
    let escaped: String = field.chars().map(|letter| format!("\\u{:04X}", u32::from(letter))).collect();
    let underscores = field.replace('_', "\\u005f");
    vec![field.to_owned(), escaped, underscores, field.to_uppercase()]
}

/// The value that a client sends; the gateway reads two of the fields itself.
fn value(field: &str) -> &'static str {
    match field {
        "nvext" => "{}",
        "_HEALTH_CHECK" => "false",
        _ => "\"MINE\"",
    }
}

/// The places in a request where an engine may read `members`.
fn places(members: &str) -> [String; 7] {
    [
        format!("{members},\"x\":1"),
        format!("{members},\"x\":1,{members}"),
        format!("\"vllm_xargs\":{{{members},\"x\":1}}"),
        format!("\"vllm_xargs\":{{\"x\":1}},\"vllm_xargs\":{{\"x\":1,{members}}}"),
        format!("\"vllm_xargs\":{{{members}}},\"vllm\\u005fxargs\":{{\"x\":1}}"),
        format!("\"extra_body\":{{{members},\"x\":1}}"),
        format!("\"extra_body\":{{\"vllm_xargs\":{{{members},\"x\":1}}}}"),
    ]
}

/// Members of requests, each with the fields that they are: in each spelling all fields at once, and each
/// field alone in one spelling and one of the [`places`].
fn requests() -> impl Iterator<Item = (&'static [&'static str], String)> {
    let member =
        |field: &str, spelling: usize| format!("\"{}\":{}", spellings(field)[spelling], value(field));
    let together = (0..4).flat_map(move |spelling| {
        places(&FIELDS.map(|field| member(field, spelling)).join(",")).map(|members| (&FIELDS[..], members))
    });
    let alone = FIELDS
        .chunks(1)
        .enumerate()
        .map(move |(at, field)| (field, places(&member(field[0], at % 4))[at % 7].clone()));
    together.chain(alone)
}

#[tokio::test]
async fn a5_no_spelling_of_a_reserved_field_reaches_an_engine() {
    for engine in ["vllm", "sglang", "trtllm", "openai"] {
        let canned = canned(ANSWER).await;
        let flag = format!("role=aggregated,engine={engine},url=http://{},model=tiny", canned.address);
        let cluster = cluster(&[flag]).await;
        for (fields, members) in requests() {
            let body = format!(r#"{{"model":"tiny","prompt":"hello",{members}}}"#);
            let reply = cluster.client.post("/v1/completions", &[], body.clone()).await.unwrap();
            assert_eq!(reply.status, 200, "{engine} {body}: {reply:?}");
            let received = last(&canned).body;
            let parsed: Value = serde_json::from_str(&received).unwrap();
            // A5.1, A5.9, A5.10, A5.11
            assert!(!received.contains("MINE"), "{engine}: {body} became {received}");
            // Fields that the gateway reads itself cannot carry the mark.
            let left = fields.iter().find(|field| value(field) != "\"MINE\"" && has_key(&parsed, field));
            // A1.4, A5.1
            assert_eq!(left, None, "{engine}: {body} became {received}");
            let rest = [&parsed["x"], &parsed["vllm_xargs"]["x"], &parsed["extra_body"]["x"]];
            let rest = rest.into_iter().chain([&parsed["extra_body"]["vllm_xargs"]["x"]]);
            assert_eq!(rest.filter(|x| **x == json!(1)).count(), 1, "{engine}: {body} became {received}");
        }
        cluster.at_rest().await.unwrap();
    }
}

/// Returns whether an object on any level has the key, in any case.
fn has_key(json: &Value, key: &str) -> bool {
    match json {
        Value::Object(fields) => {
            fields.iter().any(|(name, value)| name.eq_ignore_ascii_case(key) || has_key(value, key))
        }
        Value::Array(items) => items.iter().any(|item| has_key(item, key)),
        _ => false,
    }
}

/// A gateway in front of one engine that answers with `answer`.
async fn single(engine: &str, answer: &'static str) -> (RawEngine, TestCluster) {
    let canned = canned(answer).await;
    let flag = format!("role=aggregated,engine={engine},url=http://{},model=tiny", canned.address);
    let cluster = cluster(&[flag]).await;
    (canned, cluster)
}

#[tokio::test]
async fn a5_a1_a_body_without_reserved_fields_passes_byte_for_byte() {
    // Spaces, escapes, forms of numbers, repeated keys, and fields that routing does not need.
    let body = r#"{ "model" : "tiny","prompt":"h\u00e9llo \/ \ud83d\ude00",  "temperature":1.0e0 ,"top_p":0.10,
        "seed":9007199254740993, "stop":["\n"],"stop_token_ids":[7], "ignore_eos":true,"logit_bias":{"1":-1e2},
        "agent_context":{"id" :1},"mm_processor_kwargs":{ },"multi_modal_data":null,"guided_json":{"a":[1.50]},
        "extra":1,"extra":2,"nested":{"rid":"KEPT","deep":[{"nvext":{}}]}, "vllm_xargs":{"x" : 1}}"#;
    for engine in ["vllm", "openai"] {
        let (canned, cluster) = single(engine, ANSWER).await;
        assert_eq!(cluster.client.post("/v1/completions", &[], body).await.unwrap().status, 200);
        // A1.1: fields that routing does not need are forwarded
        // A5.7
        assert_eq!(last(&canned).body, body, "{engine}");
    }
}

#[tokio::test]
async fn a5_a_container_that_cannot_be_cleaned_becomes_null_and_a_list_is_no_container() {
    let (canned, cluster) = single("vllm", ANSWER).await;
    let send = async |fields: String| -> (String, Value) {
        let body = format!(r#"{{"model":"tiny","prompt":"hello",{fields}}}"#);
        assert_eq!(cluster.client.post("/v1/completions", &[], body).await.unwrap().status, 200);
        let received = last(&canned).body;
        (received.clone(), serde_json::from_str(&received).unwrap())
    };
    let many: Vec<String> = (0..1_030).map(|number| format!("\"k{number}\":1")).collect();
    let (text, parsed) = send(format!(r#""vllm_xargs":{{"rid":"MINE",{}}},"x":1"#, many.join(","))).await;
    // A5.12: too many keys
    assert!(
        parsed["vllm_xargs"].is_null() && parsed["x"] == 1 && text.contains("\"vllm_xargs\":null"),
        "{text}"
    );
    let deep = r#""extra_body":{"y":1,"extra_args":{"sampling_params":{"rid":"MINE"},"z":1}}"#;
    let (text, parsed) = send(deep.to_owned()).await;
    let inner = &parsed["extra_body"]["extra_args"];
    // A5.12: too deep
    assert!(inner["sampling_params"].is_null() && inner["z"] == 1 && !text.contains("MINE"), "{text}");
    let lists = r#""extra_body":[{"rid":"KEPT"}],"messages":[{"role":"user","content":"x","rid":"KEPT"}]"#;
    let (text, _) = send(lists.to_owned()).await;
    // A5.13
    assert_eq!(text.matches("KEPT").count(), 2, "{text}");
}

#[tokio::test]
async fn a5_an_answer_of_vllm_keeps_the_token_ids_that_the_client_asked_for() {
    const WITH_IDS: &str = r#"{"id":"x","choices":[{"index":0,"text":"hi","finish_reason":"stop","prompt_token_ids":[1,2]}],"prompt_token_ids":[3],"kv_transfer_params":{"remote_host":"LEAK"},"ec_transfer_params":{"a":"LEAK"}}"#;
    let (_canned, cluster) = single("vllm", WITH_IDS).await;
    let body = r#"{"model":"tiny","prompt":"hello","return_token_ids":true}"#;
    let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap().json().unwrap();
    // A5.16
    assert_eq!(
        (&reply["choices"][0]["prompt_token_ids"], &reply["prompt_token_ids"]),
        (&json!([1, 2]), &json!([3]))
    );
    let hidden = [&reply["kv_transfer_params"], &reply["ec_transfer_params"]];
    // A5.14
    assert!(hidden.iter().all(|value| value.is_null()), "{reply}");
}

#[tokio::test]
async fn a5_no_header_of_a_client_reaches_an_engine() {
    for engine in ["vllm", "sglang", "trtllm", "openai"] {
        let canned = canned(ANSWER).await;
        let cluster =
            cluster(&[format!("role=aggregated,engine={engine},url=http://{},model=tiny", canned.address)])
                .await;
        let headers = [
            ("x-request-id", "___prefill_addr_mine"),
            ("x-data-parallel-rank", "0"),
            ("x-override-rid", "mine"),
            ("x-override-bootstrap-host", "mine"),
            ("x-override-bootstrap-room", "7"),
            ("x-override-routed-dp-rank", "7"),
            ("x-smg-routing-key", "mine"),
            ("authorization", "Bearer mine"),
            ("x-session-id", "mine"),
        ];
        let body = r#"{"model":"tiny","prompt":"hello"}"#;
        assert_eq!(cluster.client.post("/v1/completions", &headers, body).await.unwrap().status, 200);
        let head = last(&canned).head;
        for name in ["override", "mine", "rank", "smg", "session"] {
            // A5.8
            assert!(!head.contains(name), "{engine} received {head}");
        }
    }
}

const CONTEXT_ANSWER: &str = r#"{"id":"x","object":"chat.completion","created":1,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"say \"disaggregated_params\": 1"},"finish_reason":"stop","disaggregated_params":{"request_type":"context_only","ctx_request_id":5,"encoded_opaque_state":"LEAK"}}],"prompt_token_ids":[770077],"prompt_token_ids_b64":"LEAK","usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}"#;

/// The context leg's answer is the client's answer (C8).
async fn context_answer(stream: bool) -> Reply {
    let prefill = canned(CONTEXT_ANSWER).await;
    let decode = canned(ANSWER).await;
    let cluster = cluster(&[
        format!("id=1,role=prefill,engine=trtllm,url=http://{},model=tiny", prefill.address),
        format!("id=2,role=decode,engine=trtllm,url=http://{},model=tiny", decode.address),
    ])
    .await;
    let body = json!({
        "model": "tiny", "stream": stream, "messages": [{"role": "user", "content": "hi"}],
        "prompt_token_ids": [1, 2], "PROMPT_TOKEN_IDS_B64": "MINE",
    });
    let reply = cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap();
    let asked: Value = serde_json::from_str(&last(&prefill).body).unwrap();
    assert_eq!(asked["disaggregated_params"]["request_type"], "context_only");
    assert!(asked.get("prompt_token_ids").is_none() && !last(&prefill).body.contains("MINE"), "{asked}");
    assert!(decode.requests().is_empty(), "no decode was needed");
    reply
}

#[tokio::test]
async fn a5_c8_an_answer_of_trtllm_s_context_leg_keeps_its_parameters_and_token_ids() {
    let reply = context_answer(false).await;
    let body = reply.json().unwrap();
    assert_eq!(body["choices"][0]["message"]["content"], "say \"disaggregated_params\": 1");
    assert_eq!(body["usage"]["total_tokens"], 2);
    let text = String::from_utf8_lossy(&reply.body);
    // A5.14, A5.15
    assert!(!text.contains("LEAK") && !text.contains("770077"), "{text}");
    let reply = context_answer(true).await;
    let text = String::from_utf8_lossy(&reply.body);
    assert!(text.contains("data: [DONE]"), "{text}");
    // A5.15: streamed
    assert!(!text.contains("LEAK") && !text.contains("770077"), "{text}");
}

#[tokio::test]
async fn a5_a_pair_of_simulated_engines_gets_the_gateway_s_own_handoff_only() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = TestCluster::disaggregated(dialect, 1, 1).await.unwrap();
        let body = json!({
            "model": "tiny", "prompt": "hello", "max_tokens": 4,
            "kv_transfer_params": {"do_remote_prefill": true}, "bootstrap_room": 1, "rid": "mine",
            "vllm_xargs": {"kv_transfer_params": "MINE"},
        });
        let reply = cluster.client.post("/v1/completions", &[], body.to_string()).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
        cluster.at_rest().await.unwrap();
    }
}
