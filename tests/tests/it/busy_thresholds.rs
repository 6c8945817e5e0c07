//! Busy thresholds (F6): engines' real load over sockets decides who may get a request.

#![allow(clippy::disallowed_methods, reason = "servers of tests end with them")]

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use pointsman_gateway::config::Config;
use pointsman_routing::{BusyByLeg, BusyThresholds};
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{COMPLETIONS, Client, TestCluster, TestClusterBuilder, client::Reply};
use pointsman_workers::Leg;
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// A prompt of this many tokens, by the estimate of four bytes a token.
fn body(tokens: usize, output: u32) -> String {
    let prompt = "abc ".repeat(tokens);
    json!({"model": "tiny", "prompt": prompt, "max_tokens": output, "ignore_eos": true}).to_string()
}

/// An engine that runs one sequence at a time, slowly.
fn narrow() -> SimConfig {
    SimConfig {
        max_num_seqs: 1,
        itl: Duration::from_millis(20),
        blocks: 200,
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    }
}

fn thresholds(config: &mut Config, leg: Leg, thresholds: BusyThresholds) {
    config.routing.busy = BusyByLeg::from([(leg, thresholds)]);
}

fn queue(most: u32) -> BusyThresholds {
    BusyThresholds { engine_queue: Some(most), ..BusyThresholds::default() }
}

fn usage(most: f32) -> BusyThresholds {
    BusyThresholds { kv_usage: Some(most), ..BusyThresholds::default() }
}

fn tokens(most: u32) -> BusyThresholds {
    BusyThresholds { prefill_tokens: Some(most), ..BusyThresholds::default() }
}

/// Requests that another client sends to an engine, past the gateway, until they are dropped.
async fn load(cluster: &TestCluster, engine: usize, requests: usize, prompt: usize) -> JoinSet<()> {
    let mut clients = JoinSet::new();
    for _ in 0..requests {
        let client =
            Client::new(cluster.sims[engine].url().strip_prefix("http://").unwrap().parse().unwrap());
        let body = body(prompt, 1_000);
        clients.spawn(async move { drop(client.post(COMPLETIONS, &[], body).await) });
    }
    clients
}

async fn workers(cluster: &TestCluster) -> Value {
    cluster.admin.get("/workers").await.unwrap().json().unwrap()
}

/// Waits until `/workers` gives this reason for a worker; `None`: it is not busy.
async fn until_busy(cluster: &TestCluster, engine: usize, reason: Option<&str>) {
    let mut last = Value::Null;
    for _ in 0..200 {
        last = workers(cluster).await["workers"][engine].clone();
        if last["busy"].get(0).and_then(|busy| busy["reason"].as_str()) == reason {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("worker {} is not busy by {reason:?}: {last}", engine + 1);
}

/// Returns the workers that would run a request of this cluster now; empty when all are busy. It asks until
/// `expected` of them were named, since equal ones are chosen by chance.
async fn chosen(cluster: &TestCluster, expected: usize) -> BTreeSet<u64> {
    let mut chosen = BTreeSet::new();
    for request in 0..64 {
        if request >= 12 && chosen.len() >= expected {
            break;
        }
        let reply = cluster.client.post("/v1/route", &[], body(8, 2)).await.unwrap();
        if reply.status == 200 {
            chosen.extend(reply.json().unwrap()["worker_id"]["decode_worker_id"].as_u64());
        } else {
            overloaded(&reply);
        }
    }
    chosen
}

fn overloaded(reply: &Reply) {
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (529, "overloaded"), "{reply:?}");
    assert!(reply.headers.contains_key("retry-after"), "{reply:?}");
}

#[tokio::test]
async fn f6_a_worker_whose_engine_queues_gets_nothing_while_another_is_free_and_all_busy_is_529() {
    let edit: Arc<parking_lot::Mutex<u32>> = Arc::new(parking_lot::Mutex::new(1));
    let read = edit.clone();
    let cluster = TestClusterBuilder::new()
        .config(|config| thresholds(config, Leg::Aggregated, queue(1)))
        .reread(None, move |started| {
            let mut config = started.clone();
            thresholds(&mut config, Leg::Aggregated, queue(*read.lock()));
            Ok(config)
        })
        .sim_with(narrow(), "")
        .sim_with(narrow(), "")
        .start()
        .await;
    let told = workers(&cluster).await;
    assert_eq!(told["busy_thresholds"]["default"]["aggregated"]["engine_queue"], 1, "{told}");
    let first = load(&cluster, 0, 4, 8).await;
    until_busy(&cluster, 0, Some("engine_queue")).await;
    // F6.7
    assert_eq!(chosen(&cluster, 1).await, BTreeSet::from([2]), "{}", workers(&cluster).await);
    let metrics = cluster.metrics_text().await.unwrap();
    assert!(metrics.contains(r#"pointsman_worker_busy{worker="1",role="aggregated"} 1"#), "{metrics}");
    let pin = [("x-worker-instance-id", "1")];
    let pinned = cluster.client.post(COMPLETIONS, &pin, body(8, 2)).await.unwrap();
    assert_eq!((pinned.status.as_u16(), pinned.code().as_str()), (409, "worker_not_eligible"));
    let second = load(&cluster, 1, 4, 8).await;
    until_busy(&cluster, 1, Some("engine_queue")).await;
    // F6.8
    overloaded(&cluster.client.post(COMPLETIONS, &[], body(8, 2)).await.unwrap());
    // The threshold rises while both engines still queue.
    *edit.lock() = 50;
    let reloaded = cluster.gateway.reload().await.unwrap();
    assert_eq!((&reloaded.applied[..], reloaded.needs_restart.len()), (&["routing.busy".to_owned()][..], 0));
    assert_eq!(chosen(&cluster, 2).await, BTreeSet::from([1, 2]), "{}", workers(&cluster).await);
    *edit.lock() = 1;
    cluster.gateway.reload().await.unwrap();
    assert_eq!(chosen(&cluster, 0).await, BTreeSet::new());
    drop((first, second));
    until_busy(&cluster, 0, None).await;
    assert_eq!(cluster.client.post(COMPLETIONS, &[], body(8, 2)).await.unwrap().status, 200);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f6_kv_usage_of_each_dialect_makes_a_worker_busy() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let engine = || SimConfig { dialect, ..narrow() };
        let cluster = TestClusterBuilder::new()
            .config(|config| thresholds(config, Leg::Aggregated, usage(0.5)))
            .sim_with(engine(), "")
            .sim_with(engine(), "")
            .start()
            .await;
        assert_eq!(chosen(&cluster, 2).await, BTreeSet::from([1, 2]));
        let other = load(&cluster, 0, 1, 16 * 120).await;
        until_busy(&cluster, 0, Some("kv_usage")).await;
        assert_eq!(chosen(&cluster, 1).await, BTreeSet::from([2]), "{dialect:?}");
        drop(other);
        until_busy(&cluster, 0, None).await;
        // Free blocks that hold a prefix do not count as used.
        assert_eq!(chosen(&cluster, 2).await, BTreeSet::from([1, 2]), "{dialect:?}");
    }
}

#[tokio::test]
async fn f6_prompt_tokens_that_wait_for_prefill_make_a_prefill_worker_busy_unless_its_model_allows_more() {
    for (allowed, status) in [(None, 529), (Some(100_000), 200)] {
        let slow = SimConfig {
            overhead: Duration::from_secs(2),
            ..SimConfig::instant(Dialect::Vllm, Role::Prefill)
        };
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                thresholds(config, Leg::Prefill, tokens(100));
                if let Some(most) = allowed {
                    let model = config.models.entry("tiny".to_owned()).or_default();
                    model.busy = BusyByLeg::from([(Leg::Prefill, tokens(most))]);
                }
            })
            .sim_with(slow, "")
            .sim(Dialect::Vllm, Role::Decode)
            .start()
            .await;
        let client = cluster.client.clone();
        let first =
            tokio::spawn(async move { client.post(COMPLETIONS, &[], body(200, 2)).await.unwrap().status });
        cluster.until("the first request is booked", |cluster| cluster.booked() == 1).await.unwrap();
        let reply = cluster.client.post(COMPLETIONS, &[], body(20, 2)).await.unwrap();
        assert_eq!(reply.status.as_u16(), status, "{reply:?}");
        if allowed.is_none() {
            overloaded(&reply);
        }
        assert_eq!(first.await.unwrap(), 200, "what runs is not shed");
        let after = cluster.client.post(COMPLETIONS, &[], body(20, 2)).await.unwrap();
        assert_eq!(after.status, 200, "the prefill is over");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn f6_figures_that_cannot_be_read_any_more_do_not_keep_a_worker_busy() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            thresholds(config, Leg::Aggregated, queue(1));
            config.probe.load_interval = Duration::from_millis(50);
        })
        .sim_with(narrow(), "")
        .start()
        .await;
    let _others = load(&cluster, 0, 4, 8).await;
    until_busy(&cluster, 0, Some("engine_queue")).await;
    let broken = pointsman_sim::FaultKind::Status { status: 500, retry_after: None };
    let leg = Some(pointsman_sim::FaultLeg::Probe);
    cluster.sims[0].set_faults(vec![pointsman_sim::Fault { leg, ..pointsman_sim::Fault::always(broken) }]);
    until_busy(&cluster, 0, None).await;
    assert_eq!(workers(&cluster).await["workers"][0]["engine_load"], Value::Null);
}
