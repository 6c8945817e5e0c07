//! What operators and clients are told when sources of workers change or cannot be read.

use std::time::Duration;

use pointsman_gateway::config::DiscoveryEtcd;
use pointsman_tests::{TestCluster, TestClusterBuilder, log::Log, own_process};
use serde_json::{Value, json};

/// Waits for a line of the log, after the first `skipped` that fit.
async fn line(log: &Log, skipped: usize, word: &str) -> String {
    for _ in 0..1_000 {
        let text = log.text();
        if let Some(line) = text.lines().filter(|line| line.contains(word)).nth(skipped) {
            return line.to_owned();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("no line with {word}: {}", log.text());
}

#[tokio::test]
async fn p13_each_change_of_a_source_has_one_bounded_line() {
    own_process!();
    let (log, dir) = (Log::start(), tempfile::tempdir().unwrap());
    let path = dir.path().join("workers.json");
    let write = |ports: &[u16]| {
        let worker = |port: &u16| {
            let url = format!("http://127.0.0.1:{port}");
            json!({ "url": url, "role": "aggregated", "engine": "vllm", "models": ["m"] })
        };
        let workers: Vec<Value> = ports.iter().map(worker).collect();
        std::fs::write(&path, json!({ "workers": workers }).to_string()).unwrap();
    };
    let ports: Vec<u16> = (1..=20).collect();
    write(&ports);
    let _cluster = TestClusterBuilder::new().worker_file(&path).start().await;
    let word = "workers of a discovery source changed";
    let first = line(&log, 0, word).await;
    // P13.1
    assert!(first.contains("source=\"file:a\" joined=20 left=0 workers=20"), "{first}");
    assert_eq!(first.matches("http://127.0.0.1:").count(), 8, "{first}");
    write(&ports[1..]);
    let second = line(&log, 1, word).await;
    // P13.1
    assert!(second.contains("joined=0 left=1 workers=19"), "{second}");
    assert!(second.contains("urls_left=\"http://127.0.0.1:1\""), "{second}");
    // A file without a change has no further line.
    tokio::time::sleep(Duration::from_millis(1_300)).await;
    let text = log.text();
    // P13.1
    assert_eq!(text.matches(word).count(), 2, "{text}");
}

async fn reasons(cluster: &TestCluster) -> Vec<String> {
    let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
    serde_json::from_value(status["reasons"].clone()).unwrap()
}

#[tokio::test]
async fn p3_a_source_that_cannot_be_read_is_a_reason_and_clients_are_told_without_its_address() {
    let etcd = DiscoveryEtcd {
        name: "main".to_owned(),
        endpoints: vec!["http://127.0.0.1:9".to_owned()],
        ..DiscoveryEtcd::default()
    };
    let builder = TestClusterBuilder::new().config(|config| config.discovery.etcd = vec![etcd]);
    let cluster = builder.start().await;
    let expected = "the source etcd:main cannot be read: http://127.0.0.1:9: ";
    let mut told = Vec::new();
    for _ in 0..500 {
        told = reasons(&cluster).await;
        if told.iter().any(|reason| reason.starts_with(expected)) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // P3.7
    assert!(told.iter().any(|reason| reason.starts_with(expected)), "{told:?}");
    assert!(told[1].ends_with("; it has listed no worker"), "{told:?}");
    let body = json!({ "model": "tiny", "messages": [] }).to_string();
    let reply = cluster.client.post("/v1/chat/completions", &[], body).await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (503, "no_worker"));
    let message = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    // P3.7
    assert_eq!(
        message,
        "no worker is registered: the gateway cannot read its sources of workers; retry after the time in `retry-after`"
    );
}
