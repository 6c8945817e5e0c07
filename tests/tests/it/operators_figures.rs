//! The figures that operators and their alerts read: of requests that run, of engines that report little, of
//! workers and models, and of requests that no endpoint takes.

#![allow(clippy::disallowed_methods, reason = "servers of tests end with them")]

use std::time::Duration;

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder, own_process,
    raw_engine::{chunk, json, stream_head},
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};

use crate::log_lines::log;

const COMPLETIONS: &str = "/v1/completions";

fn body(tokens: u32, stream: bool) -> String {
    let prompt = "which way does this train go, and who decides? ".repeat(20);
    json!({ "model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "stream": stream })
        .to_string()
}

/// The sum of the samples whose line starts with this.
async fn metric(cluster: &TestCluster, series: &str) -> f64 {
    cluster.metric(series).await.unwrap().iter().sum()
}

async fn live(cluster: &TestCluster) -> Value {
    cluster.admin.get("/status").await.unwrap().json().unwrap()["live"].clone()
}

/// An engine that never says how much of a prompt was cached, and reports the length of a prompt only in
/// whole answers.
async fn engine() -> RawEngine {
    RawEngine::start(move |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(r#"{"data":[{"id":"tiny"}]}"#))],
        line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
        _ if request.body.contains(r#""stream":true"#) => {
            let delta = r#"{"choices":[{"index":0,"text":"a","finish_reason":null}]}"#;
            let last = r#"{"choices":[{"index":0,"text":"","finish_reason":"stop"}]}"#;
            let event = |text: &str| Act::Send(chunk(format!("data: {text}\n\n").as_bytes()));
            vec![
                Act::Send(stream_head()),
                event(delta),
                event(last),
                event("[DONE]"),
                Act::Send(b"0\r\n\r\n".to_vec()),
            ]
        }
        _ => vec![Act::Send(json(
            r#"{"choices":[{"index":0,"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":235,"completion_tokens":1}}"#,
        ))],
    })
    .await
    .unwrap()
}

async fn in_front_of(engine: &RawEngine) -> TestCluster {
    let flag = format!("id=1,role=aggregated,engine=openai,url=http://{}", engine.address);
    let worker = WorkerSpec::parse_flag(&flag).unwrap();
    TestClusterBuilder::new().config(|config| config.workers.push(worker)).start().await.unwrap()
}

#[tokio::test]
async fn m4_a_running_request_counts_its_wait_its_first_token_and_its_blocks() {
    let slow = SimConfig {
        itl: Duration::from_millis(10),
        load_factor: 1.0,
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    let cluster = TestClusterBuilder::new()
        .config(|config| config.queue.limit = 4)
        .sim_with(slow, ",max_concurrency=1")
        .start()
        .await
        .unwrap();
    let mut first = cluster.client.stream(COMPLETIONS, &[], body(20, true)).await.unwrap();
    first.next().await.unwrap().unwrap();
    let (first, second) =
        tokio::join!(first.all(), cluster.client.stream(COMPLETIONS, &[], body(1_000, true)));
    first.unwrap();
    let mut second = second.unwrap();
    for _ in 0..60 {
        second.next().await.unwrap().unwrap();
    }
    // M4.11
    assert_eq!(metric(&cluster, "pointsman_ttft_seconds_count").await, 2.0);
    assert_eq!(metric(&cluster, "pointsman_queue_seconds_count").await, 1.0);
    assert_eq!(metric(&cluster, "pointsman_tenant_queue_seconds_count{tenant=\"none\"}").await, 1.0);
    let tokens = metric(&cluster, "pointsman_output_tokens_total").await;
    assert!((20.0 + 60.0 - 16.0..400.0).contains(&tokens), "{tokens}");
    assert_eq!(metric(&cluster, "pointsman_inflight_requests").await, 1.0, "the second stream runs");
    drop(second);
    cluster.at_rest().await.unwrap();
    assert_eq!(metric(&cluster, "pointsman_ttft_seconds_count").await, 2.0);
    assert_eq!(metric(&cluster, "pointsman_queue_seconds_count").await, 1.0);
}
