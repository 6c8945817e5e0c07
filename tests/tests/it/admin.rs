//! The admin listener: authentication, and the messages of refusals.

use pointsman_routing::SlotKind;
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{TestCluster, TestClusterBuilder};

async fn cluster(reads: bool) -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            config.server.admin_token = Some("s3cret".into());
            config.server.admin_token_reads = reads;
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await
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
        assert_eq!(post(path, Some("s3creT")).await, (401, "unauthorized".to_owned()), "{path}");
    }
    let left = cluster.admin.delete("/workers/1").await.unwrap();
    assert_eq!((left.status.as_u16(), left.code()), (401, "unauthorized".to_owned()));
    assert!(left.json().unwrap()["error"]["request_id"].is_string());
    assert_eq!(post("/policies/reload", Some("s3cret")).await.0, 200);
    for path in ["/policies", "/workers", "/metrics", "/readyz"] {
        assert_eq!(cluster.admin.get(path).await.unwrap().status, 200, "{path}");
    }
    // The API keys of clients do not count.
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
async fn an_impossible_command_is_answered_with_its_reason() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    for (path, status, code) in [
        ("/policies/prefil/rollback", 404, "slot_not_found"),
        ("/policies/prefill/rollback?model=unknown", 404, "slot_not_found"),
        ("/policies/prefill/rollback", 409, "nothing_to_roll_back"),
        ("/policies/prefill/promote", 409, "nothing_to_promote"),
        ("/policies/prefill/promote?from=canary", 409, "nothing_to_promote"),
        ("/policies/prefill/promote?from=active", 400, "invalid_request"),
        ("/policies/prefill/promote?from=nowhere&model=unknown", 404, "slot_not_found"),
        ("/policies/prefill/rollback?from=canary", 400, "invalid_request"),
        ("/policies/prefill/rollback?lane=nowhere", 400, "invalid_request"),
        ("/policies/prefill/promote?from=nowhere", 400, "invalid_request"),
        ("/policies/prefill/promote?form=canary", 400, "invalid_request"),
    ] {
        let reply = cluster.admin.post(path, &[], "").await.unwrap();
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (status, code), "{path}");
    }
    for query in ["lane=canary", "from=canary"] {
        let reply = cluster.admin.delete(&format!("/policies/prefill/rollback?{query}")).await.unwrap();
        // O1.15
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (400, "invalid_request"), "{query}");
    }
}

#[tokio::test]
async fn o1_a_promotion_that_cannot_be_says_what_the_slot_runs_and_what_to_do() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            let entry = toml::from_str("shadow = { builtin = 'least-loaded' }").unwrap();
            config.policies.slots.insert(SlotKind::Aggregated, entry);
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let message = async |path: &str| {
        let reply = cluster.admin.post(path, &[], "").await.unwrap();
        reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned()
    };
    for (path, expected) in [
        (
            "/policies/prefill/promote",
            "slot `prefill` does not have a canary or shadow to promote; it runs active `kv-aware`; put the policy at \
             `prefill.canary.wasm` or `prefill.shadow.wasm` first",
        ),
        (
            "/policies/aggregated/promote?from=canary",
            "slot `aggregated` does not have a canary to promote; it runs active `predicted-latency`, shadow `least-loaded`; name \
             `shadow`",
        ),
        (
            "/policies/aggregated/promote?from=active",
            "`from=active` is not a lane for this: expected canary or shadow; slot `aggregated` runs active `predicted-latency`, \
             shadow `least-loaded`",
        ),
        (
            "/policies/aggregated/rollback?lane=shadwo",
            "`lane=shadwo` is not a lane for this: expected active, canary or shadow; slot `aggregated` runs active \
             `predicted-latency`, shadow `least-loaded`",
        ),
    ] {
        // O1.14
        assert_eq!(message(path).await, expected, "{path}");
    }
    cluster.drop_policy("prefill.canary.wasm", b"garbage").unwrap();
    cluster.admin.post("/policies/reload", &[], "").await.unwrap();
    let refused = message("/policies/prefill/promote?from=canary").await;
    assert!(refused.ends_with("`prefill.canary.wasm` was refused (not_wasm): correct it first"), "{refused}");
}

/// Sends a request with the given head, byte for byte, and returns status and body.
async fn raw(cluster: &TestCluster, head: &str) -> (u16, String) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(cluster.gateway.admin).await.unwrap();
    let head = format!("{}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", head.replace('\n', "\r\n"));
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let status = answer.get(9..12).unwrap().parse().unwrap();
    (status, answer.split("\r\n\r\n").nth(1).unwrap_or_default().to_owned())
}

#[tokio::test]
async fn a_page_that_rebinds_its_name_to_this_address_reads_and_changes_nothing() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.server.admin_names = vec!["gw.internal".to_owned()])
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let json = "content-type: application/json";
    for path in
        ["GET /workers", "GET /", "GET /events", "GET /metrics", "GET /decisions", "POST /policies/reload"]
    {
        let (status, body) =
            raw(&cluster, &format!("{path} HTTP/1.1\nhost: evil.example:9090\n{json}")).await;
        assert_eq!(status, 403, "{path}: {body}");
        assert!(body.contains("`evil.example:9090` is not a name of this listener"), "{body}");
    }
    for host in ["127.0.0.1:9", "localhost", "[::1]:9090", "gw.internal:9090"] {
        let (status, body) =
            raw(&cluster, &format!("POST /policies/reload HTTP/1.1\nhost: {host}\n{json}")).await;
        assert_eq!(status, 200, "{host}: {body}");
    }
    // A load balancer's health check may use any name.
    assert_eq!(raw(&cluster, "GET /healthz HTTP/1.1\nhost: evil.example").await.0, 200);
}

#[tokio::test]
async fn a_page_of_another_site_changes_nothing_with_any_browser() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let json = "content-type: application/json";
    let reload = "POST /policies/reload HTTP/1.1\nhost: 127.0.0.1:9090";
    for origin in ["https://evil.example", "null", "http://127.0.0.1:8000", "http://localhost:9090"] {
        let (status, body) = raw(&cluster, &format!("{reload}\norigin: {origin}\n{json}")).await;
        assert!(status == 403 && body.contains("is another site"), "{origin}: {status} {body}");
    }
    assert_eq!(raw(&cluster, &format!("{reload}\norigin: http://127.0.0.1:9090\n{json}")).await.0, 200);
    assert_eq!(raw(&cluster, &format!("{reload}\nsec-fetch-site: cross-site\n{json}")).await.0, 403);
    // The content types that a form can send.
    for kind in ["", "\ncontent-type: text/plain", "\ncontent-type: application/x-www-form-urlencoded"] {
        let (status, body) = raw(&cluster, &format!("{reload}{kind}")).await;
        assert!(status == 415 && body.contains("application/json"), "{kind}: {status} {body}");
    }
    assert_eq!(
        raw(&cluster, &format!("{reload}\ncontent-type: Application/JSON; charset=utf-8")).await.0,
        200
    );
}

#[tokio::test]
async fn with_the_token_a_change_needs_neither_a_name_nor_json() {
    let cluster = cluster(true).await;
    let reload = "POST /policies/reload HTTP/1.1\nhost: any.name\nauthorization: Bearer s3cret";
    assert_eq!(raw(&cluster, reload).await.0, 200);
    assert_eq!(raw(&cluster, "POST /policies/reload HTTP/1.1\nhost: any.name").await.0, 403);
}

#[tokio::test]
async fn k1_wrong_keys_from_a_trusted_proxy_do_not_slow_its_clients_down() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.server.admin_token = Some("s3cret".into());
            config.auth.keys = pointsman_tests::client_keys(&[("sk-1", "")]);
            config.auth.trusted_proxies = vec!["127.0.0.0/8".to_owned()];
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    for number in 0..12 {
        let wrong = [("authorization", "Bearer wrong")];
        let reply = cluster.client.post("/v1/completions", &wrong, "{}").await.unwrap();
        // K1.12
        assert_eq!((reply.status.as_u16(), reply.code()), (401, "unauthorized".to_owned()), "{number}");
    }
    assert_eq!(cluster.metric("pointsman_wrong_keys_total{listener=\"clients\"}").await.unwrap(), [12.0]);
    let mut last = 0;
    for _ in 0..11 {
        let wrong = [("authorization", "Bearer wrong")];
        last = cluster.admin.post("/policies/reload", &wrong, "").await.unwrap().status.as_u16();
    }
    // K1.12
    assert_eq!(last, 429, "operators do not share the address of a proxy");
}

#[tokio::test]
async fn repeated_wrong_keys_are_slowed_down_and_right_ones_are_not() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.server.admin_token = Some("s3cret".into());
            config.auth.keys = pointsman_tests::client_keys(&[("sk-1", "")]);
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let wrong = [("authorization", "Bearer wrong")];
    for number in 0..10 {
        let reply = match number % 3 {
            0 => cluster.admin.post("/policies/reload", &wrong, "").await.unwrap(),
            1 => cluster.client.get_with("/v1/models", &wrong).await.unwrap(),
            _ => cluster.client.post("/v1/completions", &wrong, "{}").await.unwrap(),
        };
        assert_eq!((reply.status.as_u16(), reply.code()), (401, "unauthorized".to_owned()), "{number}");
    }
    for client in [&cluster.admin, &cluster.client] {
        let begun = tokio::time::Instant::now();
        let path = if std::ptr::eq(client, &raw const cluster.admin) {
            "/policies/reload"
        } else {
            "/v1/completions"
        };
        let reply = client.post(path, &wrong, "{}").await.unwrap();
        assert_eq!((reply.status.as_u16(), reply.code()), (429, "rate_limited".to_owned()));
        assert!(reply.headers.contains_key("retry-after"));
        assert!(begun.elapsed() >= std::time::Duration::from_millis(900), "{:?}", begun.elapsed());
    }
    let begun = tokio::time::Instant::now();
    for _ in 0..10 {
        let right = cluster.client.get_with("/v1/models", &[("authorization", "Bearer sk-1")]).await.unwrap();
        assert_eq!(right.status, 200);
        let right =
            cluster.admin.post("/policies/reload", &[("authorization", "Bearer s3cret")], "").await.unwrap();
        assert_eq!(right.status, 200);
    }
    // A delay would hold up each of the twenty for a second.
    assert!(begun.elapsed() < std::time::Duration::from_secs(15), "{:?}", begun.elapsed());
    let text = cluster.metrics_text().await.unwrap();
    assert!(text.contains("pointsman_wrong_keys_total{listener=\"operators\"} 5"), "{text}");
    assert!(text.contains("pointsman_wrong_keys_total{listener=\"clients\"} 7"), "{text}");
}
