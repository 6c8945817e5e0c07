//! Fleets that lose and regain a leg, local and remote prefill, and what the log says about a request.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "helpers of tests may fail as tests do"
)]

use std::time::Duration;

use pointsman_gateway::config::SlotEntry;
use pointsman_routing::SlotKind;
use pointsman_sim::{Dialect, Fault, FaultKind, FaultLeg, Role, SimConfig};
use pointsman_test_guests::{ROGUE_LEARNING_PLANNER, scripted};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder, log::Log, own_process};
use serde_json::{Value, json};

const EXPLAIN: (&str, &str) = ("x-pointsman-decision", "1");

fn body(prompt: &str) -> String {
    json!({"model": "tiny", "prompt": prompt.repeat(40), "max_tokens": 3, "ignore_eos": true}).to_string()
}

/// Returns the parts of the decision header without ids and policies, such as `prefill=1/0 policy`.
async fn decisions(cluster: &TestCluster, body: String) -> Vec<String> {
    let reply = cluster.client.post(COMPLETIONS, &[EXPLAIN], body).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    let header = reply.headers["x-pointsman-decision"].to_str().unwrap().to_owned();
    let short = |one: &str| format!("{} {}", one.split(' ').next().unwrap(), one.rsplit(' ').next().unwrap());
    header.split(", ").map(short).collect()
}

/// Makes the health checks of an engine fail, or succeed again, and waits until the gateway knows.
async fn set_healthy(cluster: &TestCluster, sims: &[usize], healthy: bool) {
    let failing = Fault {
        leg: Some(FaultLeg::Health),
        ..Fault::always(FaultKind::Status { status: 500, retry_after: None })
    };
    for sim in sims {
        cluster.sims[*sim].set_faults(if healthy { vec![] } else { vec![failing.clone()] });
    }
    let known = |cluster: &TestCluster| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        let eligible = |sim: &usize| {
            let id = pointsman_workers::WorkerId(*sim as u64 + 1);
            snapshot.get(id).unwrap().ineligible().is_none()
        };
        sims.iter().all(|sim| eligible(sim) == healthy)
    };
    cluster.until("the gateway knows", known).await.unwrap();
}

fn recording(role: Role) -> SimConfig {
    SimConfig { record: 50, ..SimConfig::instant(Dialect::Vllm, role) }
}

#[tokio::test]
async fn b1_b2_b3_a_fleet_without_prefill_serves_locally_and_continues_where_it_was() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.policies.slots = toml::from_str("[prefill]\nnative = \"round-robin\"").unwrap();
        })
        .sim_with(recording(Role::Prefill), "")
        .sim_with(recording(Role::Prefill), "")
        .sim_with(recording(Role::Decode), "")
        .start()
        .await;
    assert_eq!(decisions(&cluster, body("one ")).await[0], "prefill=1/0 native");
    // How many blocks of the first prompt the index has at worker 1.
    let cached = async || -> u64 {
        cluster.gateway.state().router.index().flush();
        let preview = cluster.client.post("/v1/route", &[], body("one ")).await.unwrap().json().unwrap();
        let candidates = preview["legs"][0]["candidates"].as_array().unwrap().clone();
        let first = candidates.into_iter().find(|candidate| candidate["worker"] == 1).unwrap();
        first["cached_blocks"]["device"].as_u64().unwrap()
    };
    let before = cached().await;
    assert!(before > 0);
    set_healthy(&cluster, &[0, 1], false).await;
    let models = cluster.client.get("/v1/models").await.unwrap().json().unwrap();
    // B3.1: without enforcement it serves while prefill is unavailable
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(cluster.admin.get("/readyz").await.unwrap().status, 200);
    let sent = body("two ");
    // B1.2
    assert_eq!(decisions(&cluster, sent.clone()).await.len(), 1);
    let recorded = cluster.sims[2].recorded().into_iter().rfind(|recorded| recorded.path == COMPLETIONS);
    // B1.2: unchanged
    assert_eq!(recorded.unwrap().body, sent);
    set_healthy(&cluster, &[0, 1], true).await;
    // B2.3: the cursor continues after worker 1, and the index still has its blocks
    assert_eq!(decisions(&cluster, body("three ")).await[0], "prefill=2/0 native");
    // B2.3
    assert_eq!(cached().await, before);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b1_stock_sglang_decode_workers_alone_serve_nothing() {
    let cluster = TestCluster::disaggregated(Dialect::Sglang, 1, 1).await.unwrap();
    assert_eq!(decisions(&cluster, body("one ")).await.len(), 2);
    set_healthy(&cluster, &[0], false).await;
    let reply = cluster.client.post(COMPLETIONS, &[], body("two ")).await.unwrap();
    // B1.3, B1.4
    assert_eq!((reply.status.as_u16(), reply.headers.contains_key("retry-after")), (503, true), "{reply:?}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a3_hints_are_ignored_where_clients_are_not_trusted() {
    for (trusted, expected) in [(true, 404), (false, 200)] {
        let cluster = TestClusterBuilder::new()
            .config(|config| config.server.trust_hints = trusted)
            .sim(Dialect::Vllm, Role::Aggregated)
            .start()
            .await;
        let pin = [("x-worker-instance-id", "99")];
        let reply = cluster.client.post(COMPLETIONS, &pin, body("x ")).await.unwrap();
        // A3.9
        assert_eq!(reply.status.as_u16(), expected, "trusted {trusted}: {reply:?}");
    }
}

fn conditional(settings: &str) -> TestClusterBuilder {
    let text = format!("builtin = \"conditional-disagg\"\nsettings = {settings}");
    let entry: SlotEntry = toml::from_str(&text).unwrap();
    TestClusterBuilder::new().config(|config| {
        config.policies.slots.insert(SlotKind::DecodeOverride, entry);
    })
}

/// Waits until the gateway has read the decode engine's load, which the policy needs.
async fn load_known(cluster: &TestCluster) {
    let known = |cluster: &TestCluster| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        snapshot.workers().iter().all(|worker| worker.engine_load().is_some())
    };
    cluster.until("the load of every engine is known", known).await.unwrap();
}

#[tokio::test]
async fn d4_the_shipped_policy_prefills_few_new_tokens_locally_and_the_header_says_so() {
    let cluster = conditional("{ enabled = true }").pair(Dialect::Vllm).start().await;
    load_known(&cluster).await;
    let first = decisions(&cluster, body("which way? ")).await;
    // D4.2: all tokens are new
    assert_eq!(first, ["prefill=1/0 policy", "decode=2/0 policy"]);
    cluster.gateway.state().router.index().flush();
    // D4.1, D4.2, D4.6: the previewed decode worker has the prompt cached
    assert_eq!(decisions(&cluster, body("which way? ")).await, ["aggregated=2/0 plan"]);
    assert_eq!(cluster.sims[0].state().requests.values().sum::<u64>(), 1, "no second prefill");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d4_an_unknown_load_and_a_busy_decode_worker_keep_prefill_remote() {
    // The load of engines is never read.
    let cluster = conditional("{ enabled = true }")
        .config(|config| config.probe.load_interval = Duration::ZERO)
        .pair(Dialect::Vllm)
        .start()
        .await;
    for _ in 0..3 {
        // D4.4: unknown
        assert_eq!(decisions(&cluster, body("which way? ")).await.len(), 2);
        cluster.gateway.state().router.index().flush();
    }
    // Every KV cache counts as too full.
    let cluster = conditional("{ enabled = true, decode-busy-kv-usage = 0.0 }")
        .sim(Dialect::Vllm, Role::Prefill)
        .sim_with(
            SimConfig { itl: Duration::from_millis(10), ..SimConfig::instant(Dialect::Vllm, Role::Decode) },
            "",
        )
        .start()
        .await;
    let long = body("which way? ").replace("\"max_tokens\":3", "\"max_tokens\":4000,\"stream\":true");
    let mut running = cluster.client.stream(COMPLETIONS, &[], long).await.unwrap();
    running.next().await.unwrap();
    let used = |cluster: &TestCluster| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        let decode = snapshot.get(pointsman_workers::WorkerId(2)).unwrap().clone();
        decode.engine_load().is_some_and(|load| load.kv_usage > Some(0.0))
    };
    cluster.until("blocks of the decode engine are in use", used).await.unwrap();
    // D4.4: busy
    assert_eq!(decisions(&cluster, body("which way? ")).await.len(), 2);
    drop(running);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d4_a_busy_prefill_pool_makes_prefill_local() {
    let slow =
        SimConfig { overhead: Duration::from_secs(3), ..SimConfig::instant(Dialect::Vllm, Role::Prefill) };
    let cluster = conditional("{ enabled = true, prefill-busy-tokens = 20 }")
        .sim_with(slow, "")
        .sim(Dialect::Vllm, Role::Decode)
        .start()
        .await;
    load_known(&cluster).await;
    let client = cluster.client.clone();
    let tasks = tokio_util::task::TaskTracker::new();
    let first = tasks.spawn(async move { client.post(COMPLETIONS, &[], body("one ")).await.unwrap() });
    cluster.until("prefill is busy", |cluster| cluster.booked() == 1).await.unwrap();
    // D4.3
    assert_eq!(decisions(&cluster, body("two ")).await, ["aggregated=2/0 plan"]);
    assert_eq!(first.await.unwrap().status, 200);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d4_the_default_prefills_locally_where_that_saves_more_than_a_step() {
    let slow =
        SimConfig { overhead: Duration::from_secs(3), ..SimConfig::instant(Dialect::Vllm, Role::Prefill) };
    let cluster = TestClusterBuilder::new().sim_with(slow, "").sim(Dialect::Vllm, Role::Decode).start().await;
    let is_remote = async |prompt: &str| {
        let reply = cluster.client.post("/v1/route", &[], body(prompt)).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json().unwrap()["worker_id"]["prefill_worker_id"].is_u64()
    };
    let long = |prompt: &str| prompt.repeat(20);
    // D4.8: an idle pair
    assert!(is_remote(&long("one long prompt ")).await);
    let tasks = tokio_util::task::TaskTracker::new();
    let send = |prompt: &str| {
        let (client, body) = (cluster.client.clone(), body(prompt));
        tasks.spawn(async move { client.post(COMPLETIONS, &[], body).await.unwrap() })
    };
    let short = send("short ");
    cluster.until("a short prompt waits", |cluster| cluster.booked() == 1).await.unwrap();
    // D4.8: less than a step
    assert!(is_remote(&long("one long prompt ")).await);
    let first = send(&long("one long prompt "));
    cluster.until("a long prompt waits", |cluster| cluster.booked() == 2).await.unwrap();
    // D4.8: more than a step
    let second = body(&long("another long prompt "));
    assert_eq!(decisions(&cluster, second.clone()).await, ["aggregated=2/0 plan"]);
    for task in [short, first] {
        assert_eq!(task.await.unwrap().status, 200);
    }
    cluster.at_rest().await.unwrap();
    cluster.gateway.state().router.index().flush();
    // D4.8: an idle pair, of which decode alone has the prompt
    assert_eq!(decisions(&cluster, second).await, ["aggregated=2/0 plan"]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d4_the_default_keeps_prefill_remote_where_a_stream_would_miss_its_target() {
    let slow =
        SimConfig { overhead: Duration::from_secs(6), ..SimConfig::instant(Dialect::Vllm, Role::Prefill) };
    let paced =
        SimConfig { itl: Duration::from_millis(10), ..SimConfig::instant(Dialect::Vllm, Role::Decode) };
    let cluster = TestClusterBuilder::new().sim_with(slow, "").sim_with(paced, "").start().await;
    let (client, first) = (cluster.client.clone(), body(&"one ".repeat(80)));
    let tasks = tokio_util::task::TaskTracker::new();
    let waiting = tasks.spawn(async move { client.post(COMPLETIONS, &[], first).await.unwrap() });
    cluster.until("a long prompt waits", |cluster| cluster.booked() == 1).await.unwrap();
    let long = body("which way? ").replace("\"max_tokens\":3", "\"max_tokens\":4000,\"stream\":true");
    let mut stream = cluster.client.stream(COMPLETIONS, &[], long).await.unwrap();
    stream.next().await.unwrap();
    let is_remote = async |headers: &[(&str, &str)]| {
        let reply = cluster.client.post("/v1/route", headers, body(&"three ".repeat(10))).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json().unwrap()["worker_id"]["prefill_worker_id"].is_u64()
    };
    // D4.8
    assert!(!is_remote(&[]).await);
    assert!(is_remote(&[("x-slo-tpot-ms", "1")]).await);
    assert!(!is_remote(&[("x-slo-tpot-ms", "60000")]).await);
    drop(stream);
    assert_eq!(waiting.await.unwrap().status, 200);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d4_a_local_plan_that_stock_sglang_cannot_execute_is_counted_and_turned_into_remote() {
    let entry: SlotEntry = toml::from_str("grants = [\"log\", \"state\"]").unwrap();
    let cluster = TestClusterBuilder::new()
        .config(|config| drop(config.policies.slots.insert(SlotKind::DecodeOverride, entry)))
        .pair(Dialect::Sglang)
        .start()
        .await;
    cluster.drop_policy("decode-override.wasm", &scripted(ROGUE_LEARNING_PLANNER, "learn-local 0")).unwrap();
    for turn in 0..400 {
        let decided = decisions(&cluster, body(&format!("{turn} "))).await;
        // D4.5: remote
        assert_eq!(decided.len(), 2, "{decided:?}");
        if cluster.metrics_text().await.unwrap().contains("handoffs_total{result=\"local_refused\"}") {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let counted = cluster.metrics_text().await.unwrap();
    // D4.5: counted
    assert!(counted.contains("local_refused"), "{counted}");
}

#[tokio::test]
async fn i_workers_that_fail_anyway_prove_nothing_against_a_request() {
    let cluster = TestClusterBuilder::new()
        .sim(Dialect::Vllm, Role::Aggregated)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    for sim in &cluster.sims {
        sim.set_faults(vec![Fault::always(FaultKind::Status { status: 500, retry_after: None })]);
    }
    let failing = |cluster: &TestCluster| {
        cluster.gateway.state().registry.snapshot().workers().iter().all(|worker| worker.is_failing())
    };
    for turn in 0..100 {
        if failing(&cluster) {
            break;
        }
        cluster.client.post(COMPLETIONS, &[], body(&format!("{turn} "))).await.unwrap();
    }
    assert!(failing(&cluster), "both workers fail");
    for _ in 0..2 {
        let reply = cluster.client.post(COMPLETIONS, &[], body("innocent ")).await.unwrap();
        // I4.4
        assert_eq!(reply.code(), "bad_upstream", "{reply:?}");
    }
}

#[tokio::test]
async fn a5_b1_the_log_has_the_client_s_request_id_and_whether_remote_prefill_is_enforced() {
    own_process!();
    let log = Log::start();
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    let headers = [("x-request-id", "client-77")];
    let reply = cluster.client.post(COMPLETIONS, &headers, body("x ")).await.unwrap();
    // A5.5: the response header
    assert_eq!(reply.headers["x-request-id"], "client-77");
    cluster.at_rest().await.unwrap();
    let text = log.text();
    let line = text.lines().find(|line| line.contains("pointsman::access")).unwrap_or_default();
    // A5.5: the log
    assert!(line.contains("client-77"), "{text}");
    let starts = text.lines().any(|line| line.contains(" serving ") && line.contains("enforce_disagg=false"));
    // B1.5: the log
    assert!(starts, "{text}");
    assert!(
        text.lines().any(|line| line.contains("remote prefill changed") && line.contains("enforced=false"))
    );
    let _: Value = reply.json().unwrap();
}
