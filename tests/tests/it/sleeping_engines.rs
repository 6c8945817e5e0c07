//! Requests that reached an engine just before the gateway learned that it sleeps.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use pointsman_sim::{Dialect, Role};
use pointsman_tests::{
    Act, CHAT, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Client,
    raw_engine::{chunk, json as json_answer, status, stream_head},
};
use pointsman_workers::{Ineligible, WorkerSpec};
use serde_json::{Value, json};
use tokio::time::timeout;

const ROLE: &str = r#"{"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#;
const WHOLE: &str = r#"{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"woken"},"finish_reason":"stop"}]}"#;
/// Much less than the limits of a silent engine.
const SOON: Duration = Duration::from_secs(20);

fn chat(number: usize, stream: bool) -> String {
    let content = format!("{number} ").repeat(50);
    json!({"model": "tiny", "max_tokens": 3, "stream": stream, "messages": [{"role": "user", "content": content}]})
        .to_string()
}

/// An engine that falls asleep when it has so many requests for whole answers and for streams. It answers as
/// `acts` says.
async fn falls_asleep(
    [wholes, streams]: [usize; 2],
    acts: impl Fn(&RawRequest) -> Vec<Act> + Send + Sync + 'static,
) -> RawEngine {
    let (got_wholes, got_streams) = (AtomicUsize::new(0), AtomicUsize::new(0));
    RawEngine::start(move |request: &RawRequest| {
        let sleeps =
            || got_wholes.load(Ordering::SeqCst) >= wholes && got_streams.load(Ordering::SeqCst) >= streams;
        let answer = match request.line.as_str() {
            "GET /v1/models" => json_answer(r#"{"data":[{"id":"tiny","owned_by":"vllm"}]}"#),
            "GET /health" => json_answer("{}"),
            "GET /metrics" => {
                let awake = u8::from(!sleeps());
                // Requests that wait for the engine to wake up count as running.
                let text = format!(
                    "vllm:engine_sleep_state{{sleep_state=\"awake\"}} {awake}\nvllm:num_requests_running 4\n"
                );
                status("200 OK", &text)
            }
            "GET /is_sleeping" => json_answer(&json!({ "is_sleeping": sleeps() }).to_string()),
            line if line.starts_with("POST") => {
                let got = if is_stream(request) { &got_streams } else { &got_wholes };
                got.fetch_add(1, Ordering::SeqCst);
                return acts(request);
            }
            _ => status("404 Not Found", "{}"),
        };
        vec![Act::Send(answer)]
    })
    .await
}

fn is_stream(request: &RawRequest) -> bool {
    request.body.contains("\"stream\":true")
}

/// Number of requests that reached an engine.
fn posts(engine: &RawEngine) -> usize {
    engine.requests().iter().filter(|request| request.line.starts_with("POST /v1/chat")).count()
}

fn spec(engine: &RawEngine) -> WorkerSpec {
    engine.worker("role=aggregated,engine=vllm")
}

fn has_sleeper(cluster: &TestCluster) -> bool {
    let snapshot = cluster.gateway.state().registry.snapshot();
    snapshot.workers().iter().any(|worker| worker.ineligible() == Some(Ineligible::Asleep))
}

#[tokio::test]
async fn b8_requests_at_an_engine_that_falls_asleep_are_answered_by_another_one() {
    let engine = falls_asleep([1, 1], |request| {
        let begins = is_stream(request);
        let role = chunk(format!("data: {ROLE}\n\n").as_bytes());
        let begin = Act::Send([stream_head(), role].concat());
        begins.then_some(begin).into_iter().chain([Act::Hang]).collect()
    })
    .await;
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    let in_turn = "[aggregated]\nnative = \"round-robin\"";
    let builder = builder.config(|config| {
        config.policies.slots = toml::from_str(in_turn).unwrap();
        config.workers.push(spec(&engine));
    });
    let cluster = builder.start().await;
    let tasks = tokio_util::task::TaskTracker::new();
    let mut requests = Vec::new();
    // Each worker gets one whole answer and one stream.
    for stream in [false, false, true, true] {
        let (client, number) = (cluster.client.clone(), requests.len());
        requests.push(tasks.spawn(async move { client.post(CHAT, &[], chat(number, stream)).await }));
        let arrived = |_: &TestCluster| {
            let ended = requests.iter().filter(|request| request.is_finished()).count();
            posts(&engine) + ended >= requests.len()
        };
        cluster.until("it reached a worker", arrived).await.unwrap();
    }
    for (number, request) in requests.into_iter().enumerate() {
        // B8.19
        let reply = timeout(SOON, request).await;
        let reply = reply.unwrap_or_else(|_| panic!("request {number} waits for the sleeping engine"));
        assert_eq!(reply.unwrap().unwrap().status, 200);
    }
    assert_eq!(posts(&engine), 2);
    let metrics = cluster.metrics_text().await.unwrap();
    let line = metrics.lines().find(|line| line.contains("outcome=\"asleep\"")).unwrap_or_default();
    // B8.19
    assert!(line.starts_with("pointsman_legs_total{"), "{metrics}");
    let list = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    let states: Vec<&str> = list["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["ineligible"].as_str().unwrap_or(""))
        .collect();
    // B8.19: it has not failed.
    assert!(states.contains(&"asleep") && states.contains(&""), "{list}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b8_a_request_at_a_sleeping_engine_moves_when_another_worker_comes() {
    let engine = falls_asleep([1, 0], |_| vec![Act::Hang]).await;
    let cluster = TestClusterBuilder::new().config(|config| config.workers.push(spec(&engine))).start().await;
    let client = cluster.client.clone();
    let tasks = tokio_util::task::TaskTracker::new();
    let request = tasks.spawn(async move { client.post(CHAT, &[], chat(1, false)).await });
    cluster.until("it is asleep", has_sleeper).await.unwrap();
    let other = RawEngine::serving(|_| vec![Act::Send(json_answer(WHOLE))]).await;
    cluster.gateway.state().registry.upsert(other.worker("role=aggregated,engine=openai"));
    // B8.19
    let reply = timeout(SOON, request).await.expect("it waits for the sleeping engine").unwrap().unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
}

#[tokio::test]
async fn b8_a_request_stays_at_a_sleeping_engine_while_no_other_worker_can_take_it() {
    let engine =
        falls_asleep([1, 0], |_| vec![Act::Pause(Duration::from_secs(3)), Act::Send(json_answer(WHOLE))])
            .await;
    let cluster = TestClusterBuilder::new().config(|config| config.workers.push(spec(&engine))).start().await;
    let reply = cluster.client.post(CHAT, &[], chat(1, false)).await.unwrap();
    // B8.19
    assert!(reply.status == 200 && String::from_utf8_lossy(&reply.body).contains("woken"), "{reply:?}");
    assert!(has_sleeper(&cluster));
}

#[tokio::test]
async fn b8_a_request_stays_at_a_sleeping_engine_that_alone_may_serve_it() {
    let acts = |_: &RawRequest| vec![Act::Pause(Duration::from_secs(3)), Act::Send(json_answer(WHOLE))];
    let engine = falls_asleep([1, 0], acts).await;
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    let cluster = builder.config(|config| config.workers.push(spec(&engine))).start().await;
    let snapshot = cluster.gateway.state().registry.snapshot();
    let address = engine.address.to_string();
    let sleeper = snapshot.workers().iter().find(|worker| worker.spec().url.contains(&address)).unwrap();
    let mut body: Value = serde_json::from_str(&chat(1, false)).unwrap();
    body["nvext"] = json!({ "allowed_worker_ids": [sleeper.id().0] });
    let reply = cluster.client.post(CHAT, &[], body.to_string()).await.unwrap();
    // B8.19
    assert!(reply.status == 200 && String::from_utf8_lossy(&reply.body).contains("woken"), "{reply:?}");
    assert!(has_sleeper(&cluster));
    assert_eq!(posts(&engine), 1);
}

#[tokio::test]
async fn b8_requests_leave_a_sleeping_engine_only_for_places_that_are_free() {
    const REQUESTS: usize = 12;
    let engine = falls_asleep([REQUESTS, 0], |_| vec![Act::Hang]).await;
    let cluster = TestClusterBuilder::new().config(|config| config.workers.push(spec(&engine))).start().await;
    let tasks = tokio_util::task::TaskTracker::new();
    let ask = |number| {
        let client = cluster.client.clone();
        tasks.spawn(async move { client.post(CHAT, &[], chat(number, false)).await })
    };
    let requests: Vec<_> = (0..REQUESTS).map(ask).collect();
    cluster.until("it is asleep", has_sleeper).await.unwrap();
    let acts = |_: &RawRequest| vec![Act::Pause(Duration::from_millis(200)), Act::Send(json_answer(WHOLE))];
    let other = RawEngine::serving(acts).await;
    cluster.gateway.state().registry.upsert(other.worker("role=aggregated,engine=openai,max_concurrency=2"));
    for request in requests {
        let reply = timeout(SOON, request).await.expect("it finds no free place").unwrap().unwrap();
        // B8.19: without a queue, a request that left for a place that another one has would be refused.
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    assert_eq!(posts(&other), REQUESTS);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b8_a_pair_whose_prefill_engine_falls_asleep_takes_another_one() {
    let builder = TestClusterBuilder::new()
        .config(|config| config.probe.load_interval = Duration::from_secs(2))
        .sim(Dialect::Vllm, Role::Prefill)
        .pair(Dialect::Vllm);
    let cluster = builder.start().await;
    Client::new(cluster.sims[0].addr()).post("/sleep", &[], "").await.unwrap();
    let requests = (0..6).map(|number| {
        let client = cluster.client.clone();
        async move { timeout(SOON, client.post(CHAT, &[], chat(number, number % 2 == 0))).await }
    });
    for reply in futures_util::future::join_all(requests).await {
        // B8.19
        assert_eq!(reply.expect("a request waits for the sleeping engine").unwrap().status, 200);
    }
}
