//! Local prefill after a failed remote one (B6), with the retries that are the default.

use pointsman_gateway::config::{Config, LegOrder};
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder, client::Reply};
use serde_json::json;

async fn ask(cluster: &TestCluster) -> Reply {
    let body = json!({"model": "tiny", "prompt": "a short prompt", "max_tokens": 3}).to_string();
    cluster.client.post(COMPLETIONS, &[("x-pointsman-decision", "1")], body).await.unwrap()
}

fn decisions(reply: &Reply) -> &str {
    reply.headers["x-pointsman-decision"].to_str().unwrap()
}

fn status(status: u16) -> FaultKind {
    FaultKind::Status { status, retry_after: None }
}

async fn cluster(prefill: usize, change: impl FnOnce(&mut Config)) -> TestCluster {
    let mut builder = TestClusterBuilder::new().config(|config| {
        config.routing.local_fallback = true;
        change(config);
    });
    for _ in 0..prefill {
        builder = builder.sim(Dialect::Vllm, Role::Prefill);
    }
    // A booking that a failed attempt leaves behind would make the worker busy.
    let decode = SimConfig::instant(Dialect::Vllm, Role::Decode);
    builder.sim_with(decode, ",max_concurrency=1").start().await
}

#[tokio::test]
async fn b6_local_prefill_follows_when_no_prefill_worker_is_left_for_a_retry() {
    for order in [LegOrder::PrefillFirst, LegOrder::DecodeFirst] {
        let faults =
            [(1, status(500)), (1, status(503)), (1, status(429)), (1, FaultKind::Refuse), (2, status(503))];
        for (prefill, fault) in faults {
            let cluster = cluster(prefill, |config| config.routing.order = order).await;
            for sim in &cluster.sims[..prefill] {
                sim.set_faults(vec![Fault::always(fault.clone())]);
            }
            for _ in 0..3 {
                let reply = ask(&cluster).await;
                assert_eq!(reply.status, 200, "{order:?} {prefill} {fault:?}: {reply:?}");
                // B6.2, B6.3, I2.7
                assert!(decisions(&reply).contains(&format!("aggregated={}/0", prefill + 1)), "{reply:?}");
            }
            cluster.at_rest().await.unwrap();
        }
    }
}

#[tokio::test]
async fn b6_local_prefill_follows_when_the_prefill_worker_dies() {
    let mut cluster = cluster(1, |_| {}).await;
    cluster.sims.remove(0).kill().await;
    let reply = ask(&cluster).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    // B6.2
    assert!(decisions(&reply).contains("aggregated=2/0"), "{reply:?}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b6_a_refused_request_and_a_busy_pool_do_not_lead_to_local_prefill() {
    let cluster = cluster(1, |_| {}).await;
    for refused in [400, 413, 422] {
        cluster.sims[0].set_faults(vec![Fault::always(status(refused))]);
        // I2.7: the request is the client's mistake
        assert_eq!(ask(&cluster).await.status, refused);
        cluster.at_rest().await.unwrap();
        assert_eq!(
            cluster.sims[1].state().requests.values().sum::<u64>(),
            0,
            "{refused}: nobody prefills it"
        );
    }

    // I2.4, I2.7: only this worker may lack the model.
    cluster.sims[0].set_faults(vec![Fault::always(status(404))]);
    assert_eq!(ask(&cluster).await.status, 200);
    cluster.at_rest().await.unwrap();

    let busy = TestClusterBuilder::new()
        .config(|config| config.routing.local_fallback = true)
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Prefill), ",max_concurrency=1")
        .sim(Dialect::Vllm, Role::Decode)
        .start()
        .await;
    busy.sims[0].set_faults(vec![Fault::always(FaultKind::HangBeforeHeaders)]);
    let held = ask(&busy);
    let second = async {
        busy.until("the prefill worker is busy", |cluster| cluster.booked() > 0).await.unwrap();
        ask(&busy).await
    };
    tokio::select! {
        held = held => panic!("the first request ended: {held:?}"),
        // C5.5
        second = second => assert_eq!((second.status.as_u16(), second.code()), (529, "overloaded".to_owned())),
    }
}

#[tokio::test]
async fn b6_without_a_worker_that_prefills_locally_the_prefill_failure_is_the_answer() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.routing.local_fallback = true)
        .pair(Dialect::Sglang)
        .start()
        .await;
    cluster.sims[0].set_faults(vec![Fault::always(status(500))]);
    let reply = ask(&cluster).await;
    assert_eq!((reply.status.as_u16(), reply.code()), (502, "bad_upstream".to_owned()), "{reply:?}");
    cluster.at_rest().await.unwrap();
}
