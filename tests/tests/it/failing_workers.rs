//! Workers whose engine fails every request although it passes its health checks: what operators see.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    log::Log,
    own_process,
    raw_engine::{ANSWER, json, status},
};
use serde_json::{Value, json};

/// An engine that answers `refusal` with status 500 while `fails`, and resets the connection if that is
/// empty.
async fn engine(fails: &Arc<AtomicBool>, refusal: &'static str) -> RawEngine {
    let fails = fails.clone();
    RawEngine::serving(move |_: &RawRequest| match (fails.load(Ordering::SeqCst), refusal) {
        (false, _) => vec![Act::Send(json(ANSWER))],
        (true, "") => vec![Act::Reset],
        (true, refusal) => vec![Act::Send(status("500 Internal Server Error", refusal))],
    })
    .await
}

async fn ask(cluster: &TestCluster, prompt: &str) -> u16 {
    let body = json!({"model": "tiny", "prompt": prompt}).to_string();
    cluster.client.post("/v1/completions", &[], body).await.unwrap().status.as_u16()
}

async fn get(cluster: &TestCluster, path: &str) -> Value {
    cluster.admin.get(path).await.unwrap().json().unwrap()
}

async fn reason(cluster: &TestCluster) -> Value {
    get(cluster, "/workers/1").await["worker"]["reason"].clone()
}

#[tokio::test]
async fn f6_operators_see_what_a_failing_engine_answers_until_it_is_mended() {
    own_process!();
    let log = Log::start();
    let refusal =
        r#"{"error":{"message":"CUDA error: out of memory while running 'SECRET prompt'","code":500}}"#;
    let fails = Arc::new(AtomicBool::new(true));
    let (bad, good) = (engine(&fails, refusal).await, engine(&Arc::default(), "").await);
    let cluster = TestClusterBuilder::new().in_turn([&bad, &good]).start().await;
    for round in 0..8 {
        assert_eq!(ask(&cluster, &format!("SECRET {round}")).await, 200);
    }
    let told =
        "the last aggregated leg failed: the engine answered 500: CUDA error: out of memory while running";
    // F6.16
    assert_eq!(reason(&cluster).await, told);
    let reasons = get(&cluster, "/status").await["reasons"].to_string();
    assert!(reasons.contains(&format!("worker 1 gets no request: failing: {told}")), "{reasons}");
    // F6.18
    let faulty = |id: u64| format!("pointsman_worker_faulty{{worker=\"{id}\"");
    assert_eq!(cluster.metric(&faulty(1)).await.unwrap(), [1.0]);
    assert_eq!(cluster.metric(&faulty(2)).await.unwrap(), [0.0]);
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    assert_eq!(cluster.metric(&faulty(1)).await.unwrap(), [1.0], "after the pause");
    fails.store(false, Ordering::SeqCst);
    for _ in 0..200 {
        assert_eq!(ask(&cluster, "again").await, 200);
        if reason(&cluster).await.is_null() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!((reason(&cluster).await, cluster.metric(&faulty(1)).await.unwrap()), (Value::Null, vec![0.0]));
    let text = log.text();
    let lines = |words: &str| text.lines().filter(|line| line.contains(words)).collect::<Vec<_>>();
    // F6.17
    let [began] = lines("worker failing: its last legs failed")[..] else { panic!("{text}") };
    assert!(began.contains("WARN") && began.contains(told) && began.contains("worker=1"), "{began}");
    assert_eq!(lines("worker gets requests again: a leg succeeded").len(), 1, "{text}");
    // F6.16
    assert!(!text.contains("SECRET"), "{text}");
}

#[tokio::test]
async fn f6_operators_see_that_a_failing_engine_resets_connections() {
    let fails = Arc::new(AtomicBool::new(true));
    let (bad, good) = (engine(&fails, "").await, engine(&Arc::default(), "").await);
    let cluster = TestClusterBuilder::new().in_turn([&bad, &good]).start().await;
    for round in 0..8 {
        assert_eq!(ask(&cluster, &format!("hello {round}")).await, 200);
    }
    let told = reason(&cluster).await;
    // F6.16
    assert!(
        told.as_str().unwrap().starts_with("the last aggregated leg failed: connection failed: "),
        "{told}"
    );
}

#[tokio::test]
async fn b8_a_health_check_that_began_before_a_failed_connect_does_not_end_it() {
    let (checks, is_gone) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, gone) = (checks.clone(), is_gone.clone());
    let slow = RawEngine::start(move |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(r#"{"data":[{"id":"tiny"}]}"#))],
        "GET /health" if gone.load(Ordering::SeqCst) => vec![Act::Close],
        "GET /health" => {
            count.fetch_add(1, Ordering::SeqCst);
            vec![Act::Pause(Duration::from_millis(300)), Act::Send(json("{}"))]
        }
        _ => vec![Act::Send(status("404 Not Found", "{}"))],
    })
    .await;
    let cluster = TestClusterBuilder::new().in_turn([&slow]).start().await;
    let worker = cluster.gateway.state().registry.snapshot().workers()[0].clone();
    let before = checks.load(Ordering::SeqCst);
    cluster.until("a check runs", |_| checks.load(Ordering::SeqCst) > before).await.unwrap();
    is_gone.store(true, Ordering::SeqCst);
    worker.note_connect_failed();
    for _ in 0..500 {
        // B8.18
        assert!(worker.ineligible().is_some(), "by the check that began before");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    is_gone.store(false, Ordering::SeqCst);
    cluster.until("it is eligible again", |_| worker.ineligible().is_none()).await.unwrap();
}
