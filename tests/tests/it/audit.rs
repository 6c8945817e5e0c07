//! The audit log of the operators' listener.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use pointsman_gateway::config::{KeyDigest, OperatorEntry};
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{TestClusterBuilder, log::Log, own_process};

#[tokio::test]
async fn every_change_is_in_the_audit_log_with_who_and_what_and_is_counted() {
    own_process!();
    let log = Log::start();
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.server.admin_token = Some("s3cret".into());
            config.auth.operators = vec![OperatorEntry {
                id: "grafana".into(),
                digest: Some(KeyDigest::sha256("reads").to_string().into()),
                ..OperatorEntry::default()
            }];
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let token = [("authorization", "Bearer s3cret")];
    let viewer = [("authorization", "Bearer reads")];
    cluster.admin.post("/policies/reload", &token, "").await.unwrap();
    cluster.admin.post("/workers/1/drain", &[], "").await.unwrap();
    cluster.admin.post("/policies/prefill/rollback?model=a%0Ab", &token, "").await.unwrap();
    let worker =
        r#"{"id":77,"url":"http://127.0.0.1:9","role":"aggregated","engine":"vllm","api_key":"sk-SECRET"}"#;
    cluster.admin.post("/workers", &token, worker).await.unwrap();
    cluster.admin.get("/workers").await.unwrap();
    cluster.admin.post("/workers/1/drain", &viewer, "").await.unwrap();
    let text = log.text();
    let lines: Vec<&str> = text.lines().filter(|line| line.contains(" audit: ")).collect();
    assert_eq!(lines.len(), 5, "{text}");
    let has = |line: &str, parts: &[&str]| {
        for part in parts {
            assert!(line.contains(part), "`{part}` is not in {line}");
        }
    };
    has(
        lines[0],
        &[
            "who=\"admin_token\"",
            "address=127.0.0.1",
            "POST /policies/reload",
            "outcome=\"done\"",
            "status=200",
        ],
    );
    has(
        lines[1],
        &[
            "who=\"anonymous\"",
            "POST /workers/{id}/drain",
            "/workers/1/drain",
            "outcome=\"refused\"",
            "status=401",
        ],
    );
    has(lines[2], &["POST /policies/{slot}/rollback", "outcome=\"refused\"", "status=404"]);
    has(lines[3], &["POST /workers", "worker=77", "url=http://127.0.0.1:9", "outcome=\"done\""]);
    // K3.2
    has(lines[4], &["who=\"grafana\"", "outcome=\"refused\"", "status=403"]);
    assert!(!text.contains("SECRET") && !text.contains("s3cret"), "{text}");
    let text = cluster.metrics_text().await.unwrap();
    let counted = "pointsman_admin_changes_total{action=\"POST /workers/{id}/drain\",status=\"401\"} 1";
    assert!(text.contains(counted), "{text}");
}
