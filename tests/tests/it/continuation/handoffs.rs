//! E4 for rests of streams: their handoff is consumed, also when no client is left.

use std::time::Duration;

use pointsman_sim::{Dialect, Fault, FaultKind, FaultLeg, Role, SimConfig};
use pointsman_tests::{TestCluster, TestClusterBuilder};
use serde_json::json;

use super::{CHAT, PAIRS, body, once, stream};

/// Pairs whose prefill takes a time.
async fn pairs(prefill: Duration, timeout: Duration) -> TestCluster {
    let sim = |role| {
        let overhead = if role == Role::Prefill { prefill } else { Duration::ZERO };
        SimConfig { itl: Duration::from_millis(3), overhead, ..SimConfig::instant(Dialect::Vllm, role) }
    };
    let builder = TestClusterBuilder::new().config(|config| config.timeouts.request = timeout);
    PAIRS.iter().fold(builder, |builder, role| builder.sim_with(sim(*role), "")).start().await.unwrap()
}

/// Asserts that nothing is booked, and that each engine gave its blocks back before their lease ended.
async fn assert_consumed(cluster: &TestCluster) {
    cluster.at_rest().await.unwrap();
    cluster
        .until("no handoff is pinned", |cluster| {
            cluster
                .sims
                .iter()
                .map(|sim| sim.state())
                .all(|state| state.pinned_blocks == 0 && state.running == 0)
        })
        .await
        .unwrap();
    // E4.2
    assert_eq!(cluster.sims[0].state().stranded, 0);
}

/// Each decode engine breaks its first stream.
fn cut_once(cluster: &TestCluster, rest: Option<FaultKind>) {
    for sim in &cluster.sims[1..] {
        let of_rest = rest.iter().map(|kind| Fault {
            prompt: Some("continue_final_message".to_owned()),
            times: Some(1),
            leg: Some(FaultLeg::Decode),
            ..Fault::always(kind.clone())
        });
        let cut = once(FaultKind::Cut { after_tokens: 3 });
        sim.set_faults(of_rest.chain(cut).collect());
    }
}

#[tokio::test]
async fn e4_the_handoff_of_a_rest_that_decode_refuses_is_consumed() {
    let cluster = pairs(Duration::ZERO, Duration::from_secs(30)).await;
    cut_once(&cluster, Some(FaultKind::Status { status: 400, retry_after: None }));
    let events = stream(&cluster, CHAT, json!({})).await;
    assert!(events.last().unwrap().contains("\"error\""), "{events:?}");
    assert_eq!(cluster.faults_fired("status-400"), 1);
    assert_consumed(&cluster).await;
}

#[tokio::test]
async fn e4_the_handoff_of_a_rest_whose_deadline_passed_in_prefill_is_consumed() {
    let cluster = pairs(Duration::from_millis(1_200), Duration::from_secs(2)).await;
    cut_once(&cluster, None);
    let events = stream(&cluster, CHAT, json!({})).await;
    assert!(events.last().unwrap().contains("\"error\""), "{events:?}");
    assert_eq!(cluster.faults_fired("cut"), 1);
    assert_consumed(&cluster).await;
}

#[tokio::test]
async fn e4_the_handoff_of_a_rest_whose_client_left_in_prefill_is_consumed() {
    let cluster = pairs(Duration::from_millis(400), Duration::from_secs(30)).await;
    cut_once(&cluster, None);
    let mut stream = cluster.client.stream(CHAT, &[], body(CHAT, json!({}))).await.unwrap();
    while cluster.faults_fired("cut") == 0 {
        stream.next().await.unwrap();
    }
    // The prefill of the rest runs.
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(stream);
    assert_consumed(&cluster).await;
}
