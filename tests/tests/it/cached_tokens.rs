//! Pairs whose prefill engine does not say in its usage how much of the prompt was cached. What the decode
//! engine says counts the blocks that it received.

use pointsman_tests::{
    Act, COMPLETIONS, MESSAGES, RawEngine, RawRequest, TestClusterBuilder,
    raw_engine::{chunk, json as json_answer, status, stream_head},
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};

/// An engine with this answer, whole or as a stream.
async fn engine(answer: impl Fn(&RawRequest) -> Value + Send + Sync + 'static) -> RawEngine {
    RawEngine::start(move |request| {
        let whole = match request.line.as_str() {
            "GET /v1/models" => json!({ "data": [{ "id": "tiny" }] }),
            "GET /query" => json!({ "0": { "engine_id": "e" } }),
            line if line.starts_with("GET") => return vec![Act::Send(status("404 Not Found", "{}"))],
            _ => answer(request),
        };
        let is_stream = request.line.starts_with("POST") && request.body.contains("\"stream\":true");
        let events = format!("data: {whole}\n\ndata: [DONE]\n\n");
        let stream = || [stream_head(), chunk(events.as_bytes()), chunk(b"")].concat();
        vec![Act::Send(if is_stream { stream() } else { json_answer(&whole.to_string()) })]
    })
    .await
}

fn completion(parameters: &Value, details: &Value) -> Value {
    let handoff = json!({ "request_type": "context_only", "ctx_request_id": 1 });
    let choice =
        json!({ "index": 0, "text": "a", "finish_reason": "length", "disaggregated_params": handoff });
    json!({ "id": "x", "choices": [choice], "kv_transfer_params": parameters, "prompt_token_ids": [1],
        "usage": { "prompt_tokens": 50, "completion_tokens": 1, "total_tokens": 51, "prompt_tokens_details": details } })
}

fn message(usage: &Value) -> Value {
    json!({ "id": "m", "type": "message", "role": "assistant", "content": [{ "type": "text", "text": "a" }],
        "stop_reason": "max_tokens", "usage": usage })
}

fn parameters(more: Value) -> Value {
    let mut parameters = json!({ "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r",
        "remote_host": "127.0.0.1", "remote_port": 1 });
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    parameters
}

/// What a client is told of the usage of a pair, whose decode engine counts the received blocks as cached.
async fn told(kind: &str, path: &str, stream: bool, handed_over: Value) -> Value {
    let counted = if path == MESSAGES { json!(49) } else { json!({ "cached_tokens": 49 }) };
    told_with(kind, path, stream, (handed_over, counted)).await
}

/// What a client is told of the usage of a pair. `counted`: what the decode engine counts as cached.
async fn told_with(kind: &str, path: &str, stream: bool, (handed_over, counted): (Value, Value)) -> Value {
    let prefill = engine(move |request| match request.line.contains(MESSAGES) {
        true => {
            let mut whole = message(&json!({ "input_tokens": 50, "output_tokens": 1 }));
            whole["kv_transfer_params"] = handed_over.clone();
            whole
        }
        false => completion(&handed_over, &Value::Null),
    });
    let decode = engine(move |request| match request.line.contains(MESSAGES) {
        true => {
            let input = 50 - counted.as_u64().unwrap_or(0);
            message(&json!({ "input_tokens": input, "cache_read_input_tokens": counted, "output_tokens": 1 }))
        }
        false => completion(&Value::Null, &counted),
    });
    let (prefill, decode) = (prefill.await, decode.await);
    let builder = TestClusterBuilder::new().config(|config| {
        for (role, engine) in [("prefill", &prefill), ("decode", &decode)] {
            let port = prefill.address.port();
            let more =
                if kind.contains("mooncake") { format!(",bootstrap_port={port}") } else { String::new() };
            let flag = format!("role={role},engine={kind},url=http://{}{more}", engine.address);
            config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
        }
    });
    let cluster = builder.start().await;
    let body = json!({ "model": "tiny", "prompt": "which way?", "max_tokens": 9, "stream": stream,
        "messages": [{ "role": "user", "content": "which way?" }], "stream_options": stream.then(|| json!({ "include_usage": true })) });
    let reply = cluster.client.post(path, &[], body.to_string()).await.unwrap();
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!(
        (reply.status.as_u16(), prefill.requests().len(), decode.requests().len()),
        (200, 1, 1),
        "{kind}: {text}"
    );
    let json = text.trim_start_matches("data: ").lines().next().unwrap();
    serde_json::from_str::<Value>(json).unwrap()["usage"].clone()
}

#[tokio::test]
async fn b8_cached_tokens_that_only_the_decode_engine_reports_are_unknown() {
    let nixl = || parameters(json!({}));
    for (kind, handed_over) in
        [("vllm", nixl()), ("vllm,transport=mooncake", Value::Null), ("trtllm", Value::Null)]
    {
        for stream in [false, true] {
            let usage = told(kind, COMPLETIONS, stream, handed_over.clone()).await;
            // B8.17
            assert_eq!(
                usage["prompt_tokens_details"],
                json!({ "cached_tokens": null }),
                "{kind}, streamed: {stream}"
            );
        }
    }
    let usage = told("vllm", MESSAGES, false, nixl()).await;
    // B8.17
    assert_eq!((&usage["input_tokens"], &usage["cache_read_input_tokens"]), (&json!(50), &json!(0)));
}

#[tokio::test]
async fn b8_cached_tokens_are_read_from_what_the_prefill_engine_hands_over() {
    for name in ["remote_prefill_cached_tokens", "remote_num_cached_tokens"] {
        for stream in [false, true] {
            let usage = told("vllm", COMPLETIONS, stream, parameters(json!({ name: 7 }))).await;
            // B8.17
            assert_eq!(
                usage["prompt_tokens_details"],
                json!({ "cached_tokens": 7 }),
                "{name}, streamed: {stream}"
            );
        }
    }
}

#[tokio::test]
async fn c7_cached_tokens_of_prefill_are_told_where_the_decode_engine_counts_none() {
    let reported = || parameters(json!({ "remote_num_cached_tokens": 7 }));
    for counted in [json!(null), json!({}), json!({ "cached_tokens": null, "audio_tokens": 1 })] {
        for stream in [false, true] {
            let usage = told_with("vllm", COMPLETIONS, stream, (reported(), counted.clone())).await;
            // C7.4
            assert_eq!(
                usage["prompt_tokens_details"]["cached_tokens"],
                json!(7),
                "{counted}, streamed: {stream}"
            );
        }
    }
    let usage = told_with("vllm", MESSAGES, false, (reported(), json!(null))).await;
    // B8.11
    assert_eq!((&usage["input_tokens"], &usage["cache_read_input_tokens"]), (&json!(43), &json!(7)));
}
