//! Requests for a model that no worker can serve now: they wait for one if `wait_for_workers` says so.

use std::time::Duration;

use pointsman_gateway::config::{Config, DiscoveryFile, DiscoveryFileFormat, Model};
use pointsman_sim::{Dialect, Role, Sim, SimConfig, SimHandle};
use pointsman_tests::{
    Act, CHAT, RawEngine, TestCluster, TestClusterBuilder,
    client::{Reply, text_of},
    picker::PickerClient,
};
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt as _,
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;

mod last_worker;
mod shares;

const WAITING: &str = "pointsman_requests_waiting_for_workers{model=\"tiny\"}";
const QUEUED: &str = "pointsman_queued_requests";

/// Requests for `tiny` wait for up to `limit`, and 8 requests may wait in all.
fn waiting_for(limit: Duration) -> TestClusterBuilder {
    TestClusterBuilder::new().config(move |config| {
        config.queue.limit = 8;
        config.server.threads = 1;
        config.models.insert("tiny".to_owned(), Model { wait_for_workers: Some(limit), ..Model::default() });
    })
}

/// A gateway without workers whose requests for `tiny` wait for a minute.
async fn empty(change: impl FnOnce(&mut Config)) -> TestCluster {
    waiting_for(Duration::from_secs(60)).config(change).start().await
}

/// Starts an engine and adds it as a worker.
async fn join(cluster: &TestCluster, id: u64, config: SimConfig, more: Value) -> SimHandle {
    let role = config.role.as_str();
    let sim = Sim::start(config).await.unwrap();
    let mut worker = json!({"id": id, "role": role, "engine": "vllm", "url": sim.url()});
    worker.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let reply = cluster.admin.post("/workers", &[], worker.to_string()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    sim
}

fn aggregated() -> SimConfig {
    SimConfig::instant(Dialect::Vllm, Role::Aggregated)
}

fn chat(more: Value) -> String {
    let mut body =
        json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

async fn ask(cluster: &TestCluster, more: Value) -> Reply {
    cluster.client.post(CHAT, &[], chat(more)).await.unwrap()
}

fn retry_after(reply: &Reply) -> &str {
    reply.headers.get("retry-after").map_or("", |value| value.to_str().unwrap())
}

fn seen(reply: &Reply) -> (u16, String, &str) {
    (reply.status.as_u16(), reply.code(), retry_after(reply))
}

/// Waits until so many requests wait for a worker, by `/metrics`.
async fn until_waiting(cluster: &TestCluster, requests: f64) {
    for _ in 0..3_000 {
        if cluster.metric(WAITING).await.unwrap() == [requests] {
            return;
        }
        sleep(Duration::from_millis(20)).await;
    }
    panic!("waited a minute in vain for {requests}: {:?}", cluster.metric(WAITING).await.unwrap());
}

/// Number of requests that an engine ran.
fn ran(sim: &SimHandle) -> u64 {
    sim.state().requests.values().sum()
}

async fn get(cluster: &TestCluster, path: &str) -> (u16, Value) {
    let reply = cluster.admin.get(path).await.unwrap();
    (reply.status.as_u16(), reply.json().unwrap())
}

#[tokio::test]
async fn f7_a_request_waits_until_a_worker_of_its_model_joins() {
    let cluster = empty(|_| {}).await;
    // F7.14: autoscalers find the series before the first request
    assert_eq!(cluster.metric(WAITING).await.unwrap(), [0.0]);
    let streams = async {
        let body = chat(json!({"stream": true}));
        text_of(&cluster.client.stream(CHAT, &[], body).await.unwrap().all().await.unwrap())
    };
    let joins = async {
        until_waiting(&cluster, 2.0).await;
        // F7.14: they are not those that wait because all are busy
        assert_eq!(cluster.metric(QUEUED).await.unwrap(), [0.0]);
        let (_, status) = get(&cluster, "/status").await;
        let text = "2 requests wait until a worker can serve the model tiny";
        // F7.14
        assert!(status["reasons"].as_array().unwrap().contains(&json!(text)), "{status}");
        let sim = join(&cluster, 1, aggregated(), json!({})).await;
        until_waiting(&cluster, 0.0).await;
        sim
    };
    let (whole, text, sim) = tokio::join!(ask(&cluster, json!({})), streams, joins);
    // F7.9
    assert_eq!((whole.status.as_u16(), text.is_empty()), (200, false), "{whole:?}");
    assert_eq!(ran(&sim), 2);
    cluster.at_rest().await.unwrap();
    let (_, list) = get(&cluster, "/decisions?limit=2").await;
    for decision in list["decisions"].as_array().unwrap() {
        // F7.13: the receipt has the time of the wait
        assert!(decision["outcome"]["times_ms"]["queued"].as_f64().unwrap() >= 20.0, "{decision}");
    }
    assert_eq!(cluster.metric("pointsman_queue_seconds_count").await.unwrap(), [2.0]);
}

#[tokio::test]
async fn f7_requests_that_waited_for_a_worker_keep_its_limits_and_their_order() {
    let cluster = empty(|_| {}).await;
    let order = parking_lot::Mutex::new(Vec::new());
    let one = async |priority: &'static str, wait: u64| {
        sleep(Duration::from_millis(wait)).await;
        let priority_header = [("x-dynamo-request-strict-priority", priority)];
        let reply = cluster.client.post(CHAT, &priority_header, chat(json!({}))).await.unwrap();
        order.lock().push((priority, reply.status.as_u16()));
    };
    let joins = async {
        until_waiting(&cluster, 4.0).await;
        let slow = SimConfig { overhead: Duration::from_millis(300), ..aggregated() };
        join(&cluster, 1, slow, json!({"max_concurrency": 1})).await
    };
    let (.., sim) = tokio::join!(one("1", 0), one("3", 100), one("2", 200), one("4", 300), joins);
    // F7.13: those that the worker does not take wait on, in the order of F7.2
    assert_eq!(*order.lock(), [("4", 200), ("3", 200), ("2", 200), ("1", 200)]);
    assert_eq!(ran(&sim), 4);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f7_a_request_is_refused_when_no_worker_comes_in_time() {
    let cluster = waiting_for(Duration::from_millis(600)).start().await;
    let begun = Instant::now();
    let reply = ask(&cluster, json!({})).await;
    // F7.10
    assert_eq!(seen(&reply), (503, "no_worker".to_owned(), "1"), "{reply:?}");
    assert!(begun.elapsed() >= Duration::from_millis(600), "{:?}", begun.elapsed());
    let message = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    let expected = "waiting for a worker of the model `tiny`: none could serve it within 600ms, the limit of \
                    models.NAME.wait_for_workers: none is registered for it; retry after the time in `retry-after`";
    assert_eq!(message, expected);
    let refused = "pointsman_requests_total{";
    let text = cluster.metrics_text().await.unwrap();
    let line = text.lines().find(|line| line.starts_with(refused) && line.contains("no_worker")).unwrap();
    // F7.10: the model has a name in metrics
    assert!(line.contains("model=\"tiny\"") && line.ends_with(" 1"), "{line}");
    // F7.9: only a model of the configuration waits, and a preview never does
    let begun = Instant::now();
    assert_eq!(ask(&cluster, json!({"model": "other"})).await.code(), "no_worker");
    assert_eq!(cluster.client.post("/v1/route", &[], chat(json!({}))).await.unwrap().code(), "no_worker");
    let pinned = cluster.client.post(CHAT, &[("x-worker-instance-id", "7")], chat(json!({}))).await.unwrap();
    assert_eq!(pinned.code(), "no_worker");
    let _sim = join(&cluster, 1, SimConfig { model: "base".to_owned(), ..aggregated() }, json!({})).await;
    cluster.until_counted("pointsman_worker_eligible{", 1.0).await.unwrap();
    assert_eq!(ask(&cluster, json!({"model": "other"})).await.status, 404);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f7_a_client_that_leaves_gives_its_place_back() {
    let cluster = empty(|_| {}).await;
    let mut client = TcpStream::connect(cluster.gateway.address).await.unwrap();
    let body = chat(json!({}));
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    until_waiting(&cluster, 1.0).await;
    drop(client);
    // F7.4
    until_waiting(&cluster, 0.0).await;
    cluster.at_rest().await.unwrap();
    let gone = cluster.metric("pointsman_requests_total{").await.unwrap();
    assert_eq!(gone.iter().sum::<f64>(), 1.0);
}

#[tokio::test]
async fn f7_a_pair_waits_for_its_missing_leg() {
    let enforce = |config: &mut Config| config.routing.enforce_disagg = true;
    let cluster = empty(enforce).await;
    let prefill = SimConfig::instant(Dialect::Vllm, Role::Prefill);
    let decode = SimConfig::instant(Dialect::Vllm, Role::Decode);
    let decodes = join(&cluster, 2, decode.clone(), json!({})).await;
    cluster.until_counted("pointsman_worker_eligible{", 1.0).await.unwrap();
    let joins = async {
        until_waiting(&cluster, 1.0).await;
        join(&cluster, 1, prefill.clone(), json!({})).await
    };
    let (reply, prefills) = tokio::join!(ask(&cluster, json!({})), joins);
    // F7.9
    assert_eq!(reply.status, 200, "{reply:?}");
    let counts = [&prefills, &decodes].map(ran);
    assert_eq!(counts, [1, 1]);
    // The decode pool goes to zero: its last worker drains and leaves.
    let drained = cluster.admin.post("/workers/2/drain", &[], "").await.unwrap();
    assert_eq!(drained.status, 200, "{drained:?}");
    let joins = async {
        until_waiting(&cluster, 1.0).await;
        assert_eq!(cluster.admin.delete("/workers/2").await.unwrap().status, 200);
        sleep(Duration::from_millis(300)).await;
        join(&cluster, 3, decode, json!({})).await
    };
    let (reply, decodes) = tokio::join!(ask(&cluster, json!({})), joins);
    // F7.9
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(ran(&decodes), 1);
    cluster.at_rest().await.unwrap();
    // Without enforcement, a decode worker serves alone.
    let cluster = empty(|_| {}).await;
    let _sim = join(&cluster, 2, SimConfig::instant(Dialect::Vllm, Role::Decode), json!({})).await;
    cluster.until_counted("pointsman_worker_eligible{", 1.0).await.unwrap();
    // B1.2
    assert_eq!(timeout(Duration::from_secs(20), ask(&cluster, json!({}))).await.unwrap().status, 200);
}

#[tokio::test]
async fn f7_a_request_waits_for_a_worker_that_drains_or_is_down() {
    let cluster = waiting_for(Duration::from_secs(60)).sim(Dialect::Vllm, Role::Aggregated).start().await;
    assert_eq!(cluster.admin.post("/workers/1/drain", &[], "").await.unwrap().status, 200);
    let returns = async {
        until_waiting(&cluster, 1.0).await;
        assert_eq!(cluster.admin.delete("/workers/1/drain").await.unwrap().status, 200);
    };
    let (reply, ()) = tokio::join!(ask(&cluster, json!({})), returns);
    // F7.9
    assert_eq!(reply.status, 200, "{reply:?}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f7_a_drain_of_the_gateway_answers_those_that_wait_for_a_worker() {
    let cluster = waiting_for(Duration::from_secs(60))
        .config(|config| config.timeouts.drain = Duration::from_secs(30))
        .start()
        .await;
    let TestCluster { gateway, client, .. } = cluster;
    let state = gateway.state();
    let waits = client.post(CHAT, &[], chat(json!({})));
    let drains = async {
        while state.queue.worker_waits().is_empty() {
            sleep(Duration::from_millis(10)).await;
        }
        let begun = Instant::now();
        gateway.drain().await;
        begun.elapsed()
    };
    let (reply, took) =
        timeout(Duration::from_secs(60), async { tokio::join!(waits, drains) }).await.unwrap();
    // F7.12
    assert_eq!(seen(&reply.unwrap()), (503, "draining".to_owned(), "1"));
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[tokio::test]
async fn b3_a_gateway_is_ready_for_models_whose_requests_wait_for_workers() {
    let ready = async |cluster: &TestCluster| get(cluster, "/readyz").await;
    let cluster = empty(|_| {}).await;
    let (status, body) = ready(&cluster).await;
    // B3.14
    assert_eq!((status, &body["models"]), (200, &json!(["tiny"])), "{body}");
    let models = cluster.client.get("/v1/models").await.unwrap().json().unwrap();
    // B3.14
    assert_eq!((&models["data"][0]["id"], models["data"].as_array().unwrap().len()), (&json!("tiny"), 1));
    // M4.8
    assert_eq!(cluster.metric("pointsman_servable_models").await.unwrap(), [1.0]);
    let cluster = empty(|config| config.models.clear()).await;
    assert_eq!(ready(&cluster).await.0, 503);
    // The workers of other models are not known before their source was read.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.json");
    let (interval, name) = (Duration::from_millis(20), "a".to_owned());
    let file = DiscoveryFile {
        path: path.clone(),
        format: DiscoveryFileFormat::Workers,
        interval,
        name,
        ..DiscoveryFile::default()
    };
    let cluster = empty(|config| config.discovery.files = vec![file]).await;
    assert_eq!(ready(&cluster).await.0, 503);
    std::fs::write(&path, r#"{ "workers": [] }"#).unwrap();
    for _ in 0..500 {
        if ready(&cluster).await.0 == 200 {
            return;
        }
        sleep(Duration::from_millis(20)).await;
    }
    // B3.14
    panic!("it is not ready although the source was read");
}

#[tokio::test]
async fn i8_a_realtime_session_waits_for_a_worker() {
    let cluster = empty(|_| {}).await;
    let address = cluster.gateway.address;
    let opens = async {
        let request = format!("ws://{address}/v1/realtime?model=tiny").into_client_request().unwrap();
        tokio_tungstenite::client_async(request, TcpStream::connect(address).await.unwrap()).await
    };
    let joins = async {
        until_waiting(&cluster, 1.0).await;
        join(&cluster, 1, aggregated(), json!({})).await
    };
    let (opened, _sim) = tokio::join!(opens, joins);
    // I8.7
    drop(opened.unwrap());
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn r2_a_request_that_envoy_carries_waits_for_a_worker() {
    let listens = |config: &mut Config| config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap());
    let cluster = empty(listens).await;
    let picker = PickerClient::connect(cluster.gateway.ext_proc.unwrap()).await.unwrap();
    let body = chat(json!({}));
    let joins = async {
        until_waiting(&cluster, 1.0).await;
        join(&cluster, 1, aggregated(), json!({})).await
    };
    let (picked, sim) = tokio::join!(picker.ask(CHAT, &[], &body), joins);
    let (picked, carried) = picked.unwrap();
    let address = sim.url().trim_start_matches("http://").to_owned();
    // F7.9
    assert_eq!(picked.endpoint(), Some(address.as_str()));
    drop(carried);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f7_a_request_in_the_queue_goes_to_a_worker_that_joined_meanwhile() {
    let cluster = empty(|_| {}).await;
    let slow = SimConfig { overhead: Duration::from_secs(12), ..aggregated() };
    let first = join(&cluster, 1, slow, json!({"max_concurrency": 1})).await;
    cluster.until_counted("pointsman_worker_eligible{", 1.0).await.unwrap();
    let runs = ask(&cluster, json!({}));
    let waits = async {
        cluster.until("the worker is busy", |cluster| cluster.booked() == 1).await.unwrap();
        ask(&cluster, json!({})).await.status.as_u16()
    };
    let joins = async {
        cluster.until_counted(QUEUED, 1.0).await.unwrap();
        join(&cluster, 2, aggregated(), json!({})).await
    };
    let (first_reply, status, second) = tokio::join!(runs, waits, joins);
    assert_eq!((first_reply.status.as_u16(), status), (200, 200));
    // F7.15
    assert_eq!([&first, &second].map(ran), [1, 1]);
    cluster.at_rest().await.unwrap();
}
