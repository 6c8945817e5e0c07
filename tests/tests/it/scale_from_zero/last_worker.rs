//! The last worker goes while requests are in the queue, or with one that it runs.

use std::sync::Arc;

use parking_lot::Mutex;
use pointsman_tests::{RawRequest, raw_engine};

use super::*;

/// A worker that runs one request for 12 s, a second request that waits for it, and what `then` does while it
/// waits. Returns the second one's answer.
async fn queued_then<T>(cluster: &TestCluster, then: impl AsyncFnOnce(SimHandle) -> T) -> (Reply, T) {
    let slow = SimConfig { overhead: Duration::from_secs(12), ..aggregated() };
    let only = join(cluster, 1, slow, json!({"max_concurrency": 1})).await;
    cluster.until_counted("pointsman_worker_eligible{", 1.0).await.unwrap();
    let runs = ask(cluster, json!({}));
    let waits = async {
        cluster.until("the worker is busy", |cluster| cluster.booked() == 1).await.unwrap();
        ask(cluster, json!({})).await
    };
    let goes = async {
        cluster.until_counted(QUEUED, 1.0).await.unwrap();
        assert_eq!(cluster.admin.delete("/workers/1").await.unwrap().status, 200);
        then(only).await
    };
    let (first, second, then) = tokio::join!(runs, waits, goes);
    assert_eq!(first.status, 200, "{first:?}");
    (second, then)
}

#[tokio::test]
async fn f7_a_request_in_the_queue_waits_for_a_worker_when_the_last_one_goes() {
    let cluster = empty(|_| {}).await;
    let joins = async |only| {
        until_waiting(&cluster, 1.0).await;
        // F7.14
        assert_eq!(cluster.metric(QUEUED).await.unwrap(), [0.0]);
        (only, join(&cluster, 2, aggregated(), json!({})).await)
    };
    let (reply, (first, second)) = queued_then(&cluster, joins).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    // F7.16
    assert_eq!([&first, &second].map(ran), [1, 1]);
    until_waiting(&cluster, 0.0).await;
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f7_a_request_that_was_in_the_queue_waits_no_longer_than_for_a_first_worker() {
    let cluster = waiting_for(Duration::from_millis(700)).start().await;
    let (reply, (_only, begun)) = queued_then(&cluster, async |only| (only, Instant::now())).await;
    let waited = begun.elapsed();
    // F7.10
    assert_eq!(seen(&reply), (503, "no_worker".to_owned(), "1"), "{reply:?}");
    let message = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    // F7.16
    assert!(message.contains("none could serve it within 700ms, the limit of models.NAME"), "{message}");
    assert!(waited >= Duration::from_millis(600), "{waited:?}");
    cluster.at_rest().await.unwrap();
}

/// Sends a request whose only worker dies, after it was removed if it `leaves`, and then another one joins.
/// Returns the answer's status, and how many requests the other one ran.
async fn last_worker_died(leaves: bool) -> (u16, u64) {
    let cluster = empty(|_| {}).await;
    let slow = SimConfig { overhead: Duration::from_secs(60), ..aggregated() };
    let only = join(&cluster, 1, slow, json!({})).await;
    cluster.until_counted("pointsman_worker_eligible{", 1.0).await.unwrap();
    let dies = async {
        cluster.until("the worker runs it", |cluster| cluster.booked() == 1).await.unwrap();
        if leaves {
            assert_eq!(cluster.admin.delete("/workers/1").await.unwrap().status, 200);
        }
        drop(only);
        until_waiting(&cluster, 1.0).await;
        join(&cluster, 2, aggregated(), json!({})).await
    };
    let (reply, second) = tokio::join!(ask(&cluster, json!({})), dies);
    cluster.at_rest().await.unwrap();
    (reply.status.as_u16(), ran(&second))
}

#[tokio::test]
async fn f7_a_request_whose_last_worker_died_waits_for_another_one() {
    // F7.16
    assert_eq!(last_worker_died(true).await, (200, 1));
}

#[tokio::test]
async fn f7_a_drain_answers_those_that_wait_since_the_last_worker_went() {
    let cluster = empty(|config| config.timeouts.drain = Duration::from_secs(30)).await;
    let state = cluster.gateway.state();
    let drains = async |only| {
        until_waiting(&cluster, 1.0).await;
        state.draining.cancel();
        only
    };
    let (reply, _only) = queued_then(&cluster, drains).await;
    // F7.12
    assert_eq!(seen(&reply), (503, "draining".to_owned(), "1"), "{reply:?}");
}

#[tokio::test]
async fn f7_a_request_in_the_queue_of_a_model_that_does_not_wait_fails_when_the_last_worker_goes() {
    let cluster = empty(|config| config.models.clear()).await;
    let (reply, _only) = queued_then(&cluster, async |only| only).await;
    // F7.16
    assert_eq!(reply.code(), "no_worker", "{reply:?}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f7_a_request_whose_last_worker_died_before_a_health_check_failed_waits_for_another_one() {
    // F7.17
    assert_eq!(last_worker_died(false).await, (200, 1));
}

#[tokio::test]
async fn f7_a_request_whose_connection_a_live_worker_broke_gets_the_error_after_a_health_check() {
    // Hardly a check comes by chance while the request is answered.
    let cluster = empty(|config| config.probe.interval = Duration::from_millis(500)).await;
    let arrived = Arc::<Mutex<Vec<(String, Instant)>>>::default();
    let arrivals = arrived.clone();
    let answers = move |request: &RawRequest| {
        arrivals.lock().push((request.line.clone(), Instant::now()));
        match request.line.as_str() {
            "GET /v1/models" => {
                vec![Act::Send(raw_engine::json(r#"{"object":"list","data":[{"id":"tiny"}]}"#))]
            }
            line if line.starts_with("GET") => vec![Act::Send(raw_engine::json("{}"))],
            _ => vec![Act::Reset],
        }
    };
    let resets = RawEngine::start(answers).await;
    let url = format!("http://{}", resets.address);
    let worker = json!({"id": 1, "role": "aggregated", "engine": "vllm", "url": url}).to_string();
    assert_eq!(cluster.admin.post("/workers", &[], worker).await.unwrap().status, 200);
    cluster.until_counted("pointsman_worker_eligible{", 1.0).await.unwrap();
    let begun = Instant::now();
    let reply = timeout(Duration::from_secs(30), ask(&cluster, json!({}))).await.unwrap();
    let answered = Instant::now();
    // F7.17
    assert_eq!(reply.status, 502, "{reply:?}");
    assert_eq!(resets.requests().len(), 1, "no worker gets a request again that it broke on");
    let arrived = arrived.lock().clone();
    let broke = arrived.iter().find(|(line, _)| line.starts_with("POST")).unwrap().1;
    let between = |line: &str, at: Instant| line == "GET /health" && at > broke && at < answered;
    // F7.17
    assert!(arrived.iter().any(|(line, at)| between(line, *at)), "no check before the answer: {arrived:?}");
    // F7.17
    assert!(answered - begun < Duration::from_secs(6), "{:?}", answered - begun);
    cluster.at_rest().await.unwrap();
}
