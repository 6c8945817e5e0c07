//! When the gateway's own file descriptors run out, no worker is blamed.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::{fs::File, process::Command, time::Duration};

use pointsman_sim::{Dialect, Role};
use pointsman_tests::{TestClusterBuilder, own_process};

#[tokio::test]
async fn exhausted_descriptors_are_not_the_worker_s_fault_and_the_client_may_retry() {
    own_process!();
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.routing.retries = 0;
            config.server.threads = 1;
        })
        .sim(Dialect::Openai, Role::Aggregated)
        .start()
        .await;
    // The client's connection is open before the descriptors run out; the gateway's to the engine is not.
    assert_eq!(cluster.client.get("/health").await.unwrap().status, 200);
    let limited = Command::new("prlimit")
        .args(["--nofile=300", "--pid", &std::process::id().to_string()])
        .status()
        .unwrap();
    assert!(limited.success());
    let mut files = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        files.push(file);
    }
    let body = r#"{"model":"tiny","prompt":"x","max_tokens":1}"#;
    let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.code()), (503, "overloaded".to_owned()), "{reply:?}");
    assert!(reply.headers.contains_key("retry-after"));
    // Some probes fail as well.
    tokio::time::sleep(Duration::from_millis(400)).await;
    let snapshot = cluster.gateway.state().registry.snapshot();
    assert!(snapshot.workers()[0].ineligible().is_none(), "{:?}", snapshot.workers()[0].ineligible());
    assert_eq!(snapshot.workers()[0].candidates()[0].load().view().error_ppm(), 0);
    drop(files);
    let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    let text = cluster.metrics_text().await.unwrap();
    assert!(text.contains("outcome=\"shortage\"} 1"), "{text}");
    cluster.at_rest().await.unwrap();
}
