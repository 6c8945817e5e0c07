//! Policies of a running gateway: a new file serves the next request, an invalid one is refused, a loop is
//! stopped.

use std::time::Duration;

use pointsman_embedded_policies::{KV_AWARE, LEAST_LOADED};
use pointsman_gateway::config::{Policies, SlotEntry};
use pointsman_routing::SlotKind;
use pointsman_sim::{Dialect, Role};
use pointsman_test_guests::{HOSTILE, ROGUE_PLANNER, WEIGHTED_RANDOM, scripted};
use pointsman_tests::{CHAT, TestCluster, TestClusterBuilder};
use serde_json::{Value, json};

async fn ask(cluster: &TestCluster) -> String {
    let body =
        json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hello there"}]});
    let reply = cluster.client.post(CHAT, &[("x-pointsman-decision", "1")], body.to_string()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.headers["x-pointsman-decision"].to_str().unwrap().to_owned()
}

async fn slot(cluster: &TestCluster, kind: &str) -> Value {
    let policies = cluster.admin.get("/policies").await.unwrap().json().unwrap();
    let slots = policies["slots"].as_array().unwrap();
    slots.iter().find(|slot| slot["slot"] == kind).cloned().unwrap()
}

async fn until_policy(cluster: &TestCluster, name: &str) {
    // A compile takes seconds while other tests run.
    let served = async {
        while !ask(cluster).await.contains(name) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), served)
        .await
        .unwrap_or_else(|_| panic!("{name} never served"));
}

#[tokio::test]
async fn a_policy_dropped_in_serves_the_next_request() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 2, 1).await.unwrap();
    let before = ask(&cluster).await;
    assert!(before.contains("prefill=") && before.contains("kv-aware@1 policy"), "{before}");
    cluster.drop_policy("prefill.wasm", LEAST_LOADED).unwrap();
    until_policy(&cluster, "least-loaded@2 policy").await;
    cluster.drop_policy("prefill.wasm", WEIGHTED_RANDOM).unwrap();
    until_policy(&cluster, "weighted-random@3 policy").await;
}

/// A component that was built against the released contract. It is never rebuilt.
const FROZEN: &[u8] = include_bytes!("../../fixtures/guests/selector-0.1.0.wasm");

#[tokio::test]
async fn a_guest_of_the_released_contract_0_1_0_is_served_and_its_state_is_kept() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            let entry = toml::from_str("grants = [\"log\", \"state\"]").unwrap();
            config.policies.slots.insert(SlotKind::Aggregated, entry);
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    cluster.drop_policy("aggregated.wasm", FROZEN).unwrap();
    until_policy(&cluster, "frozen@2 policy").await;
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]});
    let preview = cluster.client.post("/v1/route", &[], body.to_string()).await.unwrap().json().unwrap();
    let receipt = &preview["legs"][0]["receipt"];
    assert!(receipt.to_string().contains("seen before"), "{receipt}");
    cluster.drop_policy("aggregated.wasm", LEAST_LOADED).unwrap();
    until_policy(&cluster, "least-loaded@3 policy").await;
    cluster.drop_policy("aggregated.wasm", FROZEN).unwrap();
    until_policy(&cluster, "frozen@4 policy").await;
    let preview = cluster.client.post("/v1/route", &[], body.to_string()).await.unwrap().json().unwrap();
    assert!(preview.to_string().contains("seen before"), "{preview}");
}

#[tokio::test]
async fn an_invalid_file_is_refused_and_the_last_valid_one_keeps_serving() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    cluster.drop_policy("prefill.wasm", LEAST_LOADED).unwrap();
    until_policy(&cluster, "least-loaded@2").await;
    cluster.drop_policy("prefill.wasm", b"\0asm garbage").unwrap();
    cluster
        .until("refused", |cluster| !cluster.gateway.state().policies.status().slots[0].refusals.is_empty())
        .await
        .unwrap();
    let refusal = &slot(&cluster, "prefill").await["refusals"][0];
    assert_eq!(refusal["kind"], "not_wasm");
    assert!(ask(&cluster).await.contains("least-loaded@2 policy"));
}

/// A cluster whose policy turns hostile in this way after 20 calls.
async fn hostile(mode: &str, change: impl FnOnce(&mut Policies)) -> TestCluster {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            change(&mut config.policies);
            let settings = toml::from_str(&format!("mode = \"{mode}\"\nafter = 20")).unwrap();
            let entry = SlotEntry { settings, ..SlotEntry::default() };
            config.policies.slots.insert(SlotKind::Aggregated, entry);
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    cluster.drop_policy("aggregated.wasm", HOSTILE).unwrap();
    until_policy(&cluster, "hostile@2").await;
    cluster
}

#[tokio::test]
async fn invariant_5_a_policy_that_loops_is_stopped_rolled_back_and_no_request_fails() {
    let cluster = hostile("spin", |_| {}).await;
    let mut fallbacks = 0;
    for _ in 0..400 {
        let decision = ask(&cluster).await;
        fallbacks += u32::from(decision.contains("timeout") || decision.contains("breaker_open"));
        if decision.contains("predicted-latency@3") {
            break;
        }
    }
    assert!(fallbacks > 0, "the fallback served while it looped");
    assert!(ask(&cluster).await.contains("predicted-latency@3 policy"), "rolled back to the default");
    // The slot is swapped first and reported a moment later.
    let reported = |cluster: &TestCluster| {
        cluster.gateway.state().policies.status().slots.iter().any(|slot| slot.rollbacks == 1)
    };
    cluster.until("the rollback is reported", reported).await.unwrap();
    let status = slot(&cluster, "aggregated").await;
    assert_eq!(status["state"], "rolled-back");
    let message = status["refusals"][0]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("rolled back after 1 failure in its first "), "{message}");
    assert!(message.ends_with("; change the file or its settings to try again"), "{message}");
}

#[tokio::test]
async fn a_panic_of_a_policy_is_shown_with_its_message_and_place() {
    let cluster = hostile("trap", |policies| policies.probation_failure_share = 1.0).await;
    for _ in 0..200 {
        if !slot(&cluster, "aggregated").await["last_failure"].is_null() {
            break;
        }
        ask(&cluster).await;
    }
    let failure = slot(&cluster, "aggregated").await["last_failure"].clone();
    assert_eq!(failure["kind"], "trap", "{failure}");
    let message = failure["message"].as_str().unwrap();
    assert!(message.contains("panicked at tests/guests/hostile/src/lib.rs:"), "{message}");
    assert!(message.contains(": as the test wants it (wasm trap"), "{message}");
}

#[tokio::test]
async fn invariant_3_reloads_under_load_fail_no_request() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let client = cluster.client.clone();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = stop.clone();
    let load = tokio::task::spawn_blocking(move || {
        tokio::runtime::Handle::current().block_on(async move {
            let body =
                json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]})
                    .to_string();
            let mut served = 0_u32;
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                let reply = client.post(CHAT, &[], body.clone()).await.unwrap();
                assert_eq!(reply.status, 200, "{reply:?}");
                served += 1;
            }
            served
        })
    });
    let mut took = Vec::new();
    for turn in 0..10 {
        let (bytes, name) =
            if turn % 2 == 0 { (LEAST_LOADED, "least-loaded") } else { (KV_AWARE, "kv-aware") };
        let generation = turn + 2;
        let started = tokio::time::Instant::now();
        cluster.drop_policy("aggregated.wasm", bytes).unwrap();
        until_policy(&cluster, &format!("{name}@{generation} ")).await;
        took.push(started.elapsed());
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let served = load.await.unwrap();
    took.sort_unstable();
    println!(
        "10 reloads, {served} requests served; rename to first decision: median {:?}, most {:?}",
        took[5], took[9]
    );
    assert!(served > 0);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn invariant_5_with_every_policy_broken_the_gateway_serves() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            for kind in [SlotKind::Prefill, SlotKind::Decode] {
                let settings = toml::from_str("mode = \"trap\"\nafter = 8").unwrap();
                config.policies.slots.insert(kind, SlotEntry { settings, ..Default::default() });
            }
            config.policies.probation_calls = 0;
        })
        .pair(Dialect::Vllm)
        .start()
        .await;
    cluster.drop_policy("prefill.wasm", HOSTILE).unwrap();
    cluster.drop_policy("decode.wasm", HOSTILE).unwrap();
    cluster
        .until("both serve", |cluster| {
            cluster
                .gateway
                .state()
                .policies
                .status()
                .slots
                .iter()
                .filter(|slot| slot.policy == "hostile")
                .count()
                == 2
        })
        .await
        .unwrap();
    let mut seen = String::new();
    for _ in 0..120 {
        seen.push_str(&ask(&cluster).await);
    }
    assert!(seen.matches("trap").count() > 2, "{seen}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_decode_override_that_fails_is_counted_among_the_fallbacks() {
    // Each of its two functions fails separately; the probe adds to the successful calls.
    for script in ["error 20", "config-error 20"] {
        let cluster = TestClusterBuilder::new()
            .config(|config| config.policies.probation_calls = 0)
            .pair(Dialect::Vllm)
            .start()
            .await;
        cluster.drop_policy("decode-override.wasm", &scripted(ROGUE_PLANNER, script)).unwrap();
        let serves = |cluster: &TestCluster| {
            cluster.gateway.state().policies.status().slots.iter().any(|slot| slot.policy == "rogue")
        };
        cluster.until("it serves", serves).await.unwrap();
        for _ in 0..40 {
            let decision = ask(&cluster).await;
            assert!(decision.contains("prefill=") && decision.contains("decode="), "{decision}");
        }
        let text = cluster.metrics_text().await.unwrap();
        for reason in ["error", "breaker_open"] {
            let line = format!("pointsman_fallbacks_total{{slot=\"decode-override\",reason=\"{reason}\"}} ");
            let count = text.split_once(&line).map(|(_, rest)| rest.lines().next().unwrap().to_owned());
            assert!(count.is_some_and(|count| count.parse::<u32>().unwrap() > 0), "{script}: {reason}");
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn m4_a_policy_that_is_refused_at_the_start_is_counted_until_it_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("aggregated.wasm"), b"garbage").unwrap();
    let cluster = TestClusterBuilder::new()
        .config(|config| config.policies.dir = Some(dir.path().to_owned()))
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let not_run = |slot: &str| format!("pointsman_policy_not_run{{slot=\"{slot}\"");
    cluster.until_counted(&not_run("aggregated"), 1.0).await.unwrap();
    // M4.20
    assert_eq!(cluster.metric(&not_run("prefill")).await.unwrap(), [0.0]);
    ask(&cluster).await;
    std::fs::remove_file(dir.path().join("aggregated.wasm")).unwrap();
    while cluster.metric(&not_run("aggregated")).await.unwrap() != [0.0] {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
