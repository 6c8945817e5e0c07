//! Pairs of vLLM engines that check bodies, and count cached tokens, as version 0.33 does.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use pointsman_gateway::config::Config;
use pointsman_tests::{
    Act, MESSAGES, RawEngine, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{RawRequest, chunk, json as json_answer, status, stream_head},
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};

/// Tokens of each prompt.
const PROMPT: u64 = 6_000;
/// Longest context of each engine, tokens.
const CONTEXT: u64 = 16_000;

/// Why vLLM refuses a body, as its `protocol.py` of chats, completions and messages checks it.
fn refusal(body: &Value) -> Option<&'static str> {
    let is_set = |field: &str| !matches!(body[field], Value::Null | Value::Bool(false));
    if is_set("logprob_token_ids") && !is_set("logprobs") {
        return Some("when using `logprob_token_ids`, `logprobs` must be set");
    }
    let asks = body["kv_transfer_params"]["do_remote_decode"] == true;
    let number = |field: &str| body[field].as_u64();
    let cap = number("max_completion_tokens").or(number("max_tokens"));
    if cap == Some(0) || cap < number("min_tokens") || cap > Some(CONTEXT) {
        return Some("the limit of output tokens is wrong");
    }
    if number("top_logprobs") > Some(20) {
        return Some("Requested sample logprobs of 25, which is greater than max allowed: 20");
    }
    if body["stream_options"].is_object() && body["stream"] != true {
        return Some("Stream options can only be defined when `stream=True`.");
    }
    let budget = body["thinking"]["budget_tokens"].as_u64().filter(|_| !asks);
    (budget >= Some(body["max_tokens"].as_u64().unwrap_or(0)))
        .then_some("thinking.budget_tokens must be less than max_tokens")
}

/// A message's usage, in which so many tokens of the prompt were cached. The other full blocks of the prompt
/// were written into the cache.
fn usage(cached: u64, output: u64) -> Value {
    let created = (PROMPT - cached) / 16 * 16;
    json!({ "input_tokens": PROMPT - cached - created, "output_tokens": output,
        "cache_read_input_tokens": cached, "cache_creation_input_tokens": created })
}

fn events(cached: u64) -> String {
    let message = json!({ "id": "m", "type": "message", "role": "assistant", "content": [], "usage": usage(cached, 0) });
    let text = json!({ "type": "text_delta", "text": "hi" });
    let delta = json!({ "stop_reason": "end_turn" });
    [
        json!({ "type": "message_start", "message": message }),
        json!({ "type": "content_block_delta", "index": 0, "delta": text }),
        json!({ "type": "message_delta", "delta": delta, "usage": usage(cached, 7) }),
        json!({ "type": "message_stop" }),
    ]
    .iter()
    .map(|event| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap()))
    .collect()
}

/// The answer to a body. An input of a tool has fields with the names of counts.
fn answer(request: &RawRequest, body: &Value, cached: u64) -> Vec<u8> {
    let asks = body["kv_transfer_params"]["do_remote_decode"] == true;
    let handoff = asks.then(|| {
        json!({ "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r",
            "remote_host": "127.0.0.1", "remote_port": 1 })
    });
    let end = if asks { "length" } else { "stop" };
    if !request.line.contains(MESSAGES) {
        let choice =
            json!({ "index": 0, "message": { "content": "hi" }, "text": "hi", "finish_reason": end });
        let whole = json!({ "id": "x", "choices": [choice], "kv_transfer_params": handoff });
        return json_answer(&whole.to_string());
    }
    if body["stream"] == true {
        return [stream_head(), chunk(events(cached).as_bytes()), chunk(b"")].concat();
    }
    let input = json!({ "usage": { "input_tokens": 1, "cache_read_input_tokens": 2 } });
    let tool = json!({ "type": "tool_use", "id": "t", "name": "f", "input": input });
    let end = if asks { "max_tokens" } else { "tool_use" };
    let whole = json!({ "id": "m", "type": "message", "role": "assistant", "content": [tool],
        "stop_reason": end, "usage": usage(cached, 7), "kv_transfer_params": handoff });
    json_answer(&whole.to_string())
}

/// An engine that answers after a pause.
async fn engine(cached: u64, pause: Duration) -> RawEngine {
    let script = move |request: &RawRequest| {
        let body = serde_json::from_str(&request.body).unwrap();
        let answer = match refusal(&body) {
            Some(message) => status(
                "400 Bad Request",
                &json!({ "error": { "message": message, "code": 400 } }).to_string(),
            ),
            None => answer(request, &body, cached),
        };
        vec![Act::Pause(pause), Act::Send(answer)]
    };
    let models = json!({ "data": [{ "id": "tiny", "owned_by": "vllm", "max_model_len": CONTEXT }] });
    RawEngine::start(move |request| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json_answer(&models.to_string()))],
        "GET /version" => vec![Act::Send(json_answer(r#"{"version":"0.33.0"}"#))],
        line if line.starts_with("GET") => vec![Act::Send(json_answer("{}"))],
        _ => script(request),
    })
    .await
}

async fn gateway(prefill: &RawEngine, decode: &RawEngine) -> TestCluster {
    gateway_with(prefill, decode, |_| ()).await
}

async fn gateway_with(
    prefill: &RawEngine,
    decode: &RawEngine,
    change: impl FnOnce(&mut Config),
) -> TestCluster {
    let flag = |role, engine: &RawEngine| format!("role={role},engine=vllm,url=http://{}", engine.address);
    let flags = [flag("prefill", prefill), flag("decode", decode)];
    let builder = TestClusterBuilder::new().config(|config| {
        config.workers.extend(flags.iter().map(|flag| WorkerSpec::parse_flag(flag).unwrap()));
        change(config);
    });
    builder.start().await
}

fn body(more: Value) -> String {
    let text = "word ".repeat(PROMPT as usize);
    let mut body = json!({ "model": "tiny", "max_tokens": 4_096, "prompt": text,
        "messages": [{ "role": "user", "content": text }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

async fn post(cluster: &TestCluster, path: &str, more: Value) -> Reply {
    cluster.client.post(path, &[], body(more)).await.unwrap()
}

fn sent(engine: &RawEngine) -> Vec<Value> {
    engine.requests().iter().map(|seen| serde_json::from_str(&seen.body).unwrap()).collect()
}

#[tokio::test]
async fn c7b_what_decode_would_refuse_costs_no_prefill() {
    let (prefill, decode) = (engine(0, Duration::ZERO).await, engine(0, Duration::ZERO).await);
    let cluster = gateway(&prefill, &decode).await;
    let chat = "/v1/chat/completions";
    let budget = json!({ "type": "enabled", "budget_tokens": 4_096 });
    for (path, more) in [
        (chat, json!({ "max_tokens": 0 })),
        (chat, json!({ "max_completion_tokens": 0 })),
        (chat, json!({ "min_tokens": 5_000 })),
        (chat, json!({ "max_tokens": CONTEXT + 1 })),
        (chat, json!({ "stream_options": { "include_usage": true } })),
        (MESSAGES, json!({ "thinking": budget })),
    ] {
        let before = decode.requests().len();
        let reply = post(&cluster, path, more.clone()).await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        // C7b.7: it is the engine's own refusal
        assert!(reply.status == 400 && text.contains("\"code\":400"), "{more}: {text}");
        assert_eq!((prefill.requests().len(), decode.requests().len()), (0, before + 1), "{more}");
    }
    for path in [chat, "/v1/completions"] {
        let before = decode.requests().len();
        let reply = post(&cluster, path, json!({ "logprobs": true, "top_logprobs": 25 })).await;
        // C1.5: prefill refuses it
        assert_eq!((reply.status.as_u16(), decode.requests().len()), (400, before), "{reply:?}");
    }
    assert_eq!(prefill.requests().len(), 2);
    assert_eq!(post(&cluster, chat, json!({ "max_tokens": CONTEXT })).await.status, 200);
    assert_eq!(prefill.requests().len(), 3);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c7b_what_decode_would_refuse_is_refused_where_no_worker_serves_alone() {
    let (prefill, decode) = (engine(0, Duration::ZERO).await, engine(0, Duration::ZERO).await);
    let enforced = |config: &mut Config| config.routing.enforce_disagg = true;
    let cluster = gateway_with(&prefill, &decode, enforced).await;
    let reply = post(&cluster, "/v1/chat/completions", json!({ "max_tokens": 0 })).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    // C7b.7
    assert!(reply.status == 400 && text.contains("a limit of 0 output tokens"), "{text}");
    assert_eq!((prefill.requests().len(), decode.requests().len()), (0, 0));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c1_log_probabilities_are_asked_of_both_legs() {
    let (prefill, decode) = (engine(0, Duration::ZERO).await, engine(0, Duration::ZERO).await);
    let cluster = gateway(&prefill, &decode).await;
    for (path, logprobs) in [("/v1/chat/completions", json!(true)), ("/v1/completions", json!(1))] {
        let more = json!({ "logprobs": logprobs, "logprob_token_ids": [1, 2] });
        let reply = post(&cluster, path, more).await;
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    for (prefill, decode) in sent(&prefill).iter().zip(sent(&decode)) {
        // C1.5
        for field in ["logprobs", "logprob_token_ids"] {
            assert!(!prefill[field].is_null() && prefill[field] == decode[field], "{prefill}");
        }
    }
    assert_eq!((prefill.requests().len(), decode.requests().len()), (2, 2));
    cluster.at_rest().await.unwrap();
}

/// An engine of a Mooncake pair. Its prefill ends with this reason, and decode waits for blocks.
async fn mooncake(end: &'static str) -> RawEngine {
    mooncake_with(end, |_| vec![Act::Hang]).await
}

/// Like [`mooncake`], with what decode does.
async fn mooncake_with(
    end: &'static str,
    decode: impl Fn(&RawRequest) -> Vec<Act> + Send + Sync + 'static,
) -> RawEngine {
    RawEngine::start(move |request| {
        let answer = match request.line.as_str() {
            "GET /v1/models" => json_answer(r#"{"data":[{"id":"tiny","owned_by":"vllm"}]}"#),
            "GET /query" => json_answer(r#"{"0":{"engine_id":"e"}}"#),
            line if line.starts_with("GET") => json_answer("{}"),
            _ if request.body.contains("\"do_remote_prefill\":true") => return decode(request),
            _ => {
                let whole = json!({ "id": "m", "type": "message", "role": "assistant", "content": [],
                    "stop_reason": end, "usage": usage(8, 1) });
                json_answer(&whole.to_string())
            }
        };
        vec![Act::Send(answer)]
    })
    .await
}

async fn mooncake_gateway(prefill: &RawEngine, decode: &[&RawEngine]) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        config.timeouts.request = Duration::from_secs(3);
        let engines = [("prefill", prefill)].into_iter().chain(decode.iter().map(|one| ("decode", *one)));
        for (role, engine) in engines {
            let port = engine.address.port();
            let more = format!("transport=mooncake,bootstrap_port={port},url=http://{}", engine.address);
            let flag = format!("role={role},engine=vllm,{more}");
            config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
        }
    });
    builder.start().await
}

/// A decode engine that refuses its first request with this status and code, after the prefill ended.
async fn refusing_once(refusal: &'static str, code: u16) -> RawEngine {
    let asked = AtomicU32::new(0);
    mooncake_with("max_tokens", move |request| {
        if asked.fetch_add(1, Ordering::Relaxed) == 0 {
            let body = json!({ "error": { "message": "boom", "code": code } }).to_string();
            return vec![Act::Pause(Duration::from_millis(300)), Act::Send(status(refusal, &body))];
        }
        let body = serde_json::from_str(&request.body).unwrap();
        vec![Act::Send(answer(request, &body, 0))]
    })
    .await
}

#[tokio::test]
async fn e6_a_mooncake_handoff_that_decode_refuses_is_consumed() {
    let transfer = |body: &Value| body["kv_transfer_params"]["transfer_id"].clone();
    let prefill = mooncake("max_tokens").await;
    let decode = refusing_once("400 Bad Request", 400).await;
    let cluster = mooncake_gateway(&prefill, &[&decode]).await;
    assert_eq!(post(&cluster, MESSAGES, json!({})).await.status, 400);
    cluster.until("the handoff is consumed", |_| decode.requests().len() == 2).await.unwrap();
    cluster.at_rest().await.unwrap();
    let seen = sent(&decode);
    // E6.6, E6.10
    assert_eq!((&seen[1]["max_tokens"], transfer(&seen[0])), (&json!(1), transfer(&seen[1])));

    for refusal in ["503 Service Unavailable", "200 OK"] {
        let prefill = mooncake("max_tokens").await;
        let (one, two) = (refusing_once(refusal, 503).await, refusing_once(refusal, 503).await);
        let cluster = mooncake_gateway(&prefill, &[&one, &two]).await;
        let reply = post(&cluster, MESSAGES, json!({})).await;
        // E6.9, E6.10, E6.16: both are asked, and the first again
        assert_eq!(reply.status, 200, "{refusal}: {reply:?}");
        let seen = [sent(&one), sent(&two)].concat();
        assert_eq!((prefill.requests().len(), seen.len()), (1, 3), "{refusal}");
        assert!(seen.iter().all(|body| transfer(body) == transfer(&seen[0])), "one handoff: {seen:?}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn c8_an_empty_message_of_a_mooncake_pair_does_not_wait_for_blocks() {
    for (stream, end) in [(false, "end_turn"), (true, "end_turn"), (false, "max_tokens")] {
        let (prefill, decode) = (mooncake(end).await, mooncake(end).await);
        let cluster = mooncake_gateway(&prefill, &[&decode]).await;
        let reply = post(&cluster, MESSAGES, json!({ "stream": stream })).await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        let is_whole = end == "end_turn";
        // C8.6
        assert_eq!((reply.status == 200, text.contains(end)), (is_whole, is_whole), "{text}");
        assert_eq!(stream, text.contains("event: message_stop"), "{text}");
        assert_eq!((prefill.requests().len(), decode.requests().len()), (1, 1));
        if is_whole {
            cluster.until("the decode leg is closed", |_| decode.open() == 0).await.unwrap();
            cluster.at_rest().await.unwrap();
        }
    }
}

#[tokio::test]
async fn e1_the_handoff_of_a_thinking_message_whose_client_left_is_consumed() {
    let (prefill, decode) = (engine(0, Duration::from_secs(2)).await, engine(0, Duration::ZERO).await);
    let change = |config: &mut Config| {
        config.workers.iter_mut().for_each(|worker| worker.prefill_cancellable = Some(false));
    };
    let cluster = gateway_with(&prefill, &decode, change).await;
    for thinking in [json!({ "type": "enabled", "budget_tokens": 2_048 }), json!({ "type": "disabled" })] {
        let before = prefill.requests().len();
        let runs = |_: &TestCluster| prefill.requests().len() > before;
        tokio::select! {
            reply = post(&cluster, MESSAGES, json!({ "thinking": thinking })) => panic!("it ended: {reply:?}"),
            seen = cluster.until("prefill runs", runs) => seen.unwrap(),
        }
        cluster.until("decode is asked", |_| decode.requests().len() > before).await.unwrap();
        cluster.at_rest().await.unwrap();
    }
    assert_eq!(decode.requests().len(), 2, "no handoff was refused and offered again");
    let sent = sent(&decode);
    // E1.3
    assert!(sent.iter().all(|body| body["max_tokens"] == 1 && refusal(body).is_none()), "{sent:?}");
    // Without it the prompt would be another one.
    assert_eq!(sent[1]["thinking"], json!({ "type": "disabled" }));
}

#[tokio::test]
async fn b8_the_usage_of_a_message_has_the_cached_tokens_of_prefill() {
    let (prefill, decode) = (engine(1_000, Duration::ZERO).await, engine(5_999, Duration::ZERO).await);
    let cluster = gateway(&prefill, &decode).await;
    let whole = post(&cluster, MESSAGES, json!({})).await.json().unwrap();
    // B8.11
    assert_eq!(whole["usage"], usage(1_000, 7));
    assert_eq!(whole["content"][0]["input"]["usage"]["cache_read_input_tokens"], 2);
    let streamed = post(&cluster, MESSAGES, json!({ "stream": true })).await;
    let text = String::from_utf8_lossy(&streamed.body).into_owned();
    // B8.11
    assert_eq!(text, events(1_000));
    cluster.at_rest().await.unwrap();
    let list = cluster.admin.get("/decisions?limit=4").await.unwrap().json().unwrap();
    for decision in list["decisions"].as_array().unwrap() {
        let outcome = &decision["outcome"];
        // B8.11
        assert_eq!(outcome["cached_tokens"]["reported"], 1_000, "{outcome}");
    }
}
