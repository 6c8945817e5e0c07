//! The operators' listener: who may use it, and how it says no.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use pointsman_sim::{Dialect, Role};
use pointsman_tests::{TestCluster, TestClusterBuilder};

async fn cluster(reads: bool) -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            config.server.admin_token = Some("s3cret".to_owned());
            config.server.admin_token_reads = reads;
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await
        .unwrap()
}

#[tokio::test]
async fn with_a_token_every_change_needs_it() {
    let cluster = cluster(false).await;
    let post = async |path: &str, token: Option<&str>| {
        let token = token.map(|token| format!("Bearer {token}"));
        let headers: Vec<_> = token.iter().map(|token| ("authorization", token.as_str())).collect();
        let reply = cluster.admin.post(path, &headers, "").await.unwrap();
        (reply.status.as_u16(), reply.code())
    };
    for path in [
        "/policies/reload",
        "/policies/prefill/rollback",
        "/policies/prefill/promote",
        "/workers",
        "/workers/1/drain",
    ] {
        assert_eq!(post(path, None).await, (401, "unauthorized".to_owned()), "{path}");
        assert_eq!(post(path, Some("s3creT")).await, (403, "forbidden".to_owned()), "{path}");
    }
    let left = cluster.admin.delete("/workers/1").await.unwrap();
    assert_eq!((left.status.as_u16(), left.code()), (401, "unauthorized".to_owned()));
    assert!(left.json().unwrap()["error"]["request_id"].is_string());
    assert_eq!(post("/policies/reload", Some("s3cret")).await.0, 200);
    for path in ["/policies", "/workers", "/metrics", "/readyz"] {
        assert_eq!(cluster.admin.get(path).await.unwrap().status, 200, "{path}");
    }
    // Clients' keys are another matter.
    assert_eq!(cluster.client.get("/v1/models").await.unwrap().status, 200);
}

#[tokio::test]
async fn reading_may_need_the_token_too_but_health_never_does() {
    let cluster = cluster(true).await;
    for path in ["/policies", "/workers", "/metrics"] {
        assert_eq!(cluster.admin.get(path).await.unwrap().code(), "unauthorized", "{path}");
    }
    for path in ["/healthz", "/readyz"] {
        assert_eq!(cluster.admin.get(path).await.unwrap().status, 200, "{path}");
    }
}

#[tokio::test]
async fn what_cannot_be_done_is_named() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await.unwrap();
    for (path, status, code) in [
        ("/policies/prefil/rollback", 404, "slot_not_found"),
        ("/policies/prefill/rollback?model=unknown", 404, "slot_not_found"),
        ("/policies/prefill/rollback", 409, "nothing_to_roll_back"),
        ("/policies/prefill/promote", 409, "nothing_to_promote"),
        ("/policies/prefill/promote?from=active", 409, "nothing_to_promote"),
        ("/policies/prefill/promote?from=nowhere", 400, "invalid_request"),
        ("/policies/prefill/promote?form=canary", 400, "invalid_request"),
    ] {
        let reply = cluster.admin.post(path, &[], "").await.unwrap();
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (status, code), "{path}");
    }
}
