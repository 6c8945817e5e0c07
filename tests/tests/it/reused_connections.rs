//! Engines that close a kept connection while a request is on its way: the servers of engines close idle
//! connections after a few seconds.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{self, chunk, json, stream_head},
};

/// An answer to a completion, and to a response.
const ANSWER: &str = r#"{"id":"c","choices":[{"index":0,"text":"good","finish_reason":"stop"}],"output":[]}"#;
/// Idle for so long, a connection may be closed by its server.
const IDLE: Duration = Duration::from_millis(1_100);
const EVENTS: &str =
    "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

/// Starts an engine that answers every other request of a client, and ends the connection of the others.
async fn every_other(end: Act) -> RawEngine {
    let posts = Arc::new(AtomicUsize::new(0));
    RawEngine::serving(move |request| {
        if posts.fetch_add(1, Ordering::SeqCst) % 2 == 1 {
            return vec![end.clone()];
        }
        if request.body.contains("\"stream\":true") {
            return vec![Act::Send(
                [stream_head(), chunk(EVENTS.as_bytes()), b"0\r\n\r\n".to_vec()].concat(),
            )];
        }
        vec![Act::Send(json(ANSWER))]
    })
    .await
}

async fn gateway(engine: &RawEngine) -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            config.workers.push(engine.worker("id=1,role=aggregated,engine=openai"));
            config.server.threads = 1;
        })
        .start()
        .await
}

#[tokio::test]
async fn i2_a_connection_that_is_closed_as_the_request_is_sent_is_not_a_failure() {
    for end in [Act::Close, Act::Reset] {
        let engine = every_other(end).await;
        let cluster = gateway(&engine).await;
        for request in 0..4 {
            tokio::time::sleep(IDLE).await;
            let stream = request == 2;
            let body = format!(r#"{{"model":"tiny","prompt":"the same","stream":{stream}}}"#);
            let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
            // I2.9
            assert_eq!(reply.status.as_u16(), 200, "{request}: {reply:?}");
        }
        cluster.at_rest().await.unwrap();
        // I2.9
        let legs = cluster.metric("pointsman_legs_total{").await.unwrap();
        assert_eq!((legs.as_slice(), engine.requests().len()), ([4.0].as_slice(), 7), "none failed");
    }
}

#[tokio::test]
async fn i2_a_request_that_ends_new_connections_too_is_a_failure() {
    let engine = RawEngine::serving(closes_bad).await;
    let cluster = gateway(&engine).await;
    for (prompt, status) in [("good", 200), ("bad", 502), ("good", 200)] {
        let body = format!(r#"{{"model":"tiny","prompt":"{prompt}"}}"#);
        let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
        assert_eq!(reply.status.as_u16(), status, "{reply:?}");
        tokio::time::sleep(IDLE).await;
    }
    // I2.9
    assert_eq!(engine.requests().len(), 4, "the bad one came twice");
    for (prompt, status) in [("good", 200), ("bad", 502)] {
        let body = format!(r#"{{"model":"tiny","prompt":"{prompt} again"}}"#);
        let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
        assert_eq!(reply.status.as_u16(), status, "{reply:?}");
    }
    // I2.11
    assert_eq!(engine.requests().len(), 7, "a retry came over a new connection, and no other did");
}

#[tokio::test]
async fn i2_a_connection_that_was_just_used_and_is_closed_is_retried_over_a_new_one() {
    for end in [Act::Close, Act::Reset] {
        let engine = every_other(end).await;
        let cluster = gateway(&engine).await;
        for request in 0..6 {
            let stream = request % 2 == 1;
            let body = format!(r#"{{"model":"tiny","prompt":"the same","stream":{stream}}}"#);
            let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
            // I2.11
            assert_eq!(reply.status.as_u16(), 200, "{request}: {reply:?}");
        }
        cluster.at_rest().await.unwrap();
        // I2.11
        let legs = r#"pointsman_legs_total{leg="aggregated",engine="openai",outcome="#;
        let counted = async |outcome| cluster.metric(&format!("{legs}\"{outcome}\"")).await.unwrap();
        assert_eq!((counted("ok").await, counted("closed").await), (vec![6.0], vec![5.0]));
        assert_eq!(engine.requests().len(), 11);
        let failed = cluster.metric("pointsman_worker_failing{").await.unwrap();
        assert!(failed.iter().all(|failing| *failing == 0.0), "the worker did not fail");
    }
}

/// Closes the connection of a bad request, and answers the others.
fn closes_bad(request: &RawRequest) -> Vec<Act> {
    if request.body.contains("bad") { vec![Act::Close] } else { vec![Act::Send(json(ANSWER))] }
}

/// Starts engines that close the connection of a bad request, and a gateway with a kept connection to each.
async fn ended_by_bad(count: usize, retries: u32) -> (TestCluster, Vec<RawEngine>) {
    let mut engines = Vec::new();
    for _ in 0..count {
        engines.push(RawEngine::serving(closes_bad).await);
    }
    let cluster = gateway_of(&engines, "", retries).await;
    keep_connections(&cluster, count).await;
    (cluster, engines)
}

async fn gateway_of(engines: &[RawEngine], more: &str, retries: u32) -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            for (number, engine) in engines.iter().enumerate() {
                let flag = format!("id={number},role=aggregated,engine=openai{more}");
                config.workers.push(engine.worker(&flag));
            }
            config.server.threads = 1;
            config.routing.retries = retries;
        })
        .start()
        .await
}

/// Has the gateway keep a connection to each of its workers.
async fn keep_connections(cluster: &TestCluster, count: usize) {
    for number in 0..count {
        let (id, body) = (number.to_string(), format!(r#"{{"model":"tiny","prompt":"good {number}"}}"#));
        let pin = [("x-worker-instance-id", id.as_str())];
        assert_eq!(cluster.client.post("/v1/completions", &pin, body).await.unwrap().status, 200);
    }
}

/// Two engines that close the connection of each odd request when it comes for the first time, to either.
async fn closes_once() -> [RawEngine; 2] {
    let seen = Arc::new(Mutex::new(HashSet::new()));
    let start = || {
        let seen = seen.clone();
        RawEngine::serving(move |request| match &request.body {
            body if body.contains("slow") => vec![Act::Hang],
            body if body.contains("odd") && seen.lock().insert(body.clone()) => vec![Act::Close],
            _ => vec![Act::Send(json(ANSWER))],
        })
    };
    [start().await, start().await]
}

fn odd_requests(engine: &RawEngine) -> usize {
    engine.requests().iter().filter(|request| request.body.contains("odd")).count()
}

#[tokio::test]
async fn i2_the_retry_after_a_closed_connection_goes_to_another_worker() {
    let engines = closes_once().await;
    let cluster = gateway_of(&engines, "", 3).await;
    for number in 1..=8 {
        keep_connections(&cluster, 2).await;
        let body = format!(r#"{{"model":"tiny","prompt":"odd {number}"}}"#);
        let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
        assert_eq!(reply.status.as_u16(), 200, "{reply:?}");
        // I2.14
        assert_eq!(engines.each_ref().map(odd_requests), [number, number]);
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i2_the_retry_after_a_closed_connection_does_not_wait_for_another_worker() {
    let engines = closes_once().await;
    let cluster = gateway_of(&engines, ",max_concurrency=1", 3).await;
    keep_connections(&cluster, 2).await;
    let slow = r#"{"model":"tiny","prompt":"slow","stream":true}"#;
    let slow = cluster.client.stream("/v1/completions", &[("x-worker-instance-id", "1")], slow);
    let other = async {
        cluster.until("the other worker is busy", |cluster| cluster.booked() == 1).await.unwrap();
        let body = r#"{"model":"tiny","prompt":"odd"}"#;
        cluster.client.post("/v1/completions", &[], body).await.unwrap()
    };
    let reply = tokio::select! {
        _ = slow => panic!("the engine hangs"),
        reply = other => reply,
    };
    assert_eq!(reply.status.as_u16(), 200, "{reply:?}");
    // I2.14
    assert_eq!(engines.each_ref().map(odd_requests), [2, 0]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i4_a_request_that_ends_kept_connections_visits_two_engines() {
    let (cluster, engines) = ended_by_bad(4, 9).await;
    let sent = || engines.iter().map(|engine| engine.requests().len()).sum::<usize>();
    let before = sent();
    let body = r#"{"model":"tiny","prompt":"bad"}"#;
    let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
    // I4.1, I4.2
    assert_eq!((reply.code().as_str(), sent() - before), ("poison_request", 2), "{reply:?}");
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert!(reply.status == 502 && text.contains("the engine closed the connection"), "{text}");
    // I2.14
    assert!(engines.iter().all(|engine| engine.requests().len() <= 2), "one got it twice");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i4_a_request_that_ends_kept_connections_of_two_engines_is_quarantined() {
    let (cluster, _engines) = ended_by_bad(2, 0).await;
    let body = r#"{"model":"tiny","prompt":"bad"}"#;
    for (id, code) in [("0", "bad_upstream"), ("1", "poison_request")] {
        let reply =
            cluster.client.post("/v1/completions", &[("x-worker-instance-id", id)], body).await.unwrap();
        // I4.2
        assert_eq!(reply.code(), code, "{id}: {reply:?}");
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i2_a_leg_of_a_pair_is_not_sent_twice() {
    let prefill = RawEngine::serving(|_| vec![Act::Send(json(PREFILLED))]).await;
    let decode = every_other(Act::Close).await;
    let cluster = pair(&prefill, &decode, 0).await;
    for status in [200, 502] {
        let body = r#"{"model":"tiny","max_tokens":2,"prompt":"a pair"}"#;
        let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
        assert_eq!(reply.status.as_u16(), status, "{reply:?}");
    }
    // I2.9
    assert_eq!((prefill.requests().len(), decode.requests().len()), (2, 2));
    cluster.at_rest().await.unwrap();
    // With retries, the prompt is prefilled again.
    let decode = every_other(Act::Close).await;
    let cluster = pair(&prefill, &decode, 3).await;
    for _ in 0..4 {
        let body = r#"{"model":"tiny","max_tokens":2,"prompt":"a pair"}"#;
        let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
        assert_eq!(reply.status.as_u16(), 200, "{reply:?}");
    }
    // I2.11, E5.3
    assert_eq!((prefill.requests().len(), decode.requests().len()), (2 + 7, 7));
    cluster.at_rest().await.unwrap();
    let prefill = every_prefill().await;
    let decode = RawEngine::serving(|_| vec![Act::Send(json(ANSWER))]).await;
    let cluster = pair(&prefill, &decode, 3).await;
    for _ in 0..4 {
        let body = r#"{"model":"tiny","max_tokens":2,"prompt":"a pair"}"#;
        let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
        assert_eq!(reply.status.as_u16(), 200, "{reply:?}");
    }
    // I2.11
    assert_eq!((prefill.requests().len(), decode.requests().len()), (7, 4));
    cluster.at_rest().await.unwrap();
}

const PREFILLED: &str = r#"{"id":"p","choices":[{"index":0,"text":"g","finish_reason":"length"}],
    "kv_transfer_params":{"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r",
    "remote_host":"127.0.0.1","remote_port":1}}"#;

/// Starts a prefill engine that closes the connection of every other request.
async fn every_prefill() -> RawEngine {
    let posts = AtomicUsize::new(0);
    let is_odd = move || posts.fetch_add(1, Ordering::SeqCst) % 2 == 1;
    let script = move |_: &RawRequest| vec![if is_odd() { Act::Close } else { Act::Send(json(PREFILLED)) }];
    RawEngine::serving(script).await
}

async fn pair(prefill: &RawEngine, decode: &RawEngine, retries: u32) -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            for (role, engine) in [("prefill", prefill), ("decode", decode)] {
                config.workers.push(engine.worker(&format!("role={role},engine=vllm")));
            }
            config.server.threads = 1;
            config.routing.retries = retries;
        })
        .start()
        .await
}

#[tokio::test]
async fn i2_a_response_that_an_engine_may_store_is_not_sent_twice() {
    for (store, statuses, sent) in [("", [200, 502], 2), (",\"store\":false", [200, 200], 3)] {
        let engine = every_other(Act::Close).await;
        let cluster = gateway(&engine).await;
        for status in statuses {
            let body = format!(r#"{{"model":"tiny","input":"the same"{store}}}"#);
            let reply = cluster.client.post("/v1/responses", &[], body).await.unwrap();
            assert_eq!(reply.status.as_u16(), status, "{store} {reply:?}");
            tokio::time::sleep(IDLE).await;
        }
        // I2.9
        assert_eq!(engine.requests().len(), sent, "{store}");
        cluster.at_rest().await.unwrap();
    }
}

/// Ends the first generation request of all engines that share `posts`, and answers the others.
fn ends_first(end: Act, posts: Arc<AtomicUsize>) -> impl Fn(&RawRequest) -> Vec<Act> {
    move |_| {
        let is_first = posts.fetch_add(1, Ordering::SeqCst) == 0;
        let answer = json(r#"{"id":"resp_1","object":"response","output":[]}"#);
        vec![if is_first { end.clone() } else { Act::Send(answer) }]
    }
}

#[tokio::test]
async fn i12_a_stored_response_is_retried_elsewhere_unless_an_engine_may_go_on_with_it() {
    for (fields, ends, status, sent) in [
        ("", Act::Reset, 200, 2),
        (",\"store\":true", Act::Close, 200, 2),
        (",\"background\":true", Act::Reset, 502, 1),
        (",\"background\":true", Act::Hang, 504, 1),
        // The engine did not take it.
        (",\"background\":true", Act::Send(raw_engine::status("503 Service Unavailable", "{}")), 200, 2),
    ] {
        let posts = Arc::new(AtomicUsize::new(0));
        let start = || RawEngine::serving(ends_first(ends.clone(), posts.clone()));
        let engines = [start().await, start().await];
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                config.timeouts.whole_head = Duration::from_secs(1);
                for engine in &engines {
                    config.workers.push(engine.worker("role=aggregated,engine=openai"));
                }
            })
            .start()
            .await;
        let body = format!(r#"{{"model":"tiny","input":"once"{fields}}}"#);
        let reply = cluster.client.post("/v1/responses", &[], body).await.unwrap();
        let got = engines.iter().map(|engine| engine.requests().len()).sum::<usize>();
        // I12.8
        assert_eq!((reply.status.as_u16(), got), (status, sent), "{fields} {reply:?}");
        cluster.at_rest().await.unwrap();
    }
}
