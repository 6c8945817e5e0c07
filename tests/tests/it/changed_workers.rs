//! Workers whose description changes while their engines run: real sockets, the gateway in process.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use pointsman_sim::{Dialect, Role, Sim, SimConfig};
use pointsman_tests::{
    Act, CHAT, RawEngine, RawRequest, Stream, TestCluster, TestClusterBuilder,
    raw_engine::{chunk, json as json_answer, status, stream_head},
};
use serde_json::{Value, json};

const DELTA: &str = r#"{"id":"c","object":"chat.completion.chunk","model":"tiny","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}"#;
const WHOLE: &str = r#"{"id":"c","object":"chat.completion","model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}]}"#;

/// What an engine does with questions about itself.
#[derive(Default)]
struct Mood {
    is_busy: AtomicBool,
    has_two_ranks: AtomicBool,
}

/// Starts an engine of `tiny` whose streams do not end. It is healthy; while it is busy, it answers no other
/// question.
async fn engine() -> (RawEngine, Arc<Mood>) {
    let mood = Arc::new(Mood::default());
    let of = mood.clone();
    let script = move |request: &RawRequest| match request.line.as_str() {
        "GET /health" => vec![Act::Send(json_answer("{}"))],
        line if line.starts_with("GET") && of.is_busy.load(Ordering::Relaxed) => vec![Act::Hang],
        "GET /v1/models" => vec![Act::Send(json_answer(r#"{"data":[{"id":"tiny"}]}"#))],
        "GET /metrics" if of.has_two_ranks.load(Ordering::Relaxed) => vec![Act::Send(json_answer(
            "vllm:num_requests_running{engine=\"0\"} 1\nvllm:num_requests_running{engine=\"1\"} 0\n",
        ))],
        "GET /metrics" => vec![Act::Send(json_answer("vllm:num_requests_running{engine=\"0\"} 1\n"))],
        line if line.starts_with("GET") => vec![Act::Send(status("404 Not Found", "{}"))],
        _ if request.body.contains("\"stream\":true") => {
            let delta = format!("data: {DELTA}\n\n");
            vec![Act::Send(stream_head()), Act::Send(chunk(delta.as_bytes())), Act::Hang]
        }
        _ => vec![Act::Send(json_answer(WHOLE))],
    };
    (RawEngine::start(script).await, mood)
}

async fn cluster() -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        config.probe.interval = Duration::from_millis(20);
        config.probe.load_interval = Duration::ZERO;
    });
    builder.start().await
}

/// Describes worker 7 at `engine`, with other keys.
async fn describe(cluster: &TestCluster, engine: &RawEngine, more: &Value) {
    let mut body = json!({
        "id": 7, "url": format!("http://{}", engine.address), "role": "aggregated", "engine": "vllm",
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    assert_eq!(cluster.admin.post("/workers", &[], body.to_string()).await.unwrap().status, 200);
}

/// The worker of the list, with the number of requests on all of its ranks.
async fn worker(cluster: &TestCluster) -> Value {
    let mut list = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    let mut worker = list["workers"][0].take();
    let ranks = worker["ranks"].as_array().into_iter().flatten();
    worker["active_requests"] = ranks.filter_map(|rank| rank["active_requests"].as_u64()).sum::<u64>().into();
    worker
}

/// Waits until the worker fits.
async fn until(cluster: &TestCluster, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
    for _ in 0..1_000 {
        let worker = worker(cluster).await;
        if fits(&worker) {
            return worker;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: {}", worker(cluster).await);
}

fn eligible(worker: &Value) -> bool {
    worker["health"] == "healthy" && worker["ineligible"].is_null()
}

fn chat(stream: bool) -> String {
    let messages = json!([{ "role": "user", "content": "hi" }]);
    json!({ "model": "tiny", "max_tokens": 9, "stream": stream, "messages": messages }).to_string()
}

async fn status_of_chat(cluster: &TestCluster) -> u16 {
    cluster.client.post(CHAT, &[], chat(false)).await.unwrap().status.as_u16()
}

/// Begins a stream. The first event has arrived, and the rest does not.
async fn stream(cluster: &TestCluster) -> Stream {
    let mut stream = cluster.client.stream(CHAT, &[], chat(true)).await.unwrap();
    assert_eq!(stream.status, 200);
    stream.next().await.unwrap().unwrap();
    stream
}

#[tokio::test]
async fn p12_a_fleet_whose_labels_change_serves_on_while_its_engines_answer_no_question() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.json");
    let engines = [engine().await, engine().await];
    let write = |zone: &str| {
        let workers = engines.iter().map(|(engine, _)| {
            let url = format!("http://{}", engine.address);
            json!({ "url": url, "role": "aggregated", "engine": "vllm", "labels": { "zone": zone } })
        });
        std::fs::write(&path, json!({ "workers": workers.collect::<Vec<_>>() }).to_string()).unwrap();
    };
    write("a");
    let cluster = TestClusterBuilder::new().worker_file(&path).start().await;
    let all = async || {
        let list = cluster.admin.get("/workers").await.unwrap().json().unwrap();
        list["workers"].as_array().unwrap().clone()
    };
    let until_all = async |what: &str, fits: &dyn Fn(&Value) -> bool| {
        for _ in 0..1_000 {
            let workers = all().await;
            if workers.len() == 2 && workers.iter().all(fits) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{what}: {:?}", all().await);
    };
    until_all("both are eligible", &eligible).await;
    engines.iter().for_each(|(_, mood)| mood.is_busy.store(true, Ordering::Relaxed));
    write("b");
    until_all("both have the new label", &|worker| worker["spec"]["labels"]["zone"] == "b").await;
    for _ in 0..20 {
        // P12.1
        assert!(all().await.iter().all(eligible), "{:?}", all().await);
        assert_eq!(status_of_chat(&cluster).await, 200);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn p12_a_drain_and_the_requests_of_a_worker_outlast_changes_of_its_description() {
    let (engine, _) = engine().await;
    let cluster = cluster().await;
    describe(&cluster, &engine, &json!({})).await;
    until(&cluster, "it is eligible", eligible).await;
    let running = stream(&cluster).await;
    assert_eq!(cluster.admin.post("/workers/7/drain", &[], "").await.unwrap().status, 200);
    let changes =
        [json!({ "labels": { "zone": "b" } }), json!({ "taints": ["t"] }), json!({ "role": "decode" })];
    for change in changes {
        describe(&cluster, &engine, &change).await;
        let worker = until(&cluster, "it is healthy", |worker| worker["health"] == "healthy").await;
        // P12.2
        assert_eq!((&worker["draining"], &worker["ineligible"]), (&json!(true), &json!("draining")));
        // P12.3: `drain --wait` reads this
        assert_eq!(worker["active_requests"], 1, "{worker}");
    }
    drop(running);
    until(&cluster, "the request ended", |worker| worker["active_requests"] == 0).await;
    // P12.5
    assert_eq!(cluster.admin.delete("/workers/7").await.unwrap().status, 200);
    describe(&cluster, &engine, &json!({})).await;
    let worker = until(&cluster, "it is eligible", eligible).await;
    assert_eq!(worker["draining"], false);
}

#[tokio::test]
async fn p12_a_limit_of_requests_counts_those_that_began_before_it() {
    let (engine, _) = engine().await;
    let cluster = cluster().await;
    describe(&cluster, &engine, &json!({ "max_concurrency": 2 })).await;
    until(&cluster, "it is eligible", eligible).await;
    let running = [stream(&cluster).await, stream(&cluster).await];
    let limit = json!(2);
    for change in [
        json!({ "max_concurrency": limit, "labels": { "zone": "b" } }),
        json!({ "max_concurrency": 1 }),
        json!({ "max_concurrency": limit, "taints": ["t"] }),
    ] {
        describe(&cluster, &engine, &change).await;
        let worker = worker(&cluster).await;
        // P12.3
        assert_eq!((&worker["active_requests"], &worker["ineligible"]), (&limit, &json!("at_capacity")));
    }
    for change in [json!({}), json!({ "max_concurrency": 3 })] {
        describe(&cluster, &engine, &change).await;
        let worker = worker(&cluster).await;
        assert_eq!((&worker["active_requests"], &worker["ineligible"]), (&limit, &Value::Null));
    }
    drop(running);
    until(&cluster, "the requests ended", |worker| worker["active_requests"] == 0).await;
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn p12_the_requests_of_an_engine_that_gains_a_rank_still_count() {
    let (engine, mood) = engine().await;
    let cluster = cluster().await;
    describe(&cluster, &engine, &json!({ "max_concurrency": 1 })).await;
    until(&cluster, "it is eligible", |worker| eligible(worker) && worker["spec"]["dp_size"] == 1).await;
    let running = stream(&cluster).await;
    mood.has_two_ranks.store(true, Ordering::Relaxed);
    let worker = until(&cluster, "it has two ranks", |worker| worker["spec"]["dp_size"] == 2).await;
    let ranks: Vec<&Value> =
        worker["ranks"].as_array().unwrap().iter().map(|rank| &rank["active_requests"]).collect();
    // P12.4
    assert_eq!(ranks, [&json!(1), &json!(0)]);
    assert_eq!(worker["ineligible"], "at_capacity");
    drop(running);
    until(&cluster, "the request ended", |worker| worker["active_requests"] == 0).await;
    until(&cluster, "it is eligible", eligible).await;
}

#[tokio::test]
async fn p12_a_worker_with_another_address_or_engine_starts_anew() {
    let [(one, _), (two, _)] = [engine().await, engine().await];
    let cluster = cluster().await;
    describe(&cluster, &one, &json!({})).await;
    until(&cluster, "it is eligible", eligible).await;
    let _running = stream(&cluster).await;
    for (engine, change) in [(&two, json!({})), (&two, json!({ "engine": "openai" }))] {
        assert_eq!(cluster.admin.post("/workers/7/drain", &[], "").await.unwrap().status, 200);
        describe(&cluster, engine, &change).await;
        let worker = until(&cluster, "it is eligible", eligible).await;
        // P12.5
        assert_eq!((&worker["active_requests"], &worker["draining"]), (&json!(0), &json!(false)));
    }
}

/// The feed has no replay, so the index would lack what the engine reported before.
#[tokio::test]
async fn p12_the_feed_of_kv_events_goes_on_when_a_description_changes_that_does_not_concern_it() {
    let config = SimConfig { kv_events: true, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let sims = [Sim::start(config.clone()).await.unwrap(), Sim::start(config).await.unwrap()];
    let cluster = cluster().await;
    let describe = async |more: Value, events: usize| {
        let port = sims[events].kv_events_port().unwrap();
        let mut body = json!({"id": 7, "url": sims[0].url(), "role": "aggregated", "engine": "vllm",
            "kv_events": format!("tcp://127.0.0.1:{port}")});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(cluster.admin.post("/workers", &[], body.to_string()).await.unwrap().status, 200);
        cluster.until_counted("pointsman_kv_feed_live{", 1.0).await.unwrap();
    };
    let prompt: Vec<u32> = (0..64).collect();
    let cached = async || {
        cluster.gateway.state().router.index().flush();
        crate::kv_groups::predicted(&cluster, &prompt).await
    };
    describe(json!({}), 0).await;
    cluster.until_counted("pointsman_worker_eligible{", 1.0).await.unwrap();
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 1}).to_string();
    assert_eq!(cluster.client.post("/v1/completions", &[], body).await.unwrap().status, 200);
    cluster.until_counted("pointsman_kv_feed_messages_total{", 1.0).await.unwrap();
    let blocks = cached().await;
    assert!(blocks > 0);
    let changes = [
        json!({"max_concurrency": 99}),
        json!({"labels": {"rack": "b"}, "taints": ["spot"]}),
        json!({"api_key": "other", "block_size": 16}),
    ];
    for change in changes {
        describe(change.clone(), 0).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        // P12.6
        assert_eq!(cached().await, blocks, "{change}");
    }
    let forgets = cluster.metric("pointsman_kv_feed_forgets_total{").await.unwrap();
    assert_eq!(forgets, [0.0]);
    describe(json!({}), 1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    // P12.6
    assert_eq!(cached().await, 0, "another engine's events");
}
