//! Both frontends of vLLM, and the ranks of its data-parallel engines. The Rust frontend
//! (`VLLM_USE_RUST_FRONTEND=1`) knows ranks by other numbers than the Python one, and has the metrics of all
//! connectors.

use std::time::Duration;

use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, TestCluster, TestClusterBuilder,
    raw_engine::{RawRequest, json as json_answer, status},
};
use pointsman_workers::Ineligible;
use serde_json::json;
use tokio::{net::TcpListener, time::timeout};

const RUST: &str = "vllm-frontend-rs";
const METRICS: &str = include_str!("../../fixtures/engines/vllm-0.33/rust-frontend-metrics.txt");
/// The labels of the engines of a second node.
const SECOND_NODE: [u32; 4] = [4, 5, 6, 7];

fn metrics(labels: &[u32]) -> String {
    labels.iter().map(|label| format!("vllm:num_requests_running{{engine=\"{label}\"}} 0\n")).collect()
}

/// An engine of this frontend with these metrics, whose other answers are those of `script`.
async fn engine(
    owner: &'static str,
    metrics: String,
    script: impl Fn(&RawRequest) -> Vec<u8> + Send + Sync + 'static,
) -> RawEngine {
    RawEngine::start(move |request| {
        let answer = match request.line.as_str() {
            "GET /v1/models" => {
                json_answer(&json!({ "data": [{ "id": "tiny", "owned_by": owner }] }).to_string())
            }
            "GET /version" => json_answer(r#"{"version":"0.33.0"}"#),
            "GET /health" => json_answer("{}"),
            "GET /metrics" => status("200 OK", &metrics),
            "GET /server_info?config_format=json" => {
                json_answer(r#"{"vllm_config":{"coordinator_mode":"None","model":"tiny","tokenizer":null}}"#)
            }
            line if line.starts_with("GET") => status("404 Not Found", ""),
            _ => script(request),
        };
        vec![Act::Send(answer)]
    })
    .await
}

fn answered(request: &RawRequest) -> Vec<u8> {
    let asks = request.body.contains("\"do_remote_decode\":true");
    let handoff = json!({ "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r",
        "remote_host": "127.0.0.1", "remote_port": 1 });
    let choice = json!({ "index": 0, "text": "a", "finish_reason": if asks { "length" } else { "stop" } });
    let whole = json!({ "id": "x", "choices": [choice], "kv_transfer_params": asks.then_some(handoff) });
    json_answer(&whole.to_string())
}

async fn gateway(workers: &[(&str, &RawEngine)]) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        for (flag, engine) in workers {
            config.workers.push(engine.worker(flag));
        }
    });
    builder.start().await
}

async fn post(cluster: &TestCluster, headers: &[(&str, &str)], number: usize) -> u16 {
    let body = json!({ "model": "tiny", "max_tokens": 2, "prompt": format!("{number} word").repeat(99) });
    cluster.client.post(COMPLETIONS, headers, body.to_string()).await.unwrap().status.as_u16()
}

/// Returns the rank that a request names.
fn rank(request: &RawRequest) -> Option<u32> {
    let lines = request.head.lines().filter_map(|line| line.split_once(": "));
    let named = lines.filter(|(name, _)| *name == "x-data-parallel-rank");
    named.map(|(_, rank)| rank.parse().unwrap()).next()
}

/// Returns the ranks that the requests of an engine name, each once.
fn ranks(engine: &RawEngine) -> Vec<Option<u32>> {
    let mut all: Vec<_> = engine.requests().iter().map(rank).collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[tokio::test]
async fn b5_a_pair_with_the_metrics_of_all_connectors_is_one_of_nixl() {
    for transport in ["", ",transport=nixl"] {
        let prefill = engine(RUST, METRICS.to_owned(), answered).await;
        let decode = engine(RUST, METRICS.to_owned(), answered).await;
        let flags = ["prefill", "decode"].map(|role| format!("engine=vllm,role={role}{transport}"));
        let cluster = gateway(&[(&flags[0], &prefill), (&flags[1], &decode)]).await;
        // B5.19
        assert_eq!(post(&cluster, &[], 0).await, 200);
        assert_eq!((prefill.requests().len(), decode.requests().len()), (1, 1));
        assert!(decode.requests()[0].body.contains("remote_engine_id"), "{:?}", decode.requests());
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn b5_both_frontends_of_vllm_are_vllm() {
    for owner in ["vllm", RUST] {
        let engine = engine(owner, metrics(&[0]), answered).await;
        let cluster = gateway(&[]).await;
        cluster.gateway.state().registry.upsert(engine.worker("engine=sglang,role=aggregated"));
        let refused = |cluster: &TestCluster| {
            let snapshot = cluster.gateway.state().registry.snapshot();
            snapshot.workers().iter().all(|one| one.ineligible() == Some(Ineligible::Misconfigured))
        };
        // B5.2
        cluster.until("it is misconfigured", refused).await.unwrap();
    }
}

#[tokio::test]
async fn b5_a_rank_is_named_by_the_number_that_the_frontend_knows_it_by() {
    for (owner, expected) in [("vllm", [0, 1, 2, 3]), (RUST, SECOND_NODE)] {
        let engine = engine(owner, metrics(&SECOND_NODE), answered).await;
        let cluster = gateway(&[("engine=vllm,role=aggregated,id=7", &engine)]).await;
        for rank in 0..4 {
            let hints = [("x-worker-instance-id", "7"), ("x-dp-rank", &rank.to_string())];
            assert_eq!(post(&cluster, &hints, 0).await, 200);
        }
        // B5.20
        assert_eq!(ranks(&engine), expected.map(Some), "{owner}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn p11_the_events_of_a_second_node_are_at_the_ports_of_its_ranks() {
    // Three ports in a row, the first of which is of the first node.
    let (base, events) = loop {
        let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = first.local_addr().unwrap().port();
        let at = |offset| TcpListener::bind(("127.0.0.1", base.saturating_add(offset)));
        if let (Ok(second), Ok(third)) = (at(2).await, at(3).await) {
            break (base, [first, second, third]);
        }
    };
    let engine = engine("vllm", metrics(&[2, 3]), answered).await;
    let flag = format!("engine=vllm,role=aggregated,kv_events=tcp://{{host}}:{base}");
    let cluster = gateway(&[(&flag, &engine)]).await;
    let [first, second, third] = &events;
    // P11.4
    for listener in [second, third] {
        timeout(Duration::from_secs(20), listener.accept()).await.unwrap().unwrap();
    }
    assert!(timeout(Duration::from_millis(100), first.accept()).await.is_err(), "that of another engine");
    drop(cluster);
}

/// What vLLM's Python frontend with two ranks says of another one.
fn out_of_range(rank: u32) -> String {
    let message = format!("data_parallel_rank {rank} is out of range [0, 2).");
    json!({ "error": { "message": message, "code": 400 } }).to_string()
}

#[tokio::test]
async fn d1_an_engine_that_lost_ranks_chooses_one_itself() {
    let rust = |_| r#"{"error":{"message":"engine-core error","type":"invalid_request_error"}}"#.to_owned();
    for problem in [out_of_range as fn(u32) -> String, rust] {
        let script = move |request: &RawRequest| match rank(request) {
            Some(rank @ 2..) => status("400 Bad Request", &problem(rank)),
            _ => answered(request),
        };
        let prefill = engine("vllm", metrics(&[0, 1, 2, 3]), script).await;
        let decode = engine("vllm", metrics(&[0, 1, 2, 3]), script).await;
        let workers =
            [("engine=vllm,role=prefill,id=6", &prefill), ("engine=vllm,role=decode,id=7", &decode)];
        let cluster = gateway(&workers).await;
        let refused =
            |engine: &RawEngine| engine.requests().iter().filter(|one| rank(one) >= Some(2)).count();
        let mut sent = 0;
        // Ranks are chosen by chance.
        while sent < 12 || (sent < 64 && [&prefill, &decode].into_iter().any(|engine| refused(engine) == 0)) {
            // D1.5
            assert_eq!(post(&cluster, &[], sent).await, 200);
            sent += 1;
        }
        for engine in [&prefill, &decode] {
            let refused = refused(engine);
            assert!(refused > 0 && engine.requests().len() == sent + refused, "{:?}", ranks(engine));
        }
        let hints = [("x-worker-instance-id", "7"), ("x-dp-rank", "3")];
        // D1.5
        assert_eq!(post(&cluster, &hints, 0).await, 400, "the client named the rank");
        cluster.at_rest().await.unwrap();
    }
}

/// Starts a gateway over a Mooncake pair whose prefill engine has four ranks, and the server that names them.
async fn mooncake(prefill: &RawEngine, decode: &RawEngine) -> (TestCluster, RawEngine) {
    let query =
        r#"{"0":{"engine_id":"e0"},"1":{"engine_id":"e1"},"2":{"engine_id":"e2"},"3":{"engine_id":"e3"}}"#;
    let bootstrap = RawEngine::start(move |_| vec![Act::Send(json_answer(query))]).await;
    let port = bootstrap.address.port();
    let flags = ["prefill,id=6", "decode,id=7"]
        .map(|role| format!("engine=vllm,role={role},transport=mooncake,bootstrap_port={port}"));
    let cluster = gateway(&[(&flags[0], prefill), (&flags[1], decode)]).await;
    (cluster, bootstrap)
}

#[tokio::test]
async fn d1_a_mooncake_prefill_whose_engine_lost_its_rank_is_tried_at_another_rank() {
    let script = move |request: &RawRequest| match rank(request) {
        Some(rank @ 2..) => status("400 Bad Request", &out_of_range(rank)),
        _ => answered(request),
    };
    let prefill = engine("vllm", metrics(&[0, 1, 2, 3]), script).await;
    let decode = engine("vllm", metrics(&[0]), answered).await;
    let (cluster, _bootstrap) = mooncake(&prefill, &decode).await;
    let hints = [("x-prefill-instance-id", "6"), ("x-prefill-dp-rank", "3")];
    // D1.5
    assert_eq!(post(&cluster, &hints, 0).await, 400, "the client named the rank");
    for number in 0..32 {
        // D1.7
        assert_eq!(post(&cluster, &[], number).await, 200);
        cluster.at_rest().await.unwrap();
    }
    let refused = prefill.requests().iter().filter(|one| rank(one) >= Some(2)).count();
    // D1.7: a rank that is lost is left out until the facts are read again
    assert!((1..16).contains(&refused), "{refused}");
    let named = |engine: &RawEngine, rank: u32| {
        let id = format!("\"remote_engine_id\":\"e{rank}\"");
        engine.requests().iter().filter(|one| one.body.contains(&id)).count()
    };
    assert!(named(&decode, 0) + named(&decode, 1) >= 32, "{:?}", decode.requests());
}

#[tokio::test]
async fn d1_a_refusal_that_quotes_the_client_is_not_about_the_rank() {
    let quotes = (0..4).map(|rank| format!("data_parallel_rank {rank} is out of range [0, 2)."));
    let quotes: Vec<_> = quotes.chain(["engine-core error".to_owned()]).collect();
    let message = format!("1 validation error: {{'msg': 'not a valid string', 'input': {quotes:?}}}");
    let problem = json!({ "error": { "message": message, "code": 400 } }).to_string();
    let script = move |request: &RawRequest| match request.body.contains("invalid") {
        true => status("400 Bad Request", &problem),
        false => answered(request),
    };
    let prefill = engine("vllm", metrics(&[0, 1, 2, 3]), script).await;
    let decode = engine("vllm", metrics(&[0]), answered).await;
    let (cluster, _bootstrap) = mooncake(&prefill, &decode).await;
    let invalid = r#"{"model":"tiny","prompt":"invalid","max_tokens":2}"#;
    assert_eq!(cluster.client.post(COMPLETIONS, &[], invalid.to_owned()).await.unwrap().status, 400);
    // D1.5, D1.7
    assert_eq!(prefill.requests().len(), 1);
    for number in 0..64 {
        assert_eq!(post(&cluster, &[], number).await, 200);
        cluster.at_rest().await.unwrap();
    }
    // D1.7: no rank is left out
    assert_eq!(ranks(&prefill), [0, 1, 2, 3].map(Some));
}

#[tokio::test]
async fn b5_decode_names_the_mooncake_engine_of_the_rank_that_prefilled() {
    let cases: [(&[u32], &[u32]); 5] =
        [(&[0, 1], &[0, 1]), (&[1], &[1]), (&[2, 3], &[2, 3]), (&[1], &[0, 1]), (&[2, 3], &[0, 1, 2, 3])];
    for (own, known) in cases {
        let entry = |rank: &u32| (rank.to_string(), json!({ "engine_id": format!("engine-{rank}") }));
        let query = json!(known.iter().map(entry).collect::<serde_json::Map<_, _>>()).to_string();
        let bootstrap = RawEngine::start(move |_| vec![Act::Send(json_answer(&query))]).await;
        let prefill = engine("vllm", metrics(own), answered).await;
        let decode = engine("vllm", metrics(&[0]), answered).await;
        let port = bootstrap.address.port();
        let flags = ["prefill", "decode"]
            .map(|role| format!("engine=vllm,role={role},transport=mooncake,bootstrap_port={port}"));
        let cluster = gateway(&[(&flags[0], &prefill), (&flags[1], &decode)]).await;
        for number in 0..6 {
            assert_eq!(post(&cluster, &[], number).await, 200, "{own:?} {known:?}");
            cluster.at_rest().await.unwrap();
            let (prefills, decodes) = (prefill.requests(), decode.requests());
            let own_rank = rank(&prefills[number]).unwrap_or(0) as usize;
            let id = format!("\"remote_engine_id\":\"engine-{}\"", own[own_rank]);
            // B5.21
            assert!(decodes[number].body.contains(&id), "{own:?} {known:?}: {}", decodes[number].body);
        }
    }
}
