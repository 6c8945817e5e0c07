//! Workers that answer, but do not serve: a prefill without a handoff, a model or an adapter that one worker
//! has unloaded, a stream that ends before its first event.

use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, TestCluster, TestClusterBuilder,
    raw_engine::{ANSWER, RawRequest, chunk, json, status, stream_head},
};
use serde_json::json as value;

const GONE: &str =
    r#"{"error":{"message":"The model `tiny` does not exist.","type":"NotFoundError","code":404}}"#;

/// Starts an engine with this answer to each request.
async fn engine(answer: Vec<u8>) -> RawEngine {
    acting(vec![Act::Send(answer)]).await
}

async fn acting(acts: Vec<Act>) -> RawEngine {
    RawEngine::serving(move |_| acts.clone()).await
}

async fn gateway(workers: &[(&str, &RawEngine)]) -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            for (id, (role, engine)) in (1..).zip(workers) {
                config.workers.push(engine.worker(&format!("id={id},role={role},engine=vllm")));
            }
        })
        .start()
        .await
}

fn prompt(number: usize) -> String {
    value!({"model": "tiny", "max_tokens": 2, "prompt": format!("prompt {number}")}).to_string()
}

/// Numbers of the prompts to send: 12, and more while `unseen`, since equal workers are chosen by chance.
fn numbers(unseen: impl Fn() -> bool) -> impl Iterator<Item = usize> {
    (0..64).take_while(move |number| *number < 12 || unseen())
}

fn prefilled(finish: &str, has_handoff: bool) -> Vec<u8> {
    let handoff = value!({"remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r",
        "remote_host": "127.0.0.1", "remote_port": 1});
    let handoff = if has_handoff { handoff } else { value!(null) };
    let choice = value!({"index": 0, "text": "", "finish_reason": finish});
    json(&value!({"id": "p", "choices": [choice], "kv_transfer_params": handoff}).to_string())
}

#[tokio::test]
async fn c7a_a_prefill_without_a_handoff_is_done_by_another_worker() {
    for finish in ["length", "abort", "error"] {
        let without = engine(prefilled(finish, false)).await;
        let with = engine(prefilled("length", true)).await;
        let decode = engine(json(ANSWER)).await;
        let workers = [("prefill", &without), ("prefill", &with), ("decode", &decode)];
        let cluster = gateway(&workers).await;
        let mut sent = 0;
        for number in numbers(|| without.requests().is_empty()) {
            let reply = cluster.client.post(COMPLETIONS, &[], prompt(number)).await.unwrap();
            // C7a.3, C8.5
            assert_eq!((reply.status.as_u16(), reply.body.as_ref()), (200, ANSWER.as_bytes()), "{finish}");
            sent += 1;
        }
        assert!(!without.requests().is_empty(), "{finish}: it was asked");
        assert_eq!(with.requests().len(), sent);
        cluster.at_rest().await.unwrap();
    }
}

/// Parameters of vLLM before 0.13, which do not name the prefill's request.
#[tokio::test]
async fn c7a_the_parameters_of_older_engines_are_complete() {
    let handoff = value!({"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "e",
        "remote_block_ids": [1, 2], "remote_host": "10.0.0.1", "remote_port": 1, "tp_size": 2, "more": {"a": [1]}});
    let choice = value!({"index": 0, "text": "", "finish_reason": "length"});
    let answer = value!({"id": "p", "choices": [choice], "kv_transfer_params": handoff.clone()});
    let (prefill, decode) = (engine(json(&answer.to_string())).await, engine(json(ANSWER)).await);
    let cluster = gateway(&[("prefill", &prefill), ("decode", &decode)]).await;
    let reply = cluster.client.post(COMPLETIONS, &[], prompt(0)).await.unwrap();
    // C7a.6
    assert_eq!((reply.status.as_u16(), reply.body.as_ref()), (200, ANSWER.as_bytes()), "{reply:?}");
    let sent: serde_json::Value = serde_json::from_str(&decode.requests()[0].body).unwrap();
    // C7.2
    assert_eq!(sent["kv_transfer_params"], handoff);
    cluster.at_rest().await.unwrap();
}

/// An engine that says that it is vLLM 0.33.
async fn recent(answer: Vec<u8>) -> RawEngine {
    RawEngine::start(move |request| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(r#"{"data":[{"id":"tiny","owned_by":"vllm"}]}"#))],
        "GET /version" => vec![Act::Send(json(r#"{"version":"0.33.0"}"#))],
        line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
        _ => vec![Act::Send(answer.clone())],
    })
    .await
}

#[tokio::test]
async fn c7a_parameters_of_an_older_engine_are_not_sent_to_a_decode_engine_that_would_hang() {
    let without = String::from_utf8(prefilled("length", true)).unwrap();
    let body = without.split_once("\r\n\r\n").unwrap().1.replace(r#","remote_request_id":"r""#, "");
    assert!(!body.contains("remote_request_id"), "{body}");
    let (older, newer) = (engine(json(&body)).await, engine(prefilled("length", true)).await);
    let decode = recent(json(ANSWER)).await;
    let cluster = gateway(&[("prefill", &older), ("decode", &decode)]).await;
    let reply = cluster.client.post(COMPLETIONS, &[], prompt(0)).await.unwrap();
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    // C7a.7
    assert!(reply.status == 502 && text.contains("lack `remote_request_id`"), "{text}");
    assert_eq!((older.requests().len(), decode.requests().len()), (1, 0));
    cluster.at_rest().await.unwrap();
    let cluster = gateway(&[("prefill", &older), ("prefill", &newer), ("decode", &decode)]).await;
    for number in numbers(|| older.requests().len() < 2) {
        let reply = cluster.client.post(COMPLETIONS, &[], prompt(number)).await.unwrap();
        // C7a.7, C7a.3
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    assert!(older.requests().len() > 1, "it was asked");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c7a_a_prefill_engine_that_hands_nothing_over_says_what_to_check() {
    let (prefill, decode) = (engine(prefilled("length", false)).await, engine(json(ANSWER)).await);
    let cluster = gateway(&[("prefill", &prefill), ("decode", &decode)]).await;
    let reply = cluster.client.post(COMPLETIONS, &[], prompt(0)).await.unwrap();
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    // C7a.3
    assert!(reply.status == 502 && text.contains("--kv-transfer-config"), "{text}");
    assert_eq!((prefill.requests().len(), decode.requests().len()), (1, 0));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i2_an_adapter_that_one_worker_has_unloaded_is_served_by_another() {
    for (code, refused) in [
        ("404 Not Found", GONE),
        ("499 Client Closed", r#"{"error":"client closed"}"#),
        ("401 Unauthorized", r#"{"error":"Unauthorized"}"#),
    ] {
        let (first, second) = (engine(status(code, refused)).await, engine(json(ANSWER)).await);
        let cluster = gateway(&[("aggregated", &first), ("aggregated", &second)]).await;
        for number in numbers(|| first.requests().is_empty()) {
            let reply = cluster.client.post(COMPLETIONS, &[], prompt(number)).await.unwrap();
            // I2.4
            assert_eq!(reply.status.as_u16(), 200, "{reply:?}");
        }
        assert!(!first.requests().is_empty(), "it was asked");
        cluster.at_rest().await.unwrap();
        // Where no worker serves it, the answer of the last one passes.
        let all = engine(status(code, refused)).await;
        let cluster = gateway(&[("aggregated", &all)]).await;
        let reply = cluster.client.post(COMPLETIONS, &[], prompt(0)).await.unwrap();
        if code.starts_with("401") {
            // I2.15
            assert!(reply.status == 502 && reply.code() == "bad_upstream", "{reply:?}");
        } else {
            // I2.4, I1.3
            assert_eq!((&code[..3], reply.body.as_ref()), (reply.status.as_str(), refused.as_bytes()));
        }
        assert_eq!(all.requests().len(), 1);
    }
}

#[tokio::test]
async fn i2_a_model_that_the_prefill_worker_has_unloaded_is_prefilled_by_another() {
    let without = engine(status("404 Not Found", GONE)).await;
    let (with, decode) = (engine(prefilled("length", true)).await, engine(json(ANSWER)).await);
    let cluster = gateway(&[("prefill", &without), ("prefill", &with), ("decode", &decode)]).await;
    for number in numbers(|| without.requests().is_empty()) {
        let reply = cluster.client.post(COMPLETIONS, &[], prompt(number)).await.unwrap();
        // I2.4
        assert_eq!(reply.status.as_u16(), 200, "{reply:?}");
    }
    assert!(!without.requests().is_empty(), "it was asked");
    cluster.at_rest().await.unwrap();
}

/// An engine that dies while it computes the prompt: the head of its answer was sent.
async fn dying() -> RawEngine {
    let begun = [stream_head(), chunk(b": waiting\n\n")].concat();
    acting(vec![Act::Send(begun), Act::Pause(std::time::Duration::from_millis(50)), Act::Close]).await
}

#[tokio::test]
async fn i2_a_stream_that_ends_before_its_first_event_is_retried_elsewhere() {
    let token =
        r#"{"id":"c","model":"tiny","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}"#;
    let events = format!("data: {token}\n\ndata: [DONE]\n\n");
    let answer = [stream_head(), chunk(events.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
    let bodies =
        [value!({}), value!({"tools": [{"type": "function", "function": {"name": "f"}}]}), value!({"n": 2})];
    for answering in ["aggregated", "decode"] {
        let (dead, alive) = (dying().await, engine(answer.clone()).await);
        let prefill = engine(prefilled("length", true)).await;
        let mut workers = vec![(answering, &dead), (answering, &alive)];
        if answering == "decode" {
            workers.push(("prefill", &prefill));
        }
        let cluster = gateway(&workers).await;
        for number in numbers(|| dead.requests().is_empty()) {
            let mut body = value!({"model": "tiny", "stream": true, "max_tokens": 2,
                "messages": [{"role": "user", "content": format!("prompt {number}")}]});
            let more = bodies[number % bodies.len()].as_object().unwrap().clone();
            body.as_object_mut().unwrap().extend(more);
            let reply = cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap();
            let text = String::from_utf8_lossy(&reply.body).into_owned();
            // I2.2
            assert_eq!(
                (reply.status.as_u16(), text.replace(": waiting\n\n", "")),
                (200, events.clone()),
                "{body}"
            );
        }
        assert!(!dead.requests().is_empty(), "it was asked");
        cluster.at_rest().await.unwrap();
        // Where every engine dies, the stream ends with one error event, after two engines (I4.1).
        let others = [dying().await, dying().await, dying().await];
        let mut workers: Vec<_> = others.iter().map(|engine| (answering, engine)).collect();
        if answering == "decode" {
            workers.push(("prefill", &prefill));
        }
        let cluster = gateway(&workers).await;
        let body = r#"{"model":"tiny","prompt":"a","max_tokens":2,"stream":true}"#;
        let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        // All handoffs were those of one prefill worker (I4.6).
        let code = if answering == "decode" { "bad_upstream" } else { "poison_request" };
        // I1.2
        assert_eq!(
            (reply.status.as_u16(), text.matches(&format!(r#""code":"{code}""#)).count()),
            (200, 1),
            "{text}"
        );
        // I4.1
        let asked: usize = others.iter().map(|engine| engine.requests().len()).sum();
        assert_eq!(asked, 2, "{answering}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i2_a_stream_that_was_retried_and_began_is_not_retried_again() {
    let role = r#"{"id":"c","model":"tiny","choices":[{"index":0,"delta":{"role":"assistant"}}]}"#;
    let full = r#"{"error":{"message":"the queue is full","type":"ServiceUnavailable","code":503}}"#;
    let begins = Act::Send([stream_head(), chunk(format!("data: {role}\n\n").as_bytes())].concat());
    let pause = || Act::Pause(std::time::Duration::from_millis(50));
    // The last error lacks its blank line.
    for end in ["\n\n", ""] {
        let refuses = [chunk(format!("data: {full}{end}").as_bytes()), b"0\r\n\r\n".to_vec()].concat();
        let overloaded = acting(vec![begins.clone(), pause(), Act::Send(refuses)]).await;
        let others = [dying().await, overloaded];
        let cluster = gateway(&others.each_ref().map(|engine| ("aggregated", engine))).await;
        for number in 0..6 {
            let body = value!({"model": "tiny", "stream": true, "max_tokens": 2, "tools": [{"type": "function"}],
                "messages": [{"role": "user", "content": format!("prompt {number}")}]});
            let asked = cluster.client.post("/v1/chat/completions", &[], body.to_string());
            let reply =
                tokio::time::timeout(std::time::Duration::from_secs(20), asked).await.expect("it hangs");
            let text = String::from_utf8_lossy(&reply.unwrap().body).into_owned();
            // I1.2, I2.2
            assert_eq!(text.matches("\"error\":").count(), 1, "{text}");
            assert!(text.trim_end().ends_with('}') && !text.contains("[DONE]"), "{text}");
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i2_the_retry_of_a_stream_without_an_event_may_end_in_prefill() {
    let turns = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let prefill = RawEngine::serving(move |_| {
        let is_first = turns.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0;
        vec![Act::Send(if is_first { prefilled("length", true) } else { prefilled("stop", false) })]
    })
    .await;
    let decode = [dying().await, dying().await];
    let workers = [("prefill", &prefill), ("decode", &decode[0]), ("decode", &decode[1])];
    let cluster = gateway(&workers).await;
    let body = r#"{"model":"tiny","prompt":"a","max_tokens":2,"stream":true}"#;
    let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    // C8.3, I2.2
    assert!(text.contains(r#""finish_reason":"stop""#) && text.ends_with("data: [DONE]\n\n"), "{text}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c8_the_tool_calls_of_a_streamed_answer_that_ended_in_prefill_are_numbered() {
    let call =
        |id: &str| value!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    for calls in [value!([call("a"), call("b")]), value!([])] {
        let message = value!({"role": "assistant", "content": null, "tool_calls": calls});
        let choice = value!({"index": 0, "message": message, "finish_reason": "tool_calls"});
        let answer = value!({"id": "p", "created": 1, "model": "tiny", "system_fingerprint": "fp",
            "choices": [choice], "kv_transfer_params": null});
        let (prefill, decode) = (engine(json(&answer.to_string())).await, engine(json(ANSWER)).await);
        let cluster = gateway(&[("prefill", &prefill), ("decode", &decode)]).await;
        let body = value!({"model": "tiny", "stream": true, "messages": [{"role": "user", "content": "a"}]});
        let stream = cluster.client.stream("/v1/chat/completions", &[], body.to_string()).await.unwrap();
        let first = stream.all().await.unwrap().swap_remove(0);
        let first: serde_json::Value = serde_json::from_str(&first).unwrap();
        assert_eq!(first["system_fingerprint"], "fp", "{first}");
        let delta = &first["choices"][0]["delta"];
        let numbers =
            delta.get("tool_calls").map(|calls| (calls[0]["index"].clone(), calls[1]["index"].clone()));
        // C8.3
        let expected = (!calls.as_array().unwrap().is_empty()).then(|| (value!(0), value!(1)));
        assert_eq!(numbers, expected, "{delta}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn c8_the_blocks_of_a_streamed_message_that_ended_in_prefill_keep_all_of_their_fields() {
    let blocks = value!([
        {"type": "thinking", "thinking": "hm", "signature": "sig"},
        {"type": "redacted_thinking", "data": "AbC="},
        {"type": "text", "text": "hi", "citations": [{"type": "char_location"}]},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}},
        {"type": "new_kind", "more": [1], "text": "t"},
    ]);
    let answer = value!({"id": "m", "type": "message", "role": "assistant", "content": blocks, "model": "tiny",
        "stop_reason": "tool_use", "stop_sequence": null, "usage": {"input_tokens": 3, "output_tokens": 1}});
    let (prefill, decode) = (engine(json(&answer.to_string())).await, engine(json(ANSWER)).await);
    let cluster = gateway(&[("prefill", &prefill), ("decode", &decode)]).await;
    let body = value!({"model": "tiny", "max_tokens": 9, "stream": true, "messages": [{"role": "user", "content": "a"}]});
    let reply = cluster.client.post("/v1/messages", &[], body.to_string()).await.unwrap();
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<serde_json::Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
    let of = |kind: &str, key: &str| -> Vec<serde_json::Value> {
        events.iter().filter(|event| event["type"] == kind).map(|event| event[key].clone()).collect()
    };
    // C8.8
    assert_eq!(
        of("content_block_start", "content_block"),
        [
            value!({"type": "thinking", "thinking": "", "signature": ""}),
            value!({"type": "redacted_thinking", "data": "AbC="}),
            value!({"type": "text", "text": "", "citations": [{"type": "char_location"}]}),
            value!({"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {"type": "direct"}}),
            value!({"type": "new_kind", "more": [1], "text": "t"}),
        ],
        "{text}"
    );
    // C8.8
    assert_eq!(
        of("content_block_delta", "delta"),
        [
            value!({"type": "thinking_delta", "thinking": "hm"}),
            value!({"type": "signature_delta", "signature": "sig"}),
            value!({"type": "text_delta", "text": "hi"}),
            value!({"type": "input_json_delta", "partial_json": "{\"a\":1}"}),
        ],
        "{text}"
    );
    assert_eq!(of("content_block_delta", "index"), [0, 0, 2, 3], "{text}");
    cluster.at_rest().await.unwrap();
}

/// An engine of this version whose prefill answers `prefill`, and any other request `ANSWER`.
async fn versioned(version: &'static str, prefill: Vec<u8>) -> RawEngine {
    RawEngine::start(move |request: &RawRequest| {
        let answer = match request.line.as_str() {
            "GET /v1/models" => json(r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"#),
            "GET /version" => json(&value!({ "version": version }).to_string()),
            line if line.starts_with("GET") => json("{}"),
            _ if request.body.contains("do_remote_decode\":true") => prefill.clone(),
            "POST /v1/responses" => json(r#"{"object":"response","status":"completed","output":[]}"#),
            _ => json(ANSWER),
        };
        vec![Act::Send(answer)]
    })
    .await
}

#[tokio::test]
async fn c7b_a_forced_tool_call_is_split_only_where_the_engine_answers_one_token_of_it() {
    let bodies = [
        ("/v1/chat/completions", value!("required"), true),
        ("/v1/chat/completions", value!({"type": "function", "function": {"name": "f"}}), true),
        ("/v1/chat/completions", value!("auto"), false),
        ("/v1/messages", value!({"type": "any"}), true),
        ("/v1/messages", value!({"type": "tool", "name": "f"}), true),
        ("/v1/messages", value!({"type": "auto"}), false),
    ];
    for (version, is_new) in [("0.18.0", false), ("0.26.1", false), ("0.27.0", true), ("1.0.0", true)] {
        let prefill = versioned(version, prefilled("length", true)).await;
        let decode = versioned(version, Vec::new()).await;
        let cluster = gateway(&[("prefill", &prefill), ("decode", &decode)]).await;
        for (path, choice, forces) in &bodies {
            let before = prefill.requests().len();
            let body = value!({"model": "tiny", "max_tokens": 9, "tools": [{"type": "function", "name": "f"}],
                "tool_choice": choice, "messages": [{"role": "user", "content": "weather? ".repeat(99)}]});
            cluster.client.post(path, &[], body.to_string()).await.unwrap();
            // C7b.1
            let split = usize::from(is_new || !forces);
            assert_eq!(prefill.requests().len() - before, split, "{version} {path} {choice}");
        }
        assert_eq!(decode.requests().len(), bodies.len(), "{version}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn c7b_a_prompt_that_both_legs_may_cut_otherwise_is_not_split() {
    let versions =
        [("0.31.2", "0.33.0", 0), ("0.33.0", "0.31.2", 0), ("0.33.0", "", 0), ("0.32.0", "0.33.0", 1)];
    for (of_prefill, of_decode, split) in versions {
        let prefill = versioned(of_prefill, prefilled("length", true)).await;
        let decode = versioned(of_decode, Vec::new()).await;
        // Other versions do not pair.
        let roles = ["prefill,kv_compatibility=a", "decode,kv_compatibility=a"];
        let cluster = gateway(&[(roles[0], &prefill), (roles[1], &decode)]).await;
        let (limit, truncation) = ("truncate_prompt_tokens", "truncation");
        // Responses are split only where versions are known.
        let known = usize::from(!of_decode.is_empty());
        let cases = [
            (COMPLETIONS, limit, value!(-1), split),
            (COMPLETIONS, limit, value!("-1"), split),
            (COMPLETIONS, limit, value!(9), 1),
            (COMPLETIONS, limit, value!(null), 1),
            // C7b.8
            ("/v1/responses", truncation, value!("auto"), split),
            ("/v1/responses", truncation, value!(null), split),
            ("/v1/responses", truncation, value!("disabled"), known),
            ("/v1/responses", "user", value!("auto"), known),
        ];
        for (path, field, given, expected) in cases {
            let before = prefill.requests().len();
            let text = "a ".repeat(99);
            let mut body = value!({"model": "tiny", "max_tokens": 9, "prompt": text, "input": text});
            body[field] = given;
            assert_eq!(cluster.client.post(path, &[], body.to_string()).await.unwrap().status, 200);
            // C7b.6
            let versions = (of_prefill, of_decode);
            assert_eq!(prefill.requests().len() - before, expected, "{versions:?} {path} {body}");
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn c7b_beam_search_runs_on_one_worker() {
    let prefill = versioned("0.33.0", prefilled("length", false)).await;
    let decode = versioned("0.33.0", Vec::new()).await;
    let cluster = gateway(&[("prefill", &prefill), ("decode", &decode)]).await;
    let body = value!({"model": "tiny", "max_tokens": 2, "prompt": "a ".repeat(99), "use_beam_search": true});
    // C7b.2
    assert_eq!(cluster.client.post(COMPLETIONS, &[], body.to_string()).await.unwrap().status, 200);
    assert_eq!((prefill.requests().len(), decode.requests().len()), (0, 1));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c7b_a_prompt_shorter_than_a_block_is_decoded_without_a_handoff() {
    let parameters =
        value!({"remote_block_ids": [], "remote_engine_id": "e", "remote_host": "h", "remote_port": 1});
    let choice = value!({"index": 0, "text": "", "finish_reason": "length"});
    let answer = value!({"id": "p", "choices": [choice], "kv_transfer_params": parameters}).to_string();
    let prefill = versioned("0.10.0", json(&answer)).await;
    let decode = versioned("0.10.0", Vec::new()).await;
    let cluster = gateway(&[("prefill", &prefill), ("decode", &decode)]).await;
    // C7b.3
    assert_eq!(cluster.client.post(COMPLETIONS, &[], prompt(1)).await.unwrap().status, 200);
    assert_eq!((prefill.requests().len(), decode.requests().len()), (1, 1));
    assert!(!decode.requests()[0].body.contains("kv_transfer_params"), "{:?}", decode.requests());
    cluster.at_rest().await.unwrap();
    let metrics = cluster.metrics_text().await.unwrap();
    let counted: Vec<&str> =
        metrics.lines().filter(|line| line.starts_with("pointsman_handoffs_total{")).collect();
    let counted: Vec<&str> = counted.into_iter().filter(|line| !line.ends_with(" 0")).collect();
    // C7b.4
    assert_eq!(counted, ["pointsman_handoffs_total{result=\"nothing_to_hand_over\"} 1"]);
}
