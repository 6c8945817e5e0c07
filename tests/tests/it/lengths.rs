//! Life of a booking and the figures of a request's end (F4): inter-token latency by block, lengths with
//! their sources, and receipts that end.

#![allow(clippy::disallowed_methods, reason = "servers of tests end with them")]

use std::time::Duration;

use pointsman_gateway::config::SlotEntry;
use pointsman_routing::SlotKind;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_test_guests::{HOSTILE, ROGUE_PLANNER, scripted};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{chunk, json, stream_head},
};
use serde_json::{Value, json};

const PAUSE: Duration = Duration::from_secs(4);

fn body(tokens: u32, stream: bool) -> String {
    let prompt = "abc ".repeat(60);
    json!({
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "stream": stream,
        "stream_options": stream.then(|| json!({"include_usage": true})),
    })
    .to_string()
}

/// The value of a series; 0 while there is none.
async fn metric(cluster: &TestCluster, series: &str) -> f64 {
    let text = cluster.metrics_text().await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.map_or(0.0, |value| value.parse().unwrap())
}

/// The load of the first worker.
async fn load(cluster: &TestCluster) -> Value {
    cluster.admin.get("/workers").await.unwrap().json().unwrap()["workers"][0]["ranks"][0].clone()
}

async fn until_blocks(cluster: &TestCluster, blocks: u64) {
    let until = tokio::time::Instant::now() + Duration::from_secs(20);
    while load(cluster).await["decode_blocks"] != blocks && tokio::time::Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(load(cluster).await["decode_blocks"], blocks);
}

async fn newest(cluster: &TestCluster) -> Value {
    cluster.at_rest().await.unwrap();
    let list = cluster.admin.get("/decisions?limit=1").await.unwrap().json().unwrap();
    list["decisions"][0].clone()
}

/// An engine that sends 40 events with text, and `usage` if it is asked for: of 8 tokens.
async fn engine() -> RawEngine {
    let event = |text: &str| Act::Send(chunk(format!("data: {text}\n\n").as_bytes()));
    RawEngine::start(move |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(r#"{"data":[{"id":"tiny"}]}"#))],
        line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
        _ => {
            let usage = r#"{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":8}}"#;
            let delta = r#"{"choices":[{"index":0,"text":"a","finish_reason":null}]}"#;
            let mut acts = vec![Act::Send(stream_head())];
            acts.extend((0..40).map(|_| event(delta)));
            if request.body.contains("include_usage") {
                acts.extend([Act::Pause(PAUSE), event(usage), Act::Pause(PAUSE)]);
            }
            acts.extend([
                event(r#"{"choices":[{"index":0,"text":"","finish_reason":"stop"}]}"#),
                event("[DONE]"),
                Act::Send(b"0\r\n\r\n".to_vec()),
            ]);
            acts
        }
    })
    .await
}

/// A gateway before one engine.
async fn before(engine: &RawEngine) -> TestCluster {
    let worker = engine.worker("id=1,role=aggregated,engine=openai");
    TestClusterBuilder::new().config(|config| config.workers.push(worker)).start().await
}

#[tokio::test]
async fn f4_usage_corrects_counted_tokens_downwards_and_the_source_is_told() {
    let engine = engine().await;
    let cluster = before(&engine).await;
    let ask = |usage: bool| {
        let mut body = json!({"model": "tiny", "prompt": "four tokens here", "stream": true});
        if usage {
            body["stream_options"] = json!({"include_usage": true});
        }
        let client = cluster.client.clone();
        tokio::spawn(async move { client.post(COMPLETIONS, &[], body.to_string()).await.unwrap() })
    };
    let reply = ask(true);
    // 4 tokens of the prompt and 40 events: 3 blocks of 16.
    until_blocks(&cluster, 3).await;
    // F4.12: 12 tokens are 1 block
    until_blocks(&cluster, 1).await;
    assert!(!reply.is_finished(), "the booking was corrected while the stream ran");
    assert_eq!(reply.await.unwrap().status, 200);
    let outcome = newest(&cluster).await["outcome"].clone();
    assert_eq!(outcome["output_tokens"], 8, "{outcome}");
    assert_eq!(outcome["output_tokens_source"], "usage", "{outcome}");
    assert_eq!(metric(&cluster, "pointsman_output_tokens_total").await, 8.0);
    // F4.13
    assert_eq!(metric(&cluster, r#"pointsman_osl_tokens_sum{source="usage"}"#).await, 8.0);
    assert_eq!(ask(false).await.unwrap().status, 200);
    let outcome = newest(&cluster).await["outcome"].clone();
    // F4.11
    assert_eq!(
        (&outcome["output_tokens"], &outcome["output_tokens_source"]),
        (&json!(40), &json!("counted"))
    );
    assert_eq!(metric(&cluster, r#"pointsman_osl_tokens_sum{source="counted"}"#).await, 40.0);
}

#[tokio::test]
async fn f4_each_new_block_yields_the_mean_inter_token_latency() {
    let slow = SimConfig {
        itl: Duration::from_millis(10),
        load_factor: 1.0,
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    let cluster = TestClusterBuilder::new().sim_with(slow, "").start().await;
    let mut stream = cluster.client.stream(COMPLETIONS, &[], body(100, true)).await.unwrap();
    for _ in 0..45 {
        stream.next().await.unwrap().unwrap();
    }
    // F4.7
    let itl = load(&cluster).await["itl_ewma_us"].as_u64().unwrap();
    assert!((8_000..60_000).contains(&itl), "{itl} us while the stream runs");
    let blocks = metric(&cluster, "pointsman_itl_seconds_count").await;
    assert!((2.0..=4.0).contains(&blocks), "{blocks}");
    stream.all().await.unwrap();
    cluster.at_rest().await.unwrap();
    let sum = metric(&cluster, "pointsman_itl_seconds_sum").await;
    let count = metric(&cluster, "pointsman_itl_seconds_count").await;
    assert!((6.0..=9.0).contains(&count) && (0.008..0.06).contains(&(sum / count)), "{sum} of {count}");
}

#[tokio::test]
async fn f4_the_end_yields_the_lengths_and_the_hit_rate() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    for stream in [false, true] {
        assert_eq!(cluster.client.post(COMPLETIONS, &[], body(20, stream)).await.unwrap().status, 200);
        cluster.at_rest().await.unwrap();
    }
    let usage = async |name: &str| metric(&cluster, &format!(r#"pointsman_{name}{{source="usage"}}"#)).await;
    // F4.8
    assert_eq!((usage("isl_tokens_count").await, usage("osl_tokens_count").await), (2.0, 2.0));
    assert_eq!((usage("isl_tokens_sum").await, usage("osl_tokens_sum").await), (120.0, 40.0));
    let hits = usage("cache_hit_ratio_sum").await;
    assert_eq!(usage("cache_hit_ratio_count").await, 2.0);
    assert!((0.5..1.0).contains(&hits), "the second prompt was cached: {hits}");
}

#[tokio::test]
async fn m4_the_time_between_tokens_is_that_of_one_choice() {
    const GAP: Duration = Duration::from_millis(60);
    let engine = RawEngine::start(move |request: &RawRequest| {
        if !request.line.starts_with("POST") {
            return vec![Act::Send(json(r#"{"data":[{"id":"tiny"}]}"#))];
        }
        let event = |index: u32| {
            let text = format!(r#"{{"choices":[{{"index":{index},"text":"a","finish_reason":null}}]}}"#);
            Act::Send(chunk(format!("data: {text}\n\n").as_bytes()))
        };
        let round = || (0..4).map(event).chain([Act::Pause(GAP)]);
        let mut acts = vec![Act::Send(stream_head())];
        acts.extend((0..6).flat_map(|_| round()));
        acts.extend([Act::Send(chunk(b"data: [DONE]\n\n")), Act::Send(b"0\r\n\r\n".to_vec())]);
        acts
    })
    .await;
    let cluster = before(&engine).await;
    let body = json!({"model": "tiny", "prompt": "a", "stream": true, "n": 4}).to_string();
    assert_eq!(cluster.client.post(COMPLETIONS, &[], body).await.unwrap().status, 200);
    let itl = newest(&cluster).await["outcome"]["itl_ms"].as_f64().unwrap();
    let sum = metric(&cluster, "pointsman_itl_seconds_sum").await;
    let mean = sum / metric(&cluster, "pointsman_itl_seconds_count").await;
    // M4.21
    assert!((55.0..200.0).contains(&itl) && (0.04..0.2).contains(&mean), "{itl} ms, {mean} s");
}

#[tokio::test]
async fn f4_tokens_that_all_came_in_one_read_have_no_time_between_them() {
    let engine = RawEngine::start(|request: &RawRequest| {
        if !request.line.starts_with("POST") {
            return vec![Act::Send(json(r#"{"data":[{"id":"tiny"}]}"#))];
        }
        let event = r#"data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}"#.to_owned() + "\n\n";
        let events = chunk((event.repeat(20) + "data: [DONE]\n\n").as_bytes());
        vec![Act::Send([stream_head(), events, b"0\r\n\r\n".to_vec()].concat())]
    })
    .await;
    let cluster = before(&engine).await;
    let body = json!({"model": "tiny", "prompt": "a", "stream": true}).to_string();
    assert_eq!(cluster.client.post(COMPLETIONS, &[], body).await.unwrap().status, 200);
    let outcome = newest(&cluster).await["outcome"].clone();
    // F4.20
    assert!(outcome["output_tokens"] == 20 && outcome["itl_ms"].is_null(), "{outcome}");
}

#[tokio::test]
async fn m4_whole_answers_are_relayed_bytes_too() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let answer = cluster.client.post(COMPLETIONS, &[], body(20, false)).await.unwrap();
    cluster.at_rest().await.unwrap();
    // M4.22
    assert_eq!(metric(&cluster, "pointsman_relayed_bytes_total").await, answer.body.len() as f64);
}

#[tokio::test]
async fn m4_the_prefill_engine_reports_the_prompt_of_a_client_that_asks_for_no_usage() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    let prompt = "abc ".repeat(60);
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": true}).to_string();
    for _ in 0..2 {
        assert_eq!(cluster.client.post(COMPLETIONS, &[], body.clone()).await.unwrap().status, 200);
        cluster.at_rest().await.unwrap();
    }
    // M4.12
    assert_eq!(metric(&cluster, "pointsman_prompt_tokens_total").await, 120.0);
    let of_usage = metric(&cluster, r#"pointsman_isl_tokens_sum{source="usage"}"#).await;
    let hits = metric(&cluster, r#"pointsman_cache_hit_ratio_sum{source="usage"}"#).await;
    // B8.11
    assert!(of_usage == 120.0 && (0.5..1.0).contains(&hits), "{of_usage} tokens, hit ratios {hits}");
    let sources = metric(&cluster, r#"pointsman_osl_tokens_sum{source="counted"}"#).await;
    // F4.13
    assert_eq!(sources, 8.0, "the prefill engine says nothing of the output");
}

/// Checks that the newest decision is a refusal that ended, in both places where operators see it.
async fn ended(cluster: &TestCluster, status: u16, code: &str) {
    let decision = newest(cluster).await;
    let outcome = &decision["outcome"];
    // F4.14
    assert_eq!((&outcome["status"], &outcome["code"]), (&json!(status), &json!(code)), "{decision}");
    assert!(outcome["ended_at_ms"].as_u64().unwrap() >= decision["call"]["now_us"].as_u64().unwrap() / 1_000);
    assert!(outcome["duration_ms"].as_f64().unwrap() > 0.0, "{decision}");
    let mut events = cluster.admin.events("/events", &[]).await.unwrap();
    let listed = async {
        loop {
            let event = events.next().await.unwrap().unwrap();
            let Some(data) = event.strip_prefix("event: decisions\ndata: ") else { continue };
            let data: Value = serde_json::from_str(data).unwrap();
            let found = data["decisions"].as_array().unwrap().iter().find(|one| one["id"] == decision["id"]);
            if let Some(found) = found {
                return found.clone();
            }
        }
    };
    let listed = tokio::time::timeout(Duration::from_secs(10), listed).await.unwrap();
    assert_eq!(listed["outcome"]["code"], code, "{listed}");
}

#[tokio::test]
async fn f4_receipts_of_requests_that_were_shed_or_refused_end() {
    let shedding = TestClusterBuilder::new()
        .config(|config| {
            let entry: SlotEntry = toml::from_str("settings = { mode = 'refuse' }").unwrap();
            config.policies.slots.insert(SlotKind::Aggregated, entry);
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    shedding.drop_policy("aggregated.wasm", HOSTILE).unwrap();
    assert_eq!(shedding.admin.post("/policies/reload", &[], "").await.unwrap().status, 200);
    assert_eq!(shedding.client.post(COMPLETIONS, &[], body(2, false)).await.unwrap().status, 429);
    ended(&shedding, 429, "shed").await;
    let direct = TestClusterBuilder::new()
        .config(|config| {
            let entry: SlotEntry = toml::from_str("native = 'direct'").unwrap();
            config.policies.slots.insert(SlotKind::Aggregated, entry);
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    assert_eq!(direct.client.post(COMPLETIONS, &[], body(2, false)).await.unwrap().status, 400);
    ended(&direct, 400, "invalid_request").await;
    let planned = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    planned.drop_policy("decode-override.wasm", &scripted(ROGUE_PLANNER, "shed-429 0")).unwrap();
    assert_eq!(planned.admin.post("/policies/reload", &[], "").await.unwrap().status, 200);
    assert_eq!(planned.client.post(COMPLETIONS, &[], body(2, false)).await.unwrap().status, 429);
    ended(&planned, 429, "shed").await;
}
