//! Gateways that share the state of their policies over JetStream.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use pointsman_routing::SlotKind;
use pointsman_test_guests::TENANT_LIMIT;
use pointsman_tests::{log::Log, own_process};

use super::*;
/// Time in which a change reaches the other gateway, many times over.
const TOLD: Duration = Duration::from_secs(1);
const JETSTREAM: &str = "jetstream: enabled";

fn limited(config: &mut Config) {
    let entry = toml::from_str(
        "grants = ['state']\nshared_state = true\n\
         settings = { requests = 6, window-ms = 4000000000, anonymous = true }",
    );
    config.policies.slots.insert(SlotKind::Aggregated, entry.unwrap());
}

/// A gateway with an engine of its own, whose policy admits six requests in 46 days.
async fn gateway(name: &str, nats: &Nats) -> TestCluster {
    with(replicas(name, &nats.url())).await
}

async fn with(settings: Replicas) -> TestCluster {
    let change = |config: &mut Config| {
        config.replicas = settings;
        limited(config);
    };
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    let cluster = builder.config(change).start().await;
    cluster.drop_policy("aggregated.wasm", TENANT_LIMIT).unwrap();
    until_limited(&cluster).await;
    cluster
}

async fn until_limited(cluster: &TestCluster) {
    let serves = |cluster: &TestCluster| {
        cluster.gateway.state().policies.status().slots.iter().any(|slot| slot.policy == "tenant-limit")
    };
    cluster.until("the policy serves", serves).await.unwrap();
}

async fn until_shared(cluster: &TestCluster) {
    until(cluster, "/replicas", "state is shared", |replicas| replicas["state"]["shared"] == true).await;
}

/// Sends a request to each gateway in turn, and returns the statuses.
async fn in_turn(gateways: [&TestCluster; 2], count: usize) -> Vec<u16> {
    let mut statuses = Vec::new();
    for number in 0..count {
        statuses.push(chat(gateways[number % 2]).await);
        tokio::time::sleep(TOLD).await;
    }
    statuses
}

#[tokio::test]
async fn q7_a_limit_holds_for_the_fleet_and_outlives_its_gateways() {
    let Some(nats) = Nats::start(JETSTREAM).await else { return };
    let (one, two) = (gateway("one", &nats).await, gateway("two", &nats).await);
    until_shared(&one).await;
    until_shared(&two).await;
    // Q7.7
    assert_eq!(in_turn([&one, &two], 8).await, [200, 200, 200, 200, 200, 200, 429, 429]);
    assert_eq!(get(&one, "/readyz").await["replicas"]["state_shared"], true);
    assert_eq!(one.metric("pointsman_replicas_state_shared ").await.unwrap(), [1.0]);
    let sent = "pointsman_replicas_state_changes_total{direction=\"sent\"}";
    assert!(one.metric(sent).await.unwrap()[0] >= 3.0);
    drop(one);
    let again = gateway("one", &nats).await;
    until_shared(&again).await;
    // Q7.3
    assert_eq!(in_turn([&again, &two], 2).await, [429, 429]);
}

#[tokio::test]
async fn q7_gateways_count_alone_while_nats_is_away_and_agree_again() {
    let Some(mut nats) = Nats::start(JETSTREAM).await else { return };
    let (one, two) = (gateway("one", &nats).await, gateway("two", &nats).await);
    until_shared(&one).await;
    until_shared(&two).await;
    assert_eq!(in_turn([&one, &two], 4).await, [200; 4]);
    nats.kill();
    for cluster in [&one, &two] {
        until(cluster, "/replicas", "NATS is away", |replicas| replicas["state"]["shared"] == false).await;
        assert_eq!(get(cluster, "/readyz").await["replicas"]["state_shared"], false);
    }
    // Five of six, as each of them sees it; together they are six.
    assert_eq!(in_turn([&one, &two], 2).await, [200; 2]);
    nats.restart().await;
    until_shared(&one).await;
    until_shared(&two).await;
    // Q7.6
    tokio::time::sleep(TOLD).await;
    assert_eq!(in_turn([&one, &two], 2).await, [429; 2]);
}

#[tokio::test]
async fn q7_without_jetstream_each_gateway_counts_alone_and_says_why() {
    let Some(nats) = Nats::start("").await else { return };
    let one = gateway("one", &nats).await;
    let problem =
        |replicas: &Value| replicas["state"]["problem"].as_str().is_some_and(|why| why.contains("JetStream"));
    // Q7.8
    until(&one, "/replicas", "JetStream is missing", problem).await;
    assert_eq!(get(&one, "/replicas").await["connected"], true);
    let mut statuses = Vec::new();
    for _ in 0..7 {
        statuses.push(chat(&one).await);
    }
    // Q7.8
    assert_eq!(statuses, [200, 200, 200, 200, 200, 200, 429]);
}

#[tokio::test]
async fn q7_garbage_in_the_bucket_is_counted_and_changes_nothing() {
    let Some(nats) = Nats::start(JETSTREAM).await else { return };
    let one = gateway("one", &nats).await;
    until_shared(&one).await;
    let client = async_nats::connect(nats.url()).await.unwrap();
    let far = json!({ "at": u64::MAX, "by": 1, "value": "AAAA", "expires_ms": u64::MAX }).to_string();
    let long = "x".repeat(100_000);
    for (key, body) in [
        ("aggregated.kYQ.v", "garbage"),
        ("aggregated.kYg.v", &*far),
        ("aggregated.kYw.v", &*long),
        ("aggregated.YQ.c.x", "{}"),
    ] {
        client.publish(format!("$KV.pointsman-default.{key}"), body.to_owned().into()).await.unwrap();
    }
    client.flush().await.unwrap();
    let refused = "pointsman_replicas_state_problems_total{reason=\"refused\"}";
    let started = Instant::now();
    while one.metric(refused).await.unwrap()[0] < 4.0 && started.elapsed() < Duration::from_secs(10) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Q7.4
    assert_eq!(one.metric(refused).await.unwrap(), [4.0]);
    assert_eq!(chat(&one).await, 200);
    assert_eq!(get(&one, "/replicas").await["state"], json!({ "shared": true, "problem": null }));
}

#[tokio::test]
async fn q7_the_permissions_of_the_documentation_are_enough() {
    let page = include_str!("../../../../docs/replicas.md");
    let users = page.split("authorization {").nth(1).unwrap().split("```").next().unwrap();
    let users = users.replace("$PASSWORD", "secret");
    let Some(nats) = Nats::start(&format!("{JETSTREAM}\nauthorization {{{users}")).await else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("password");
    std::fs::write(&file, "secret").unwrap();
    let settings = |name| Replicas {
        username: Some("pointsman".to_owned()),
        password_file: Some(file.clone()),
        ..replicas(name, &nats.url())
    };
    let (one, two) = (with(settings("one")).await, with(settings("two")).await);
    until_shared(&one).await;
    until_shared(&two).await;
    until_peers(&one, 1).await;
    // Q7.11
    assert_eq!(in_turn([&one, &two], 8).await, [200, 200, 200, 200, 200, 200, 429, 429]);
}

#[tokio::test]
async fn q7_a_slot_that_begins_to_share_takes_over_what_the_fleet_told() {
    let Some(nats) = Nats::start(JETSTREAM).await else { return };
    let one = gateway("one", &nats).await;
    until_shared(&one).await;
    assert_eq!(in_turn([&one, &one], 6).await, [200; 6]);
    let shares = Arc::new(AtomicBool::new(false));
    let begun = shares.clone();
    let settings = replicas("two", &nats.url());
    let change = move |config: &mut Config| {
        config.replicas = settings;
        limited(config);
        let mut other = config.policies.slots[&SlotKind::Aggregated].clone();
        other.settings.clear();
        config.policies.slots.insert(SlotKind::Decode, other);
        config.policies.slots.get_mut(&SlotKind::Aggregated).unwrap().shared_state = false;
    };
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).config(change);
    let builder = builder.reread(None, move |started| {
        let mut config = started.clone();
        let slot = config.policies.slots.get_mut(&SlotKind::Aggregated).unwrap();
        slot.shared_state = begun.load(Ordering::Relaxed);
        Ok(config)
    });
    let two = builder.start().await;
    two.drop_policy("aggregated.wasm", TENANT_LIMIT).unwrap();
    until_limited(&two).await;
    until_shared(&two).await;
    assert_eq!(chat(&two).await, 200, "it counts alone, though another slot shares");
    shares.store(true, Ordering::Relaxed);
    let reloaded = two.gateway.reload().await.unwrap();
    assert!(reloaded.needs_restart.is_empty(), "{reloaded:?}");
    let started = Instant::now();
    while chat(&two).await != 429 {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "it does not know the six requests of the other"
        );
        // Five of its own would end the window as well: they come too slowly for that.
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
    // Q7.12
    assert!(started.elapsed() < Duration::from_secs(16));
}

#[tokio::test]
async fn q7_what_has_expired_is_removed_from_the_bucket() {
    let Some(nats) = Nats::start(JETSTREAM).await else { return };
    let one = gateway("one", &nats).await;
    until_shared(&one).await;
    let bucket = async_nats::jetstream::new(async_nats::connect(nats.url()).await.unwrap());
    let bucket = bucket.get_key_value("pointsman-default").await.unwrap();
    // A gateway that is gone wrote them.
    let old = json!({ "at": 0, "by": 7, "incarnation": 1, "sum": 3, "expires_ms": 1 }).to_string();
    let new = json!({ "at": 0, "by": 7, "incarnation": 1, "sum": 3, "expires_ms": u64::MAX }).to_string();
    for (key, body) in [("aggregated.kYQ.c.gone", old), ("aggregated.kYg.c.gone", new)] {
        bucket.put(key, body.into()).await.unwrap();
    }
    let started = Instant::now();
    while bucket.entry("aggregated.kYQ.c.gone").await.unwrap().is_some() {
        assert!(started.elapsed() < Duration::from_secs(25), "it stays");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // Q7.10
    assert!(bucket.entry("aggregated.kYg.c.gone").await.unwrap().is_some());
}

#[tokio::test]
async fn q7_without_the_permissions_of_the_state_bookings_are_still_exchanged() {
    let users = "authorization { users = [ { user: pointsman, password: secret, permissions: {
        publish: [\"pointsman.default.v1.>\"], subscribe: [\"pointsman.default.v1.*\", \"_INBOX.>\"] } } ] }";
    let Some(nats) = Nats::start(&format!("{JETSTREAM}\n{users}")).await else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("password");
    std::fs::write(&file, "secret").unwrap();
    let settings = |name| Replicas {
        username: Some("pointsman".to_owned()),
        password_file: Some(file.clone()),
        ..replicas(name, &nats.url())
    };
    let (one, two) = (with(settings("one")).await, with(settings("two")).await);
    let refused = |replicas: &Value| {
        replicas["state"]["problem"].as_str().is_some_and(|why| why.contains("may not publish to `$JS.API."))
    };
    // Q7.13
    until(&one, "/replicas", "the refusal is named", refused).await;
    until_peers(&one, 1).await;
    until_peers(&two, 1).await;
    assert_eq!(get(&one, "/replicas").await["problem"], Value::Null);
    // Q7.13
    assert_eq!(one.metric("pointsman_replicas_disconnects_total ").await.unwrap(), [0.0]);
    assert_eq!(chat(&one).await, 200);
}

/// Lines of a server whose user may publish to these subjects.
fn publishing(subjects: &str) -> String {
    format!(
        "{JETSTREAM}\nauthorization {{ users = [ {{ user: pointsman, password: secret, permissions: {{ \
         publish: [\"pointsman.default.v1.>\", \"$JS.API.>\", \"$JS.FC.>\"{subjects}], \
         subscribe: [\"pointsman.default.v1.*\", \"_INBOX.>\"] }} }} ] }}"
    )
}

#[tokio::test]
async fn q7_while_the_server_refuses_writes_the_state_is_not_shared_and_one_line_says_why() {
    own_process!();
    let log = Log::start();
    let Some(mut nats) = Nats::start(&publishing("")).await else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("password");
    std::fs::write(&file, "secret").unwrap();
    let settings = Replicas {
        username: Some("pointsman".to_owned()),
        password_file: Some(file),
        ..replicas("one", &nats.url())
    };
    let one = with(settings).await;
    let is_refused = |replicas: &Value| {
        let state = &replicas["state"];
        state["shared"] == false && state["problem"].to_string().contains("may not publish to `$KV.")
    };
    // Q7.14: also without changes
    until(&one, "/replicas", "the refusal is named", is_refused).await;
    assert_eq!(chat(&one).await, 200);
    // More than one attempt.
    let end = Instant::now() + Duration::from_secs(7);
    while Instant::now() < end {
        let replicas = get(&one, "/replicas").await;
        // Q7.14
        assert!(is_refused(&replicas), "{replicas}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let text = log.text();
    // Q7.14
    assert_eq!(text.matches("state of policies is not shared").count(), 1, "{text}");
    nats.configure(&publishing(", \"$KV.pointsman-default.>\"")).unwrap();
    nats.restart().await;
    // Q7.14
    until_shared(&one).await;
}

#[tokio::test]
async fn q7_state_is_shared_over_mutual_tls_by_users_with_nkeys() {
    let (files, lines) = secured::mutual_tls();
    let users = [nkeys::KeyPair::new_user(), nkeys::KeyPair::new_user()];
    let [one, two] = [0, 1].map(|place| users[place].public_key());
    let lines = format!(
        "{lines}{JETSTREAM}\naccounts {{ fleet: {{ jetstream: enabled, \
         users: [ {{ nkey: {one} }}, {{ nkey: {two} }} ] }} }}"
    );
    let Some(nats) = Nats::start(&lines).await else { return };
    let settings = |place: usize, name: &str| {
        files.write(name, &users[place].seed().unwrap()).unwrap();
        Replicas {
            nkey_file: Some(files.path(name)),
            tls: secured::tls(&files),
            ..replicas(name, &secured::secure_url(&nats))
        }
    };
    let (one, two) = (with(settings(0, "one")).await, with(settings(1, "two")).await);
    until_shared(&one).await;
    until_shared(&two).await;
    until_peers(&one, 1).await;
    // Q7.7
    assert_eq!(in_turn([&one, &two], 8).await, [200, 200, 200, 200, 200, 200, 429, 429]);
}
