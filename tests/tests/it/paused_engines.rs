//! Engines that an operator pauses get no request until they resume.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{ANSWER, json as json_answer, status},
};
use pointsman_workers::Ineligible;
use serde_json::json;

/// An engine that hangs while it is paused, and how often it was asked whether it is.
struct Engine {
    raw: RawEngine,
    paused: Arc<AtomicBool>,
    asked: Arc<AtomicUsize>,
}

/// Starts an engine whose probes answer `probe`, given whether it is paused.
async fn engine(owner: &'static str, probe: fn(&str, bool) -> Option<Vec<u8>>) -> Engine {
    let (paused, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (is_paused, count) = (paused.clone(), asked.clone());
    let raw = RawEngine::start(move |request: &RawRequest| {
        let paused = is_paused.load(Ordering::SeqCst);
        let answer = match request.line.as_str() {
            "GET /v1/models" => json_answer(&json!({"data": [{"id": "m", "owned_by": owner}]}).to_string()),
            line if line.starts_with("GET") => {
                count.fetch_add(usize::from(line == "GET /is_paused"), Ordering::SeqCst);
                match probe(line, paused) {
                    Some(answer) => answer,
                    None => return vec![Act::Hang],
                }
            }
            _ if paused => return vec![Act::Hang],
            _ => json_answer(ANSWER),
        };
        vec![Act::Send(answer)]
    })
    .await;
    Engine { raw, paused, asked }
}

async fn gateway(engine: &str, workers: [&Engine; 2]) -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            config.probe.timeout = Duration::from_millis(500);
            config.probe.health_timeout = Duration::from_millis(500);
            for worker in workers {
                config.workers.push(worker.raw.worker(&format!("role=aggregated,engine={engine}")));
            }
        })
        .start()
        .await
}

fn first(cluster: &TestCluster) -> Option<Ineligible> {
    cluster.gateway.state().registry.snapshot().workers()[0].ineligible()
}

/// Pauses the first engine, sends requests, and has it resume.
async fn pause_and_resume(cluster: &TestCluster, engine: &Engine) {
    engine.paused.store(true, Ordering::SeqCst);
    cluster.until("it is paused", |cluster| first(cluster) == Some(Ineligible::EnginePaused)).await.unwrap();
    let before = engine.raw.requests().len();
    for number in 0..12 {
        let body = json!({"model": "m", "prompt": format!("{number} ").repeat(50)});
        assert_eq!(cluster.client.post("/v1/completions", &[], body.to_string()).await.unwrap().status, 200);
    }
    // B6.5
    assert_eq!(engine.raw.requests().len(), before);
    // Several checks, of which each waits for the paused engine.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let list = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    let shown = (&list["workers"][0]["ineligible"], &list["workers"][0]["health"]);
    assert_eq!(shown, (&json!("engine_paused"), &json!("healthy")));
    engine.paused.store(false, Ordering::SeqCst);
    // B6.6
    cluster.until("it has resumed", |cluster| first(cluster).is_none()).await.unwrap();
}

#[tokio::test]
async fn b6_a_paused_vllm_engine_gets_no_request_until_it_resumes() {
    let probe = |line: &str, paused: bool| {
        Some(match line {
            "GET /health" => json_answer("{}"),
            "GET /is_paused" => json_answer(&json!({ "is_paused": paused }).to_string()),
            "GET /metrics" => status("200 OK", "vllm:engine_sleep_state{sleep_state=\"awake\"} 1\n"),
            _ => status("404 Not Found", "{}"),
        })
    };
    let engines = [engine("vllm", probe).await, engine("vllm", probe).await];
    let cluster = gateway("vllm", [&engines[0], &engines[1]]).await;
    pause_and_resume(&cluster, &engines[0]).await;
}

fn sglang(line: &str, paused: bool) -> Vec<u8> {
    match line {
        "GET /ready" if paused => status("503 Service Unavailable", ""),
        "GET /ready" => json_answer("{}"),
        "GET /server_info" => json_answer(r#"{"disaggregation_mode":"null"}"#),
        _ => status("404 Not Found", "{}"),
    }
}

#[tokio::test]
async fn b6_a_paused_sglang_engine_gets_no_request_until_it_resumes() {
    // The health check generates a token, or is set not to.
    let hangs = |line: &str, paused: bool| match line {
        "GET /health" | "GET /health_generate" if paused => None,
        "GET /health" | "GET /health_generate" => Some(json_answer("{}")),
        _ => Some(sglang(line, paused)),
    };
    let answers = |line: &str, paused: bool| match line {
        "GET /health" => Some(json_answer("{}")),
        _ => Some(sglang(line, paused)),
    };
    for probe in [hangs as fn(&str, bool) -> Option<Vec<u8>>, answers] {
        let engines = [engine("sglang", probe).await, engine("sglang", probe).await];
        let cluster = gateway("sglang", [&engines[0], &engines[1]]).await;
        pause_and_resume(&cluster, &engines[0]).await;
    }
}

#[tokio::test]
async fn b6_a_vllm_engine_that_does_not_know_the_question_is_not_asked_again() {
    let probe = |line: &str, _: bool| {
        let known = matches!(line, "GET /health" | "GET /metrics");
        Some(if known { json_answer("{}") } else { status("404 Not Found", "{}") })
    };
    let engines = [engine("vllm", probe).await, engine("vllm", probe).await];
    let cluster = gateway("vllm", [&engines[0], &engines[1]]).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    // B6.7
    assert_eq!(engines[0].asked.load(Ordering::SeqCst), 1);
    assert_eq!(first(&cluster), None);
}

#[tokio::test]
async fn b6_an_sglang_engine_that_is_neither_ready_nor_healthy_gets_no_request_in_between() {
    let fails = Arc::new(AtomicBool::new(false));
    let failing = fails.clone();
    let unavailable = || Act::Send(status("503 Service Unavailable", ""));
    let engine = RawEngine::start(move |request: &RawRequest| match request.line.as_str() {
        "GET /ready" if failing.load(Ordering::SeqCst) => vec![unavailable()],
        "GET /health_generate" => vec![Act::Pause(Duration::from_millis(200)), unavailable()],
        "GET /v1/models" => vec![Act::Send(json_answer(r#"{"data":[{"id":"m","owned_by":"sglang"}]}"#))],
        line => vec![Act::Send(sglang(line, false))],
    })
    .await;
    let spec = engine.worker("role=aggregated,engine=sglang");
    let cluster = TestClusterBuilder::new().config(|config| config.workers.push(spec)).start().await;
    cluster.until("it is eligible", |cluster| first(cluster).is_none()).await.unwrap();
    fails.store(true, Ordering::SeqCst);
    cluster.until("it is not", |cluster| first(cluster).is_some()).await.unwrap();
    let mut seen = vec![];
    while seen.last() != Some(&Some(Ineligible::Unhealthy)) {
        let now = first(&cluster);
        if seen.last() != Some(&now) {
            seen.push(now);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // B6.8
    assert_eq!(seen, [Some(Ineligible::EnginePaused), Some(Ineligible::Unhealthy)]);
    fails.store(false, Ordering::SeqCst);
    cluster.until("it is eligible again", |cluster| first(cluster).is_none()).await.unwrap();
}
