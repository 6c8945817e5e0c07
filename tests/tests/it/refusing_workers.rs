//! Workers that refuse what others take: they answer an error at once, look idle, and would draw the
//! traffic (I17).

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{self, ANSWER, chunk, json, stream_head},
};
use serde_json::{Value, json};

const NO_TEMPLATE: &str =
    r#"{"error":{"message":"a chat template is missing","type":"BadRequestError","code":400}}"#;
const EVENTS: &str =
    "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

/// The worker with the smallest `turn` is chosen while it is eligible.
/// An engine that refuses everything while `refuses`, and prompts that are wrong always.
async fn engine(refuses: &Arc<AtomicBool>, status: &'static str) -> RawEngine {
    let refuses = refuses.clone();
    RawEngine::serving(move |request: &RawRequest| {
        if refuses.load(Ordering::SeqCst) || request.body.contains("wrong") {
            vec![Act::Send(raw_engine::status(status, NO_TEMPLATE))]
        } else if request.body.contains("\"stream\":true") {
            vec![Act::Send([stream_head(), chunk(EVENTS.as_bytes()), b"0\r\n\r\n".to_vec()].concat())]
        } else {
            vec![Act::Send(json(ANSWER))]
        }
    })
    .await
}

/// A gateway in front of engines, the first of which is preferred.
async fn cluster(engines: &[&RawEngine]) -> TestCluster {
    TestClusterBuilder::new().in_turn(engines.iter().copied()).start().await
}

async fn ask(cluster: &TestCluster, prompt: &str, stream: bool) -> Reply {
    let body = json!({"model": "tiny", "prompt": prompt, "stream": stream}).to_string();
    cluster.client.post(COMPLETIONS, &[], body).await.unwrap()
}

async fn worker(cluster: &TestCluster, id: u64) -> Value {
    cluster.admin.get(&format!("/workers/{id}")).await.unwrap().json().unwrap()["worker"].clone()
}

fn posts(engine: &RawEngine) -> usize {
    engine.requests().iter().filter(|request| request.line.starts_with("POST")).count()
}

#[tokio::test]
async fn i17_a_worker_that_refuses_what_another_takes_is_left_out_until_it_answers() {
    for (stream, status) in [(false, "400 Bad Request"), (true, "422 Unprocessable Entity")] {
        let refuses = Arc::new(AtomicBool::new(true));
        let (bad, good) = (engine(&refuses, status).await, engine(&Arc::default(), status).await);
        let cluster = cluster(&[&bad, &good]).await;
        let mut statuses = Vec::new();
        for round in 0..20 {
            statuses.push(ask(&cluster, &format!("hello {round}"), stream).await.status.as_u16());
        }
        let code: u16 = status[..3].parse().unwrap();
        // I17.1
        assert_eq!(statuses[..4], [code; 4], "{status}");
        assert!(statuses[4..].iter().all(|status| *status == 200), "{statuses:?}");
        let told = worker(&cluster, 1).await;
        let reason = told["reason"].as_str().unwrap();
        // I17.3
        assert!(reason.contains(&format!("answered {code}: a chat template is missing")), "{reason}");
        assert!(posts(&bad) < 12, "{} of 20 requests", posts(&bad));
        assert_eq!(worker(&cluster, 2).await["ineligible"], Value::Null);
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        // I17.4
        assert_eq!(ask(&cluster, "after the pause", stream).await.status, 200);
        refuses.store(false, Ordering::SeqCst);
        let before = posts(&bad);
        for round in 0..200 {
            assert_eq!(ask(&cluster, &format!("again {round}"), stream).await.status, 200);
            if posts(&bad) > before + 1 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let told = worker(&cluster, 1).await;
        assert_eq!((&told["ineligible"], &told["reason"]), (&Value::Null, &Value::Null), "it was mended");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i17_wrong_requests_eject_no_worker_and_are_rarely_tried_twice() {
    let never = Arc::default();
    let engines = [engine(&never, "400 Bad Request").await, engine(&never, "400 Bad Request").await];
    let cluster = cluster(&[&engines[0], &engines[1]]).await;
    let to_second = [("x-worker-instance-id", "2")];
    for round in 0..3 {
        let good = json!({"model": "tiny", "prompt": format!("good {round}")}).to_string();
        assert_eq!(cluster.client.post(COMPLETIONS, &to_second, good).await.unwrap().status, 200);
        let before = posts(&engines[1]);
        for request in 0..10 {
            let reply = ask(&cluster, &format!("wrong {round} {request}"), request % 2 == 0).await;
            assert_eq!((reply.status.as_u16(), &*reply.body), (400, NO_TEMPLATE.as_bytes()));
            // I17.2
            for id in [1, 2] {
                let told = worker(&cluster, id).await;
                assert_eq!((&told["ineligible"], &told["reason"]), (&Value::Null, &Value::Null), "{id}");
            }
        }
        // I17.1: the second has refused its last request, so it is not asked again.
        assert_eq!(posts(&engines[1]) - before, 1, "{round}");
    }
    assert_eq!(posts(&engines[0]), 30);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i17_a_pinned_leg_and_a_worker_that_answers_in_between_are_not_doubted() {
    let never = Arc::default();
    let engines = [engine(&never, "400 Bad Request").await, engine(&never, "400 Bad Request").await];
    let cluster = cluster(&[&engines[0], &engines[1]]).await;
    for round in 0..10 {
        let body = json!({"model": "tiny", "prompt": format!("wrong {round}")}).to_string();
        let pin = [("x-worker-instance-id", "1")];
        assert_eq!(cluster.client.post(COMPLETIONS, &pin, body).await.unwrap().status, 400);
    }
    assert_eq!(ask(&cluster, "good", false).await.status, 200);
    for round in 0..3 {
        for request in 0..4 {
            assert_eq!(ask(&cluster, &format!("wrong {round} {request}"), false).await.status, 400);
        }
        assert_eq!(ask(&cluster, &format!("good {round}"), round == 1).await.status, 200);
    }
    // I17.1
    assert_eq!(posts(&engines[1]), 0);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i17_a_prefill_worker_that_refuses_everything_is_left_out() {
    let by_turn = "[prefill]\nbuiltin = 'formula'\nsettings = { cost = \"label_number('turn')\" }";
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = TestClusterBuilder::new()
            .sim_with(SimConfig::instant(dialect, Role::Prefill), ",label.turn=1")
            .sim_with(SimConfig::instant(dialect, Role::Prefill), ",label.turn=2")
            .sim(dialect, Role::Decode)
            .config(|config| config.policies.slots = toml::from_str(by_turn).unwrap())
            .start()
            .await;
        let refusal = FaultKind::Status { status: 400, retry_after: None };
        cluster.sims[0].set_faults(vec![Fault::always(refusal)]);
        let mut statuses = Vec::new();
        for round in 0..15 {
            let body = json!({"model": "tiny", "prompt": format!("hello {round}"), "max_tokens": 3});
            let reply = cluster.client.post(COMPLETIONS, &[], body.to_string()).await.unwrap();
            statuses.push(reply.status.as_u16());
        }
        // I17.5
        assert!(statuses[4..].iter().all(|status| *status == 200), "{dialect:?}: {statuses:?}");
        assert!(worker(&cluster, 1).await["reason"].as_str().unwrap().contains("answered 400"));
        cluster.at_rest().await.unwrap();
    }
}
