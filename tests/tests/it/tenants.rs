//! Tenants: a request's tenant comes from its API key or from a trusted header, and policies see it.

use std::time::Duration;

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_test_guests::TENANT_LIMIT;
use pointsman_tests::{TestCluster, TestClusterBuilder, client_keys};

use crate::api_keys::ask;

const HEADER: &str = "x-llm-d-inference-fairness-id";

/// A gateway whose clients have the keys `sk-a` and `sk-b` of two tenants, and `sk-proxy` of none. It
/// believes `proxies` which tenant a request has.
async fn cluster(slots: &str, proxies: &str) -> TestCluster {
    let text = format!(
        r#"
        [server]
        tenant_header = "{HEADER}"
        [decisions]
        facts = ["tenant-hash", "tenant-active-requests"]
        {slots}
        "#
    );
    let from: Config = toml::from_str(&text).unwrap();
    TestClusterBuilder::new()
        .config(|config| {
            config.auth.keys = client_keys(&[("sk-proxy", ""), ("sk-a", "team-a"), ("sk-b", "team-b")]);
            config.server.tenant_header = from.server.tenant_header;
            config.auth.trusted_proxies = vec![proxies.to_owned()];
            config.decisions = from.decisions;
            config.policies.slots = from.policies.slots;
        })
        .sim_with(SimConfig { record: 100, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) }, "")
        .start()
        .await
}

/// Facts `tenant-hash` and `tenant-active-requests` of the newest decision.
async fn facts(cluster: &TestCluster) -> (String, u64) {
    let facts = cluster.newest_facts().await.unwrap();
    (facts["tenant-hash"].to_string(), facts["tenant-active-requests"].as_u64().unwrap())
}

#[tokio::test]
async fn the_key_names_the_tenant_and_a_trusted_header_does_for_keys_of_none() {
    let cluster = cluster("", "127.0.0.0/8").await;
    let mut seen = Vec::new();
    for headers in [
        &[("authorization", "Bearer sk-a")][..],
        &[("authorization", "Bearer sk-b")],
        // The header says nothing about a key that has a tenant.
        &[("authorization", "Bearer sk-a"), (HEADER, "team-b")],
        &[("authorization", "Bearer sk-proxy"), (HEADER, "team-b")],
        &[("authorization", "Bearer sk-proxy"), (HEADER, "team-c")],
        &[("authorization", "Bearer sk-proxy")],
    ] {
        assert_eq!(ask(&cluster, headers).await, (200, String::new()), "{headers:?}");
        seen.push(facts(&cluster).await);
        cluster.at_rest().await.unwrap();
    }
    let [a, b, still_a, named_b, c, none] = seen.try_into().unwrap();
    assert_eq!((&a, &b), (&still_a, &named_b));
    assert!(a.0 != b.0 && b.0 != c.0 && a.0 != c.0 && a.0 != none.0, "{a:?} {b:?} {c:?} {none:?}");
    assert_eq!((a.1, none), (1, ("0".to_owned(), 0)), "the request itself is in the gateway");
    assert_eq!(ask(&cluster, &[("authorization", "Bearer sk-c")]).await.0, 401);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn the_shipped_tenant_limit_limits_each_tenant_by_its_name() {
    let slots = r#"
        [policies.slots.aggregated]
        grants = ["state"]
        settings = { requests = 3, window-ms = 4000000000, tenants = { "tenant:team-a" = 1 } }
    "#;
    let cluster = cluster(slots, "127.0.0.1").await;
    cluster.drop_policy("aggregated.wasm", TENANT_LIMIT).unwrap();
    let report = cluster.admin.post("/policies/reload", &[], "").await.unwrap();
    assert_eq!(report.status, 200, "{:?}", report.json());
    let admitted = async |key: &str| {
        let mut admitted = 0;
        for _ in 0..5 {
            let (status, code) = ask(&cluster, &[("authorization", key)]).await;
            assert!(status == 200 || (status == 429 && code == "shed"), "{status} {code}");
            admitted += u32::from(status == 200);
        }
        admitted
    };
    assert_eq!(admitted("Bearer sk-a").await, 1, "the limit of team-a");
    assert_eq!(admitted("Bearer sk-b").await, 3, "the limit of every other tenant");
    assert_eq!(admitted("Bearer sk-proxy").await, 5, "no tenant, no limit");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn k4_the_tenants_header_counts_from_trusted_proxies_only() {
    let named = [("authorization", "Bearer sk-proxy"), (HEADER, "team-b")];
    let trusting = cluster("", "127.0.0.1").await;
    assert_eq!(ask(&trusting, &named).await.0, 200);
    // K4.1
    assert_ne!(facts(&trusting).await.0, "0");
    let (twice, long) = ([named[0], named[1], named[1]], "x".repeat(200));
    // K4.3
    assert_eq!(ask(&trusting, &twice).await, (400, "invalid_request".to_owned()));
    assert_eq!(ask(&trusting, &[named[0], (HEADER, &long)]).await, (400, "invalid_request".to_owned()));
    let other = cluster("", "10.0.0.0/8").await;
    assert_eq!(ask(&other, &named).await.0, 200);
    // K4.1: from elsewhere it is ignored, and does not reach the engine.
    assert_eq!(facts(&other).await.0, "0");
    let seen = other.sims[0].recorded();
    assert!(!seen.is_empty());
    assert!(seen.iter().flat_map(|request| &request.headers).all(|(name, _)| name != HEADER), "{seen:?}");
}

#[tokio::test]
async fn m4_tenants_have_series_when_the_configuration_names_them() {
    let text = r#"
        [server]
        tenant_header = "x-llm-d-inference-fairness-id"
        [auth]
        trusted_proxies = ["127.0.0.1"]
        [queue]
        limit = 4
        max_inflight = 1
        [tenants.team-a]
        [tenants.team-b]
        requests_per_minute = 1
    "#;
    let from: Config = toml::from_str(text).unwrap();
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.server.tenant_header = from.server.tenant_header;
            (config.auth, config.queue, config.tenants) = (from.auth, from.queue, from.tenants);
        })
        .sim_with(
            SimConfig {
                overhead: Duration::from_millis(50),
                ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
            },
            "",
        )
        .start()
        .await;
    let of = |name: &'static str| [(HEADER, name)];
    let a = of("team-a");
    let (first, second) = tokio::join!(ask(&cluster, &a), ask(&cluster, &a));
    assert_eq!((first.0, second.0), (200, 200));
    assert_eq!(ask(&cluster, &of("team-b")).await.0, 200);
    assert_eq!(ask(&cluster, &of("team-b")).await.1, "rate_limit_exceeded");
    assert_eq!(ask(&cluster, &of("stranger")).await.0, 200);
    assert_eq!(ask(&cluster, &of("another")).await.0, 200);
    assert_eq!(ask(&cluster, &[]).await.0, 200);
    cluster.at_rest().await.unwrap();
    let metric = async |series: &str| cluster.metric(&format!("pointsman_tenant_{series}")).await.unwrap();
    for (labels, count) in [
        (r#"tenant="team-a",code="ok""#, 2.0),
        (r#"tenant="team-b",code="ok""#, 1.0),
        (r#"tenant="team-b",code="rate_limit_exceeded""#, 1.0),
        (r#"tenant="other",code="ok""#, 2.0),
        (r#"tenant="none",code="ok""#, 1.0),
    ] {
        // M4.5
        assert_eq!(metric(&format!("requests_total{{{labels}}}")).await, [count], "{labels}");
    }
    assert_eq!(metric("requests_total{").await.len(), 5);
    assert_eq!(metric("output_tokens_total{tenant=\"team-a\"}").await, [4.0]);
    assert!(metric("prompt_tokens_total{tenant=\"team-a\"}").await[0] > 0.0);
    assert_eq!(metric("queue_seconds_count{tenant=\"team-a\"}").await, [1.0], "one of the two waited");
    assert!(metric("queue_seconds_sum{tenant=\"team-a\"}").await[0] > 0.01);
}

#[test]
fn k4_a_tenants_header_without_trusted_proxies_is_a_problem() {
    let mut config = Config::default();
    config.server.tenant_header = HEADER.to_owned();
    let problem = config.resolve().unwrap_err().to_string();
    // K4.2
    assert!(
        problem
            .contains("server.tenant_header: `x-llm-d-inference-fairness-id` has no effect without trusted"),
        "{problem}"
    );
    config.auth.trusted_proxies = vec!["127.0.0.1".into(), "10.0.0.0/33".into(), "proxy".into()];
    let problem = config.resolve().unwrap_err().to_string();
    assert!(problem.contains("auth.trusted_proxies[1]: `10.0.0.0/33`"), "{problem}");
    assert!(problem.contains("auth.trusted_proxies[2]: `proxy`"), "{problem}");
}
