//! Gateways that tell each other their load over the real NATS server. Without `nats-server` in the PATH
//! these tests say so and pass.

use std::time::Duration;

use pointsman_gateway::config::{Config, Replicas};
use pointsman_sim::{Dialect, Role};
use pointsman_test_stopping_proxy::StoppingProxy;
use pointsman_tests::{TestCluster, TestClusterBuilder, nats::Nats};
use pointsman_workers::{BlockHash, Booking, BookingRequest, Leg, WorkerSpec};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, net::TcpStream, time::Instant};

mod permissions;
pub(crate) mod secured;
mod state;

const LEASE: Duration = Duration::from_millis(800);

fn replicas(name: &str, url: &str) -> Replicas {
    Replicas {
        servers: vec![url.to_owned()],
        name: name.to_owned(),
        lease: LEASE,
        snapshot_interval: Duration::from_secs(2),
        ..Replicas::default()
    }
}

/// A gateway with an engine of its own.
async fn first(settings: Replicas) -> TestCluster {
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    builder.config(|config| config.replicas = settings).start().await
}

/// A gateway with the engine of another one, which has another id here.
async fn second(of: &TestCluster, settings: Replicas) -> TestCluster {
    let flag = format!("role=aggregated,engine=vllm,url={}", of.sims[0].url());
    let change = |config: &mut Config| {
        config.replicas = settings;
        config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
    };
    TestClusterBuilder::new().config(change).start().await
}

fn book(cluster: &TestCluster) -> Booking {
    let snapshot = cluster.gateway.state().registry.snapshot();
    let blocks: Vec<BlockHash> = (1..=5).map(BlockHash).collect();
    snapshot.workers()[0].candidates()[0].book(&BookingRequest::new(Leg::Aggregated, blocks.into(), 90, 16))
}

async fn get(cluster: &TestCluster, path: &str) -> Value {
    cluster.admin.get(path).await.unwrap().json().unwrap()
}

async fn rank(cluster: &TestCluster) -> Value {
    get(cluster, "/workers").await["workers"][0]["ranks"][0].clone()
}

/// Waits until a document fits, and returns how long that took.
async fn until(cluster: &TestCluster, path: &str, what: &str, fits: impl Fn(&Value) -> bool) -> Duration {
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(15) {
        if fits(&get(cluster, path).await) {
            return started.elapsed();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what}: {}", get(cluster, path).await);
}

fn remote(workers: &Value) -> u64 {
    workers["workers"][0]["ranks"][0]["remote"]["active_requests"].as_u64().unwrap()
}

async fn until_remote(cluster: &TestCluster, requests: u64) -> Duration {
    until(cluster, "/workers", "remote requests", |workers| remote(workers) == requests).await
}

async fn until_peers(cluster: &TestCluster, count: usize) -> Duration {
    let in_sync = |peer: &Value| peer["in_sync"] == true;
    until(cluster, "/replicas", "peers", |replicas| {
        let peers = replicas["peers"].as_array().unwrap();
        replicas["connected"] == true && peers.len() == count && peers.iter().all(in_sync)
    })
    .await
}

async fn chat(cluster: &TestCluster) -> u16 {
    let body = json!({ "model": "tiny", "max_tokens": 4, "messages": [{ "role": "user", "content": "hi" }] });
    cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap().status.as_u16()
}

#[tokio::test]
async fn q1_gateways_count_each_other_s_bookings_and_show_them() {
    let Some(nats) = Nats::start("").await else { return };
    let one = first(replicas("one", &nats.url())).await;
    let two = second(&one, replicas("two", &nats.url())).await;
    until_peers(&one, 1).await;
    until_peers(&two, 1).await;
    let mut booking = book(&one);
    until_remote(&two, 1).await;
    // Q1.1
    assert_eq!(
        rank(&two).await["remote"],
        json!({ "active_requests": 1, "active_prefill_tokens": 90, "decode_blocks": 6 })
    );
    assert_eq!((rank(&two).await["active_requests"].as_u64(), two.booked()), (Some(1), 1));
    assert_eq!(rank(&one).await["remote"]["active_requests"], 0);
    // M4.15: each request is in the figures of one gateway only
    let booked = async |of: &TestCluster| of.metric("pointsman_worker_active_requests{").await.unwrap();
    assert_eq!((booked(&one).await, booked(&two).await), (vec![1.0], vec![0.0]));
    booking.prefill_done();
    let done = |workers: &Value| workers["workers"][0]["ranks"][0]["remote"]["active_prefill_tokens"] == 0;
    until(&two, "/workers", "prefill is done", done).await;
    // Q3.3
    assert_eq!(
        get(&two, "/readyz").await["replicas"],
        json!({ "connected": true, "peers": 1, "alone": false, "name_conflict": false })
    );
    assert_eq!(two.metric("pointsman_replicas_connected ").await.unwrap(), [1.0]);
    until(&two, "/replicas", "one booking", |replicas| replicas["peers"][0]["bookings"] == 1).await;
    assert_eq!(get(&two, "/replicas").await["peers"][0]["name"], "one");
    drop(booking);
    until_remote(&two, 0).await;
    assert_eq!(chat(&one).await, 200);
    assert_eq!(chat(&two).await, 200);
    until_remote(&one, 0).await;
    // Q2.4
    one.gateway.drain().await;
    until(&two, "/replicas", "it left", |replicas| replicas["peers"] == json!([])).await;
    assert_eq!(two.metric("pointsman_replicas_expired_total ").await.unwrap(), [0.0]);
}

#[tokio::test]
async fn q3_a_killed_server_leaves_each_gateway_serving_alone_and_its_return_heals() {
    let Some(mut nats) = Nats::start("").await else { return };
    let one = first(replicas("one", &nats.url())).await;
    let two = second(&one, replicas("two", &nats.url())).await;
    until_peers(&two, 1).await;
    let booking = book(&one);
    until_remote(&two, 1).await;
    nats.kill();
    // Q2.2
    let forgotten = until_remote(&two, 0).await;
    assert!(forgotten < LEASE * 3, "{forgotten:?}");
    until(&one, "/readyz", "alone", |ready| ready["replicas"]["connected"] == false).await;
    let ready = one.admin.get("/readyz").await.unwrap();
    // Q3.1
    assert_eq!((ready.status.as_u16(), &ready.json().unwrap()["replicas"]["alone"]), (200, &json!(true)));
    assert_eq!((chat(&one).await, chat(&two).await), (200, 200));
    assert!(get(&one, "/replicas").await["problem"].is_string());
    // Q8.3
    assert!(has_reason(&get(&one, "/status").await, "not connected to NATS, so that"));
    assert!(one.metric("pointsman_replicas_disconnects_total ").await.unwrap()[0] >= 1.0);
    let second_booking = book(&one);
    nats.restart().await;
    // Q3.2
    until_remote(&two, 2).await;
    until_peers(&one, 1).await;
    drop((booking, second_booking));
    until_remote(&two, 0).await;
}

#[tokio::test]
async fn q3_a_partition_is_noticed_and_heals() {
    let Some(nats) = Nats::start("").await else { return };
    let proxy = StoppingProxy::start(nats.port).await.unwrap();
    let one = first(replicas("one", &format!("nats://{}", proxy.address))).await;
    let two = second(&one, replicas("two", &nats.url())).await;
    until_peers(&two, 1).await;
    let booking = book(&one);
    until_remote(&two, 1).await;
    proxy.stop(true);
    // Q2.2
    until_remote(&two, 0).await;
    // Q3.1
    until(&one, "/readyz", "alone", |ready| ready["replicas"]["alone"] == true).await;
    until(&one, "/readyz", "not connected", |ready| ready["replicas"]["connected"] == false).await;
    assert_eq!((chat(&one).await, chat(&two).await), (200, 200));
    proxy.stop(false);
    // Q3.2
    until_remote(&two, 1).await;
    until_peers(&one, 1).await;
    drop(booking);
    until_remote(&two, 0).await;
}

/// The largest number of cached blocks of a worker that a preview of the request names.
async fn cached_blocks(cluster: &TestCluster, body: &str) -> u64 {
    fn largest(value: &Value) -> u64 {
        let own = value["cached_blocks"]["device"].as_u64().unwrap_or(0);
        let inner: Vec<&Value> = match value {
            Value::Array(values) => values.iter().collect(),
            Value::Object(fields) => fields.values().collect(),
            _ => Vec::new(),
        };
        inner.into_iter().map(largest).max().unwrap_or(0).max(own)
    }
    let reply = cluster.client.post("/v1/route", &[], body.to_owned()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    largest(&reply.json().unwrap())
}

#[tokio::test]
async fn q5_a_prompt_that_one_gateway_sent_counts_at_the_others() {
    let Some(nats) = Nats::start("").await else { return };
    let one = first(replicas("one", &nats.url())).await;
    let two = second(&one, replicas("two", &nats.url())).await;
    until_peers(&one, 1).await;
    until_peers(&two, 1).await;
    let tokens: Vec<u32> = (0..128).collect();
    let body = json!({ "model": "tiny", "prompt": tokens, "max_tokens": 2 }).to_string();
    assert_eq!((cached_blocks(&one, &body).await, cached_blocks(&two, &body).await), (0, 0));
    for turn in 0..2 {
        assert_eq!(one.client.post("/v1/completions", &[], body.clone()).await.unwrap().status, 200);
        let own = cached_blocks(&one, &body).await;
        assert!(own > 0, "turn {turn}");
        let end = Instant::now() + Duration::from_secs(15);
        while cached_blocks(&two, &body).await < own && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Q5.1
        assert_eq!(cached_blocks(&two, &body).await, own, "turn {turn}");
    }
    assert_eq!(two.sims.len(), 0, "it sent nothing itself");
}

#[tokio::test]
async fn q6_a_session_bound_at_one_gateway_is_bound_at_the_others() {
    let Some(nats) = Nats::start("").await else { return };
    let one = first(replicas("one", &nats.url())).await;
    let two = second(&one, replicas("two", &nats.url())).await;
    until_peers(&one, 1).await;
    until_peers(&two, 1).await;
    assert_eq!(bind(&one).await, 200);
    let bound = |status: &Value| status["live"]["session_bindings"] == 1;
    // Q6.1
    until(&two, "/status", "bound", bound).await;
    // A gateway that joins later learns it, too.
    let three = second(&one, replicas("three", &nats.url())).await;
    // Q6.1
    until(&three, "/status", "bound", bound).await;
}

/// Binds a session at a gateway, or asks the gateway that it is bound at.
async fn bind(cluster: &TestCluster) -> u16 {
    let control = json!({ "session_control": { "session_id": "s", "action": "bind" } });
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let body = json!({ "model": "tiny", "max_tokens": 2, "messages": messages, "nvext": control });
    cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap().status.as_u16()
}

#[tokio::test]
async fn q6_a_gateway_that_restarts_gets_its_bindings_back_from_another_one() {
    let Some(nats) = Nats::start("").await else { return };
    let engines = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let one = second(&engines, replicas("one", &nats.url())).await;
    let two = second(&engines, replicas("two", &nats.url())).await;
    until_peers(&one, 1).await;
    until_peers(&two, 1).await;
    assert_eq!(bind(&one).await, 200);
    let bound = |status: &Value| status["live"]["session_bindings"] == 1;
    until(&two, "/status", "bound", bound).await;
    one.gateway.drain().await;
    let one = second(&engines, replicas("one", &nats.url())).await;
    // Q6.6
    until(&one, "/status", "bound after its restart", bound).await;
    // One that joins when the gateway that bound the session is gone learns it, too.
    one.gateway.drain().await;
    let three = second(&engines, replicas("three", &nats.url())).await;
    // Q6.6
    until(&three, "/status", "bound at a new gateway", bound).await;
}

#[tokio::test]
async fn q6_a_gateway_that_reads_its_workers_late_keeps_the_bindings_of_the_others() {
    let Some(nats) = Nats::start("").await else { return };
    let one = first(replicas("one", &nats.url())).await;
    assert_eq!(bind(&one).await, 200);
    let settings = replicas("two", &nats.url());
    let builder = TestClusterBuilder::new().config(|config| config.replicas = settings);
    let two = builder.start().await;
    let known = |replicas: &Value| replicas["peers"][0]["in_sync"] == true;
    until(&two, "/replicas", "in sync", known).await;
    assert_eq!(get(&two, "/status").await["live"]["session_bindings"], 0);
    let worker = json!({ "url": one.sims[0].url(), "role": "aggregated", "engine": "vllm" });
    let added = two.admin.post("/workers", &[], worker.to_string()).await.unwrap();
    assert_eq!(added.status, 200);
    // Q6.7
    until(&two, "/status", "bound", |status| status["live"]["session_bindings"] == 1).await;
}

/// Publishes raw bytes as any client of the server can.
async fn publish(nats: &Nats, subject: &str, payloads: &[Vec<u8>]) {
    let mut stream = TcpStream::connect(("127.0.0.1", nats.port)).await.unwrap();
    stream.write_all(b"CONNECT {\"verbose\":false}\r\n").await.unwrap();
    for payload in payloads {
        let head = format!("PUB {subject} {}\r\n", payload.len());
        stream.write_all(&[head.as_bytes(), payload, b"\r\n"].concat()).await.unwrap();
    }
    stream.write_all(b"PING\r\n").await.unwrap();
    stream.readable().await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
}

#[tokio::test]
async fn q4_garbage_and_floods_change_nothing() {
    let Some(nats) = Nats::start("").await else { return };
    let one = first(replicas("one", &nats.url())).await;
    let two = second(&one, replicas("two", &nats.url())).await;
    until_peers(&two, 1).await;
    let booking = book(&one);
    until_remote(&two, 1).await;
    let garbage: Vec<Vec<u8>> = (0..20_000_u32).map(|number| number.to_le_bytes().repeat(40)).collect();
    publish(&nats, "pointsman.default.v1.evil", &garbage).await;
    publish(&nats, "pointsman.default.v1.one", &[b"\x01\x00".to_vec(), vec![7; 900_000]]).await;
    // Q4.1
    two.until_counted("pointsman_replicas_dropped_total{reason=\"refused\"", 2.0).await.unwrap();
    assert_eq!((chat(&one).await, chat(&two).await), (200, 200));
    let second_booking = book(&one);
    // Q4.3
    until_remote(&two, 2).await;
    drop((booking, second_booking));
    until_remote(&two, 0).await;
    assert_eq!(get(&two, "/replicas").await["peers"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn q4_two_gateways_with_one_name_are_named() {
    let Some(nats) = Nats::start("").await else { return };
    let one = first(replicas("same", &nats.url())).await;
    let _two = second(&one, replicas("same", &nats.url())).await;
    // Q4.6
    until(&one, "/readyz", "conflict", |ready| ready["replicas"]["name_conflict"] == true).await;
    let three = second(&one, replicas("three", &nats.url())).await;
    let reason =
        "exchange with other gateways: two gateways use the name `same`: give each its own `replicas.name`";
    let named = |status: &Value| has_reason(status, reason);
    // Q8.3, Q4.6: a gateway that hears both names it, too
    until(&one, "/status", "the reason", named).await;
    until(&three, "/status", "the reason at another gateway", named).await;
    assert_eq!(three.metric("pointsman_replicas_name_conflict ").await.unwrap(), [1.0]);
}

fn has_reason(status: &Value, start: &str) -> bool {
    status["reasons"].as_array().unwrap().iter().any(|reason| reason.as_str().unwrap().starts_with(start))
}

/// A heartbeat of another gateway whose clock is ahead.
fn heartbeat(sequence: u64, ahead: Duration) -> Vec<u8> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap() + ahead;
    let mut bytes = [&[1, 0][..], &7_u64.to_le_bytes(), &sequence.to_le_bytes()].concat();
    // A lease of 60 s, blocks of 16 tokens, and the entry with the time.
    bytes.extend([0xe0, 0xd4, 0x03, 16, 3]);
    let mut number = (1 << 63) | u64::try_from(now.as_micros()).unwrap();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

#[tokio::test]
async fn q8_a_gateway_whose_clock_is_wrong_is_named() {
    let Some(nats) = Nats::start("").await else { return };
    let one = first(replicas("one", &nats.url())).await;
    until(&one, "/replicas", "connected", |replicas| replicas["connected"] == true).await;
    publish(&nats, "pointsman.default.v1.two", &[heartbeat(1, Duration::from_secs(4))]).await;
    until(&one, "/replicas", "4 s", |replicas| replicas["peers"][0]["clock_ahead_ms"].as_i64() > Some(2_000))
        .await;
    let start = "the clock of gateway two is ";
    // Q8.1
    assert!(!has_reason(&get(&one, "/status").await, start));
    publish(&nats, "pointsman.default.v1.two", &[heartbeat(2, Duration::from_secs(300))]).await;
    // Q8.1
    until(&one, "/status", "the reason", |status| has_reason(status, start)).await;
    let difference = one.metric("pointsman_replicas_clock_difference_seconds ").await.unwrap();
    assert!((295.0..=300.0).contains(&difference[0]), "{difference:?}");
}
