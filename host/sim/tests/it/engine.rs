//! A vLLM engine: endpoints, recorded errors, limits, cache, and disconnecting clients.

use std::time::Duration;

use crate::client::*;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, Sim, SimConfig, StartError};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn chat(content: &str) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4})
}

#[tokio::test]
async fn a_chat_streams_role_tokens_usage_done() {
    let sim = start(Dialect::Vllm, Role::Aggregated).await;
    let mut body = chat(&"x".repeat(4 * 35));
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let events = post(&sim, CHAT, &body).await.events();
    assert_eq!(events.len(), 1 + 4 + 2);
    assert!(events[0].contains(r#""delta":{"role":"assistant","content":""}"#));
    assert!(
        events[4].contains(r#""finish_reason":"length","stop_reason":null"#)
            && !events[3].contains("stop_reason")
    );
    assert!(events[5].contains(r#""prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":32}"#));
    assert_eq!(events[6], "[DONE]");
    assert!(events[0].starts_with(r#"{"id":"chatcmpl-req-1","object":"chat.completion.chunk","created":"#));
    let again = post(&sim, CHAT, &body).await.events();
    assert!(again[5].contains(r#""cached_tokens":32,"created_cache_tokens":0"#), "{}", again[5]);
}

#[tokio::test]
async fn usage_can_be_in_every_chunk_or_nowhere() {
    let sim = start(Dialect::Vllm, Role::Aggregated).await;
    let mut body = json!({"prompt": [1, 2, 3], "max_tokens": 3, "stream": true, "return_token_ids": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let events = post(&sim, TEXT, &body).await.events();
    assert!(
        events[0].contains(r#""prompt_token_ids":[1,2,3],"token_ids":["#) && !events[1].contains("[1,2,3]")
    );
    for (event, total) in events.iter().zip([4, 5, 6]) {
        assert!(
            event.contains(&format!(r#""usage":{{"prompt_tokens":3,"total_tokens":{total},"#)),
            "{event}"
        );
    }
    body["stream_options"] = Value::Null;
    let events = post(&sim, TEXT, &body).await.events();
    assert!(events.iter().all(|event| !event.contains("usage")));
    assert!(events[2].contains("system_fingerprint") && events.len() == 4);
}

#[tokio::test]
async fn prompts_come_in_four_forms_and_answers_in_any_number() {
    let sim = start(Dialect::Vllm, Role::Aggregated).await;
    let forms = [
        (json!("abcdefgh"), 2, 1),
        (json!(["abcd", "efgh"]), 2, 2),
        (json!([7, 8, 9]), 3, 1),
        (json!([[7], [8, 9]]), 3, 2),
    ];
    for (prompt, tokens, choices) in forms {
        let answer = post(&sim, TEXT, &json!({"prompt": prompt, "max_tokens": 2, "n": 3})).await.json();
        assert_eq!(answer["usage"]["prompt_tokens"], tokens, "{prompt}");
        let indices: Vec<_> =
            answer["choices"].as_array().unwrap().iter().map(|c| c["index"].clone()).collect();
        assert_eq!(indices, (0..choices * 3).map(Value::from).collect::<Vec<_>>());
        assert_eq!(answer["usage"]["completion_tokens"], choices * 3 * 2);
    }
    let messages = json!([{"role": "user", "content": [{"type": "text", "text": "abcdefgh"}]}]);
    let parts = json!({"messages": messages, "max_completion_tokens": 2, "max_tokens": 9});
    let answer = post(&sim, CHAT, &parts).await.json();
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(2), &json!(2))
    );
}

#[tokio::test]
async fn the_model_generates_eos_unless_it_is_ignored() {
    let sim = start_with(Dialect::Vllm, Role::Aggregated, |config| config.natural_len = 6).await;
    let table = [
        (json!({"max_tokens": 4}), 4, "length"),
        (json!({"max_tokens": 9}), 6, "stop"),
        (json!({}), 6, "stop"),
        (json!({"max_tokens": 9, "ignore_eos": true}), 9, "length"),
        (json!({"max_tokens": 9, "min_tokens": 8}), 8, "stop"),
    ];
    for (extra, tokens, finish) in table {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let answer = post(&sim, CHAT, &body).await.json();
        assert_eq!(answer["usage"]["completion_tokens"], tokens, "{extra}");
        assert_eq!(answer["choices"][0]["finish_reason"], finish, "{extra}");
    }
}

#[tokio::test]
async fn errors_are_the_recorded_ones() {
    let sim = start_with(Dialect::Vllm, Role::Aggregated, |config| config.max_model_len = 2048).await;
    let long: Vec<u32> = vec![1; 3000];
    let table = [
        (
            CHAT,
            json!({"model": "nope", "messages": []}),
            404,
            r#"{"error":{"message":"The model `nope` does not exist. Valid aliases: tiny.","type":"NotFoundError","param":"model","code":404}}"#,
        ),
        (
            CHAT,
            json!({"model": "tiny"}),
            400,
            r#"{"error":{"message":"1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input': '<dict of 1 items>'}","type":"Bad Request","param":"body.messages","code":400}}"#,
        ),
        (
            CHAT,
            json!({"model": "tiny", "messages": "hi"}),
            400,
            r#"{"error":{"message":"1 validation error:\n  {'type': 'list_type', 'loc': 'body.messages', 'msg': 'Input should be a valid list', 'input': 'hi'}","type":"Bad Request","param":"body.messages","code":400}}"#,
        ),
        (
            TEXT,
            json!({"prompt": ""}),
            400,
            r#"{"error":{"message":"Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)","type":"BadRequestError","param":"prompt","code":400}}"#,
        ),
        (
            TEXT,
            json!({"prompt": "x", "temperature": -3.0}),
            400,
            r#"{"error":{"message":"temperature must be non-negative, got -3.0. (parameter=temperature, value=-3.0)","type":"BadRequestError","param":"temperature","code":400}}"#,
        ),
        (
            TEXT,
            json!({"prompt": "x", "max_tokens": 400_000}),
            400,
            r#"{"error":{"message":"max_tokens=400000 cannot be greater than max_model_len=2048. Please request fewer output tokens. (parameter=max_tokens, value=400000)","type":"BadRequestError","param":"max_tokens","code":400}}"#,
        ),
        (
            TEXT,
            json!({"prompt": long}),
            400,
            r#"{"error":{"message":"This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=2049)","type":"BadRequestError","param":"input_tokens","code":400}}"#,
        ),
    ];
    for (path, body, status, text) in table {
        let answer = post(&sim, path, &body).await;
        assert_eq!((answer.status, answer.text().as_str()), (status, text));
    }
    let broken = send(sim.addr(), &request_bytes(CHAT, r#"{"model": "tiny", "messages""#)).await.unwrap();
    assert!(
        broken.status == 400 && broken.text().contains("'msg': 'JSON decode error'"),
        "{}",
        broken.text()
    );
    let untyped = request_bytes(TEXT, "{}").replace("application/json", "text/plain");
    let untyped = send(sim.addr(), &untyped).await.unwrap();
    assert_eq!(
        untyped.text(),
        r#"{"error":{"message":"1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed","type":"Bad Request","param":null,"code":400}}"#
    );
    assert_eq!(get(&sim, CHAT).await.status, 405);
    let absent = get(&sim, "/server_info").await;
    assert_eq!((absent.status, absent.text().as_str()), (404, r#"{"detail":"Not Found"}"#));
    assert_eq!(sim.state().requests.get("aggregated/invalid"), Some(&9));
}

#[tokio::test]
async fn probes_are_vllms() {
    let sim = start(Dialect::Vllm, Role::Aggregated).await;
    let health = get(&sim, "/health").await;
    assert_eq!((health.status, health.body.len()), (200, 0));
    assert_eq!(get(&sim, "/version").await.text(), r#"{"version":"0.32.0"}"#);
    let model = get(&sim, "/v1/models").await.json()["data"][0].clone();
    assert_eq!(
        (&model["owned_by"], &model["id"], &model["max_model_len"]),
        (&json!("vllm"), &json!("tiny"), &json!(131_072))
    );
    let tokens = post(&sim, "/tokenize", &json!({"model": "tiny", "prompt": "abcdabcdx"})).await;
    assert!(
        tokens.text().starts_with(r#"{"count":3,"max_model_len":131072,"tokens":["#),
        "{}",
        tokens.text()
    );
    let tokens = tokens.json()["tokens"].clone();
    assert_eq!(tokens[0], tokens[1]);
    let chat = post(
        &sim,
        "/tokenize",
        &json!({"messages": [{"role": "user", "content": "abcd"}, {"role": "user", "content": "abcd"}]}),
    )
    .await;
    assert_eq!(chat.json()["tokens"], json!([tokens[0], tokens[0]]));
    let messages = json!({"messages": [{"role": "user", "content": "abcd"}]});
    let render = "/v1/chat/completions/render";
    assert_eq!(post(&sim, render, &messages).await.status, 404);
    let scale_out = start_with(Dialect::Vllm, Role::Aggregated, |config| config.scale_out = true).await;
    assert_eq!(post(&scale_out, render, &messages).await.json()["token_ids"], json!([tokens[0]]));
    post(&sim, TEXT, &json!({"prompt": "x".repeat(4 * 33), "max_tokens": 2})).await;
    post(&sim, TEXT, &json!({"prompt": "x".repeat(4 * 33), "max_tokens": 2})).await;
    let metrics = get(&sim, "/metrics").await.text();
    for line in [
        r#"vllm:num_requests_running{engine="0",model_name="tiny"} 0.0"#,
        r#"vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0"#,
        r#"vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0"#,
        r#"vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 66.0"#,
        r#"vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 32.0"#,
        r#"sim_requests_total{leg="aggregated",outcome="ok"} 2"#,
        r#"sim_handoffs_total{result="reused"} 0"#,
        "sim_generated_tokens_total 4",
        "sim_pinned_blocks 0",
        "sim_stranded_total 0",
        "sim_aborted_total 0",
        "sim_client_disconnects_total 0",
    ] {
        assert!(metrics.lines().any(|have| have == line), "no `{line}` in\n{metrics}");
    }
    let config = metrics.lines().find(|line| line.starts_with("vllm:cache_config_info{")).unwrap();
    assert!(config.contains(r#"block_size="16""#) && config.contains(r#"num_gpu_blocks="28000""#));
}

#[tokio::test]
async fn a_request_over_the_queue_limit_is_refused() {
    let sim = start_with(Dialect::Vllm, Role::Aggregated, |config| {
        (config.max_num_seqs, config.max_waiting, config.overhead) = (1, 1, Duration::from_secs(60));
    })
    .await;
    let _running = open(&sim, CHAT, &chat("one")).await;
    eventually(&sim, "one runs", |state| state.running == 1).await;
    let waiting = open(&sim, CHAT, &chat("two")).await;
    eventually(&sim, "one waits", |state| state.waiting == 1).await;
    let mut body = chat("three");
    for stream in [false, true] {
        body["stream"] = json!(stream);
        let refused = post(&sim, CHAT, &body).await;
        assert_eq!(refused.status, 503);
        assert!(refused.text().contains("queue is full: 1 requests are waiting, limit 1"));
    }
    let metrics = get(&sim, "/metrics").await.text();
    assert!(metrics.contains(r#"vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0"#));
    drop(waiting);
    eventually(&sim, "it left the line", |state| state.waiting == 0 && state.client_disconnects == 1).await;
    assert_eq!(sim.state().requests.get("aggregated/refused"), Some(&2));
}

#[tokio::test]
async fn a_client_that_leaves_frees_everything_at_once() {
    let sim =
        start_with(Dialect::Vllm, Role::Aggregated, |config| config.itl = Duration::from_secs(60)).await;
    for (at, stream) in [false, true].into_iter().enumerate() {
        let mut body = chat(&"x".repeat(400));
        body["stream"] = json!(stream);
        let client = open(&sim, CHAT, &body).await;
        eventually(&sim, "it runs", |state| state.running == 1 && state.used_blocks > 0).await;
        drop(client);
        let left = u64::try_from(at).unwrap() + 1;
        eventually(&sim, "all free", |state| {
            state.running == 0 && state.used_blocks == 0 && state.client_disconnects == left
        })
        .await;
    }
}

#[tokio::test]
async fn durations_follow_the_model_and_the_speedup() {
    let sim = start_with(Dialect::Vllm, Role::Aggregated, |config| {
        config.overhead = Duration::from_secs(10);
        config.itl = Duration::from_secs(2);
        config.speedup = 100.0;
    })
    .await;
    let before = tokio::time::Instant::now();
    let mut body = chat("hi");
    body["max_tokens"] = json!(6);
    post(&sim, CHAT, &body).await;
    // The request takes 10 s + 5 * 2 s, accelerated a hundred times.
    let took = before.elapsed();
    assert!(took >= Duration::from_millis(195), "{took:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[tokio::test]
async fn the_next_turn_of_a_conversation_finds_the_answer_cached() {
    let sim = start(Dialect::Vllm, Role::Aggregated).await;
    let question = "x".repeat(4 * 32);
    let mut first = chat(&question);
    // The last token's KV is not computed, so 32 of 33 tokens can be cached.
    first["max_tokens"] = json!(33);
    let answer = post(&sim, CHAT, &first).await.answer();
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let turns = [message("user", &question), message("assistant", &answer), message("user", "and?")];
    let next = json!({"max_tokens": 1, "messages": turns});
    assert_eq!(post(&sim, CHAT, &next).await.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 64);
}

#[tokio::test]
async fn requests_are_recorded_when_asked_for() {
    let sim = start_with(Dialect::Vllm, Role::Aggregated, |config| config.record = 2).await;
    for content in ["one", "two", "three"] {
        post(&sim, CHAT, &chat(content)).await;
    }
    let recorded = sim.recorded();
    assert_eq!(recorded.len(), 2);
    assert!(recorded[1].body.contains("three") && recorded[0].body.contains("two"));
    assert!(recorded[1].headers.contains(&("x-request-id".to_owned(), "req-1".to_owned())));
    assert_eq!(get(&sim, "/sim/requests").await.json()[1]["leg"], "aggregated");
}

#[tokio::test]
async fn a_plain_server_is_plain() {
    let sim = start(Dialect::Openai, Role::Aggregated).await;
    let answer = post(&sim, CHAT, &chat("hi")).await.json();
    let mut keys: Vec<_> = answer.as_object().unwrap().keys().collect();
    keys.sort();
    assert_eq!(keys, ["choices", "created", "id", "model", "object", "usage"]);
    assert_eq!(get(&sim, "/v1/models").await.json()["data"][0]["owned_by"], "openai");
    let bad = Sim::start(SimConfig::instant(Dialect::Openai, Role::Decode)).await;
    assert!(matches!(bad.err(), Some(StartError::Config(problem)) if problem.contains("cannot be `decode`")));
}

#[tokio::test]
async fn starting_and_ending() {
    let sim = start(Dialect::Vllm, Role::Prefill).await;
    let (addr, port) = (sim.addr(), sim.bootstrap_port().unwrap());
    let taken = Sim::start(SimConfig { listen: addr, ..SimConfig::default() }).await;
    assert!(matches!(taken.err(), Some(StartError::Listen { addr: at, .. }) if at == addr));
    sim.shutdown(Duration::from_secs(5)).await;
    for port in [addr.port(), port] {
        let refused = tokio::net::TcpStream::connect(("127.0.0.1", port)).await;
        assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    }
    let slow =
        start_with(Dialect::Vllm, Role::Aggregated, |config| config.overhead = Duration::from_secs(60)).await;
    let mut client = open(&slow, CHAT, &chat("hi")).await;
    eventually(&slow, "it runs", |state| state.running == 1).await;
    slow.kill().await;
    let mut byte = [0; 1];
    let reset = tokio::io::AsyncReadExt::read(&mut client, &mut byte).await;
    assert_eq!(reset.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn one_engine_stands_for_many_workers_and_stamps_its_events() {
    let sim = start_with(Dialect::Vllm, Role::Aggregated, |config| {
        (config.any_prefix, config.stamp) = (true, true);
    })
    .await;
    for path in ["/health", "/v1/models", "/w17/health", "/w17/v1/models"] {
        assert_eq!(get(&sim, path).await.status, 200, "{path}");
    }
    assert_eq!(get(&sim, "/w17/nothing").await.status, 404);
    let mut body = chat("hi");
    body["stream"] = json!(true);
    let events = post(&sim, &format!("/w3{CHAT}"), &body).await.events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let stamps: Vec<u64> = events
        .iter()
        .filter(|event| *event != "[DONE]")
        .map(|event| serde_json::from_str::<Value>(event).unwrap()["t"].as_str().unwrap().parse().unwrap())
        .collect();
    assert!(stamps.len() > 4 && stamps.is_sorted() && stamps[0] > 0, "{stamps:?}");
}

#[tokio::test]
async fn disconnects_are_recorded_with_the_answer_s_id_and_faults_are_counted() {
    let sim = start_with(Dialect::Vllm, Role::Aggregated, |config| {
        (config.record, config.itl) = (8, Duration::from_millis(5));
        config.faults = vec![Fault {
            times: Some(1),
            ..Fault::always(FaultKind::Status { status: 503, retry_after: None })
        }];
    })
    .await;
    assert_eq!(post(&sim, CHAT, &chat("hi")).await.status, 503);
    assert_eq!(sim.state().faults_fired, [("status-503".to_owned(), 1)].into());
    let mut body = chat("hi");
    (body["stream"], body["max_tokens"], body["ignore_eos"]) = (json!(true), json!(5_000), json!(true));
    let client = open(&sim, CHAT, &body).await;
    eventually(&sim, "it runs", |state| state.running == 1).await;
    drop(client);
    eventually(&sim, "the disconnect is noticed", |state| state.client_disconnects == 1).await;
    let log = get(&sim, "/sim/disconnects").await.json();
    assert_eq!(log.as_array().unwrap().len(), 1, "{log}");
    assert!(
        log[0]["id"].as_str().unwrap().starts_with("chatcmpl-") && log[0]["at_ns"].as_u64() > Some(0),
        "{log}"
    );
}
