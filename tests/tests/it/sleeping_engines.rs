//! Requests that reached an engine just before the gateway learned that it sleeps.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use pointsman_sim::{Dialect, Role};
use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Client,
    raw_engine::{chunk, json as json_answer, status, stream_head},
};
use pointsman_workers::{Ineligible, WorkerSpec};
use serde_json::json;
use tokio::time::timeout;

const CHAT: &str = "/v1/chat/completions";
const ROLE: &str = r#"{"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#;
const WHOLE: &str = r#"{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"woken"},"finish_reason":"stop"}]}"#;
/// Much less than the limits of a silent engine.
const SOON: Duration = Duration::from_secs(20);

fn chat(number: usize, stream: bool) -> String {
    let content = format!("{number} ").repeat(50);
    json!({"model": "tiny", "max_tokens": 3, "stream": stream, "messages": [{"role": "user", "content": content}]})
        .to_string()
}

/// An engine that falls asleep with its first request. It answers as `acts` says then.
async fn falls_asleep(acts: impl Fn(&RawRequest) -> Vec<Act> + Send + Sync + 'static) -> RawEngine {
    let sleeps = Arc::new(AtomicBool::new(false));
    RawEngine::start(move |request: &RawRequest| {
        let answer = match request.line.as_str() {
            "GET /v1/models" => json_answer(r#"{"data":[{"id":"tiny","owned_by":"vllm"}]}"#),
            "GET /health" => json_answer("{}"),
            "GET /metrics" => {
                let awake = u8::from(!sleeps.load(Ordering::SeqCst));
                // Requests that wait for the engine to wake up count as running.
                let text = format!(
                    "vllm:engine_sleep_state{{sleep_state=\"awake\"}} {awake}\nvllm:num_requests_running 4\n"
                );
                status("200 OK", &text)
            }
            "GET /is_sleeping" => {
                json_answer(&json!({ "is_sleeping": sleeps.load(Ordering::SeqCst) }).to_string())
            }
            line if line.starts_with("POST") => {
                sleeps.store(true, Ordering::SeqCst);
                return acts(request);
            }
            _ => status("404 Not Found", "{}"),
        };
        vec![Act::Send(answer)]
    })
    .await
    .unwrap()
}

fn spec(engine: &RawEngine) -> WorkerSpec {
    let flag = format!("role=aggregated,engine=vllm,url=http://{}", engine.address);
    WorkerSpec::parse_flag(&flag).unwrap()
}

fn has_sleeper(cluster: &TestCluster) -> bool {
    let snapshot = cluster.gateway.state().registry.snapshot();
    snapshot.workers().iter().any(|worker| worker.ineligible() == Some(Ineligible::Asleep))
}

#[tokio::test]
async fn b8_requests_at_an_engine_that_falls_asleep_are_answered_by_another_one() {
    let engine = falls_asleep(|request| {
        let begins = request.body.contains("\"stream\":true");
        let role = chunk(format!("data: {ROLE}\n\n").as_bytes());
        let begin = Act::Send([stream_head(), role].concat());
        begins.then_some(begin).into_iter().chain([Act::Hang]).collect()
    })
    .await;
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    let cluster = builder.config(|config| config.workers.push(spec(&engine))).start().await.unwrap();
    let requests = (0..8).map(|number| {
        let client = cluster.client.clone();
        async move {
            let stream = number % 2 == 1;
            let reply = client.post(CHAT, &[], chat(number, stream));
            (number, timeout(SOON, reply).await)
        }
    });
    for (number, reply) in futures_util::future::join_all(requests).await {
        // B8.19
        let reply =
            reply.unwrap_or_else(|_| panic!("request {number} waits for the sleeping engine")).unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    let asked = engine.requests();
    let streamed = asked.iter().filter(|request| request.body.contains("\"stream\":true")).count();
    assert!(
        (1..asked.len()).contains(&streamed),
        "{streamed} of {} at the sleeper were streams",
        asked.len()
    );
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
    let engine = falls_asleep(|_| vec![Act::Hang]).await;
    let cluster =
        TestClusterBuilder::new().config(|config| config.workers.push(spec(&engine))).start().await.unwrap();
    let client = cluster.client.clone();
    let tasks = tokio_util::task::TaskTracker::new();
    let request = tasks.spawn(async move { client.post(CHAT, &[], chat(1, false)).await });
    cluster.until("it is asleep", has_sleeper).await.unwrap();
    let other = RawEngine::serving(|_| vec![Act::Send(json_answer(WHOLE))]).await.unwrap();
    let flag = format!("role=aggregated,engine=openai,url=http://{}", other.address);
    cluster.gateway.state().registry.upsert(WorkerSpec::parse_flag(&flag).unwrap());
    // B8.19
    let reply = timeout(SOON, request).await.expect("it waits for the sleeping engine").unwrap().unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
}

#[tokio::test]
async fn b8_a_request_stays_at_a_sleeping_engine_while_no_other_worker_can_take_it() {
    let engine =
        falls_asleep(|_| vec![Act::Pause(Duration::from_secs(3)), Act::Send(json_answer(WHOLE))]).await;
    let cluster =
        TestClusterBuilder::new().config(|config| config.workers.push(spec(&engine))).start().await.unwrap();
    let reply = cluster.client.post(CHAT, &[], chat(1, false)).await.unwrap();
    // B8.19
    assert!(reply.status == 200 && String::from_utf8_lossy(&reply.body).contains("woken"), "{reply:?}");
    assert!(has_sleeper(&cluster));
}

#[tokio::test]
async fn b8_a_pair_whose_prefill_engine_falls_asleep_takes_another_one() {
    let builder = TestClusterBuilder::new()
        .config(|config| config.probe.load_interval = Duration::from_secs(2))
        .sim(Dialect::Vllm, Role::Prefill)
        .sim(Dialect::Vllm, Role::Prefill)
        .sim(Dialect::Vllm, Role::Decode);
    let cluster = builder.start().await.unwrap();
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
