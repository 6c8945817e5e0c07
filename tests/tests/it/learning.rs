//! Policies that learn from the outcomes of their decisions: traffic follows what they learnt, and a learner
//! that fails harms no request.

use std::time::Duration;

use pointsman_gateway::config::SlotEntry;
use pointsman_routing::SlotKind;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_test_guests::{LEARNED_TTFT, ROGUE_LEARNER, ROGUE_LEARNING_PLANNER, scripted};
use pointsman_tests::{CHAT, TestCluster, TestClusterBuilder};
use serde_json::json;

fn body(stream: bool, tokens: u32) -> String {
    json!({
        "model": "tiny", "stream": stream, "max_tokens": tokens, "ignore_eos": true,
        "messages": [{"role": "user", "content": "hello there"}],
    })
    .to_string()
}

async fn ask(cluster: &TestCluster) -> String {
    let reply = cluster.client.post(CHAT, &[("x-pointsman-decision", "1")], body(false, 2)).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.headers["x-pointsman-decision"].to_str().unwrap().to_owned()
}

/// Streams a chat to its end, so that it has a time to first token. Returns its decision.
async fn stream(cluster: &TestCluster) -> String {
    let stream = cluster.client.stream(CHAT, &[("x-pointsman-decision", "1")], body(true, 2)).await.unwrap();
    assert_eq!(stream.status, 200);
    let decision = stream.headers["x-pointsman-decision"].to_str().unwrap().to_owned();
    assert_eq!(stream.all().await.unwrap().last().unwrap(), "[DONE]");
    decision
}

fn slot(cluster: TestClusterBuilder, kind: SlotKind, entry: &str) -> TestClusterBuilder {
    let entry: SlotEntry = toml::from_str(entry).unwrap();
    cluster.config(|config| drop(config.policies.slots.insert(kind, entry)))
}

fn engine(first_token: Duration) -> SimConfig {
    SimConfig { overhead: first_token, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) }
}

async fn serves(cluster: &TestCluster, name: &'static str) {
    let serves = move |cluster: &TestCluster| {
        cluster.gateway.state().policies.status().slots.iter().any(|slot| slot.policy == name)
    };
    cluster.until("the policy serves", serves).await.unwrap();
}

/// Returns the value of a metric.
async fn metric(cluster: &TestCluster, line: &str) -> u64 {
    let text = cluster.metrics_text().await.unwrap();
    let value =
        text.split_once(&format!("\n{line} ")).map(|(_, rest)| rest.lines().next().unwrap().to_owned());
    value.map_or(0, |value| value.parse().unwrap())
}

/// Waits until this number of outcomes was delivered, failed or dropped.
async fn until_outcomes(cluster: &TestCluster, results: &[&str], count: u64) {
    for _ in 0..1_000 {
        let mut sum = 0;
        for result in results {
            sum += metric(cluster, &format!("pointsman_policy_outcomes_total{{result=\"{result}\"}}")).await;
        }
        if sum >= count {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {count} outcomes {results:?}");
}

/// Returns the counts that the rogue policy reports in its reason.
async fn counted(cluster: &TestCluster) -> String {
    let preview = cluster.client.post("/v1/route", &[], body(false, 2)).await.unwrap().json().unwrap();
    preview["legs"][0]["receipt"]["reason"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn traffic_moves_away_from_a_slow_engine_and_a_reload_forgets_nothing() {
    let entry = "grants = [\"log\", \"state\"]\nsettings = { explore = 0.02 }";
    let cluster = slot(TestClusterBuilder::new(), SlotKind::Aggregated, entry)
        .sim_with(engine(Duration::from_millis(400)), "")
        .sim_with(engine(Duration::ZERO), "")
        .start()
        .await;
    cluster.drop_policy("aggregated.wasm", LEARNED_TTFT).unwrap();
    serves(&cluster, "learned-ttft").await;
    let mut asked = 0;
    // Nothing is learnt yet: both get requests.
    let mut both = [false; 2];
    while both != [true; 2] {
        let decision = stream(&cluster).await;
        assert!(decision.contains("learned-ttft@2 policy") && asked < 200, "{asked}: {decision}");
        both[usize::from(decision.contains("=2/0"))] = true;
        asked += 1;
    }
    until_outcomes(&cluster, &["given"], asked).await;
    let mut slow = 0;
    for _ in 0..100 {
        slow += u32::from(stream(&cluster).await.contains("=1/0"));
    }
    // One in fifty explores, and half of those find the slow one; without what was learnt it is every second.
    assert!(slow <= 8, "{slow} of 100 still go to the slow engine");
    cluster.drop_policy("aggregated.wasm", &[LEARNED_TTFT, &[0, 1, 0]].concat()).unwrap();
    let reloaded =
        |cluster: &TestCluster| cluster.gateway.state().policies.status().slots[2].generation.0 == 3;
    cluster.until("the same with another digest", reloaded).await.unwrap();
    let mut slow = 0;
    for _ in 0..100 {
        slow += u32::from(stream(&cluster).await.contains("=1/0"));
    }
    assert!(slow <= 8, "{slow} of 100 after the reload");
    assert_eq!(metric(&cluster, "pointsman_policy_outcomes_total{result=\"dropped\"}").await, 0);
    let policies = cluster.admin.get("/policies").await.unwrap().json().unwrap();
    let slot = &policies["slots"][2];
    assert_eq!(slot["grants"], json!(["log", "state"]));
    let memory = &slot["memory"];
    // A key of either worker: `1/0`, 8 bytes, and 64 that each entry counts.
    assert_eq!((&memory["entries"], &memory["bytes"]), (&json!(2), &json!(2 * (3 + 8 + 64))), "{memory}");
    assert_eq!((&memory["entries_limit"], &memory["bytes_limit"]), (&json!(65_536), &json!(16_777_216)));
    assert_eq!(metric(&cluster, "pointsman_policy_state_entries{slot=\"aggregated\"}").await, 2);
    assert_eq!(policies["slots"][0]["memory"], json!(null), "no policy may keep state there");
    assert_eq!(policies["slots"][0]["grants"], json!(["log", "wasi"]));
    let part = &slot["parts"][0];
    assert_eq!((&part["learns"], &part["remembers"]), (&json!(true), &json!(true)));
}

#[tokio::test]
async fn every_decision_s_outcome_is_delivered_once_with_its_worker_and_status() {
    let slow = SimConfig { itl: Duration::from_millis(10), ..engine(Duration::ZERO) };
    let cluster = slot(TestClusterBuilder::new(), SlotKind::Aggregated, "grants = [\"log\", \"state\"]")
        .sim_with(slow.clone(), "")
        .sim_with(slow, "")
        .start()
        .await;
    cluster.drop_policy("aggregated.wasm", &scripted(ROGUE_LEARNER, "good 0")).unwrap();
    serves(&cluster, "rogue").await;
    for _ in 0..5 {
        ask(&cluster).await;
    }
    let mut stream = cluster.client.stream(CHAT, &[], body(true, 5_000)).await.unwrap();
    for _ in 0..4 {
        stream.next().await.unwrap();
    }
    drop(stream);
    // The first row is worker 1; the second try goes to worker 2.
    let once =
        Fault { times: Some(1), ..Fault::always(FaultKind::Status { status: 500, retry_after: None }) };
    cluster.sims[0].set_faults(vec![once]);
    ask(&cluster).await;
    cluster.at_rest().await.unwrap();
    until_outcomes(&cluster, &["given"], 8).await;
    let expected = "outcomes=8 by-policy=8 retried=1 odd=0 status/200=7 status/499=1 worker/1=7 worker/2=1";
    assert_eq!(counted(&cluster).await, expected);
}

/// A stream that left a worker that drains did not fail there, and the worker of its rest did not generate
/// its first token.
#[tokio::test]
async fn a_stream_that_moves_teaches_of_the_worker_where_it_began() {
    for (name, policy) in
        [("rogue", scripted(ROGUE_LEARNER, "good 0")), ("learned-ttft", LEARNED_TTFT.to_vec())]
    {
        let itl = Duration::from_millis(3);
        let slow = SimConfig { itl, ..engine(Duration::ZERO) };
        let cluster = slot(TestClusterBuilder::new(), SlotKind::Aggregated, "grants = [\"log\", \"state\"]")
            .sim_with(slow.clone(), "")
            .sim_with(slow, "")
            .start()
            .await;
        cluster.drop_policy("aggregated.wasm", &policy).unwrap();
        serves(&cluster, name).await;
        cluster.admin.post("/workers/2/drain", &[], "").await.unwrap();
        let mut stream = cluster.client.stream(CHAT, &[], body(true, 200)).await.unwrap();
        stream.next().await.unwrap();
        cluster.admin.delete("/workers/2/drain").await.unwrap();
        cluster.admin.post("/workers/1/drain?move=true", &[], "").await.unwrap();
        assert_eq!(stream.all().await.unwrap().last().unwrap(), "[DONE]");
        cluster.at_rest().await.unwrap();
        until_outcomes(&cluster, &["given"], 2).await;
        if name == "rogue" {
            // I15.9
            let expected =
                "outcomes=2 by-policy=2 retried=0 odd=0 status/200=2 status/499=0 worker/1=1 worker/2=1";
            assert_eq!(counted(&cluster).await, expected);
        } else {
            let policies = cluster.admin.get("/policies").await.unwrap().json().unwrap();
            assert_eq!(policies["slots"][2]["memory"]["entries"], json!(1));
        }
    }
}

#[tokio::test]
async fn each_leg_s_slot_learns_of_its_own_workers_only() {
    let mut builder = TestClusterBuilder::new();
    for kind in [SlotKind::Prefill, SlotKind::Decode] {
        builder = slot(builder, kind, "grants = [\"log\", \"state\"]");
    }
    let cluster = builder.pair(Dialect::Vllm).start().await;
    for file in ["prefill.wasm", "decode.wasm"] {
        cluster.drop_policy(file, &scripted(ROGUE_LEARNER, "good 0")).unwrap();
    }
    let both = |cluster: &TestCluster| {
        cluster.gateway.state().policies.status().slots.iter().filter(|slot| slot.policy == "rogue").count()
            == 2
    };
    cluster.until("both serve", both).await.unwrap();
    for _ in 0..6 {
        ask(&cluster).await;
    }
    until_outcomes(&cluster, &["given"], 12).await;
    let preview = cluster.client.post("/v1/route", &[], body(false, 2)).await.unwrap().json().unwrap();
    let reason = |leg: usize| preview["legs"][leg]["receipt"]["reason"].as_str().unwrap().to_owned();
    assert!(reason(0).starts_with("outcomes=6") && reason(0).ends_with("worker/1=6 worker/2=0"), "{preview}");
    assert!(reason(1).starts_with("outcomes=6") && reason(1).ends_with("worker/1=0 worker/2=6"), "{preview}");
}

#[tokio::test]
async fn a_decode_override_learns_which_leg_answered() {
    let cluster = slot(TestClusterBuilder::new(), SlotKind::DecodeOverride, "grants = [\"log\", \"state\"]")
        .pair(Dialect::Vllm)
        .start()
        .await;
    cluster.drop_policy("decode-override.wasm", &scripted(ROGUE_LEARNING_PLANNER, "learn-local 0")).unwrap();
    serves(&cluster, "rogue").await;
    let (mut remote, mut local) = (0, 0);
    while local < 3 {
        let decision = ask(&cluster).await;
        if decision.starts_with("aggregated=2/0") {
            local += 1;
        } else {
            assert!(decision.contains("decode=2/0") && local == 0, "{decision}");
            remote += 1;
            assert!(remote < 200, "it never learnt");
            tokio::time::sleep(Duration::from_millis(40)).await;
        }
    }
    assert!(remote >= 3, "{remote}");
}

#[tokio::test]
async fn t7_a_shadow_learns_from_requests_that_the_active_lane_served() {
    let entry = "builtin = \"conditional-disagg\"\ngrants = [\"log\", \"state\"]";
    let cluster =
        slot(TestClusterBuilder::new(), SlotKind::DecodeOverride, entry).pair(Dialect::Vllm).start().await;
    let policy = scripted(ROGUE_LEARNING_PLANNER, "learn-local 0");
    cluster.drop_policy("decode-override.shadow.wasm", &policy).unwrap();
    let compared = |cluster: &TestCluster| {
        let status = cluster.gateway.state().policies.status();
        let slot = status.slots.iter().find(|slot| slot.slot == SlotKind::DecodeOverride).unwrap();
        slot.shadow.as_ref().map(|shadow| (shadow.agree, shadow.disagree))
    };
    cluster.until("the shadow runs", move |cluster| compared(cluster).is_some()).await.unwrap();
    let mut asked = 0;
    while compared(&cluster).unwrap().1 < 3 {
        assert!(ask(&cluster).await.contains("decode=2/0"), "the active lane serves");
        asked += 1;
        assert!(asked < 200, "it never learnt: {:?}", compared(&cluster));
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
    // T7.5
    assert!(compared(&cluster).unwrap().0 >= 3, "it plans as the active lane does until three outcomes came");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_learner_that_traps_loops_or_hoards_touches_no_request_and_decides_on() {
    for (script, kind) in
        [("observe-trap 1", "trap"), ("observe-loop 1", "timeout"), ("observe-hoard 1", "memory")]
    {
        let cluster = slot(TestClusterBuilder::new(), SlotKind::Aggregated, "grants = [\"log\", \"state\"]")
            .sim(Dialect::Vllm, Role::Aggregated)
            .start()
            .await;
        cluster.drop_policy("aggregated.wasm", &scripted(ROGUE_LEARNER, script)).unwrap();
        serves(&cluster, "rogue").await;
        let mut asked = 0;
        // Each batch is one call: the first goes well, the second does not.
        let failed = format!(
            "pointsman_policy_observations_total{{slot=\"aggregated\",lane=\"active\",outcome=\"{kind}\"}}"
        );
        while metric(&cluster, &failed).await == 0 {
            for _ in 0..10 {
                let decision = ask(&cluster).await;
                assert!(decision.contains("rogue@2 policy"), "{script}: {decision}");
            }
            asked += 10;
            assert!(asked < 3_000, "{script}: it never failed");
            tokio::time::sleep(Duration::from_millis(80)).await;
        }
        for _ in 0..20 {
            assert!(ask(&cluster).await.contains("rogue@2 policy"), "{script}");
        }
        until_outcomes(&cluster, &["given", "failed", "withheld"], asked + 20).await;
        let failures = cluster.gateway.state().policies.status().slots[2].failures;
        assert_eq!(
            (failures, cluster.gateway.state().policies.status().slots[2].rollbacks),
            (0, 0),
            "{script}"
        );
        let calls = "pointsman_policy_calls_total{slot=\"aggregated\",lane=\"active\",outcome=\"ok\"}";
        assert!(metric(&cluster, calls).await >= asked + 20, "{script}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn a_learner_that_fails_in_its_probe_is_refused() {
    let cluster = slot(TestClusterBuilder::new(), SlotKind::Aggregated, "grants = [\"log\", \"state\"]")
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    cluster.drop_policy("aggregated.wasm", &scripted(ROGUE_LEARNER, "observe-loop 0")).unwrap();
    let refused =
        |cluster: &TestCluster| !cluster.gateway.state().policies.status().slots[2].refusals.is_empty();
    cluster.until("it is refused", refused).await.unwrap();
    let refusal = cluster.gateway.state().policies.status().slots[2].refusals[0].clone();
    assert_eq!(
        (refusal.kind, refusal.message.as_str()),
        (
            "observe",
            "observe failed on made-up outcomes: stopped after 20 ms of CPU time (policies.observe_deadline)"
        )
    );
}
