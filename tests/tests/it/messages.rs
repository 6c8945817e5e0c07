//! Messages as a client and an operator meet them, word for word.

use pointsman_sim::{Dialect, Role};
use pointsman_tests::{TestCluster, TestClusterBuilder, client::Reply};
use pointsman_workers::WorkerId;
use serde_json::{Value, json};

fn message(reply: &Reply) -> (u16, String) {
    let json = reply.json().unwrap();
    let text = json.pointer("/error/message").and_then(Value::as_str).unwrap_or_default().to_owned();
    (reply.status.as_u16(), text)
}

async fn ask(cluster: &TestCluster) -> (u16, String) {
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]});
    message(&cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap())
}

fn drain(cluster: &TestCluster, ids: impl IntoIterator<Item = u64>) {
    for id in ids {
        cluster.gateway.state().registry.snapshot().get(WorkerId(id)).unwrap().set_draining(true);
    }
}

#[tokio::test]
async fn a_missing_leg_is_named() {
    for (role, missing) in [(Role::Prefill, "decode"), (Role::Decode, "prefill")] {
        // Stock SGLang decode workers cannot prefill.
        let cluster = TestClusterBuilder::new().sim(Dialect::Sglang, role).start().await;
        let expected = format!(
            "no {missing} worker is registered for 'tiny': GET /v1/models lists the models that are served"
        );
        assert_eq!(ask(&cluster).await, (503, expected));
    }
}

#[tokio::test]
async fn i1_a_worker_whose_models_are_unknown_is_not_called_missing() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Sglang, Role::Prefill).start().await;
    for (id, decode) in [
        (2, "1 decode worker, whose models are unknown, is not ready yet"),
        (3, "2 decode workers, whose models are unknown, are not ready yet"),
    ] {
        let port = pointsman_rig::fleet::free_port().unwrap();
        let body = json!({ "role": "decode", "engine": "sglang", "url": format!("http://127.0.0.1:{port}") });
        cluster.admin.put(&format!("/workers/{id}"), &[], body.to_string()).await.unwrap();
        // I1.11
        assert_eq!(
            ask(&cluster).await,
            (503, format!("no decode worker is known to serve 'tiny': {decode}"))
        );
    }
}

#[tokio::test]
async fn workers_that_cannot_serve_are_counted_with_what_is_wrong_in_every_kind_of_fleet() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = TestCluster::disaggregated(dialect, 1, 2).await.unwrap();
        drain(&cluster, [2, 3]);
        let expected = "no worker can serve 'tiny': both decode workers are draining".to_owned();
        assert_eq!(ask(&cluster).await, (503, expected), "{dialect:?}");
    }
    let cluster = TestClusterBuilder::new()
        .sim(Dialect::Vllm, Role::Aggregated)
        .sim(Dialect::Vllm, Role::Aggregated)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    drain(&cluster, 1..=3);
    let expected = "no worker can serve 'tiny': all 3 aggregated workers are draining".to_owned();
    assert_eq!(ask(&cluster).await, (503, expected));
    let pinned = [("x-worker-instance-id", "2")];
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]});
    let reply = cluster.client.post("/v1/chat/completions", &pinned, body.to_string()).await.unwrap();
    assert_eq!(
        message(&reply),
        (409, "worker 2 is not eligible for this request: it is draining".to_owned())
    );
}

#[tokio::test]
async fn the_admin_port_asks_for_the_admin_token_and_not_for_an_api_key() {
    let cluster = TestClusterBuilder::new()
        .sim(Dialect::Vllm, Role::Aggregated)
        .config(|config| {
            config.server.admin_token = Some("right".into());
            config.auth.keys = pointsman_tests::client_keys(&[("client", "")]);
        })
        .start()
        .await;
    let reload = async |headers: &[(&str, &str)]| {
        message(&cluster.admin.post("/policies/reload", headers, "").await.unwrap())
    };
    let expected = "this needs the admin token (Authorization: Bearer …)".to_owned();
    assert_eq!(reload(&[]).await, (401, expected));
    let (status, text) = reload(&[("authorization", "Bearer client")]).await;
    assert!(status == 401 && text.starts_with("this is not the admin token; send the one of"), "{text}");
    // A client is asked for what it needs.
    let (status, text) = ask(&cluster).await;
    assert!(
        status == 401 && text.contains("no API key; send the header `authorization: Bearer KEY`"),
        "{text}"
    );
}
