//! Targets for latency: where a request has them from, and what they change in the queue.

use std::{sync::Arc, time::Duration};

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder, client::Reply};
use serde_json::{Value, json};
use tokio::sync::Mutex;

const TENANT: &str = "x-tenant";
const TTFT: &str = "x-slo-ttft-ms";
const ITL: &str = "x-slo-tpot-ms";

/// A gateway with one engine, these sections, and the targets in its receipts.
async fn cluster(sections: &str, sim: SimConfig) -> TestCluster {
    let from: Config = toml::from_str(sections).unwrap();
    TestClusterBuilder::new()
        .config(|config| {
            config.server.tenant_header = TENANT.to_owned();
            config.server.trust_hints = from.server.trust_hints;
            config.auth.trusted_proxies = vec!["127.0.0.0/8".to_owned()];
            config.decisions.facts = ["ttft-target-us", "itl-target-us"].map(str::to_owned).to_vec();
            (config.queue, config.tenants, config.models) = (from.queue, from.tenants, from.models);
        })
        .sim_with(sim, "")
        .start()
        .await
}

fn instant() -> SimConfig {
    SimConfig::instant(Dialect::Vllm, Role::Aggregated)
}

async fn ask(cluster: &TestCluster, headers: &[(&str, &str)], more: Value) -> Reply {
    let mut body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 2});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    cluster.client.post(COMPLETIONS, headers, body.to_string()).await.unwrap()
}

/// The targets in the newest receipt, microseconds.
async fn targets(cluster: &TestCluster) -> [u64; 2] {
    let facts = cluster.newest_facts().await.unwrap();
    ["ttft-target-us", "itl-target-us"].map(|fact| facts[fact].as_u64().unwrap())
}

#[tokio::test]
async fn a3_a_target_is_the_header_s_or_the_body_s_or_the_tenant_s_or_the_model_s() {
    let sections = "[models.tiny]\nttft_target = '4s'\nitl_target = '40ms'\n\
                    [tenants.'*']\nttft_target = '3s'\n[tenants.a]\nitl_target = '20ms'";
    let cluster = cluster(sections, instant()).await;
    let in_body = json!({"nvext": {"ttft_target": 2_000, "router": {"itl_target": 15}}});
    let none: &[(&str, &str)] = &[];
    for (headers, body, expected) in [
        (none, json!({}), [3_000_000, 40_000]),
        (&[(TENANT, "a")], json!({}), [3_000_000, 20_000]),
        (&[(TENANT, "a")], in_body.clone(), [2_000_000, 15_000]),
        (&[(TTFT, "1000"), (ITL, "12.5")], in_body, [1_000_000, 12_500]),
    ] {
        assert_eq!(ask(&cluster, headers, body).await.status, 200);
        // A3.13
        assert_eq!(targets(&cluster).await, expected, "{headers:?}");
    }
    for bad in ["0", "-5", "inf", "NaN", "soon", ""] {
        let refused = ask(&cluster, &[(TTFT, bad)], json!({})).await;
        // A3.13
        assert_eq!(refused.status, 400, "{bad}: {:?}", refused.json());
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a3_without_targets_and_from_clients_without_trust_there_are_none() {
    let by_default = cluster("", instant()).await;
    assert_eq!(ask(&by_default, &[], json!({})).await.status, 200);
    assert_eq!(targets(&by_default).await, [0, 0]);
    let untrusting =
        cluster("[server]\ntrust_hints = false\n[models.tiny]\nttft_target = '4s'", instant()).await;
    assert_eq!(ask(&untrusting, &[(TTFT, "1"), (ITL, "nonsense")], json!({})).await.status, 200);
    // A3.9
    assert_eq!(targets(&untrusting).await, [4_000_000, 0]);
    by_default.at_rest().await.unwrap();
    untrusting.at_rest().await.unwrap();
}

#[tokio::test]
async fn f7_a_full_gateway_serves_the_earliest_target_that_can_be_met() {
    let slow = SimConfig { itl: Duration::from_millis(10), ..instant() };
    let cluster = Arc::new(cluster("queue = { limit = 9, max_inflight = 1, timeout = '60s' }", slow).await);
    let long = json!({"model": "tiny", "prompt": "hello", "max_tokens": 2_000, "stream": true});
    let mut first = cluster.client.stream(COMPLETIONS, &[], long.to_string()).await.unwrap();
    first.next().await.unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let tasks = tokio_util::task::TaskTracker::new();
    for (waiting, target) in [(1, None), (2, Some("15000")), (3, Some("8000")), (4, Some("1"))] {
        let (cluster, served) = (cluster.clone(), served.clone());
        let queue = cluster.gateway.state().queue.clone();
        tasks.spawn(async move {
            let headers: Vec<_> = target.iter().map(|target| (TTFT, *target)).collect();
            let reply = ask(&cluster, &headers, json!({})).await;
            served.lock().await.push((target, reply.status.as_u16()));
        });
        while queue.waiting() < waiting {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    // The target of 1 ms passes.
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(first);
    tasks.close();
    tasks.wait().await;
    let expected = [Some("8000"), Some("15000"), None, Some("1")].map(|target| (target, 200));
    // F7.7, F7.8
    assert_eq!(*served.lock().await, expected);
    cluster.at_rest().await.unwrap();
}
