//! The record of decisions: content, outcomes, and replay.

use std::time::Duration;

use pointsman_embedded_policies::{CONDITIONAL_DISAGG, KV_AWARE, LEAST_LOADED, PREDICTED_LATENCY};
use pointsman_gateway::config::Config;
use pointsman_policy_runtime::{Access, Capacity, Limits, LoadedPolicy, PolicyEngine, compile};
use pointsman_policy_tools::replay::{RankBy, Report, replay};
use pointsman_routing::Origin;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_test_guests::{LEARNED_TTFT, LOW_QUEUE, TENANT_LIMIT};
use pointsman_tests::{CHAT, TestCluster, TestClusterBuilder};
use serde_json::{Value, json};

fn chat(stream: bool, tokens: u32, words: usize) -> String {
    json!({
        "model": "tiny", "stream": stream, "max_tokens": tokens, "ignore_eos": true,
        "messages": [{"role": "user", "content": format!("{words} ").repeat(60 + words % 7 * 40)}],
    })
    .to_string()
}

/// Streams a chat to its end.
async fn stream(cluster: &TestCluster, id: &str, number: usize) {
    let stream = cluster.client.stream(CHAT, &[("x-request-id", id)], chat(true, 3, number)).await.unwrap();
    assert_eq!(stream.status, 200);
    assert_eq!(stream.all().await.unwrap().last().unwrap(), "[DONE]");
}

async fn ask(cluster: &TestCluster, id: &str, words: usize) -> u16 {
    let headers = [("x-request-id", id), ("x-pointsman-decision", "1")];
    cluster.client.post(CHAT, &headers, chat(false, 3, words)).await.unwrap().status.as_u16()
}

async fn get(cluster: &TestCluster, path: &str) -> Value {
    cluster.admin.get(path).await.unwrap().json().unwrap()
}

async fn list(cluster: &TestCluster, query: &str) -> Vec<Value> {
    get(cluster, &format!("/decisions?{query}")).await["decisions"].as_array().unwrap().clone()
}

/// Prefill and decode workers, each kind several times, with facts recorded for other policies too.
async fn fleet(change: impl FnOnce(&mut Config)) -> TestCluster {
    let mut builder = TestClusterBuilder::new().config(|config| {
        config.decisions.facts = ["engine-queue", "active-requests"].map(str::to_owned).to_vec();
        change(config);
    });
    for role in [Role::Prefill, Role::Prefill, Role::Prefill, Role::Decode, Role::Decode] {
        builder = builder.sim(Dialect::Vllm, role);
    }
    builder.start().await
}

fn loaded(bytes: &[u8], settings: &str) -> (LoadedPolicy, Access) {
    let engine = PolicyEngine::new(
        Limits { deadline: Duration::from_secs(1), ..Limits::default() },
        Capacity::detect(),
    )
    .unwrap();
    let access = Access::new(&Access::ALL);
    (compile(&engine, bytes, &access).unwrap().configure(Origin::Embedded, settings).unwrap(), access)
}

async fn again(cluster: &TestCluster, query: &str, policy: &[u8]) -> Report {
    again_with(cluster, query, policy, "{}").await
}

async fn again_with(cluster: &TestCluster, query: &str, policy: &[u8], settings: &str) -> Report {
    let export = cluster.admin.get(&format!("/decisions/export?{query}")).await.unwrap();
    assert_eq!(export.headers["content-type"], "application/x-ndjson");
    let (policy, access) = loaded(policy, settings);
    replay(&policy, access.state(), &*export.body, RankBy::Policy).unwrap()
}

#[tokio::test]
async fn each_decision_is_recorded_with_its_inputs_its_outcome_and_its_id() {
    let cluster = fleet(|_| {}).await;
    let headers = [("x-request-id", "mine"), ("x-pointsman-decision", "1")];
    let reply = cluster.client.stream(CHAT, &headers, chat(true, 3, 5)).await.unwrap();
    let answer = reply.headers["x-pointsman-decision"].to_str().unwrap().to_owned();
    assert_eq!(reply.all().await.unwrap().last().unwrap(), "[DONE]");
    cluster.at_rest().await.unwrap();
    let all = list(&cluster, "request_id=mine").await;
    // The plan, the prefill leg and the decode leg; newest first.
    let slots: Vec<_> = all.iter().map(|one| one["slot"].as_str().unwrap()).collect();
    assert_eq!(slots, ["decode", "prefill", "decode-override"], "{all:?}");
    for (one, policy) in all.iter().zip(["predicted-latency", "kv-aware"]) {
        assert!(answer.contains(&format!("id={}", one["id"].as_str().unwrap())), "{answer}");
        assert_eq!((&one["policy"], &one["decider"]["by"]), (&json!(policy), &json!("policy")));
    }
    let prefill = &all[1];
    let mut one = get(&cluster, &format!("/decisions/{}", prefill["id"].as_str().unwrap())).await;
    let sentences = one.as_object_mut().unwrap().remove("sentences").unwrap();
    assert!(sentences.as_array().is_some_and(|list| list.len() > 3), "{sentences}");
    assert_eq!(one, *prefill);
    assert_eq!(prefill["candidates"].as_array().map(Vec::len), Some(3));
    let outcome = &prefill["outcome"];
    assert_eq!(
        (&outcome["status"], &outcome["code"], &outcome["output_tokens"]),
        (&200.into(), &"ok".into(), &3.into())
    );
    assert!(outcome["ttft_ms"].is_f64() && outcome["cached_tokens"]["predicted"].is_u64(), "{outcome}");
    let costs: Vec<f64> =
        prefill["costs"].as_array().unwrap().iter().map(|cost| cost.as_f64().unwrap()).collect();
    assert_eq!(costs.len(), 3);
    let (choice, second) = (&prefill["choice"], &prefill["runner_up"]);
    assert!(
        choice["cost"].as_f64() <= second["cost"].as_f64() && choice["row"] != second["row"],
        "{prefill}"
    );
    let stages = prefill["stages"].as_array().unwrap();
    assert_eq!(stages[0]["workers"]["engine-queue"].as_array().map(Vec::len), Some(3));
    assert!(stages[1]["request"]["prompt-tokens"].as_u64() > Some(0), "{stages:?}");
    assert_eq!(all[2]["plan"]["word"], "remote");
    assert_eq!(all[2]["outcome"]["status"], 200, "a plan has its request's outcome too");
}

#[tokio::test]
async fn a_replay_of_the_same_policy_agrees_and_of_another_differs_where_it_must() {
    let cluster = fleet(|config| {
        config.routing.cost.temperature = 0.3;
        config.policies.slots.entry(pointsman_routing::SlotKind::DecodeOverride).or_default();
    })
    .await;
    for number in 0..40 {
        assert_eq!(ask(&cluster, "r", number).await, 200);
    }
    cluster.at_rest().await.unwrap();
    for (slot, policy) in [("prefill", KV_AWARE), ("decode", PREDICTED_LATENCY)] {
        let same = again(&cluster, &format!("slot={slot}"), policy).await;
        assert_eq!((same.decisions, same.agree), (40, 40), "{slot}: {:?}", same.differences);
    }
    let plans = again(&cluster, "slot=decode-override", CONDITIONAL_DISAGG).await;
    assert_eq!((plans.decisions, plans.agree), (40, 40), "{:?}", plans.differences);
    let other = again(&cluster, "", LEAST_LOADED).await;
    assert_eq!((other.decisions, other.skipped["not for a selector"]), (80, 40));
    assert_eq!(other.agree + other.differences.len() as u64, 80);
    let first = other.differences.first().expect("a softmax over costs is not least-loaded");
    assert!(first.recorded_cost.is_some() && first.new_cost.is_some() && first.by.is_some(), "{first:?}");
    let falling = other.differences.windows(2).all(|pair| pair[0].by >= pair[1].by);
    assert!(falling, "{:?}", other.differences);
}

#[tokio::test]
async fn o1_a_plan_of_the_built_in_predicted_disagg_is_told_with_its_reason() {
    let cluster = fleet(|config| {
        let entry = toml::from_str("builtin = \"predicted-disagg\"").unwrap();
        config.policies.slots.insert(pointsman_routing::SlotKind::DecodeOverride, entry);
    })
    .await;
    assert_eq!(ask(&cluster, "r", 1).await, 200);
    cluster.at_rest().await.unwrap();
    let plans = list(&cluster, "slot=decode-override").await;
    let plan = get(&cluster, &format!("/decisions/{}", plans[0]["id"].as_str().unwrap())).await;
    let sentences = plan["sentences"].as_array().unwrap();
    let is_reason = |one: &Value| one.as_str().is_some_and(|one| one.starts_with("Remote, because "));
    // O1.27
    assert!(sentences.iter().any(is_reason), "{plan:#}");
}

#[tokio::test]
async fn a_filter_is_replayed_too_and_facts_that_were_not_recorded_are_named() {
    let cluster = fleet(|config| {
        config.decisions.facts.clear();
        let kv_aware = toml::from_str("builtin = \"kv-aware\"").unwrap();
        config.policies.slots.insert(pointsman_routing::SlotKind::Decode, kv_aware);
    })
    .await;
    cluster.drop_policy("prefill.wasm", LOW_QUEUE).unwrap();
    let filtered = |cluster: &TestCluster| {
        cluster.gateway.state().policies.status().slots[0].policy.starts_with("low-queue")
    };
    cluster.until("the filter serves", filtered).await.unwrap();
    for number in 0..10 {
        assert_eq!(ask(&cluster, "f", number).await, 200);
    }
    cluster.at_rest().await.unwrap();
    let filters = again(&cluster, "slot=prefill&generation=2", LOW_QUEUE).await;
    assert_eq!((filters.decisions, filters.agree), (10, 10), "{:?}", filters.differences);
    let scorers = again(&cluster, "slot=prefill&generation=2", KV_AWARE).await;
    assert_eq!((scorers.decisions, scorers.agree), (10, 10), "{:?}", scorers.differences);
    let export = cluster.admin.get("/decisions/export?slot=decode").await.unwrap();
    let (policy, access) = loaded(LEAST_LOADED, "{}");
    let error = replay(&policy, access.state(), &*export.body, RankBy::Policy).unwrap_err().to_string();
    assert!(error.contains("\"least-loaded\" asks for: `engine-queue` (in 10 decisions)"), "{error}");
    assert!(error.ends_with(r#"`[decisions] facts = ["engine-queue", "engine-queue-known"]`"#), "{error}");
}

#[tokio::test]
async fn the_outcome_of_failures_of_retries_and_of_clients_that_leave_is_recorded() {
    let slow = |role| SimConfig { itl: Duration::from_millis(10), ..SimConfig::instant(Dialect::Vllm, role) };
    let cluster = TestClusterBuilder::new()
        .sim_with(slow(Role::Aggregated), "")
        .sim_with(slow(Role::Aggregated), "")
        .start()
        .await;
    let fault = |status| Fault::always(FaultKind::Status { status, retry_after: None });
    cluster.sims[0].set_faults(vec![Fault { times: Some(1), ..fault(500) }]);
    cluster.sims[1].set_faults(vec![Fault { times: Some(1), ..fault(500) }]);
    assert_eq!(ask(&cluster, "retried", 1).await, 502);
    stream(&cluster, "fine", 1).await;
    cluster.sims.iter().for_each(|sim| sim.set_faults(vec![fault(422)]));
    // Another body: two workers broke on the first one, so it is refused for a while.
    assert_eq!(ask(&cluster, "refused", 2).await, 422);
    cluster.sims.iter().for_each(|sim| sim.set_faults(vec![]));
    let headers = [("x-request-id", "leaver")];
    let mut stream = cluster.client.stream(CHAT, &headers, chat(true, 5_000, 1)).await.unwrap();
    for _ in 0..4 {
        stream.next().await.unwrap();
    }
    let running = list(&cluster, "request_id=leaver").await.remove(0);
    assert_eq!(running["outcome"], Value::Null, "it runs");
    drop(stream);
    cluster.at_rest().await.unwrap();
    let outcomes = |list: &[Value]| -> Vec<Value> {
        let one = |answer: &Value| json!([answer["outcome"]["status"], answer["outcome"]["retried"]]);
        list.iter().map(one).collect()
    };
    let retried = list(&cluster, "request_id=retried").await;
    assert_eq!(outcomes(&retried), [json!([502, false]), json!([502, true])]);
    assert_eq!(outcomes(&list(&cluster, "request_id=refused").await), [json!([422, false])]);
    let left = list(&cluster, "code=client_closed").await;
    assert_eq!((outcomes(&left), &left[0]["request_id"]), (vec![json!([499, false])], &json!("leaver")));
    let outcome = &left[0]["outcome"];
    assert!(
        outcome["output_tokens"].as_u64() >= Some(3) && outcome["itl_ms"].as_f64() > Some(1.0),
        "{outcome}"
    );
    assert_eq!(list(&cluster, "min_ttft_ms=60000").await.len(), 0);
    assert!(!list(&cluster, "min_ttft_ms=0.001&code=ok").await.is_empty());
}

#[tokio::test]
async fn filters_narrow_the_list_pages_go_back_in_time_and_a_wrong_filter_is_named() {
    let cluster = fleet(|_| {}).await;
    for number in 0..6 {
        ask(&cluster, &format!("r{number}"), number).await;
    }
    cluster.at_rest().await.unwrap();
    let count = |query: &'static str| async { list(&cluster, query).await.len() };
    assert_eq!(count("").await, 18);
    assert_eq!((count("leg=prefill").await, count("slot=decode-override").await), (6, 6));
    assert_eq!((count("policy=kv-aware&model=tiny").await, count("model=huge").await), (6, 0));
    assert_eq!(count("policy=predicted-latency&slot=decode").await, 6);
    assert_eq!((count("decider=policy").await, count("decider=pin").await), (18, 0));
    assert_eq!((count("generation=1&code=ok").await, count("generation=2").await), (18, 0));
    let by_worker = [1, 2, 3].map(|worker| format!("slot=prefill&worker={worker}"));
    let mut sum = 0;
    for query in &by_worker {
        sum += list(&cluster, query).await.len();
    }
    assert_eq!(sum, 6);
    let choice = list(&cluster, "slot=prefill").await[0]["choice"].take();
    let of_rank = |rank: &Value| format!("slot=prefill&worker={}/{rank}", choice["worker"]);
    // O1.5
    assert!(!list(&cluster, &of_rank(&choice["dp_rank"])).await.is_empty(), "{choice}");
    assert_eq!(list(&cluster, &of_rank(&json!(99))).await.len(), 0);
    let (mut seen, mut before) = (Vec::new(), String::new());
    loop {
        let page = list(&cluster, &format!("limit=4{before}")).await;
        let Some(last) = page.last() else { break };
        before = format!("&before={}", last["id"].as_str().unwrap());
        seen.extend(page.into_iter().map(|one| one["id"].clone()));
    }
    let all: Vec<Value> = list(&cluster, "").await.into_iter().map(|one| one["id"].clone()).collect();
    assert_eq!(seen, all);
    for path in ["/decisions?colour=red", "/decisions/export?colour=red"] {
        let reply = cluster.admin.get(path).await.unwrap();
        assert_eq!(
            (reply.status.as_u16(), reply.json().unwrap()["error"]["message"].clone()),
            (
                400,
                json!(
                    "unknown filter `colour`: expected limit, before, model, leg, slot, slot_model, worker, policy, generation, decider, code, min_ttft_ms, request_id, lane, ended, failed or short"
                )
            )
        );
    }
    assert_eq!(cluster.admin.get("/decisions/00").await.unwrap().status, 404);
    assert_eq!(cluster.admin.get("/decisions/zz").await.unwrap().status, 400);
}

#[tokio::test]
async fn the_ring_is_bounded_and_recording_and_the_header_can_be_switched_off() {
    let cluster = fleet(|config| config.decisions.keep = 7).await;
    for number in 0..10 {
        ask(&cluster, &format!("r{number}"), number).await;
    }
    cluster.at_rest().await.unwrap();
    let answer = get(&cluster, "/decisions").await;
    assert_eq!((&answer["kept"], answer["decisions"].as_array().map(Vec::len)), (&json!(7), Some(7)));
    let newest: Vec<_> =
        answer["decisions"].as_array().unwrap().iter().map(|one| one["request_id"].clone()).collect();
    assert!(newest.iter().take(3).all(|id| *id == "r9"), "{newest:?}");

    let off = fleet(|config| (config.decisions.keep, config.server.tell_decisions) = (0, false)).await;
    let headers = [("x-pointsman-decision", "1")];
    let reply = off.client.post(CHAT, &headers, chat(false, 2, 1)).await.unwrap();
    assert!(reply.status == 200 && !reply.headers.contains_key("x-pointsman-decision"), "{reply:?}");
    assert_eq!(get(&off, "/decisions").await, json!({ "kept": 0, "lost": 0, "decisions": [] }));
    let route = off.client.post("/v1/route", &[], chat(false, 2, 1)).await.unwrap().json().unwrap();
    assert!(route["worker_id"]["prefill_worker_id"].is_u64() && route["legs"].is_null(), "{route}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reading_under_load_fails_nothing_and_loses_nothing() {
    let cluster = fleet(|config| config.decisions.keep = 300).await;
    let tasks = tokio_util::task::TaskTracker::new();
    let load = |client: pointsman_tests::Client| {
        tasks.spawn(async move {
            for number in 0..150 {
                let reply = client.post(CHAT, &[], chat(false, 2, number)).await.unwrap();
                assert_eq!(reply.status, 200, "{reply:?}");
            }
        })
    };
    let load = [load(cluster.client.clone()), load(cluster.client.clone())];
    let (mut lines, mut least) = (0, usize::MAX);
    while load.iter().any(|task| !task.is_finished()) {
        let export = cluster.admin.get("/decisions/export").await.unwrap();
        let text = String::from_utf8(export.body.to_vec()).unwrap();
        for line in text.lines() {
            let answer: Value = serde_json::from_str(line).unwrap();
            assert_eq!(answer["inputs_dropped"], false);
            lines += 1;
        }
        least = least.min(text.lines().count());
    }
    for task in load {
        task.await.unwrap();
    }
    cluster.at_rest().await.unwrap();
    let answer = get(&cluster, "/decisions?limit=1000").await;
    assert_eq!((&answer["kept"], &answer["lost"]), (&json!(300), &json!(0)), "{lines} lines were read");
    let over = answer["decisions"].as_array().unwrap().iter().all(|one| one["outcome"]["status"] == 200);
    assert!(over && lines > 0, "every outcome was written down, late ones too");
}

#[tokio::test]
async fn f2_a_preview_shows_every_candidate_s_cost_terms_and_the_runner_up_and_is_not_recorded() {
    let cluster = fleet(|_| {}).await;
    for number in 0..3 {
        ask(&cluster, "r", number).await;
    }
    cluster.at_rest().await.unwrap();
    cluster.gateway.state().router.index().flush();
    let before = get(&cluster, "/decisions").await["kept"].clone();
    let answer = cluster.client.post("/v1/route", &[], chat(false, 3, 2)).await.unwrap().json().unwrap();
    assert_eq!(get(&cluster, "/decisions").await["kept"], before);
    let leg = &answer["legs"][0];
    let candidates = leg["candidates"].as_array().unwrap();
    assert_eq!(candidates.len(), 3, "{answer}");
    let one = |key: &str| candidates.iter().find(|candidate| candidate[key] == true).unwrap();
    let (chosen, second) = (one("chosen"), one("runner_up"));
    assert_eq!(chosen["worker"], answer["worker_id"]["prefill_worker_id"]);
    assert_eq!(
        (&second["worker"], &second["cost"]),
        (&leg["runner_up"]["worker"], &leg["runner_up"]["cost"])
    );
    // The same prompt was prefilled there a moment ago.
    assert!(
        chosen["cached_blocks"]["device"].as_u64() > second["cached_blocks"]["device"].as_u64(),
        "{answer}"
    );
    for candidate in candidates {
        assert_eq!(
            candidate["cost"], candidate["native_cost"],
            "kv-aware ranks by the native cost: {candidate}"
        );
        assert!(candidate["terms"]["prompt_tokens"].as_u64() > Some(0));
    }
}

fn grants_state(config: &mut Config, settings: &str) {
    let entry = toml::from_str(&format!("grants = [\"log\", \"state\"]\nsettings = {settings}")).unwrap();
    config.policies.slots.insert(pointsman_routing::SlotKind::Aggregated, entry);
}

async fn cluster_of_two(settings: &str, policy: &[u8], name: &'static str) -> TestCluster {
    let cluster = TestClusterBuilder::new()
        .config(|config| grants_state(config, settings))
        .sim(Dialect::Vllm, Role::Aggregated)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    cluster.drop_policy("aggregated.wasm", policy).unwrap();
    let serves =
        move |cluster: &TestCluster| cluster.gateway.state().policies.status().slots[2].policy == name;
    cluster.until("the policy serves", serves).await.unwrap();
    cluster
}

#[tokio::test]
async fn a_replay_of_a_policy_with_state_agrees_by_what_it_read() {
    let cluster = cluster_of_two(
        "{ requests = 6, window-ms = 4000000000, anonymous = true }",
        TENANT_LIMIT,
        "tenant-limit",
    )
    .await;
    let mut statuses = Vec::new();
    for number in 0..12 {
        statuses.push(ask(&cluster, "t", number).await);
    }
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
    cluster.at_rest().await.unwrap();
    let all = list(&cluster, "policy=tenant-limit").await;
    assert_eq!(all.len(), 12);
    // Newest first; each tells how many came before it, and nothing else.
    let state = all[3]["stages"][0]["state"].as_object().unwrap();
    assert_eq!((state.len(), state.values().next()), (1, Some(&json!(8))), "{}", all[3]);
    assert_eq!(all[3]["stages"][0]["state_cut"], false);
    let settings = r#"{"requests":6,"window-ms":4000000000,"anonymous":true}"#;
    let same = again_with(&cluster, "policy=tenant-limit", TENANT_LIMIT, settings).await;
    assert_eq!((same.decisions, same.agree), (12, 12), "{:?}", same.differences);
    // A larger limit admits one more.
    let settings = settings.replace(":6,", ":7,");
    let other = again_with(&cluster, "policy=tenant-limit", TENANT_LIMIT, &settings).await;
    assert_eq!(other.agree, 11, "{:?}", other.differences);
}

#[tokio::test]
async fn what_a_scorer_learnt_is_recorded_row_by_row() {
    let cluster = cluster_of_two("{ explore = 0.3 }", LEARNED_TTFT, "learned-ttft").await;
    // Only streams have a time to first token that a policy could learn from.
    for number in 0..40 {
        stream(&cluster, "l", number).await;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    for number in 0..20 {
        stream(&cluster, "l", number).await;
    }
    cluster.at_rest().await.unwrap();
    let newest = list(&cluster, "policy=learned-ttft&limit=1").await.remove(0);
    let learnt = newest["stages"][0]["state"].as_object().unwrap();
    assert!(learnt["1/0"].as_i64() > Some(0) && learnt["2/0"].as_i64() > Some(0), "{newest}");
    let same = again_with(&cluster, "policy=learned-ttft", LEARNED_TTFT, r#"{"explore":0.3}"#).await;
    assert_eq!((same.decisions, same.agree), (60, 60), "{:?}", same.differences);
}
