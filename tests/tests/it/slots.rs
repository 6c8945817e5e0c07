//! Slots in production: composed slots, slots of one model, canaries, shadows, promotion and rollback over
//! HTTP.

use pointsman_embedded_policies::LEAST_LOADED;
use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role};
use pointsman_test_guests::{HOSTILE, LOW_QUEUE, TENANT_LIMIT, WEIGHTED_RANDOM};
use pointsman_tests::{CHAT, Reply, TestCluster, TestClusterBuilder};
use serde_json::{Value, json};

async fn ask_as(cluster: &TestCluster, session: Option<&str>) -> String {
    let mut body =
        json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hello there"}]});
    if let Some(session) = session {
        body["nvext"] = json!({ "session_id": session });
    }
    let reply = cluster.client.post(CHAT, &[("x-pointsman-decision", "1")], body.to_string()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.headers["x-pointsman-decision"].to_str().unwrap().to_owned()
}

async fn ask(cluster: &TestCluster) -> String {
    ask_as(cluster, None).await
}

/// The slot of aggregated legs.
pub(crate) async fn slot(cluster: &TestCluster) -> Value {
    let policies = cluster.admin.get("/policies").await.unwrap().json().unwrap();
    let slots = policies["slots"].as_array().unwrap();
    slots.iter().find(|slot| slot["slot"] == "aggregated").cloned().unwrap()
}

async fn post(cluster: &TestCluster, path: &str) -> Reply {
    cluster.admin.post(path, &[], "").await.unwrap()
}

async fn cluster(config: &str) -> TestCluster {
    let more: Config = toml::from_str(config).unwrap();
    TestClusterBuilder::new()
        .config(|config| {
            config.policies.slots = more.policies.slots;
            config.models = more.models;
            config.server = pointsman_gateway::config::Server {
                listen: config.server.listen,
                admin_listen: config.server.admin_listen,
                ..more.server
            };
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await
}

const COMPOSED: &str = r#"
[policies.slots.aggregated]
filters = [{ policy = "low-queue" }]
scorers = [{ policy = "kv-aware", weight = 2.0, normalize = "min-max" }]
picker = { softmax = { temperature = 0.3 } }
"#;

/// As the file says, with the slots of this text.
fn with_slots(config: &Config, text: &str) -> Config {
    let mut config = config.clone();
    config.policies.slots = toml::from_str::<Config>(text).unwrap().policies.slots;
    config
}

#[tokio::test]
async fn a_slot_that_cannot_be_built_stops_the_start_and_a_reload_keeps_the_old_one() {
    let builder = || {
        TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).sim(Dialect::Vllm, Role::Aggregated)
    };
    let at_start = builder().config(|config| *config = with_slots(config, COMPOSED)).try_start().await;
    let problem = at_start.map(drop).unwrap_err().to_string();
    let expected = "policies.slots.aggregated: the policy `parts/low-queue.wasm` is refused: `low-queue` is neither built \
                    in nor a file of the policy directory; built in: kv-aware, ";
    // N7.2
    assert!(problem.contains(expected), "{problem}");
    assert!(
        problem.contains("in `parts/`: nothing; name one of these, or add `parts/low-queue.wasm`"),
        "{problem}"
    );

    let cluster = builder().reread(None, |started| Ok(with_slots(started, COMPOSED))).start().await;
    cluster.gateway.reload().await.unwrap();
    // N7.3
    assert!(ask(&cluster).await.contains("predicted-latency@1 policy"), "the old content serves");
    assert_eq!(slot(&cluster).await["refusals"][0]["kind"], "missing_part");
    std::fs::create_dir(cluster.policy_path("parts")).unwrap();
    cluster.drop_policy("parts/low-queue.wasm", LOW_QUEUE).unwrap();
    post(&cluster, "/policies/reload").await;
    assert!(ask(&cluster).await.contains("kv-aware@2 policy"));
    let parts = slot(&cluster).await["parts"].clone();
    assert_eq!((&parts[0]["policy"], &parts[1]["weight"]), (&json!("low-queue"), &json!(2.0)));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f10_a_slot_that_sends_everything_to_one_worker_is_told() {
    let cluster = cluster("").await;
    let only = async || slot(&cluster).await["only_choice"].clone();
    let min = pointsman_routing::MIN_IN_A_ROW;
    for _ in 0..min + 20 {
        ask(&cluster).await;
    }
    // F10.1
    assert_eq!(only().await, Value::Null, "the default balances");
    cluster.drop_policy("aggregated.wasm", HOSTILE).unwrap();
    post(&cluster, "/policies/reload").await;
    for _ in 0..=min {
        assert!(ask(&cluster).await.contains("hostile@2"));
    }
    let told = only().await;
    // F10.1
    assert!(told["decisions"].as_u64() >= Some(min) && told["worker"].is_u64(), "{told}");
    let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
    let slots = status["slots"].as_array().unwrap();
    let slot = slots.iter().find(|slot| slot["slot"] == "aggregated").unwrap();
    // F10.1
    assert_eq!(slot["only_choice"]["worker"], told["worker"]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_model_s_own_slot_serves_that_model_alone() {
    let cluster = cluster("[models.tiny.slots.aggregated]\nnative = \"round-robin\"\n").await;
    assert!(ask(&cluster).await.contains("native@1 native"));
    std::fs::create_dir(cluster.policy_path("tiny")).unwrap();
    cluster.drop_policy("tiny/aggregated.wasm", LEAST_LOADED).unwrap();
    let report = post(&cluster, "/policies/reload").await.json().unwrap();
    assert!(ask(&cluster).await.contains("least-loaded@2 policy"), "{report}");
    assert_eq!(slot(&cluster).await["policy"], "predicted-latency", "the slot of all models is as it was");
    // A rollback of this slot needs the model's name.
    assert_eq!(post(&cluster, "/policies/aggregated/rollback").await.code(), "nothing_to_roll_back");
    assert_eq!(post(&cluster, "/policies/aggregated/rollback?model=tiny").await.status, 200);
    assert!(ask(&cluster).await.contains("native@3 native"));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_canary_serves_its_share_by_session_and_is_promoted() {
    let cluster = cluster("[policies.slots.aggregated]\ncanary = { share = 0.5 }").await;
    cluster.drop_policy("aggregated.canary.wasm", LEAST_LOADED).unwrap();
    post(&cluster, "/policies/reload").await;
    let mut canaries = 0;
    for session in 0..24 {
        let name = format!("session-{session}");
        let first = ask_as(&cluster, Some(&name)).await.contains("least-loaded@2");
        for _ in 0..2 {
            assert_eq!(ask_as(&cluster, Some(&name)).await.contains("least-loaded@2"), first, "{name}");
        }
        canaries += u32::from(first);
    }
    assert!((4..=20).contains(&canaries), "{canaries} of 24 sessions");
    let promoted = post(&cluster, "/policies/aggregated/promote?from=canary").await;
    assert_eq!(promoted.status, 200, "{promoted:?}");
    assert_eq!(promoted.json().unwrap()["changed"][0]["result"], "promoted");
    for _ in 0..8 {
        assert!(ask(&cluster).await.contains("least-loaded@3 policy"));
    }
    assert_eq!(slot(&cluster).await["source"], "promoted");
    post(&cluster, "/policies/reload").await;
    assert!(ask(&cluster).await.contains("least-loaded@3 policy"), "the scan leaves it");
    let again = post(&cluster, "/policies/aggregated/promote").await;
    assert_eq!(again.code(), "nothing_to_promote");
    let message = again.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("was promoted before: change it to start a new trial"), "{message}");
    let back = post(&cluster, "/policies/aggregated/rollback").await;
    assert_eq!((back.status.as_u16(), ask(&cluster).await.contains("predicted-latency@4")), (200, true));
    assert_eq!(post(&cluster, "/policies/aggregated/rollback").await.status, 409);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn invariant_5_a_canary_that_loops_is_withdrawn_and_no_request_fails() {
    let cluster = cluster(
        "[policies.slots.aggregated]\ncanary = { share = 0.5, settings = { mode = \"spin\", after = 12 } }",
    )
    .await;
    cluster.drop_policy("aggregated.canary.wasm", HOSTILE).unwrap();
    post(&cluster, "/policies/reload").await;
    let mut seen = String::new();
    for _ in 0..600 {
        seen.push_str(&ask(&cluster).await);
        if seen.contains("timeout") {
            break;
        }
    }
    assert!(seen.contains("timeout"), "it served, and looped");
    let withdrawn = |cluster: &TestCluster| {
        cluster
            .gateway
            .state()
            .policies
            .status()
            .slots
            .iter()
            .any(|slot| slot.rollbacks == 1 && slot.canary.is_none())
    };
    cluster.until("withdrawn", withdrawn).await.unwrap();
    for _ in 0..20 {
        assert!(ask(&cluster).await.contains("predicted-latency@1 policy"));
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_shadow_is_counted_and_never_serves() {
    let cluster = cluster("").await;
    cluster.drop_policy("aggregated.shadow.wasm", WEIGHTED_RANDOM).unwrap();
    post(&cluster, "/policies/reload").await;
    for _ in 0..40 {
        assert!(ask(&cluster).await.contains("predicted-latency@1 policy"));
    }
    let shadow = slot(&cluster).await["shadow"].clone();
    let count = |key: &str| shadow[key].as_u64().unwrap();
    assert_eq!(count("agree") + count("disagree"), 40, "{shadow}");
    assert!(count("agree") > 0 && count("disagree") > 0, "{shadow}");
    let metrics = cluster.metrics_text().await.unwrap();
    for line in [
        &format!(
            "pointsman_policy_shadow_total{{slot=\"aggregated\",policy=\"weighted-random\",result=\"agree\"}} {}",
            count("agree")
        ),
        "pointsman_policy_calls_total{slot=\"aggregated\",lane=\"shadow\",outcome=\"ok\"} 40",
        "pointsman_policy_calls_total{slot=\"aggregated\",lane=\"active\",outcome=\"ok\"} 40",
        "pointsman_policy_call_seconds_count{slot=\"aggregated\",lane=\"active\"} 40",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    cluster.at_rest().await.unwrap();
}

/// Three requests, in a window that outlasts the test.
const LIMITED_SHADOW: &str = r#"
[policies.slots.aggregated]
builtin = "least-loaded"
grants = ["log", "state"]
shadow = { settings = { requests = 3, window-ms = 86400000, anonymous = true } }
"#;

#[tokio::test]
async fn t7_a_shadow_remembers_in_a_state_of_its_own() {
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    let builder = builder.config(|config| *config = with_slots(config, LIMITED_SHADOW));
    let cluster = builder.start().await;
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]});
    let preview = async || cluster.client.post("/v1/route", &[], body.to_string()).await.unwrap();
    let compared = async |requests: u32| {
        for _ in 0..requests {
            ask(&cluster).await;
            // T7.4
            assert_eq!(preview().await.status, 200);
        }
        let shadow = slot(&cluster).await["shadow"].clone();
        ["agree", "disagree", "failed", "shed"].map(|key| shadow[key].as_u64().unwrap())
    };
    let entries = async || slot(&cluster).await["memory"]["entries"].clone();
    cluster.drop_policy("aggregated.shadow.wasm", TENANT_LIMIT).unwrap();
    post(&cluster, "/policies/reload").await;
    // T7.1
    assert_eq!(compared(5).await, [3, 0, 0, 2], "it refuses the requests above its limit");
    post(&cluster, "/policies/reload").await;
    assert_eq!(compared(1).await, [3, 0, 0, 3], "nothing changed");
    cluster.drop_policy("aggregated.shadow.wasm", &[TENANT_LIMIT, &[0, 1, 0]].concat()).unwrap();
    post(&cluster, "/policies/reload").await;
    // T7.2
    assert_eq!(compared(4).await, [3, 0, 0, 1], "another file begins anew");
    // T7.1
    assert_eq!(entries().await, json!(0), "the state of the lanes that serve is as it was");
    assert_eq!(post(&cluster, "/policies/aggregated/promote?from=shadow").await.status, 200);
    for _ in 0..3 {
        // T7.3
        assert!(ask(&cluster).await.contains("tenant-limit"), "it serves, and counts from 0");
    }
    assert_eq!(preview().await.status, 429);
    assert_eq!(cluster.client.post(CHAT, &[], body.to_string()).await.unwrap().status, 429);
    assert_eq!(entries().await, json!(1));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_reload_changes_slots_and_workers_and_names_what_needs_a_restart() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_owned();
    let write = |text: &str| std::fs::write(file.path(), text).unwrap();
    let cluster = TestClusterBuilder::new()
        .reread(None, move |started| {
            let more = Config::read(&path)?;
            let mut config = started.clone();
            config.policies.slots = more.policies.slots;
            config.index.ttl = more.index.ttl;
            config.workers.extend(more.workers);
            config.check()?;
            Ok(config)
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    assert!(ask(&cluster).await.contains("predicted-latency@1"));
    write(
        "[policies.slots.aggregated]\nbuiltin = \"least-loaded\"\n[index]\nttl = \"77s\"\n[[workers]]\nid = 7\nrole = \"decode\"\nengine = \"vllm\"\nurl = \"http://127.0.0.1:9\"",
    );
    let report = post(&cluster, "/config/reload").await.json().unwrap();
    assert_eq!(report["changed"].as_array().unwrap().len(), 1, "{report}");
    assert_eq!(report["needs_restart"], json!(["index.ttl"]));
    assert_eq!(report["workers"], json!({ "added": [7], "removed": [], "changed": [] }));
    assert!(ask(&cluster).await.contains("least-loaded@2 policy"));
    // One slot is refused, the other applies; each applies as a whole.
    write(
        "[policies.slots.aggregated]\nbuiltin = \"kv-aware\"\nsettings = { no = 1 }\n[policies.slots.prefill]\nnative = \"random\"",
    );
    let report = post(&cluster, "/config/reload").await.json().unwrap();
    assert_eq!(
        (report["refused"][0]["kind"].as_str(), report["refused"].as_array().unwrap().len()),
        (Some("configure"), 1)
    );
    assert!(
        report["changed"].as_array().unwrap().iter().any(|change| change["slot"] == "prefill"),
        "{report}"
    );
    assert_eq!(report["workers"]["removed"], json!([7]));
    assert!(ask(&cluster).await.contains("least-loaded@2 policy"));
    // An invalid configuration changes nothing, and every problem is reported.
    write("[policies.slots.aggregated]\nbuiltin = \"no\"\n[policies.slots.prefill]\npicker = \"min\"");
    let wrong = post(&cluster, "/config/reload").await;
    assert_eq!((wrong.status.as_u16(), wrong.code().as_str()), (400, "invalid_config"));
    let text = wrong.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    assert!(text.contains("aggregated.builtin: `no`") && text.contains("prefill.picker"), "{text}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_changed_configuration_file_is_reloaded_without_a_command() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_owned();
    let cluster = TestClusterBuilder::new()
        .reread(Some(path.clone()), move |started| {
            let mut config = started.clone();
            config.policies.slots = Config::read(&path)?.policies.slots;
            config.check()?;
            Ok(config)
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let write = |text: &str| std::fs::write(file.path(), text).unwrap();
    let runs = |name: &'static str| {
        move |cluster: &TestCluster| {
            cluster.gateway.state().policies.status().slots.iter().any(|slot| slot.policy == name)
        }
    };
    write("[policies.slots.prefill]\nbuiltin = \"least-loaded\"");
    cluster.until("the change is taken", runs("least-loaded")).await.unwrap();
    // An invalid file is ignored, and the valid file after it is applied.
    write("[policies.slots.prefill]\nbuiltin = 1");
    tokio::time::sleep(std::time::Duration::from_millis(2_500)).await;
    assert!(runs("least-loaded")(&cluster));
    write("[policies.slots.prefill]\nnative = \"random\"");
    cluster.until("the next change is taken", runs("native:random")).await.unwrap();
}
