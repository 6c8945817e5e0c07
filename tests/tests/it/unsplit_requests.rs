//! Requests that are never split over a pair, where no single worker may serve them (I6.21, B1.6).

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{RESPONSES, TestCluster, TestClusterBuilder, client::Reply};
use serde_json::{Value, json};

async fn pair(dialect: Dialect, version: &str, enforced: bool) -> TestCluster {
    let mut builder = TestClusterBuilder::new().config(|config| config.routing.enforce_disagg = enforced);
    for role in [Role::Prefill, Role::Decode] {
        let version = Some(version.to_owned());
        builder = builder.sim_with(SimConfig { version, record: 9, ..SimConfig::instant(dialect, role) }, "");
    }
    builder.start().await
}

async fn post(cluster: &TestCluster, path: &str, more: &Value) -> Reply {
    let mut body = json!({"model": "tiny", "input": "hello"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    cluster.client.post(path, &[], body.to_string()).await.unwrap()
}

fn recorded(cluster: &TestCluster) -> usize {
    cluster.sims.iter().map(|sim| sim.recorded().len()).sum()
}

async fn unsplittable(cluster: &TestCluster) -> f64 {
    let name = "pointsman_handoffs_total{result=\"unsplittable\"}";
    cluster.metric(name).await.unwrap().into_iter().sum()
}

#[track_caller]
fn assert_refused(reply: &Reply, path: &str) {
    let message = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(reply.status, 400, "{path}: {message}");
    assert!(message.contains("the request cannot be split over two workers"), "{path}: {message}");
    assert!(reply.headers.get("retry-after").is_none(), "{path}: no retry helps");
}

#[tokio::test]
async fn i6_a_request_that_no_worker_of_the_model_can_run_alone_is_refused() {
    let cluster = pair(Dialect::Sglang, "0.5.23", false).await;
    let requests = [
        ("/v1/embeddings", json!({})),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"]})),
        (RESPONSES, json!({"background": true})),
        (RESPONSES, json!({"tools": [{"type": "web_search"}]})),
    ];
    for (path, more) in &requests {
        // I6.21
        assert_refused(&post(&cluster, path, more).await, path);
    }
    assert_eq!((recorded(&cluster), unsplittable(&cluster).await), (0, 4.0));
    assert_eq!(post(&cluster, RESPONSES, &json!({"store": false})).await.status, 200);
    let old = pair(Dialect::Sglang, "0.5.22", false).await;
    assert_refused(&post(&old, RESPONSES, &json!({"store": false})).await, RESPONSES);
    assert_eq!(recorded(&old), 0);
}

#[tokio::test]
async fn i6_a_response_that_a_pair_would_run_is_not_refused_for_good_while_no_pair_is_up() {
    let mut cluster = pair(Dialect::Sglang, "0.5.23", false).await;
    cluster.sims.remove(0).kill().await;
    let down = |cluster: &TestCluster| {
        cluster.gateway.state().registry.snapshot().workers().iter().any(|worker| worker.is_down())
    };
    cluster.until("the prefill worker is down", down).await.unwrap();
    let reply = post(&cluster, RESPONSES, &json!({"store": false})).await;
    // B1.4
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (503, "no_worker"), "{reply:?}");
}

#[tokio::test]
async fn b1_enforce_disagg_holds_for_every_endpoint_that_generates_text() {
    let ids: Vec<u32> = (0..40).collect();
    let generate = json!({"token_ids": ids, "sampling_params": {"max_tokens": 4}});
    let requests = [
        ("/inference/v1/generate", generate),
        (RESPONSES, json!({"background": true})),
        (RESPONSES, json!({"tools": [{"type": "web_search"}]})),
    ];
    for enforced in [true, false] {
        let cluster = pair(Dialect::Vllm, "0.33.0", enforced).await;
        for (path, more) in &requests {
            let reply = post(&cluster, path, more).await;
            if enforced {
                // B1.6
                assert_refused(&reply, path);
            } else {
                assert_ne!(reply.status, 400, "{path}: {reply:?}");
            }
        }
        // The simulated engine lacks the first endpoint.
        let (reached, refused) = if enforced { (0, 3.0) } else { (2, 0.0) };
        assert_eq!((recorded(&cluster), unsplittable(&cluster).await), (reached, refused));
        // B1.6: no prefill leg is left out.
        for (path, more) in [("/v1/embeddings", json!({})), ("/tokenize", json!({"prompt": "a"}))] {
            let reply = post(&cluster, path, &more).await;
            assert_eq!(reply.status, 200, "{path}: {reply:?}");
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn b1_a_response_that_may_be_stored_runs_on_a_pair_where_that_is_enforced() {
    for (enforced, expected) in [(true, [1, 1, 0]), (false, [0, 0, 1])] {
        let mut builder = TestClusterBuilder::new().config(|config| config.routing.enforce_disagg = enforced);
        for role in [Role::Prefill, Role::Decode, Role::Aggregated] {
            let version = Some("0.5.23".to_owned());
            let sim = SimConfig { version, record: 9, ..SimConfig::instant(Dialect::Sglang, role) };
            builder = builder.sim_with(sim, "");
        }
        let cluster = builder.start().await;
        let reply = post(&cluster, RESPONSES, &json!({})).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let of_each: Vec<usize> = cluster.sims.iter().map(|sim| sim.recorded().len()).collect();
        // B1.6, I6.3
        assert_eq!(of_each, expected);
    }
}
