//! Workers that come from files and leases: real sockets, the gateway in process.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use pointsman_gateway::config::{DiscoveryFile, DiscoveryFileFormat, DiscoveryScheme};
use pointsman_sim::{Dialect, Role, Sim, SimConfig, SimHandle};
use pointsman_tests::{
    Act, CHAT, RawEngine, TestCluster, TestClusterBuilder,
    raw_engine::{json as json_answer, status},
    tls::{Authority, TlsFiles},
    tls_proxy::TlsProxy,
};
use serde_json::{Value, json};

async fn sim() -> SimHandle {
    Sim::start(SimConfig::instant(Dialect::Vllm, Role::Aggregated)).await.unwrap()
}

fn worker(sim: &SimHandle) -> Value {
    json!({ "url": sim.url(), "role": "aggregated", "engine": "vllm" })
}

async fn workers(cluster: &TestCluster) -> Vec<Value> {
    let list = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    list["workers"].as_array().unwrap().clone()
}

async fn source(cluster: &TestCluster, name: &str) -> Value {
    let status = cluster.admin.get("/discovery").await.unwrap().json().unwrap();
    status["sources"].as_array().unwrap().iter().find(|source| source["name"] == name).unwrap().clone()
}

/// Waits until the workers fit.
async fn until(cluster: &TestCluster, what: &str, fits: impl Fn(&[Value]) -> bool) {
    for _ in 0..1_000 {
        if fits(&workers(cluster).await) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: {:?}", workers(cluster).await);
}

fn eligible(workers: &[Value]) -> bool {
    !workers.is_empty() && workers.iter().all(|worker| worker["ineligible"].is_null())
}

async fn status_of_chat(cluster: &TestCluster) -> u16 {
    let body = json!({ "model": "tiny", "max_tokens": 2, "messages": [{ "role": "user", "content": "hi" }] });
    cluster.client.post(CHAT, &[], body.to_string()).await.unwrap().status.as_u16()
}

#[tokio::test]
async fn p5_a_file_feeds_the_fleet_and_keeps_it_when_it_breaks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.json");
    let (one, two) = (sim().await, sim().await);
    let write = |workers: &[Value]| std::fs::write(&path, json!({ "workers": workers }).to_string()).unwrap();
    write(&[worker(&one)]);
    let cluster = TestClusterBuilder::new().worker_file(&path).start().await;
    until(&cluster, "the first worker is eligible", eligible).await;
    assert_eq!(workers(&cluster).await[0]["source"], "file:a");
    assert_eq!(status_of_chat(&cluster).await, 200);
    write(&[worker(&one), worker(&two)]);
    // P5.1
    until(&cluster, "both are eligible", |workers| workers.len() == 2 && eligible(workers)).await;
    std::fs::write(&path, "{ \"workers\": [").unwrap();
    let mut away = source(&cluster, "file:a").await;
    for _ in 0..500 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        away = source(&cluster, "file:a").await;
        if away["state"] == "away" {
            break;
        }
    }
    // P3.2, P5.2
    assert_eq!(
        (&away["state"], &away["workers"], &away["times_away"]),
        (&json!("away"), &json!(2), &json!(1))
    );
    assert!(away["problem"].as_str().unwrap().contains("workers.json") && away["age_ms"].is_u64(), "{away}");
    assert_eq!(status_of_chat(&cluster).await, 200);
    let metrics = cluster.metrics_text().await.unwrap();
    // P3.3
    assert!(metrics.contains("pointsman_discovery_source_present{source=\"file:a\"} 0"), "{metrics}");
    assert!(metrics.contains("pointsman_discovery_workers{source=\"file:a\"} 2"), "{metrics}");
}

#[tokio::test]
async fn p6_a_worker_registers_itself_renews_and_leaves() {
    let engine = sim().await;
    let cluster = TestClusterBuilder::new().start().await;
    let put = async |path: &str, body: String| cluster.admin.put(path, &[], body).await.unwrap();
    assert_eq!(put("/workers/7", String::new()).await.status, 404);
    // P6.1
    assert_eq!(put("/workers/7?ttl=60", worker(&engine).to_string()).await.status, 200);
    until(&cluster, "it is eligible", eligible).await;
    assert_eq!(put("/workers/7", String::new()).await.status, 200);
    assert_eq!(status_of_chat(&cluster).await, 200);
    for (path, body) in [
        ("/workers/7?ttl=0", worker(&engine)),
        ("/workers/7?ttl=86400", worker(&engine)),
        ("/workers/7?ttl=x", worker(&engine)),
        ("/workers/7", json!({ "id": 8, "url": engine.url(), "role": "aggregated", "engine": "vllm" })),
        ("/workers/7", json!({ "url": "ftp://x", "role": "aggregated", "engine": "vllm" })),
    ] {
        let refused = put(path, body.to_string()).await;
        // P6.4
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (400, "invalid_request"), "{path}");
    }
    let taken = put("/workers/8", worker(&engine).to_string()).await;
    // P2.2: over HTTP
    assert_eq!((taken.status.as_u16(), taken.code().as_str()), (409, "worker_conflict"));
    assert_eq!(workers(&cluster).await[0]["source"], "leases");
    // P6.3
    assert_eq!(cluster.admin.delete("/workers/7").await.unwrap().status, 200);
    until(&cluster, "it left", <[Value]>::is_empty).await;
    assert_eq!(put("/workers/7?ttl=1", worker(&engine).to_string()).await.status, 200);
    // P6.2
    until(&cluster, "its lease ended", <[Value]>::is_empty).await;
}

#[tokio::test]
async fn p6_a_lease_needs_the_role_of_an_operator() {
    let builder = TestClusterBuilder::new();
    let cluster = builder.config(|config| config.server.admin_token = Some("t".into())).start().await;
    let put = async |headers: &[(&str, &str)]| {
        let body = json!({ "url": "http://127.0.0.1:9", "role": "decode", "engine": "vllm" }).to_string();
        cluster.admin.put("/workers/7", headers, body).await.unwrap().status.as_u16()
    };
    // P6.5
    assert_eq!(put(&[]).await, 401);
    assert_eq!(put(&[("authorization", "Bearer t")]).await, 200);
}

#[tokio::test]
async fn p10_a_discovered_worker_is_not_eligible_before_its_engine_was_asked() {
    let answers = Arc::new(AtomicBool::new(false));
    let script = {
        let answers = answers.clone();
        move |request: &pointsman_tests::RawRequest| match request.line.as_str() {
            "GET /v1/models" if !answers.load(Ordering::Relaxed) => vec![Act::Hang],
            "GET /v1/models" => vec![Act::Send(json_answer(r#"{"data":[{"id":"tiny"}]}"#))],
            line if line.starts_with("POST") => vec![Act::Send(json_answer(r#"{"choices":[]}"#))],
            "GET /health" => vec![Act::Send(json_answer("{}"))],
            _ => vec![Act::Send(status("404 Not Found", "{}"))],
        }
    };
    let engine = RawEngine::start(script).await;
    let cluster = TestClusterBuilder::new().start().await;
    // The source tells everything, and the engine is healthy.
    let body = json!({
        "url": format!("http://{}", engine.address), "role": "aggregated", "engine": "openai",
        "models": ["tiny"], "block_size": 16, "total_blocks": 100,
    });
    assert_eq!(cluster.admin.put("/workers/7", &[], body.to_string()).await.unwrap().status, 200);
    until(&cluster, "it is known", |workers| workers.len() == 1).await;
    for _ in 0..10 {
        // P10.1
        assert_eq!(workers(&cluster).await[0]["ineligible"], "not_ready");
        assert_eq!(status_of_chat(&cluster).await, 503);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(engine.requests().is_empty(), "{:?}", engine.requests());
    answers.store(true, Ordering::Relaxed);
    // P10.1
    until(&cluster, "it is eligible", eligible).await;
    assert_eq!(status_of_chat(&cluster).await, 200);
}

#[tokio::test]
async fn p10_a_discovered_worker_that_its_engine_contradicts_is_refused_with_both_values() {
    let engine = sim().await;
    let cluster = TestClusterBuilder::new().start().await;
    let cases = [
        (json!({ "models": ["other"] }), "model", "other", "tiny"),
        (json!({ "engine": "sglang" }), "engine", "sglang", "vllm"),
        (json!({ "block_size": 48 }), "block_size", "48", "16"),
    ];
    for (id, (more, fact, configured, reported)) in (1..).zip(cases) {
        let mut body = worker(&engine);
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        let path = format!("/workers/{id}");
        let put = cluster.admin.put(&path, &[], body.to_string()).await.unwrap();
        assert_eq!(put.status, 200);
        until(&cluster, "it is refused", |workers| workers[0]["ineligible"] == "misconfigured").await;
        let contradiction = workers(&cluster).await[0]["contradiction"].clone();
        // P10.2
        assert_eq!(contradiction, json!({ "fact": fact, "configured": configured, "reported": reported }));
        assert_eq!(cluster.admin.delete(&path).await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn p10_engines_of_a_source_without_urls_may_have_tls() {
    let authority = Authority::new().unwrap();
    let certificate = authority.server().unwrap();
    let engine = sim().await;
    let proxy = TlsProxy::start(engine.addr(), &certificate, None).await.unwrap();
    let files = TlsFiles::new(&certificate, Some(&authority)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("endpoints.yaml");
    let port = proxy.address.port();
    std::fs::write(&path, format!("endpoints: [{{ name: a, address: 127.0.0.1, port: \"{port}\" }}]"))
        .unwrap();
    let defaults = [("engine", "vllm"), ("role", "aggregated"), ("tls_server_name", "127.0.0.1")];
    let file = DiscoveryFile {
        name: "a".to_owned(),
        path,
        format: DiscoveryFileFormat::LlmD,
        scheme: DiscoveryScheme::Https,
        defaults: defaults.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        ..DiscoveryFile::default()
    };
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.discovery.files = vec![file];
            config.upstream.tls.ca_file = Some(files.path("ca.pem"));
        })
        .start()
        .await;
    // P10.4
    until(&cluster, "it is eligible", eligible).await;
    assert_eq!(status_of_chat(&cluster).await, 200);
    assert_eq!(workers(&cluster).await[0]["spec"]["url"], format!("https://127.0.0.1:{port}"));
}
