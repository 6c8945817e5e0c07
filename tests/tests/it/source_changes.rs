//! What operators and clients are told when sources of workers change or cannot be read.

use std::time::Duration;

use pointsman_gateway::config::DiscoveryEtcd;
use pointsman_tests::{TestCluster, TestClusterBuilder};
use serde_json::json;

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
    let cluster = builder.start().await.unwrap();
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
