//! An engine whose KV events the gateway cannot read.

use std::time::Duration;

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{TestCluster, TestClusterBuilder, log::Log, own_process};
use serde_json::{Value, json};

use super::kv_groups::{Publisher, predicted};

#[tokio::test]
async fn h6_a_feed_that_cannot_be_read_is_not_live_and_decisions_predict_the_cache() {
    own_process!();
    let log = Log::start();
    let mut publisher = Publisher::bind().await;
    let endpoint = format!("tcp://127.0.0.1:{}", publisher.port);
    let config = SimConfig::instant(Dialect::Vllm, Role::Aggregated);
    let builder = TestClusterBuilder::new().sim_with(config, &format!(",kv_events={endpoint}"));
    let cluster = builder.start().await;
    // A batch of vLLM as JSON.
    let json = json!([1.0, [{ "type": "BlockStored", "block_hashes": [1] }], 0]).to_string();
    let error = "cannot decode kv event batch: ";
    for _ in 0..400 {
        publisher.send_payload(json.clone().into_bytes()).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        if worker(&cluster).await["reason"].as_str().is_some_and(|reason| reason.contains(error)) {
            break;
        }
    }
    let told = format!("no KV events of rank 0 from {endpoint}: {error}");
    let begins = |text: &Value, with: &str| text.as_str().unwrap_or_default().starts_with(with);
    let seen = worker(&cluster).await;
    let feed = &seen["ranks"][0]["kv_feed"];
    // H6.22
    assert!(begins(&seen["reason"], &told) && begins(&feed["reason"], error), "{seen}");
    assert_eq!((&feed["live"], &seen["ineligible"]), (&json!(false), &Value::Null));
    assert_eq!(cluster.metric("pointsman_kv_feed_live{").await.unwrap(), [0.0]);
    let status: Value = cluster.admin.get("/status").await.unwrap().json().unwrap();
    assert!(begins(&status["reasons"][0], &format!("worker 1: {told}")), "{}", status["reasons"]);
    let tokens: Vec<u32> = (0..640).collect();
    let body = json!({ "model": "tiny", "prompt": tokens, "max_tokens": 2 }).to_string();
    let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    for _ in 0..5 {
        publisher.send_payload(json.clone().into_bytes()).await;
    }
    for _ in 0..200 {
        if predicted(&cluster, &tokens).await > 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // H6.22
    assert_eq!(predicted(&cluster, &tokens).await, 40);
    let text = log.text();
    let told = text.lines().filter(|line| line.contains("kv events of a worker cannot be decoded"));
    let lines: Vec<&str> = told.collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    for part in ["WARN", "worker=1", "rank=0", &format!("endpoint={endpoint}"), error] {
        assert!(lines[0].contains(part), "`{part}` is not in {}", lines[0]);
    }
    // The engine sends what can be read.
    for _ in 0..14 {
        publisher.send(&[json!({ "type": "AllBlocksCleared" })]).await;
    }
    let seen = until_live(&cluster, true).await;
    // H6.22
    assert_eq!(seen["ranks"][0]["kv_feed"], json!({ "endpoint": endpoint, "live": true, "reason": null }));
    assert_eq!(seen["reason"], Value::Null);
}

#[tokio::test]
async fn h6_a_feed_of_which_two_of_three_batches_cannot_be_read_is_not_live() {
    let mut publisher = Publisher::bind().await;
    let endpoint = format!("tcp://127.0.0.1:{}", publisher.port);
    let config = SimConfig::instant(Dialect::Vllm, Role::Aggregated);
    let builder = TestClusterBuilder::new().sim_with(config, &format!(",kv_events={endpoint}"));
    let cluster = builder.start().await;
    let tokens: Vec<u32> = (0..640).collect();
    until_live(&cluster, true).await;
    // More than once, because a new connection may miss messages.
    for _ in 0..20 {
        two_of_three(&mut publisher).await;
    }
    let seen = until_live(&cluster, false).await;
    let reason = seen["reason"].as_str().unwrap_or_default();
    // H6.22
    assert!(reason.contains("cannot decode kv event batch"), "{seen}");
    let body = json!({ "model": "tiny", "prompt": tokens, "max_tokens": 2 }).to_string();
    assert_eq!(cluster.client.post("/v1/completions", &[], body).await.unwrap().status, 200);
    for _ in 0..5 {
        two_of_three(&mut publisher).await;
    }
    for _ in 0..200 {
        if predicted(&cluster, &tokens).await > 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // H6.22: from decisions
    assert_eq!(predicted(&cluster, &tokens).await, 40);
    assert_eq!(worker(&cluster).await["ranks"][0]["kv_feed"]["live"], false);
    for _ in 0..16 {
        publisher.send(&[json!({ "type": "BlockRemoved", "block_hashes": [1] })]).await;
    }
    // H6.22
    assert_eq!(until_live(&cluster, true).await["reason"], Value::Null);
}

/// Publishes two batches that cannot be decoded, and one that can.
async fn two_of_three(publisher: &mut Publisher) {
    for _ in 0..2 {
        publisher.send_payload(b"{}".to_vec()).await;
    }
    publisher.send(&[json!({ "type": "BlockRemoved", "block_hashes": [1] })]).await;
}

async fn worker(cluster: &TestCluster) -> Value {
    let workers = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    workers["workers"][0].clone()
}

/// Waits until the feed of the only worker is live, or is not. Returns the worker.
async fn until_live(cluster: &TestCluster, live: bool) -> Value {
    for _ in 0..500 {
        let seen = worker(cluster).await;
        if seen["ranks"][0]["kv_feed"]["live"] == live {
            return seen;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the feed is not as expected: live={live}");
}
