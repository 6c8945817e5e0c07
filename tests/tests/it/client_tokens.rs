//! Clients that leave while their prompts are tokenized: nothing is sent for them, and nothing waits for
//! them.

use std::{path::PathBuf, time::Duration};

use pointsman_gateway::config::{Model, TokenSource};
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder, raw::send};
use tokio::net::TcpStream;

fn body(bytes: usize) -> String {
    // Each sentence is another one, so that no piece of it is cached.
    let text: String = (0..bytes / 32).map(|number| format!("sentence number {number:09} of it. ")).collect();
    format!(r#"{{"model":"tiny","max_tokens":1,"prompt":"{text}"}}"#)
}

async fn cluster(timeout: Duration) -> TestCluster {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../host/tokens/fixtures/model"));
    let sim = SimConfig {
        record: 100,
        max_model_len: 10_000_000,
        blocks: 1_000_000,
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    let builder = TestClusterBuilder::new().sim_with(sim, "").config(|config| {
        let tokenizer = Some(TokenSource::Folder(folder));
        let model = Model { tokenizer, tokenizer_timeout: timeout, ..Model::default() };
        config.models.insert("tiny".to_owned(), model);
    });
    builder.start().await
}

fn generations(cluster: &TestCluster) -> usize {
    cluster.sims[0].recorded().iter().filter(|request| request.path == COMPLETIONS).count()
}

async fn not_tokenized(cluster: &TestCluster) -> String {
    let text = cluster.metrics_text().await.unwrap();
    let lines = text.lines().filter(|line| line.starts_with("pointsman_not_tokenized_total{"));
    lines.collect::<Vec<_>>().join("\n")
}

fn inflight(cluster: &TestCluster) -> i64 {
    cluster.gateway.state().metrics.inflight.get()
}

/// A cluster, and four clients with long prompts that wait for the tokenizer.
async fn with_long_prompts() -> (TestCluster, Vec<TcpStream>) {
    let cluster = cluster(Duration::from_secs(60)).await;
    let body = body(16_000_000);
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(send(cluster.gateway.address, &[&head, &*body].concat()).await.unwrap());
    }
    cluster.until("the prompts wait", |cluster| inflight(cluster) == 4).await.unwrap();
    (cluster, clients)
}

#[tokio::test]
async fn prompts_of_clients_that_left_are_not_encoded_and_delay_nothing() {
    let (cluster, clients) = with_long_prompts().await;
    drop(clients);
    let reply = cluster.client.post(COMPLETIONS, &[], body(6_000)).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    cluster.at_rest().await.unwrap();
    assert_eq!(not_tokenized(&cluster).await, "", "the short prompt has tokens");
    assert_eq!(generations(&cluster), 1, "an engine was asked for a client that left");
}

#[tokio::test]
async fn a_short_prompt_does_not_wait_for_long_ones_of_others() {
    let (cluster, clients) = with_long_prompts().await;
    let reply = cluster.client.post(COMPLETIONS, &[], body(6_000)).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    assert!(inflight(&cluster) >= 3, "most of the long ones wait: {}", inflight(&cluster));
    assert_eq!(not_tokenized(&cluster).await, "", "the short prompt has tokens");
    drop(clients);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn h7_a_prompt_that_waits_too_long_is_routed_by_bytes_and_counted() {
    let cluster = cluster(Duration::from_millis(100)).await;
    let reply = cluster.client.post(COMPLETIONS, &[], body(3_000_000)).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    // H7.5
    assert_eq!(not_tokenized(&cluster).await, "pointsman_not_tokenized_total{reason=\"tokenizer_slow\"} 1");
    cluster.at_rest().await.unwrap();
}
