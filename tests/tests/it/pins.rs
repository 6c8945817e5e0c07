//! Pins (F3, D4), previews (F2), a client's credit (D2) and rules of single models (D5).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use pointsman_gateway::config::{Config, LegOrder, SlotEntry, TokenSource};
use pointsman_routing::{NativeMode, SlotKind};
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder, client::Reply};
use serde_json::{Value, json};

const EXPLAIN: (&str, &str) = ("x-pointsman-decision", "1");

fn body(model: &str, word: &str) -> String {
    json!({"model": model, "prompt": format!("{word} ").repeat(200), "max_tokens": 3}).to_string()
}

async fn ask(cluster: &TestCluster, headers: &[(&str, &str)], body: String) -> Reply {
    let headers: Vec<_> = headers.iter().copied().chain([EXPLAIN]).collect();
    cluster.client.post(COMPLETIONS, &headers, body).await.unwrap()
}

fn decisions(reply: &Reply) -> String {
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.headers["x-pointsman-decision"].to_str().unwrap().to_owned()
}

/// The answer to a refused request.
fn refused(reply: &Reply) -> (u16, String) {
    (reply.status.as_u16(), reply.code())
}

fn conditional(config: &mut Config, enabled: bool) {
    let entry: SlotEntry = toml::from_str(&format!("settings = {{ enabled = {enabled} }}")).unwrap();
    let entry = SlotEntry { builtin: Some("conditional-disagg".to_owned()), ..entry };
    config.policies.slots.insert(SlotKind::DecodeOverride, entry);
}

#[tokio::test]
async fn f3_the_worker_header_alone_pins_decode_and_the_policy_chooses_prefill() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 2, 2).await.unwrap();
    let mut prefill = BTreeSet::new();
    for request in 0..64 {
        // Equal workers are chosen by chance.
        if request >= 8 && prefill.len() == 2 {
            break;
        }
        let prompt = format!("prompt {request}");
        let reply = ask(&cluster, &[("x-worker-instance-id", "4")], body("tiny", &prompt)).await;
        let decided = decisions(&reply);
        let (first, second) = decided.split_once(", ").unwrap();
        // F3.1
        assert!(first.starts_with("prefill=") && first.ends_with("policy"), "{decided}");
        // F3.2
        assert!(second.starts_with("decode=4/0") && second.ends_with("pin"), "{decided}");
        prefill.insert(first.split(['=', '/']).nth(1).unwrap().to_owned());
    }
    assert_eq!(prefill.len(), 2, "the policy chooses among both: {prefill:?}");
    let reply = ask(&cluster, &[("x-worker-instance-id", "1")], body("tiny", "a")).await;
    assert_eq!(refused(&reply), (409, "worker_not_eligible".to_owned()), "a prefill worker does not decode");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f3_the_decode_worker_pins_an_aggregated_request_and_an_empty_list_allows_no_worker() {
    for direct in [false, true] {
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                let native = direct.then_some(NativeMode::Direct);
                config
                    .policies
                    .slots
                    .insert(SlotKind::Aggregated, SlotEntry { native, ..SlotEntry::default() });
            })
            .sim(Dialect::Vllm, Role::Aggregated)
            .sim(Dialect::Vllm, Role::Aggregated)
            .start()
            .await;
        let with = |nvext: Value| {
            let mut body: Value = serde_json::from_str(&body("tiny", "a")).unwrap();
            body["nvext"] = nvext;
            body.to_string()
        };
        for worker in [1, 2, 1, 1, 2] {
            let decided = decisions(&ask(&cluster, &[], with(json!({ "decode_worker_id": worker }))).await);
            // F3.3, F3.6
            assert!(
                decided.starts_with(&format!("aggregated={worker}/0")) && decided.ends_with("pin"),
                "{decided}"
            );
        }
        let both = with(json!({ "decode_worker_id": 1, "backend_instance_id": 2 }));
        // F3.3
        assert!(decisions(&ask(&cluster, &[], both).await).starts_with("aggregated=2/0"));
        if !direct {
            let reply = ask(&cluster, &[], with(json!({ "allowed_worker_ids": [] }))).await;
            // F6.4
            assert_eq!(refused(&reply), (503, "no_worker".to_owned()));
            let reply = ask(&cluster, &[], with(json!({ "allowed_worker_ids": null }))).await;
            assert_eq!(reply.status, 200, "{reply:?}");
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn f2_a_preview_returns_the_token_ids_of_a_text_prompt() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            let model = config.models.entry("tiny".to_owned()).or_default();
            (model.tokenizer, model.tokenizer_timeout) = (Some(TokenSource::Engine), Duration::from_secs(2));
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let tokens = cluster.client.post("/tokenize", &[], body("tiny", "which")).await.unwrap();
    let tokens = tokens.json().unwrap()["tokens"].clone();
    assert!(tokens.as_array().unwrap().len() >= 200, "{tokens}");
    let mut annotated: Value = serde_json::from_str(&body("tiny", "which")).unwrap();
    annotated["nvext"] = json!({"annotations": ["query_instance_id:"]});
    for (path, body) in [("/v1/route", body("tiny", "which")), (COMPLETIONS, annotated.to_string())] {
        let reply = cluster.client.post(path, &[], body).await.unwrap().json().unwrap();
        // F2.3
        assert_eq!(reply["token_ids"], tokens, "{path}");
        assert_eq!(reply["prompt_tokens_estimated"], false, "{path}");
    }
}

/// The counters of policies and handoffs.
async fn counters(cluster: &TestCluster) -> Vec<String> {
    let text = cluster.metrics_text().await.unwrap();
    let names = ["pointsman_policy_calls_total", "pointsman_policy_shadow_total", "pointsman_handoffs_total"];
    let counts = |line: &&str| names.iter().any(|name| line.starts_with(name));
    text.lines().filter(counts).map(str::to_owned).collect()
}

#[tokio::test]
async fn f2_previews_move_no_counter_of_a_shadow() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            conditional(config, true);
            for kind in [SlotKind::Prefill, SlotKind::Decode, SlotKind::DecodeOverride] {
                let shadow =
                    if kind == SlotKind::DecodeOverride { "conditional-disagg" } else { "least-loaded" };
                let entry = config.policies.slots.entry(kind).or_default();
                entry.shadow = Some(toml::from_str(&format!("builtin = '{shadow}'")).unwrap());
            }
        })
        .pair(Dialect::Vllm)
        .start()
        .await;
    assert_eq!(ask(&cluster, &[], body("tiny", "a")).await.status, 200);
    cluster.at_rest().await.unwrap();
    let before = counters(&cluster).await;
    let calls = before.iter().any(|line| line.contains(r#"lane="shadow""#));
    assert!(calls, "a request moves them: {before:?}");
    let mut annotated: Value = serde_json::from_str(&body("tiny", "b")).unwrap();
    annotated["nvext"] = json!({"annotations": ["query_instance_id:"]});
    for (path, body) in [("/v1/route", body("tiny", "b")), (COMPLETIONS, annotated.to_string())] {
        for _ in 0..5 {
            assert_eq!(cluster.client.post(path, &[], body.clone()).await.unwrap().status, 200, "{path}");
        }
    }
    // F2.5
    assert_eq!(counters(&cluster).await, before);
}

/// The credit that the newest decode decision was made with.
async fn credit(cluster: &TestCluster) -> f64 {
    let list = cluster.admin.get("/decisions?limit=1&slot=decode").await.unwrap().json().unwrap();
    let stages = list["decisions"][0]["stages"].as_array().unwrap().clone();
    let facts = stages.iter().find(|stage| stage.get("policy").is_none()).unwrap();
    facts["request"]["overlap-score-credit"].as_f64().unwrap()
}

#[tokio::test]
async fn d2_a_credit_given_explicitly_is_kept_with_conditional_disaggregation() {
    for (enabled, kept) in [(true, 0.5), (false, 0.0)] {
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                conditional(config, enabled);
                config.decisions.facts = vec!["overlap-score-credit".to_owned()];
            })
            .pair(Dialect::Vllm)
            .start()
            .await;
        assert_eq!(ask(&cluster, &[], body("tiny", "a")).await.status, 200);
        // D2.1
        assert_eq!(credit(&cluster).await, 0.0, "nobody gave a credit");
        let mut explicit: Value = serde_json::from_str(&body("tiny", "b")).unwrap();
        explicit["nvext"] = json!({"router_config_override": {"overlap_score_credit": 0.5}});
        assert_eq!(ask(&cluster, &[], explicit.to_string()).await.status, 200);
        // D2.4
        assert_eq!(credit(&cluster).await, kept, "conditional disaggregation: {enabled}");
    }
}

#[tokio::test]
async fn d4_a_pinned_prefill_worker_is_honoured_or_refused() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            conditional(config, true);
            config.routing.local_fallback = true;
            config.routing.retries = 0;
        })
        .pair(Dialect::Vllm)
        .start()
        .await;
    let pin = [("x-prefill-instance-id", "1")];
    let local = async || {
        for _ in 0..50 {
            let decided = decisions(&ask(&cluster, &[], body("tiny", "a")).await);
            if decided.starts_with("aggregated=2/") {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        false
    };
    assert!(local().await, "the prompt is cached on the decode worker: local prefill");
    let pinned = decisions(&ask(&cluster, &pin, body("tiny", "a")).await);
    // D4.7
    assert!(pinned.starts_with("prefill=1/0") && pinned.contains("decode=2/0"), "{pinned}");
    let unknown = ask(&cluster, &[("x-prefill-instance-id", "77")], body("tiny", "a")).await;
    assert_eq!(refused(&unknown), (404, "worker_not_found".to_owned()));
    let broken = Fault::always(FaultKind::Status { status: 500, retry_after: None });
    cluster.sims[0].set_faults(vec![broken]);
    let failed = ask(&cluster, &pin, body("tiny", "a")).await;
    assert_eq!(refused(&failed), (502, "bad_upstream".to_owned()), "no local fallback: {failed:?}");
    cluster.admin.post("/workers/1/drain", &[], "").await.unwrap();
    let draining = ask(&cluster, &pin, body("tiny", "a")).await;
    assert_eq!(refused(&draining), (409, "worker_not_eligible".to_owned()), "{draining:?}");
    assert_eq!(ask(&cluster, &[], body("tiny", "a")).await.status, 200, "without the pin: local prefill");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d5_order_fallback_and_enforcement_are_rules_of_each_model_and_follow_a_reload() {
    let sim =
        |model: &str, role| SimConfig { model: model.to_owned(), ..SimConfig::instant(Dialect::Vllm, role) };
    let enforce = Arc::new(parking_lot::Mutex::new(None));
    let read = enforce.clone();
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.routing.retries = 0;
            let model = config.models.entry("a".to_owned()).or_default();
            (model.order, model.local_fallback) = (Some(LegOrder::DecodeFirst), Some(true));
        })
        .reread(None, move |started| {
            let mut config = started.clone();
            config.models.entry("a".to_owned()).or_default().enforce_disagg = *read.lock();
            Ok(config)
        })
        .sim_with(sim("a", Role::Prefill), "")
        .sim_with(sim("a", Role::Decode), "")
        .sim_with(sim("b", Role::Prefill), "")
        .sim_with(sim("b", Role::Decode), "")
        .start()
        .await;
    let (a, b) = (ask(&cluster, &[], body("a", "x")).await, ask(&cluster, &[], body("b", "x")).await);
    // D5.1
    assert!(decisions(&a).starts_with("decode=2/"), "{}", decisions(&a));
    assert!(decisions(&b).starts_with("prefill=3/"), "{}", decisions(&b));
    let broken = Fault::always(FaultKind::Status { status: 500, retry_after: None });
    for sim in [0, 2] {
        cluster.sims[sim].set_faults(vec![broken.clone()]);
    }
    // B6.2
    assert!(decisions(&ask(&cluster, &[], body("a", "y")).await).contains("aggregated=2/"));
    assert_eq!(refused(&ask(&cluster, &[], body("b", "y")).await), (502, "bad_upstream".to_owned()));
    for worker in [1, 3] {
        cluster.admin.post(&format!("/workers/{worker}/drain"), &[], "").await.unwrap();
    }
    let models = async || cluster.client.get("/v1/models").await.unwrap().json().unwrap()["data"].clone();
    assert_eq!(models().await.as_array().unwrap().len(), 2);
    *enforce.lock() = Some(true);
    let reloaded = cluster.gateway.reload().await.unwrap();
    assert_eq!(reloaded.applied, ["models.a.enforce_disagg"], "{reloaded:?}");
    // B1.1
    assert_eq!(refused(&ask(&cluster, &[], body("a", "z")).await), (503, "prefill_unavailable".to_owned()));
    assert!(decisions(&ask(&cluster, &[], body("b", "z")).await).starts_with("aggregated=4/"));
    // B3.3
    assert_eq!(models().await.as_array().unwrap().len(), 1, "{}", models().await);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i2_a_pinned_request_is_tried_once_and_the_error_names_the_pin() {
    let pools = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    for (header, place) in [("x-prefill-instance-id", 0), ("x-worker-instance-id", 2)] {
        for (status, seen) in [(500, (502, "bad_upstream")), (503, (503, "overloaded"))] {
            let builder = pools
                .iter()
                .fold(TestClusterBuilder::new(), |builder, role| builder.sim(Dialect::Vllm, *role));
            let cluster = builder.start().await;
            let fault = FaultKind::Status { status, retry_after: Some(60) };
            cluster.sims[place].set_faults(vec![Fault::always(fault)]);
            let worker = (place + 1).to_string();
            let reply = ask(&cluster, &[(header, &worker)], body("tiny", "a")).await;
            let text = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
            // I2.8
            assert!(text.contains(&format!("worker {worker}")), "{text}");
            assert_eq!(refused(&reply), (seen.0, seen.1.to_owned()), "{header} {status}: {reply:?}");
            assert_eq!(cluster.faults_fired(&format!("status-{status}")), 1, "{header} {status}");
            cluster.at_rest().await.unwrap();
        }
    }
    let alone =
        TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).sim(Dialect::Vllm, Role::Aggregated);
    let cluster = alone.start().await;
    cluster.sims[1].set_faults(vec![Fault::always(FaultKind::Refuse)]);
    let reply = ask(&cluster, &[("x-worker-instance-id", "2")], body("tiny", "a")).await;
    assert_eq!(refused(&reply), (502, "bad_upstream".to_owned()), "{reply:?}");
    // I2.8
    assert!(String::from_utf8_lossy(&reply.body).contains("to worker 2"), "{reply:?}");
    assert_eq!(
        (cluster.faults_fired("refuse"), cluster.sims[0].state().requests.values().sum::<u64>()),
        (1, 0)
    );
    cluster.at_rest().await.unwrap();
}
