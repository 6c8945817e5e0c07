//! Sessions [F8] whose requests take long, run at the same time, or come from coding agents.

use std::time::Duration;

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{CHAT, Client, TestCluster, TestClusterBuilder};
use serde_json::json;

use crate::orchestration::{EXPLAIN, chat};

const SESSION: (&str, &str) = ("x-session-id", "s");

/// Two prefill and two decode workers. Sessions are bound for one second.
fn pairs(prefill: &SimConfig, decode: &SimConfig) -> TestClusterBuilder {
    TestClusterBuilder::new()
        .sim_with(prefill.clone(), "")
        .sim(Dialect::Vllm, Role::Prefill)
        .sim_with(decode.clone(), "")
        .sim_with(decode.clone(), "")
}

fn instant(role: Role) -> SimConfig {
    SimConfig::instant(Dialect::Vllm, role)
}

/// The decisions of a request: worker and reason of each leg.
async fn decisions(client: &Client, headers: &[(&str, &str)], more: serde_json::Value) -> Vec<String> {
    let headers: Vec<(&str, &str)> = headers.iter().copied().chain([EXPLAIN]).collect();
    let reply = client.post(CHAT, &headers, chat(more)).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    let decisions = reply.headers["x-pointsman-decision"].to_str().unwrap();
    decisions.split(", ").map(str::to_owned).collect()
}

fn are_bound(decisions: &[String]) -> bool {
    decisions.len() == 2 && decisions.iter().all(|decision| decision.ends_with("session"))
}

#[tokio::test]
async fn f8_an_answer_that_takes_longer_than_the_ttl_keeps_its_session() {
    let slow = SimConfig { itl: Duration::from_millis(25), ..instant(Role::Decode) };
    let cluster = pairs(&instant(Role::Prefill), &slow)
        .config(|config| config.routing.session_affinity = Duration::from_secs(1))
        .start()
        .await;
    let long = chat(json!({ "stream": true, "max_tokens": 100 }));
    let mut stream = cluster.client.stream(CHAT, &[SESSION], long).await.unwrap();
    for _ in 0..60 {
        stream.next().await.unwrap();
    }
    // F8.4: 1.5 s after its head
    let during = decisions(&cluster.client, &[SESSION], json!({})).await;
    assert!(are_bound(&during), "{during:?}");
    stream.all().await.unwrap();
    // F8.4: 2.5 s after its head
    let after = decisions(&cluster.client, &[SESSION], json!({})).await;
    assert!(are_bound(&after), "{after:?}");
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let late = decisions(&cluster.client, &[SESSION], json!({})).await;
    // F8.4
    assert!(late.iter().all(|decision| decision.ends_with("policy")), "{late:?}");
}

/// Sends a request of the session to the slow prefill worker 1, and `meanwhile` when it is there.
async fn overlapping(cluster: &TestCluster, meanwhile: impl Future<Output = ()>) {
    let pinned = [SESSION, ("x-prefill-instance-id", "1")];
    let slow = decisions(&cluster.client, &pinned, json!({}));
    let fast = async {
        cluster.until("its prefill runs", |cluster| cluster.booked() > 0).await.unwrap();
        meanwhile.await;
    };
    let (slow, ()) = tokio::join!(slow, fast);
    assert!(slow[0].starts_with("prefill=1/"), "{slow:?}");
}

#[tokio::test]
async fn f8_a_late_dispatch_neither_replaces_a_binding_nor_begins_a_closed_session() {
    let slow = SimConfig { overhead: Duration::from_secs(1), ..instant(Role::Prefill) };
    let cluster = pairs(&slow, &instant(Role::Decode))
        .config(|config| config.routing.session_affinity = Duration::from_secs(60))
        .start()
        .await;
    let first = [SESSION, ("x-prefill-instance-id", "2")];
    overlapping(&cluster, async {
        decisions(&cluster.client, &first, json!({})).await;
    })
    .await;
    let next = decisions(&cluster.client, &[SESSION], json!({})).await;
    // F8.1
    assert!(next[0].starts_with("prefill=2/") && are_bound(&next), "{next:?}");
    let close = json!({ "nvext": { "session_control": { "session_id": "s", "action": "close" } } });
    overlapping(&cluster, async {
        decisions(&cluster.client, &first, close).await;
    })
    .await;
    let next = decisions(&cluster.client, &[SESSION], json!({})).await;
    // F8.7
    assert!(next.iter().all(|decision| decision.ends_with("policy")), "{next:?}");
}

#[tokio::test]
async fn a3_sessions_of_coding_agents_are_bound() {
    let cluster = pairs(&instant(Role::Prefill), &instant(Role::Decode))
        .config(|config| config.routing.session_affinity = Duration::from_secs(60))
        .start()
        .await;
    let claude = ("x-claude-code-session-id", "c");
    for headers in [
        &[claude][..],
        &[claude, ("x-claude-code-agent-id", "a")],
        &[("session-id", "codex")],
        &[("session_id", "former codex")],
        &[("x-session-id", "opencode"), ("x-parent-session-id", "p")],
    ] {
        let first = decisions(&cluster.client, headers, json!({})).await;
        assert!(first.iter().all(|decision| decision.ends_with("policy")), "{headers:?}: {first:?}");
        let next = decisions(&cluster.client, headers, json!({})).await;
        // A3.15
        assert!(are_bound(&next), "{headers:?}: {next:?}");
    }
}
