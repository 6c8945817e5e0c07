//! Load figures of engines: those that stand still, those of data-parallel ranks, and those that vanish.

use std::{
    io::Read as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_gateway::config::Config;
use pointsman_routing::{BusyByLeg, BusyThresholds};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    log::Log,
    own_process,
    raw_engine::{json, status},
};
use pointsman_workers::{Leg, WorkerSpec};
use serde_json::Value;
use tokio::time::{Instant, sleep};

const BODY: &str = r#"{"model":"tiny","prompt":"a few words","max_tokens":2}"#;
const MODELS: &str = r#"{"data":[{"id":"tiny","owned_by":"vllm"}]}"#;
const ANSWER: &str = r#"{"id":"x","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}"#;
const MS: Duration = Duration::from_millis(1);

/// A vLLM engine with these metrics, which may change. `served`: called with each generation request.
async fn vllm(
    metrics: &Arc<Mutex<String>>,
    served: impl Fn(&RawRequest) + Send + Sync + 'static,
) -> RawEngine {
    let metrics = metrics.clone();
    let script = move |request: &RawRequest| {
        let answer = match request.line.as_str() {
            "GET /health" => json("{}"),
            "GET /v1/models" => json(MODELS),
            "GET /metrics" => status("200 OK", &metrics.lock()),
            line if line.starts_with("POST") => {
                served(request);
                json(ANSWER)
            }
            _ => status("404 Not Found", "{}"),
        };
        vec![Act::Send(answer)]
    };
    RawEngine::start(script).await
}

fn metrics(text: impl Into<String>) -> Arc<Mutex<String>> {
    Arc::new(Mutex::new(text.into()))
}

/// A gateway with this engine, which is busy with more than 16 waiting requests.
async fn gateway(engine: &RawEngine, more: &str) -> TestCluster {
    let change = |config: &mut Config| {
        let most = BusyThresholds { engine_queue: Some(16), ..BusyThresholds::default() };
        config.routing.busy = BusyByLeg::from([(Leg::Aggregated, most)]);
        config.probe.load_interval = 100 * MS;
        let flag = format!("id=1,role=aggregated,engine=vllm,url=http://{}{more}", engine.address);
        config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
    };
    TestClusterBuilder::new().config(change).start().await
}

async fn ask(cluster: &TestCluster) -> u16 {
    cluster.client.post(COMPLETIONS, &[], BODY).await.unwrap().status.as_u16()
}

async fn read(cluster: &TestCluster, path: &str) -> Value {
    cluster.admin.get(path).await.unwrap().json().unwrap()
}

async fn worker(cluster: &TestCluster) -> Value {
    read(cluster, "/workers").await["workers"][0].clone()
}

async fn until(cluster: &TestCluster, what: &str, limit: Duration, condition: impl Fn(&Value) -> bool) {
    let begun = Instant::now();
    loop {
        let told = worker(cluster).await;
        if condition(&told) {
            return;
        }
        assert!(begun.elapsed() < limit, "never: {what}: {told}");
        sleep(50 * MS).await;
    }
}

/// The engine's figures, as vLLM exports them.
fn figures(running: u32, waiting: u32, kv_usage: f32, tokens: u32) -> String {
    format!(
        "vllm:num_requests_running{{engine=\"0\"}} {running}\nvllm:num_requests_waiting{{engine=\"0\"}} {waiting}\n\
         vllm:kv_cache_usage_perc{{engine=\"0\"}} {kv_usage}\nvllm:generation_tokens_total{{engine=\"0\"}} {tokens}\n"
    )
}

/// vLLM publishes nothing between the abort of its last request and its next step (vllm#22545).
#[tokio::test]
async fn b8_an_idle_engine_whose_gauges_stand_still_gets_requests_again() {
    let told = metrics(figures(16, 24, 0.97, 1_000));
    let step = told.clone();
    let engine = vllm(&told, move |_| *step.lock() = figures(0, 0, 0.0, 1_002)).await;
    let cluster = gateway(&engine, "").await;
    let is_busy = |told: &Value| told["busy"][0]["reason"] == "engine_queue";
    until(&cluster, "busy", Duration::from_secs(9), is_busy).await;
    assert_eq!(ask(&cluster).await, 529);
    let (told, status) = (worker(&cluster).await, read(&cluster, "/status").await);
    // F6.15
    assert_eq!(told["reason"], "beyond busy thresholds: aggregated.engine_queue", "{told}");
    let reason = "worker 1 is beyond busy thresholds: aggregated.engine_queue";
    assert!(status["reasons"].as_array().unwrap().contains(&reason.into()), "{status}");
    until(&cluster, "its load is unknown", Duration::from_secs(20), |told| told["engine_load"].is_null())
        .await;
    // B8.14
    assert_eq!(ask(&cluster).await, 200, "{}", worker(&cluster).await);
    let is_idle = |told: &Value| told["engine_load"]["waiting"] == 0 && told["reason"].is_null();
    until(&cluster, "its load is known again", Duration::from_secs(9), is_idle).await;
    assert_eq!(ask(&cluster).await, 200);
}

#[tokio::test]
async fn b8_an_engine_that_moves_stays_busy() {
    let told = metrics(String::new());
    let engine = vllm(&told, |_| {}).await;
    let (works, writer) = (Arc::new(AtomicBool::new(true)), told.clone());
    let goes_on = works.clone();
    *told.lock() = figures(16, 24, 0.97, 0);
    let tasks = tokio_util::task::TaskTracker::new();
    let steps = tasks.spawn(async move {
        let mut tokens = 0;
        while goes_on.load(Relaxed) {
            sleep(400 * MS).await;
            tokens += 16;
            *writer.lock() = figures(16, 24, 0.97, tokens);
        }
    });
    let cluster = gateway(&engine, "").await;
    let is_busy = |told: &Value| told["busy"][0]["reason"] == "engine_queue";
    until(&cluster, "busy", Duration::from_secs(9), is_busy).await;
    for _ in 0..130 {
        // B8.14
        assert_eq!(ask(&cluster).await, 529, "{}", worker(&cluster).await);
        sleep(100 * MS).await;
    }
    works.store(false, Relaxed);
    steps.await.unwrap();
}

#[tokio::test]
async fn b8_a_rank_has_the_figures_of_its_label() {
    // A server of a second node, whose labels begin with 4.
    let of = |rank: u32, running: u32, waiting: u32, kv_usage: f32| {
        figures(running, waiting, kv_usage, 9).replace("engine=\"0\"", &format!("engine=\"{rank}\""))
    };
    let told = metrics(of(4, 8, 20, 0.75) + &of(5, 1, 2, 0.25));
    let ranks = Arc::new(Mutex::new(Vec::new()));
    let seen = ranks.clone();
    let engine = vllm(&told, move |request: &RawRequest| {
        let named = request.head.lines().find_map(|line| line.strip_prefix("x-data-parallel-rank: "));
        seen.lock().push(named.map(str::to_owned));
    })
    .await;
    let cluster = gateway(&engine, ",dp_size=2").await;
    until(&cluster, "busy", Duration::from_secs(9), |told| told["busy"][0].is_object()).await;
    let told = worker(&cluster).await;
    // B8.2
    assert_eq!(
        (&told["busy"][0]["dp_rank"], told["busy"].as_array().unwrap().len()),
        (&0.into(), 1),
        "{told}"
    );
    let load = &told["engine_load"];
    assert_eq!(
        (&load["running"], &load["waiting"], &load["kv_usage"]),
        (&9.into(), &22.into(), &0.75.into())
    );
    let of_ranks = [0, 1].map(|rank| told["ranks"][rank]["engine_load"]["waiting"].clone());
    assert_eq!(of_ranks, [20, 2], "{told}");
    for _ in 0..12 {
        assert_eq!(ask(&cluster).await, 200);
    }
    let ranks = ranks.lock().clone();
    assert!(ranks.iter().all(|rank| rank.as_deref() == Some("1")), "{ranks:?}");
}

#[tokio::test]
async fn b8_figures_that_vanish_are_told_once() {
    own_process!();
    let log = Log::start();
    let lines = || {
        let text = log.text();
        let told = text.lines().filter(|line| line.contains("load figures of a worker are unknown"));
        told.map(str::to_owned).collect::<Vec<_>>()
    };
    let told = metrics(figures(0, 0, 0.0, 9));
    let engine = vllm(&told, |_| {}).await;
    let cluster = gateway(&engine, "").await;
    let known = async || cluster.metric("pointsman_worker_load_known{worker=\"1\"").await.unwrap();
    until(&cluster, "known", Duration::from_secs(9), |told| told["engine_load"]["waiting"] == 0).await;
    // B8.15
    assert_eq!((known().await, lines().len()), (vec![1.0], 0));
    // One figure, and then all of them.
    *told.lock() = "vllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.5\n".to_owned();
    until(&cluster, "one is unknown", Duration::from_secs(9), |told| {
        told["engine_load"]["waiting"].is_null()
    })
    .await;
    assert_eq!(known().await, [0.0]);
    sleep(1_100 * MS).await;
    *told.lock() = "vllm:scheduler_running 16\nvllm:scheduler_waiting 40\n".to_owned();
    until(&cluster, "all are unknown", Duration::from_secs(9), |told| told["engine_load"].is_null()).await;
    sleep(1_100 * MS).await;
    let lines = lines();
    assert_eq!(lines.len(), 2, "{lines:?}");
    let parts = [["missing=\"waiting\"", "path=\"/metrics\""], ["missing=\"running, kv_usage\"", "worker=1"]];
    for (line, parts) in lines.iter().zip(parts) {
        assert!(line.contains("WARN") && parts.iter().all(|part| line.contains(part)), "{line}");
    }
}

#[tokio::test]
async fn b8_an_engine_that_never_told_its_load_is_told_once() {
    own_process!();
    let log = Log::start();
    let engine = vllm(&metrics("vllm:scheduler_running 16\n"), |_| {}).await;
    let cluster = gateway(&engine, "").await;
    sleep(Duration::from_secs(4)).await;
    let text = log.text();
    let told = |line: &&str| line.contains("load figures of a worker are unknown");
    let lines: Vec<&str> = text.lines().filter(told).collect();
    // B8.15
    assert!(lines.len() == 1 && lines[0].contains("missing=\"running, waiting, kv_usage\""), "{lines:?}");
    assert_eq!(cluster.metric("pointsman_worker_load_known{worker=\"1\"").await.unwrap(), [0.0]);
}

#[tokio::test]
async fn m4_metrics_are_compressed_for_a_scraper_that_takes_gzip() {
    let cluster = gateway(&vllm(&metrics(figures(0, 0, 0.0, 9)), |_| {}).await, "").await;
    for (accepted, coded) in
        [("gzip", true), ("br, *;q=0, GZIP;q=0.5", true), ("gzip;q=0", false), ("br", false)]
    {
        let reply = cluster.admin.get_with("/metrics", &[("accept-encoding", accepted)]).await.unwrap();
        let coding = reply.headers.get("content-encoding").map(|value| value.to_str().unwrap());
        // M4.10
        assert_eq!(coding, coded.then_some("gzip"), "{accepted}");
        assert_eq!(reply.headers["vary"], "accept, accept-encoding");
        let mut text = String::new();
        if coded {
            flate2::read::GzDecoder::new(&reply.body[..]).read_to_string(&mut text).unwrap();
        } else {
            text.push_str(std::str::from_utf8(&reply.body).unwrap());
        }
        assert!(text.contains("# TYPE pointsman_worker_eligible gauge"), "{text}");
    }
}
