//! L3.14: one tenant that fills the queue leaves room for another one.

use std::time::Duration;

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder, client::Reply, client_keys};
use serde_json::json;
use tokio::task::JoinSet;

const A: &str = "Bearer sk-a";
const B: &str = "Bearer sk-b";

/// The key of a request, and its answer.
type Answered = (&'static str, Reply);

/// A gateway with two tenants, and a worker for one request at a time. Four more may wait.
async fn cluster() -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            config.auth.keys = client_keys(&[("sk-a", "team-a"), ("sk-b", "team-b")]);
            config.queue.limit = 4;
        })
        .sim_with(
            SimConfig {
                itl: Duration::from_millis(3),
                ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
            },
            ",max_concurrency=1",
        )
        .start()
        .await
}

fn ask(requests: &mut JoinSet<Answered>, cluster: &TestCluster, key: &'static str) {
    let client = cluster.client.clone();
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 2}).to_string();
    requests.spawn(
        async move { (key, client.post(COMPLETIONS, &[("authorization", key)], body).await.unwrap()) },
    );
}

#[tokio::test]
async fn l3_a_tenant_that_fills_the_queue_leaves_room_for_another_one() {
    let (cluster, mut requests) = (cluster().await, JoinSet::new());
    let waiting = |cluster: &TestCluster| cluster.gateway.state().queue.waiting();
    let long = json!({"model": "tiny", "prompt": "hello", "max_tokens": 100_000, "ignore_eos": true, "stream": true}).to_string();
    let mut running = cluster.client.stream(COMPLETIONS, &[("authorization", A)], long).await.unwrap();
    assert!(running.next().await.unwrap().is_some());
    (0..4).for_each(|_| ask(&mut requests, &cluster, A));
    cluster.until("the queue is full", |cluster| waiting(cluster) == 4).await.unwrap();
    ask(&mut requests, &cluster, A);
    let (_, equal) = requests.join_next().await.unwrap().unwrap();
    let message = |reply: &Reply| reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    // L3.14: an equal one
    assert_eq!((equal.status.as_u16(), equal.code()), (529, "overloaded".to_owned()));
    assert!(message(&equal).contains("the queue is full, or the request waited"), "{}", message(&equal));
    (0..2).for_each(|_| ask(&mut requests, &cluster, B));
    for _ in 0..2 {
        let (key, lost) = requests.join_next().await.unwrap().unwrap();
        // L3.14
        assert_eq!((key, lost.status.as_u16(), lost.code()), (A, 529, "overloaded".to_owned()));
        let text =
            "the queue is full, and a request that comes before this one took its place: 4 requests with";
        assert!(message(&lost).contains(text), "{}", message(&lost));
        assert!(lost.headers.contains_key("retry-after"));
    }
    assert_eq!(waiting(&cluster), 4);
    drop(running);
    let mut served = Vec::new();
    while let Some(answered) = requests.join_next().await {
        let (key, reply) = answered.unwrap();
        assert_eq!(reply.status.as_u16(), 200, "{}", reply.code());
        served.push(key);
    }
    assert_eq!(served.iter().filter(|key| **key == B).count(), 2, "{served:?}");
    assert_eq!(served.len(), 4);
    let metric = async |series: &str| cluster.metric(series).await.unwrap();
    // L3.14
    assert_eq!(metric("pointsman_displaced_requests_total").await, [2.0]);
    assert_eq!(
        metric("pointsman_queue_seconds_count").await,
        [6.0],
        "the two that lost their places waited, too"
    );
    cluster.at_rest().await.unwrap();
}
