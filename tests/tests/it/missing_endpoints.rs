//! Engines that lack an endpoint which others of their model have.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "helpers of tests may fail as tests do")]

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use pointsman_tests::{
    Act, COMPLETIONS, RESPONSES, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{json as ok, status},
};
use serde_json::{Value, json};

const RERANK: &str = "/rerank";
const NOT_FOUND: &str = r#"{"detail":"Not Found"}"#;

/// An engine, which has the endpoints for text. It knows no response to continue.
async fn engine(has_others: bool) -> RawEngine {
    let answer = move |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => ok(r#"{"object":"list","data":[{"id":"tiny","owned_by":"vllm"}]}"#),
        "POST /v1/completions" => ok(r#"{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}"#),
        "POST /rerank" if has_others => ok(r#"{"results":[]}"#),
        "POST /v1/responses" if request.body.contains("previous_response_id") && !has_others => {
            status("404 Not Found", r#"{"error":{"message":"Response with id 'a' not found."}}"#)
        }
        "POST /v1/responses" if has_others || request.body.contains("BOTH") => {
            ok(r#"{"id":"resp_1","status":"completed","output":[]}"#)
        }
        line if line.starts_with("GET") => ok("{}"),
        _ => status("404 Not Found", NOT_FOUND),
    };
    RawEngine::start(move |request| vec![Act::Send(answer(request))]).await
}

/// Adds a worker, or gives it another description.
async fn describe(cluster: &TestCluster, id: u64, engine: &RawEngine, max_concurrency: u32) {
    let worker = json!({
        "id": id, "role": "aggregated", "engine": "vllm", "url": format!("http://{}", engine.address),
        "max_concurrency": max_concurrency,
    });
    let told = cluster.admin.post("/workers", &[], worker.to_string()).await.unwrap();
    assert_eq!(told.status, 200, "{told:?}");
    cluster.until_counted("pointsman_worker_eligible{", id as f64).await.unwrap();
}

/// Worker 1, whose engine lacks endpoints, and worker 2.
async fn cluster() -> (TestCluster, [RawEngine; 2]) {
    let engines = [engine(false).await, engine(true).await];
    let cluster = TestClusterBuilder::new().start().await;
    describe(&cluster, 1, &engines[0], 100).await;
    describe(&cluster, 2, &engines[1], 100).await;
    (cluster, engines)
}

async fn post(cluster: &TestCluster, path: &str, more: Value) -> (u16, String) {
    let mut body = json!({"model": "tiny", "prompt": "a", "input": "a", "query": "a", "documents": ["a"]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let reply = cluster.client.post(path, &[], body.to_string()).await.unwrap();
    (reply.status.as_u16(), String::from_utf8_lossy(&reply.body).into_owned())
}

fn asked(engine: &RawEngine, path: &str) -> usize {
    engine.requests().iter().filter(|request| request.line == format!("POST {path}")).count()
}

#[tokio::test]
async fn i17_an_engine_that_lacks_an_endpoint_is_asked_for_it_only_when_no_other_is_left() {
    let (cluster, [lacks, other]) = cluster().await;
    for path in [RESPONSES, RERANK] {
        for _ in 0..20 {
            assert_eq!(post(&cluster, path, json!({})).await.0, 200, "{path}");
        }
        // I17.7
        assert_eq!((asked(&lacks, path), asked(&other, path)), (1, 20), "{path}");
    }
    for _ in 0..20 {
        assert_eq!(post(&cluster, COMPLETIONS, json!({})).await.0, 200);
    }
    // I17.7: it has this one
    assert!(asked(&lacks, COMPLETIONS) >= 5, "{}", asked(&lacks, COMPLETIONS));
    let drained = cluster.admin.post("/workers/2/drain", &[], String::new()).await.unwrap();
    assert_eq!(drained.status, 200, "{drained:?}");
    // I17.7: it is asked, and its answer passes
    assert_eq!(post(&cluster, RERANK, json!({})).await, (404, NOT_FOUND.to_owned()));
    assert_eq!(post(&cluster, RESPONSES, json!({"input": "BOTH"})).await.0, 200);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i17_another_description_of_a_worker_has_its_engine_asked_again() {
    let (cluster, [lacks, _other]) = cluster().await;
    for _ in 0..8 {
        assert_eq!(post(&cluster, RERANK, json!({})).await.0, 200);
    }
    assert_eq!(asked(&lacks, RERANK), 1);
    describe(&cluster, 1, &lacks, 99).await;
    cluster.until_counted("pointsman_worker_eligible{", 2.0).await.unwrap();
    for _ in 0..20 {
        assert_eq!(post(&cluster, RERANK, json!({})).await.0, 200);
    }
    // I17.7
    assert_eq!(asked(&lacks, RERANK), 2);
}

/// Both engines have the endpoint. Only one has the response.
#[tokio::test]
async fn i17_a_response_that_an_engine_does_not_have_does_not_say_that_it_lacks_the_endpoint() {
    let (cluster, [lacks, other]) = cluster().await;
    for _ in 0..4 {
        post(&cluster, RESPONSES, json!({"previous_response_id": "a", "store": false})).await;
    }
    for _ in 0..20 {
        assert_eq!(post(&cluster, RESPONSES, json!({"input": "BOTH"})).await.0, 200);
    }
    // I17.7
    assert!(asked(&lacks, RESPONSES) >= 5, "{} and {}", asked(&lacks, RESPONSES), asked(&other, RESPONSES));
}

/// The proxy before one engine loses its routes for a moment.
#[tokio::test]
async fn i17_a_404_for_a_moment_does_not_take_from_an_engine_what_it_has_answered() {
    let is_lost = Arc::new(AtomicBool::new(false));
    let lost = is_lost.clone();
    let answer = move |request: &RawRequest| match request.line.as_str() {
        line if line.starts_with("POST") && lost.load(Ordering::SeqCst) => {
            status("404 Not Found", "no route to a backend")
        }
        line => ok(match line {
            "GET /v1/models" => r#"{"object":"list","data":[{"id":"tiny","owned_by":"vllm"}]}"#,
            "POST /v1/completions" => r#"{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}"#,
            _ => "{}",
        }),
    };
    let proxied = RawEngine::start(move |request| vec![Act::Send(answer(request))]).await;
    let other = engine(true).await;
    let cluster = TestClusterBuilder::new().start().await;
    describe(&cluster, 1, &proxied, 100).await;
    describe(&cluster, 2, &other, 100).await;
    let ask = async |number: usize| {
        let before = asked(&proxied, COMPLETIONS);
        for _ in 0..number {
            assert_eq!(post(&cluster, COMPLETIONS, json!({})).await.0, 200);
        }
        asked(&proxied, COMPLETIONS) - before
    };
    assert!(ask(20).await >= 5);
    is_lost.store(true, Ordering::SeqCst);
    assert!(ask(20).await >= 2, "its requests are retried");
    is_lost.store(false, Ordering::SeqCst);
    // I17.7
    assert!(ask(20).await >= 5);
    cluster.at_rest().await.unwrap();
}
