//! What the operators' page learns of problems: why the gateway cannot serve, failed legs and attempts.

use std::{fs, time::Duration};

use pointsman_embedded_policies::LEAST_LOADED;
use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, Sim, SimConfig};
use pointsman_tests::{CHAT, Stream, TestCluster, TestClusterBuilder};
use pointsman_workers::Ineligible;
use serde_json::{Value, json};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(40);

async fn ask(cluster: &TestCluster, id: &str, model: &str) -> u16 {
    let body = json!({ "model": model, "max_tokens": 2, "messages": [{ "role": "user", "content": id }] });
    cluster.client.post(CHAT, &[("x-request-id", id)], body.to_string()).await.unwrap().status.as_u16()
}

/// Returns the next event that satisfies `wanted`. The reader asked for one kind.
async fn until(events: &mut Stream, wanted: impl Fn(&Value) -> bool) -> Value {
    let found = timeout(PATIENCE, async {
        loop {
            let event = events.next().await.unwrap().unwrap();
            let data = event.split_once("\ndata: ").map(|(_, data)| serde_json::from_str(data).unwrap());
            if let Some(data) = data.filter(|data| !event.starts_with("event: hello") && wanted(data)) {
                return data;
            }
        }
    });
    found.await.expect("no such event")
}

fn fails_once() -> Vec<Fault> {
    let fault = Fault::always(FaultKind::Status { status: 500, retry_after: None });
    vec![Fault { times: Some(1), ..fault }]
}

/// Returns the values of a column of the fleet.
fn column(fleet: &Value, name: &str) -> Vec<Value> {
    let place = fleet["columns"].as_array().unwrap().iter().position(|column| column == name).unwrap();
    fleet["workers"].as_array().unwrap().iter().map(|row| row[place].clone()).collect()
}

#[tokio::test]
async fn m6_events_say_that_the_gateway_is_not_ready_and_why_as_status_does() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let log = dir.path().join("file/log");
    let builder = TestClusterBuilder::new().config(|config| config.decisions.log_dir = Some(log));
    let builder = builder.pair(Dialect::Vllm);
    let cluster = builder.start().await;
    let mut events = cluster.admin.events("/events?kinds=stats", &[]).await.unwrap();
    // M6.1
    let stats =
        until(&mut events, |stats| stats["reasons"].to_string().contains("file/log cannot be written")).await;
    assert_eq!(stats["ready"], true);
    cluster.admin.post("/workers/2/drain", &[], "").await.unwrap();
    let stats = until(&mut events, |stats| stats["ready"] == false).await;
    let cannot =
        "model tiny cannot be served; ranks in service: prefill 1 of 1, decode 0 of 1, aggregated 0 of 1";
    let reasons = stats["reasons"].as_array().unwrap();
    assert!(reasons.contains(&json!(cannot)), "{reasons:?}");
    let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
    let all = status["reasons"].as_array().unwrap();
    assert!(reasons.iter().all(|reason| all.contains(reason)), "{all:?}");
    let of_worker = json!("worker 2 gets no request: draining");
    assert!(all.contains(&of_worker) && !reasons.contains(&of_worker), "the fleet has it: {reasons:?}");
    cluster.admin.delete("/workers/2/drain").await.unwrap();
    let served = |stats: &Value| stats["ready"] == true && !stats["reasons"].to_string().contains("tiny");
    until(&mut events, served).await;
}

#[tokio::test]
async fn m6_a_worker_that_drains_is_no_failure_when_its_engine_is_stopped() {
    let config = SimConfig { kv_events: true, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let engine = Sim::start(config).await.unwrap();
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let events = format!("tcp://127.0.0.1:{}", engine.kv_events_port().unwrap());
    let worker =
        json!({ "id": 9, "url": engine.url(), "role": "aggregated", "engine": "vllm", "kv_events": events });
    assert_eq!(cluster.admin.post("/workers", &[], worker.to_string()).await.unwrap().status, 200);
    cluster.until("it is eligible", |one| one.worker(9).ineligible().is_none()).await.unwrap();
    engine.shutdown(Duration::ZERO).await;
    let is_out = |one: &TestCluster| one.worker(9).ineligible() == Some(Ineligible::Unhealthy);
    cluster.until("it is unhealthy", is_out).await.unwrap();
    let live = async || cluster.metric("pointsman_kv_feed_live{worker=\"9\"").await.unwrap();
    assert_eq!(live().await.len(), 1);
    cluster.admin.post("/workers/9/drain", &[], "").await.unwrap();
    // M5.7
    assert_eq!(live().await, [0.0_f64; 0]);
    assert_eq!(cluster.metric("pointsman_worker_faulty{worker=\"9\"").await.unwrap(), [0.0]);
    let worker = cluster.admin.get("/workers/9").await.unwrap().json().unwrap()["worker"].take();
    // M6.11
    assert_eq!((&worker["ineligible"], &worker["health"]), (&json!("draining"), &json!("unhealthy")));
    let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
    assert_eq!(status["workers"]["ineligible"], json!({ "draining": 1 }));
    let [reason] = status["reasons"].as_array().unwrap().as_slice() else { panic!("{}", status["reasons"]) };
    assert!(reason.as_str().unwrap().starts_with("worker 9 gets no request: draining: "), "{reason}");
    let mut events = cluster.admin.events("/events?kinds=fleet", &[]).await.unwrap();
    let fleet = until(&mut events, |fleet| !column(fleet, "out").is_empty()).await;
    assert!(column(&fleet, "out").contains(&json!("draining")), "{fleet}");
}

#[tokio::test]
async fn o1_a_policy_in_a_slot_whose_role_no_worker_has_is_told() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    cluster.drop_policy("prefill.wasm", LEAST_LOADED).unwrap();
    let mut events = cluster.admin.events("/events?kinds=stats", &[]).await.unwrap();
    let told =
        "policy least-loaded is in slot prefill, which decides nothing: no worker has the role prefill";
    // O1.31
    until(&mut events, |stats| stats["reasons"] == json!([told])).await;
}

#[tokio::test]
async fn o1_a_policy_in_a_slot_of_a_model_whose_workers_lack_the_role_is_told_last() {
    let other = SimConfig { model: "other".to_owned(), ..SimConfig::instant(Dialect::Vllm, Role::Prefill) };
    let own: Config = toml::from_str("models.tiny.slots.prefill = {}").unwrap();
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).sim_with(other, "");
    let cluster = builder.config(|config| config.models = own.models).start().await;
    fs::create_dir(cluster.policy_path("tiny")).unwrap();
    cluster.drop_policy("tiny/prefill.wasm", LEAST_LOADED).unwrap();
    let mut events = cluster.admin.events("/events?kinds=stats", &[]).await.unwrap();
    let told = "policy least-loaded is in slot prefill of tiny, which decides nothing: no worker of tiny has the role prefill";
    // O1.31
    until(&mut events, |stats| stats["reasons"].as_array().and_then(|all| all.last()) == Some(&json!(told)))
        .await;
    let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
    assert_eq!(status["reasons"].as_array().unwrap().last(), Some(&json!(told)), "{}", status["reasons"]);
}

#[tokio::test]
async fn m6_the_fleet_has_failed_legs_and_which_workers_serve_the_same_models() {
    let other =
        SimConfig { model: "other".to_owned(), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let builder = TestClusterBuilder::new()
        .sim(Dialect::Vllm, Role::Aggregated)
        .sim(Dialect::Vllm, Role::Aggregated)
        .sim_with(other, "");
    let cluster = builder.start().await;
    cluster.sims[2].set_faults(fails_once());
    assert_eq!(ask(&cluster, "fails", "other").await, 502);
    assert_eq!(ask(&cluster, "fine", "other").await, 200);
    let mut events = cluster.admin.events("/events?kinds=fleet", &[]).await.unwrap();
    // M6.2
    let fleet = until(&mut events, |fleet| column(fleet, "failed") == [0, 0, 1]).await;
    assert_eq!(column(&fleet, "legs"), [0, 0, 2]);
    // M6.3
    let models = column(&fleet, "models");
    assert!(models[0] == models[1] && models[0] != models[2], "{models:?}");
}

#[tokio::test]
async fn m6_a_receipt_says_when_its_leg_ran_and_why_it_failed() {
    let mut builder = TestClusterBuilder::new();
    for role in [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode] {
        builder = builder.sim(Dialect::Vllm, role);
    }
    let cluster = builder.start().await;
    cluster.sims[2].set_faults(fails_once());
    let mut found = Vec::new();
    for number in 0..40 {
        let id = format!("r{number}");
        assert_eq!(ask(&cluster, &id, "tiny").await, 200);
        cluster.at_rest().await.unwrap();
        let list = cluster.admin.get(&format!("/decisions?request_id={id}")).await.unwrap().json().unwrap();
        found = list["decisions"].as_array().unwrap().clone();
        if found.iter().any(|one| one["attempt"] == 1) {
            break;
        }
    }
    // M6.4
    let run = |one: &Value| one["outcome"]["run"].clone();
    let failed = found.iter().find(|one| run(one)["failed"] != Value::Null).expect("a failed leg");
    assert_eq!((&failed["leg"], &failed["outcome"]["retried"]), (&json!("decode"), &json!(true)));
    assert_eq!((&run(failed)["failed"], &run(failed)["status"]), (&json!("status_5xx"), &json!(500)));
    let at = |one: &Value, when: &str| run(one)[when].as_f64().unwrap();
    assert!(0.0 < at(failed, "sent_ms") && at(failed, "sent_ms") <= at(failed, "ended_ms"), "{failed}");
    let served = &found[0];
    assert_eq!((&served["leg"], &run(served)["failed"]), (&json!("decode"), &Value::Null));
    assert!(at(served, "sent_ms") >= at(failed, "ended_ms"), "{served}");
    assert_eq!(run(served)["sent_ms"], served["outcome"]["times_ms"]["answer_sent"]);
    let id = failed["id"].as_str().unwrap();
    let whole = cluster.admin.get(&format!("/decisions/{id}")).await.unwrap().json().unwrap();
    let last = whole["sentences"].as_array().unwrap().last().unwrap().as_str().unwrap().to_owned();
    // T2.7
    assert!(last.contains(" The leg failed on this worker after "), "{last}");
    assert!(last.ends_with("(HTTP 500) and was decided again."), "{last}");
}
