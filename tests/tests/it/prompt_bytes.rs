//! Prompts without tokens: what of a request is measured and identifies its prefix.

use std::time::Duration;

use pointsman_gateway::config::Config;
use pointsman_tests::{
    Act, CHAT, MESSAGES, RESPONSES, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{chunk, json, stream_head},
};
use serde_json::{Value, json};

/// Answers of each endpoint, without usage.
fn answer(request: &RawRequest) -> Vec<Act> {
    vec![Act::Send(json(match request.line.as_str() {
        "POST /v1/messages" => {
            r#"{"id":"m","type":"message","role":"assistant","content":[],"stop_reason":"end_turn"}"#
        }
        "POST /v1/responses" => r#"{"id":"r","object":"response","status":"completed","output":[]}"#,
        "POST /v1/embeddings" => r#"{"object":"list","data":[{"index":0,"embedding":[0.5]}]}"#,
        _ => r#"{"id":"c","choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}]}"#,
    }))]
}

async fn cluster_of(engines: &[&RawEngine], change: impl FnOnce(&mut Config)) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        for engine in engines {
            config.workers.push(engine.worker("role=aggregated,engine=vllm"));
        }
        change(config);
    });
    builder.start().await
}

/// Sends a request. Returns the tokens of its prompt, and those that its worker was expected to have cached.
async fn ask(cluster: &TestCluster, path: &str, body: &Value) -> (u64, u64) {
    let reply = cluster.client.post(path, &[], body.to_string()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    cluster.at_rest().await.unwrap();
    cluster.gateway.state().router.index().flush();
    let list = cluster.admin.get("/decisions?limit=1").await.unwrap().json().unwrap();
    let decision = &list["decisions"][0];
    let tokens = decision["stages"][0]["request"]["prompt-tokens"].as_u64().unwrap();
    (tokens, decision["cached_blocks"][0].as_u64().unwrap() * 16)
}

/// Twelve tools of an agent: 60 KB.
fn tools(agent: &str) -> Value {
    let tool = |number| json!({"type": "function", "name": format!("t{number}"), "description": agent.repeat(1_000)});
    (0..12).map(tool).collect()
}

fn with(mut body: Value, key: &str, value: Value) -> Value {
    body[key] = value;
    body
}

#[tokio::test]
async fn h5_agents_with_other_tools_share_nothing_and_those_with_the_same_share_the_tools() {
    let engine = RawEngine::serving(answer).await;
    for path in [CHAT, MESSAGES, RESPONSES] {
        let cluster = cluster_of(&[&engine], |_| {}).await;
        let body = |text: &str, agent: &str| {
            let key = if path == RESPONSES { "input" } else { "messages" };
            let messages = json!([{"role": "user", "content": text.repeat(300)}]);
            let body = json!({"model": "tiny", "max_tokens": 1, "tools": tools(agent)});
            with(body, key, messages)
        };
        let (tokens, _) = ask(&cluster, path, &body("one ", "read ")).await;
        // H5.6
        assert!((15_000..16_000).contains(&tokens), "{path} {tokens}");
        let (_, shared) = ask(&cluster, path, &body("one ", "send ")).await;
        assert!(shared < 100, "{path}: other tools, the same messages: {shared}");
        let (_, shared) = ask(&cluster, path, &body("two ", "read ")).await;
        assert!((14_000..15_500).contains(&shared), "{path}: the same tools, other messages: {shared}");
    }
}

#[tokio::test]
async fn h5_turns_of_claude_code_find_their_prefix_though_its_line_differs_in_each() {
    let engine = RawEngine::serving(answer).await;
    let cluster = cluster_of(&[&engine], |_| {}).await;
    let rules = "You are Claude Code. Follow all rules. ".repeat(500);
    let line =
        |turn: u32| format!("x-anthropic-billing-header: cc_version=2.1.177; cch={:05x};", turn * 77_777);
    let talk = |turn: u32| -> Vec<Value> {
        (0..=turn)
            .map(|turn| json!({"role": "user", "content": format!("turn {turn} ").repeat(60)}))
            .collect()
    };
    let of_messages = |turn: u32| {
        let text = |text: String| json!({"type": "text", "text": text});
        let system = [text(line(turn)), text(rules.clone())];
        (MESSAGES, json!({"model": "tiny", "max_tokens": 1, "system": system, "messages": talk(turn)}))
    };
    // As proxies translate it.
    let of_chat = |turn: u32| {
        let system = json!({"role": "system", "content": format!("{}\n{rules}", line(turn))});
        let messages: Vec<Value> = [system].into_iter().chain(talk(turn)).collect();
        (CHAT, json!({"model": "tiny", "max_tokens": 1, "messages": messages}))
    };
    for form in [&of_messages as &dyn Fn(u32) -> (&'static str, Value), &of_chat] {
        for turn in 0..4 {
            let (path, body) = form(turn);
            let (tokens, cached) = ask(&cluster, path, &body).await;
            // H5.7
            assert!(turn == 0 || cached + 800 > tokens, "{path} turn {turn}: {cached} of {tokens}");
            let sent = engine.requests().pop().unwrap().body;
            assert!(sent.contains(&line(turn)), "the engine gets the line");
        }
    }
}

/// A chat about a photo of 1.2 MB.
fn photo(seed: &str) -> Value {
    let url = format!("data:image/png;base64,{seed}{}", "iVBORw0KGgoA".repeat(100_000));
    json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]}]})
}

#[tokio::test]
async fn h5_inline_photos_and_sounds_fit_the_token_limits_of_a_tenant() {
    let engine = RawEngine::serving(answer).await;
    let cluster = cluster_of(&[&engine], |config| {
        config.tenants = toml::from_str("'*' = { input_tokens_per_minute = 20000 }").unwrap();
    })
    .await;
    let data = "AAAA".repeat(200_000);
    let part = |part: Value| json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]});
    let source = json!({"type": "base64", "media_type": "image/png", "data": data});
    let sound = json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}});
    for (path, body) in [
        (CHAT, photo("a")),
        (CHAT, part(sound)),
        (MESSAGES, part(json!({"type": "image", "source": source}))),
    ] {
        let (tokens, _) = ask(&cluster, path, &body).await;
        // H5.8
        assert!((1_024..1_100).contains(&tokens), "{path} {tokens}");
    }
    let prompts = [photo("b"), photo("b"), photo("c")];
    let mut cached = Vec::new();
    for prompt in &prompts {
        cached.push(ask(&cluster, CHAT, prompt).await.1);
    }
    assert!(cached[0] < 100 && cached[1] > 1_000 && cached[2] < 100, "by the photo: {cached:?}");
}

#[tokio::test]
async fn h5_a_photo_in_flight_does_not_keep_other_requests_from_its_worker() {
    let slow = || {
        RawEngine::serving(|request: &RawRequest| {
            let waits = request.body.contains("image_url");
            let pause = Act::Pause(Duration::from_millis(if waits { 3_000 } else { 30 }));
            [vec![pause], answer(request)].concat()
        })
    };
    let (one, other) = (slow().await, slow().await);
    let cluster = cluster_of(&[&one, &other], |_| {}).await;
    let first = async { cluster.client.post(CHAT, &[], photo("a").to_string()).await.unwrap().status };
    let others = async {
        cluster.until("the photo is there", |_| one.open() + other.open() == 1).await.unwrap();
        let texts = (0..8).map(async |client| {
            for turn in 0..5 {
                let text = format!("{client} {turn} of many words ").repeat(60);
                let body = json!({"model": "tiny", "messages": [{"role": "user", "content": text}]});
                assert_eq!(cluster.client.post(CHAT, &[], body.to_string()).await.unwrap().status, 200);
            }
        });
        futures_util::future::join_all(texts).await;
    };
    let (first, ()) = tokio::join!(first, others);
    let texts = |engine: &RawEngine| {
        engine.requests().iter().filter(|request| !request.body.contains("image_url")).count()
    };
    let (a, b) = (texts(&one), texts(&other));
    // H5.8
    assert!(a + b == 40 && a.min(b) >= 8, "{a} and {b} requests");
    assert_eq!(first, 200);
}

#[tokio::test]
async fn f4_a_photo_by_url_does_not_make_a_worker_look_slow_when_its_engine_counts_it() {
    let engine = RawEngine::serving(|request: &RawRequest| {
        let usage = r#""usage":{"prompt_tokens":10000,"completion_tokens":1,"total_tokens":10001}"#;
        let event =
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]USAGE}"#;
        let event = match request.body.contains("continuous_usage_stats") {
            true => event.replace("USAGE", &format!(",{usage}")),
            false => event.replace("USAGE", ""),
        };
        let events = [format!("{event}\n\n"), "data: [DONE]\n\n".to_owned()];
        let pause = Act::Pause(Duration::from_millis(200));
        let chunks = events.iter().map(|event| Act::Send(chunk(event.as_bytes())));
        [pause, Act::Send(stream_head())].into_iter().chain(chunks).chain([Act::Send(chunk(b""))]).collect()
    })
    .await;
    let speed = async |options: Value| {
        let cluster = cluster_of(&[&engine], |_| {}).await;
        let url = json!({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}});
        let body = json!({"model": "tiny", "stream": true, "stream_options": options,
            "messages": [{"role": "user", "content": [url]}]});
        let stream = cluster.client.stream(CHAT, &[], body.to_string()).await.unwrap();
        assert_eq!(stream.all().await.unwrap().last().unwrap(), "[DONE]");
        let workers = cluster.admin.get("/workers").await.unwrap().json().unwrap();
        let found = find(&workers, "prefill_us_per_ktoken");
        found.and_then(Value::as_u64).unwrap()
    };
    assert!(speed(json!({})).await > 1_000_000, "20 tokens in 200 ms");
    let counted = speed(json!({"include_usage": true, "continuous_usage_stats": true})).await;
    // F4.17
    assert!((20_000..100_000).contains(&counted), "10,000 tokens in 200 ms: {counted}");
}

/// The first value of a key at any depth.
fn find<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    match value {
        Value::Object(fields) => {
            fields.get(key).or_else(|| fields.values().find_map(|field| find(field, key)))
        }
        Value::Array(items) => items.iter().find_map(|item| find(item, key)),
        _ => None,
    }
}

#[tokio::test]
async fn a1_an_embeddings_request_with_messages_reaches_an_engine() {
    let engine = RawEngine::serving(answer).await;
    let cluster = cluster_of(&[&engine], |_| {}).await;
    let message =
        json!({"role": "user", "content": [{"type": "text", "text": "Represent the given image."}]});
    for messages in [json!([message]), json!([[message], [message]])] {
        let body = json!({"model": "tiny", "messages": messages, "encoding_format": "float"});
        let reply = cluster.client.post("/v1/embeddings", &[], body.to_string()).await.unwrap();
        // A1.15
        assert_eq!((reply.status.as_u16(), engine.requests().pop().unwrap().body), (200, body.to_string()));
    }
    let reply = cluster.client.post("/v1/embeddings", &[], r#"{"model":"tiny"}"#.to_owned()).await.unwrap();
    assert_eq!(reply.status, 400);
}
