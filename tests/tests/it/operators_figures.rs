//! The figures that operators and their alerts read: of requests that run, of engines that report little, of
//! workers and models, and of requests that no endpoint takes.

#![allow(clippy::disallowed_methods, reason = "servers of tests end with them")]

use std::time::Duration;

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    log::Log,
    own_process,
    raw_engine::{chunk, json, stream_head},
};
use serde_json::{Value, json};

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
}

async fn in_front_of(engine: &RawEngine) -> TestCluster {
    let worker = engine.worker("id=1,role=aggregated,engine=openai");
    TestClusterBuilder::new().config(|config| config.workers.push(worker)).start().await
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
        .await;
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

#[tokio::test]
async fn m4_prompts_that_no_engine_measured_count_with_the_gateway_s_length() {
    let engine = engine().await;
    let cluster = in_front_of(&engine).await;
    for _ in 0..3 {
        assert_eq!(cluster.client.post(COMPLETIONS, &[], body(1, true)).await.unwrap().status, 200);
        cluster.at_rest().await.unwrap();
    }
    let prompts = metric(&cluster, "pointsman_prompt_tokens_total").await;
    let of_tenant = metric(&cluster, "pointsman_tenant_prompt_tokens_total{tenant=\"none\"}").await;
    // M4.12
    assert!(prompts > 3.0 * 100.0 && prompts == of_tenant, "{prompts}, {of_tenant} of the tenant");
    let predicted = metric(&cluster, "pointsman_predicted_tokens_total").await;
    assert!((1.0..=prompts).contains(&predicted), "{predicted} of {prompts}");
    assert_eq!(metric(&cluster, "pointsman_cache_predicted_prompt_tokens_total").await, prompts);
    // A request that no engine ran has no prompt.
    let unknown = body(1, true).replace("tiny", "unknown");
    assert_eq!(cluster.client.post(COMPLETIONS, &[], unknown).await.unwrap().status, 404);
    // The engine's number takes precedence.
    assert_eq!(cluster.client.post(COMPLETIONS, &[], body(1, false)).await.unwrap().status, 200);
    cluster.at_rest().await.unwrap();
    assert_eq!(metric(&cluster, "pointsman_prompt_tokens_total").await, prompts + 235.0);
    let live = live(&cluster).await;
    // M4.13
    assert_eq!(live["cached_share"], Value::Null, "{live}");
    assert!(live["predicted_share"].as_f64().is_some_and(|share| share <= 1.0), "{live}");
    assert_eq!(metric(&cluster, "pointsman_cache_reported_prompt_tokens_total").await, 0.0);
}

#[tokio::test]
async fn m4_the_share_of_cached_tokens_is_that_of_prompts_with_a_report() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    for _ in 0..2 {
        assert_eq!(cluster.client.post(COMPLETIONS, &[], body(1, false)).await.unwrap().status, 200);
        cluster.at_rest().await.unwrap();
    }
    let prompts = metric(&cluster, "pointsman_prompt_tokens_total").await;
    // A stream without usage adds to the prompts, and not to the share.
    assert_eq!(cluster.client.post(COMPLETIONS, &[], body(1, true)).await.unwrap().status, 200);
    cluster.at_rest().await.unwrap();
    // M4.13
    assert_eq!(metric(&cluster, "pointsman_cache_reported_prompt_tokens_total").await, prompts);
    let cached = metric(&cluster, "pointsman_cached_tokens_total").await;
    let share = live(&cluster).await["cached_share"].as_f64().unwrap();
    assert!(cached > 0.0 && (share - cached / prompts).abs() < 1e-6, "{share}: {cached} of {prompts}");
}

#[tokio::test]
async fn m4_the_access_log_has_the_length_of_a_prompt_with_its_source() {
    own_process!();
    let log = Log::start();
    let engine = engine().await;
    let cluster = in_front_of(&engine).await;
    for stream in [true, false] {
        assert_eq!(cluster.client.post(COMPLETIONS, &[], body(1, stream)).await.unwrap().status, 200);
        cluster.at_rest().await.unwrap();
    }
    let unknown = body(1, true).replace("tiny", "unknown");
    assert_eq!(cluster.client.post(COMPLETIONS, &[], unknown).await.unwrap().status, 404);
    let path = format!("/v1/nothing/{}%0A?key=SECRET", "x".repeat(1_000));
    assert_eq!(cluster.client.get(&path).await.unwrap().status, 404);
    cluster.at_rest().await.unwrap();
    let text = log.text();
    let lines: Vec<_> = text.lines().filter(|line| line.contains("pointsman::access")).collect();
    let [streamed, whole, refused, other] = lines.as_slice() else { panic!("{text}") };
    // M4.14
    assert!(streamed.contains(" prompt_source=\"estimate\"") && !streamed.contains(" prompt_tokens=0"));
    assert!(streamed.contains(" prompt_tokens=2"), "{streamed}");
    assert!(whole.contains(" prompt_tokens=235 prompt_source=\"usage\""), "{whole}");
    assert!(!refused.contains("prompt_tokens") && !refused.contains("prompt_source"), "{refused}");
    // M4.17
    assert!(other.contains(" endpoint=\"other\" status=404 code=\"unknown_url\""), "{other}");
    assert!(
        other.len() < 600 && other.contains("GET /v1/nothing/xxx") && !text.contains("SECRET"),
        "{other}"
    );
}

#[tokio::test]
async fn m4_requests_that_no_endpoint_takes_are_counted() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    for path in ["/chat/completions", "/v2/other"] {
        assert_eq!(cluster.client.post(path, &[], body(1, false)).await.unwrap().status, 404);
    }
    assert_eq!(cluster.client.get(COMPLETIONS).await.unwrap().status, 405);
    let series = |status: u16, code: &str| {
        format!(
            r#"pointsman_requests_total{{endpoint="other",model="other",status="{status}",code="{code}"}}"#
        )
    };
    // M4.17
    assert_eq!(cluster.metric(&series(404, "unknown_url")).await.unwrap(), [2.0]);
    assert_eq!(cluster.metric(&series(405, "method_not_allowed")).await.unwrap(), [1.0]);
}

#[tokio::test]
async fn m4_models_and_workers_are_named() {
    let cluster = TestClusterBuilder::new()
        .sim(Dialect::Vllm, Role::Aggregated)
        .config(|config| drop(config.models.insert("away".to_owned(), Default::default())))
        .start()
        .await;
    let servable = async |model: &str| {
        cluster.metric(&format!("pointsman_model_servable{{model=\"{model}\"}}")).await.unwrap()
    };
    // M4.16
    assert_eq!((servable("tiny").await, servable("away").await), (vec![1.0], vec![0.0]));
    let url = cluster.sims[0].url();
    let info =
        format!("pointsman_worker_info{{worker=\"1\",role=\"aggregated\",engine=\"vllm\",url=\"{url}\"}}");
    // M4.15
    assert_eq!(cluster.metric(&info).await.unwrap(), [1.0]);
}

#[tokio::test]
async fn m4_buckets_reach_the_limits_of_policies_and_contexts() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    assert_eq!(cluster.client.post(COMPLETIONS, &[], body(3, false)).await.unwrap().status, 200);
    cluster.at_rest().await.unwrap();
    let text = cluster.metrics_text().await.unwrap();
    // M4.18
    for (metric, bound) in [
        ("route_seconds", "0.25"),
        ("policy_call_seconds", "0.02"),
        ("policy_call_seconds", "0.25"),
        ("isl_tokens", "1048576.0"),
        ("osl_tokens", "4.0"),
    ] {
        let found = text.lines().any(|line| {
            line.starts_with(&format!("pointsman_{metric}_bucket{{"))
                && line.contains(&format!("le=\"{bound}\""))
        });
        assert!(found, "{metric} {bound}");
    }
}
