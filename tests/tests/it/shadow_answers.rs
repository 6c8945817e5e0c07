//! What the records tell of a shadow that refuses, and of rules that differ in their slot or settings.

use std::time::Duration;

use pointsman_embedded_policies::{FORMULA, KV_AWARE};
use pointsman_gateway::config::Config;
use pointsman_policy_runtime::{Access, Capacity, Limits, PolicyEngine, compile};
use pointsman_policy_tools::replay::{RankBy, Share, replay};
use pointsman_routing::Origin;
use pointsman_sim::{Dialect, Role};
use pointsman_test_guests::{ROGUE_PLANNER, scripted};
use pointsman_tests::{TestCluster, TestClusterBuilder};
use serde_json::{Value, json};

async fn cluster(text: &str) -> TestCluster {
    let more: Config = toml::from_str(text).unwrap();
    TestClusterBuilder::new()
        .config(|config| (config.policies.slots, config.models) = (more.policies.slots, more.models))
        .sim(Dialect::Vllm, Role::Aggregated)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await
}

async fn ask(cluster: &TestCluster) {
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]});
    let reply = cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
}

async fn get(cluster: &TestCluster, path: &str) -> Value {
    cluster.admin.get(path).await.unwrap().json().unwrap()
}

async fn decisions(cluster: &TestCluster, query: &str) -> Vec<Value> {
    get(cluster, &format!("/decisions?{query}")).await["decisions"].as_array().unwrap().clone()
}

const REFUSING: &str = r#"
[policies.slots.aggregated]
builtin = "least-loaded"
shadow = { builtin = "formula", settings = { cost = "1", shed = { when = "n > 0", status = 429 } } }
"#;

#[tokio::test]
async fn t8_the_requests_that_a_shadow_would_have_refused_are_counted_and_told() {
    let cluster = cluster(REFUSING).await;
    for _ in 0..6 {
        ask(&cluster).await;
    }
    cluster.at_rest().await.unwrap();
    let shadow = crate::slots::slot(&cluster).await["shadow"].clone();
    let counts = ["agree", "disagree", "failed", "shed"].map(|key| shadow[key].as_u64().unwrap());
    // T8.1
    assert_eq!(counts, [0, 0, 0, 6], "{shadow}");
    let metrics = cluster.metrics_text().await.unwrap();
    let line = "pointsman_policy_shadow_total{slot=\"aggregated\",policy=\"formula\",result=\"shed\"} 6";
    // T8.1
    assert!(metrics.contains(line), "{metrics}");
    let summary = get(&cluster, "/decisions/summary").await;
    let slots = summary["slots"].as_array().unwrap();
    let lanes = slots.iter().find(|slot| slot["slot"] == "aggregated").unwrap()["lanes"].as_array().unwrap();
    let lane = lanes.iter().find(|lane| lane["lane"] == "shadow").unwrap();
    // T8.1
    assert_eq!((&lane["sheds"], &lane["agreed"], &lane["compared"]), (&json!(6), &json!(0), &json!(6)));
    let newest = &decisions(&cluster, "slot=aggregated&limit=1").await[0];
    let shadow = &newest["shadow"];
    // T8.2
    assert_eq!(
        (&shadow["answer"], &shadow["status"], &shadow["choice"]),
        (&json!("refused"), &json!(429), &Value::Null)
    );
    let one = get(&cluster, &format!("/decisions/{}", newest["id"].as_str().unwrap())).await;
    let told = one["sentences"].to_string();
    // T8.2
    assert!(told.contains("would have refused it with 429"), "{told}");
}

const PAIR: &str = r#"
[policies.slots.prefill]
builtin = "least-loaded"
shadow = { builtin = "kv-aware" }
[policies.slots.decode-override]
builtin = "conditional-disagg"
"#;

/// Installs a policy file.
async fn put(cluster: &TestCluster, file: &str, policy: &[u8]) {
    cluster.drop_policy(file, policy).unwrap();
    assert_eq!(cluster.admin.post("/policies/reload", &[], "").await.unwrap().status, 200);
}

/// Returns these figures of the shadow in the summary.
async fn of_shadow<const N: usize>(cluster: &TestCluster, slot: &str, figures: [&str; N]) -> [Value; N] {
    let summary = get(cluster, "/decisions/summary").await;
    let slots = summary["slots"].as_array().unwrap();
    let lanes = &slots.iter().find(|one| one["slot"] == slot).unwrap()["lanes"];
    let shadow = lanes.as_array().unwrap().iter().find(|lane| lane["lane"] == "shadow").unwrap();
    figures.map(|key| shadow[key].clone())
}

#[tokio::test]
async fn t8_the_summary_has_the_shadows_of_overrides_and_those_beside_newer_generations() {
    let more: Config = toml::from_str(PAIR).unwrap();
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.policies.slots = more.policies.slots;
            config.policies.probation_calls = 0;
        })
        .pair(Dialect::Vllm)
        .start()
        .await;
    let counts = ["decisions", "compared", "agreed", "sheds", "fallbacks"];
    put(&cluster, "decode-override.shadow.wasm", &scripted(ROGUE_PLANNER, "shed-429 0")).await;
    for _ in 0..3 {
        ask(&cluster).await;
    }
    cluster.at_rest().await.unwrap();
    // T8.1
    assert_eq!(of_shadow(&cluster, "decode-override", counts).await, [3, 3, 0, 3, 0].map(Value::from));
    put(&cluster, "decode-override.wasm", &scripted(ROGUE_PLANNER, "shed-429 0")).await;
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]});
    let reply = cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap();
    assert_eq!(reply.status, 429, "{reply:?}");
    cluster.at_rest().await.unwrap();
    // T8.1: the active lane refused it, too.
    assert_eq!(of_shadow(&cluster, "decode-override", counts).await, [1, 1, 1, 0, 0].map(Value::from));
    // Calls before the first failure are good: it is tried when it is installed.
    put(&cluster, "decode-override.wasm", &scripted(ROGUE_PLANNER, "remote 0")).await;
    put(&cluster, "decode-override.shadow.wasm", &scripted(ROGUE_PLANNER, "error 20")).await;
    let mut asked = 0;
    let [failed, compared, agreed, decisions] = loop {
        ask(&cluster).await;
        cluster.at_rest().await.unwrap();
        let figures = ["fallbacks", "compared", "agreed", "decisions"];
        let counts = of_shadow(&cluster, "decode-override", figures).await;
        let counts = counts.map(|count| count.as_u64().unwrap());
        if counts[0] > 0 {
            break counts;
        }
        asked += 1;
        assert!(asked < 400, "its calls do not fail");
    };
    // T8.1, I9.3
    assert_eq!((failed, compared, agreed), (1, decisions, decisions - 1));
    let [before] = of_shadow(&cluster, "prefill", ["generation"]).await;
    put(&cluster, "prefill.wasm", KV_AWARE).await;
    assert_eq!(of_shadow(&cluster, "prefill", ["decisions"]).await, [json!(0)]);
    ask(&cluster).await;
    cluster.at_rest().await.unwrap();
    // T8.1, I9.4
    assert_eq!(
        of_shadow(&cluster, "prefill", ["decisions", "generation"]).await,
        [json!(1), before],
        "the active generation is newer than the shadow"
    );
}

const TWO_RULES: &str = r#"
[models.tiny.slots.aggregated]
builtin = "formula"
settings = { cost = "active_requests" }
canary = { share = 0.5, builtin = "formula", settings = { cost = "0 - active_requests" } }
"#;

#[tokio::test]
async fn t8_receipts_tell_the_slot_of_a_model_and_two_settings_of_one_policy() {
    let cluster = cluster(TWO_RULES).await;
    for _ in 0..40 {
        ask(&cluster).await;
    }
    cluster.at_rest().await.unwrap();
    // T8.4
    assert_eq!(decisions(&cluster, "slot=aggregated&slot_model=").await.len(), 0);
    let own = decisions(&cluster, "slot=aggregated&slot_model=tiny").await;
    // T8.4
    assert!(own.len() == 40 && own.iter().all(|one| one["slot_model"] == "tiny"), "{own:?}");
    let values = |key: &str, lane: &str| {
        let mut values: Vec<String> =
            own.iter().filter(|one| one["mode"] == lane).map(|one| one[key].to_string()).collect();
        values.sort();
        values.dedup();
        values
    };
    // T8.5
    assert_eq!(values("digest", "active"), values("digest", "canary"), "one policy");
    let [active, canary] = ["active", "canary"].map(|lane| values("settings_digest", lane));
    // T8.5
    assert!(active.len() == 1 && canary.len() == 1 && active != canary, "{active:?} {canary:?}");
    let export = cluster.admin.get("/decisions/export?slot=aggregated").await.unwrap();
    let limits = Limits { deadline: Duration::from_secs(1), ..Limits::default() };
    let engine = PolicyEngine::new(limits, Capacity::detect()).unwrap();
    let access = Access::new(&Access::ALL);
    let rule = compile(&engine, FORMULA, &access).unwrap();
    let rule = rule.configure(Origin::Embedded, r#"{"cost":"1"}"#).unwrap();
    let report = replay(&rule, access.state(), &*export.body, RankBy::Policy).unwrap();
    let rules: Vec<(&String, &Share)> = report.rules.iter().collect();
    // T8.5
    let [(first, of_first), (second, of_second)] = rules[..] else { panic!("{rules:?}") };
    assert!(first.starts_with("tiny/aggregated active: formula "), "{first}");
    assert!(second.starts_with("tiny/aggregated canary: formula "), "{second}");
    assert_eq!(of_first.decisions + of_second.decisions, 40);
}
