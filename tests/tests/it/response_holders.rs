//! Requests that continue a stored response, while its worker has too much to do or is down.

use std::time::Duration;

use pointsman_gateway::config::{Config, Model};
use pointsman_sim::{Dialect, Fault, FaultKind, FaultLeg, Role, SimConfig};
use pointsman_tests::{
    RESPONSES, TestCluster, TestClusterBuilder,
    client::{Client, Stream},
};
use pointsman_workers::Ineligible;
use tokio::task::JoinSet;

use crate::stored_responses::{first, id_of, place_of, turn};

const ONE: &[Role] = &[Role::Aggregated; 2];
const PAIR: &[Role] = &[Role::Prefill, Role::Decode, Role::Decode];

/// A cluster whose decoding workers run one request at a time, and the place of a response's worker.
async fn with_one_response(roles: &[Role], change: impl FnOnce(&mut Config)) -> (TestCluster, String, usize) {
    let builder = roles.iter().fold(TestClusterBuilder::new().config(change), |builder, role| {
        let slow = SimConfig { itl: Duration::from_millis(3), ..SimConfig::instant(Dialect::Vllm, *role) };
        builder.sim_with(slow, if *role == Role::Prefill { "" } else { ",max_concurrency=1" })
    });
    let cluster = builder.start().await;
    let id = first(&cluster.client).await;
    let mut stores = Vec::new();
    for (place, sim) in cluster.sims.iter().enumerate().filter(|(place, _)| roles[*place] != Role::Prefill) {
        let read = Client::new(sim.addr()).get(&format!("{RESPONSES}/{id}")).await.unwrap();
        stores.extend((read.status == 200).then_some(place));
    }
    (cluster, id, stores[0])
}

/// Keeps the worker of a response busy until the stream is dropped.
async fn keep_busy(cluster: &TestCluster, id: &str) -> Stream {
    let long = turn(Some(id), true).replace("\"max_output_tokens\":2", "\"max_output_tokens\":100000");
    let mut running = cluster.client.stream(RESPONSES, &[], long).await.unwrap();
    assert!(running.next().await.unwrap().is_some());
    running
}

#[tokio::test]
async fn i12_the_next_turn_waits_in_the_queue_while_its_worker_is_busy() {
    for roles in [ONE, PAIR] {
        let (cluster, id, place) = with_one_response(roles, |config| config.queue.limit = 8).await;
        let running = keep_busy(&cluster, &id).await;
        let (client, body) = (cluster.client.clone(), turn(Some(&id), false));
        let waiting = JoinSet::from_iter([async move { client.post(RESPONSES, &[], body).await }]);
        let waits = |cluster: &TestCluster| cluster.gateway.state().queue.waiting() == 1;
        cluster.until("the next turn waits", waits).await.unwrap();
        for _ in 0..3 {
            // I12.13: other requests do not wait behind it
            first(&cluster.client).await;
        }
        drop(running);
        let next = waiting.join_all().await.remove(0).unwrap();
        let engine = Client::new(cluster.sims[place].addr());
        // I12.13
        assert_eq!(engine.get(&format!("{RESPONSES}/{}", id_of(&next))).await.unwrap().status, 200);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i12_the_next_turn_is_to_come_back_when_its_worker_can_serve_it() {
    let (cluster, id, place) = with_one_response(ONE, |_| {}).await;
    let next = async || {
        let next = cluster.client.post(RESPONSES, &[], turn(Some(&id), false)).await.unwrap();
        let text = String::from_utf8_lossy(&next.body).into_owned();
        ((next.status.as_u16(), next.code(), next.headers.contains_key("retry-after")), text)
    };
    let running = keep_busy(&cluster, &id).await;
    let (busy, text) = next().await;
    // I12.13
    assert_eq!(busy, (529, "overloaded".to_owned(), true), "{text}");
    let why = format!("only worker {} has what the request continues, so no other one was tried", place + 1);
    assert!(text.contains(&why), "{text}");
    drop(running);
    cluster.at_rest().await.unwrap();
    let refuses = FaultKind::Status { status: 500, retry_after: None };
    cluster.sims[place].set_faults(vec![Fault { leg: Some(FaultLeg::Health), ..Fault::always(refuses) }]);
    let worker = cluster.worker(place as u64 + 1);
    let fails = |_: &TestCluster| worker.ineligible() == Some(Ineligible::Unhealthy);
    cluster.until("it fails its health checks", fails).await.unwrap();
    let (down, text) = next().await;
    // I12.13
    assert_eq!(down, (503, "no_worker".to_owned(), true), "{text}");
    assert!(text.contains("which has what the request continues, fails its health checks"), "{text}");
    cluster.sims[place].set_faults(vec![]);
    cluster.until("it is up", |_| worker.ineligible().is_none()).await.unwrap();
    assert_eq!(next().await.0.0, 200);
}

#[tokio::test]
async fn i12_the_next_turn_waits_until_its_worker_is_up_where_requests_wait_for_workers() {
    let waits = Model { wait_for_workers: Some(Duration::from_secs(60)), ..Model::default() };
    let (cluster, id, place) = with_one_response(ONE, |config| {
        config.queue.limit = 8;
        config.models.insert("tiny".to_owned(), waits);
    })
    .await;
    let refuses = FaultKind::Status { status: 500, retry_after: None };
    cluster.sims[place].set_faults(vec![Fault { leg: Some(FaultLeg::Health), ..Fault::always(refuses) }]);
    let worker = cluster.worker(place as u64 + 1);
    cluster.until("it is down", |_| worker.ineligible().is_some()).await.unwrap();
    let (client, body) = (cluster.client.clone(), turn(Some(&id), false));
    let waiting = JoinSet::from_iter([async move { client.post(RESPONSES, &[], body).await }]);
    let counted = "pointsman_requests_waiting_for_workers{model=\"tiny\"}";
    // I12.13, F7.9
    assert!(cluster.until_counted(counted, 1.0).await.is_ok());
    // I12.13: others have a worker
    assert_ne!(place_of(&cluster, &first(&cluster.client).await).await, place);
    cluster.sims[place].set_faults(vec![]);
    let next = waiting.join_all().await.remove(0).unwrap();
    // I12.13
    assert_eq!(place_of(&cluster, &id_of(&next)).await, place);
}
