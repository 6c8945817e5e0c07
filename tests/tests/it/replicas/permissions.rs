//! NATS servers that let a gateway do a part of what the exchange needs, or stop letting it in.

use nkeys::KeyPair;

use super::{secured::*, *};

/// Lines of a server with two users, whose passwords are `right`, and the permissions of the first one.
fn users(permissions: &str) -> String {
    format!(
        "authorization {{ users = [ {{ user: one, password: right, permissions: {{ {permissions} }} }}, \
         {{ user: two, password: right }} ] }}"
    )
}

const ALL: &str = "publish: [\"pointsman.default.v1.>\"], subscribe: [\"pointsman.default.v1.*\"]";

/// A gateway of the user `one`, one of the user `two`, and the directory of their password.
async fn gateways(nats: &Nats) -> (TestCluster, TestCluster, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("password"), "right\n").unwrap();
    let of = |name: &str| Replicas {
        username: Some(name.to_owned()),
        password_file: Some(dir.path().join("password")),
        ..replicas(name, &nats.url())
    };
    let one = first(of("one")).await;
    let two = second(&one, of("two")).await;
    (one, two, dir)
}

async fn until_problem(cluster: &TestCluster, word: &str) {
    let is_named = |replicas: &Value| replicas["problem"].to_string().contains(word);
    until(cluster, "/replicas", word, is_named).await;
}

/// Checks that the gateway keeps its connection, as it does when it may not use a subject.
async fn stays_connected(cluster: &TestCluster) {
    for _ in 0..20 {
        assert_eq!(get(cluster, "/replicas").await["connected"], true);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(cluster.metric("pointsman_replicas_disconnects_total ").await.unwrap(), [0.0]);
    assert_eq!(chat(cluster).await, 200);
}

async fn until_permitted(cluster: &TestCluster) {
    until(cluster, "/replicas", "no problem", |replicas| replicas["problem"].is_null()).await;
}

#[tokio::test]
async fn q4_a_user_that_may_not_publish_is_named_and_hears_the_others() {
    let only_reads = users("publish: [\"nothing\"], subscribe: [\"pointsman.default.v1.*\"]");
    let Some(nats) = Nats::start(&only_reads).await else { return };
    let (one, two, _dir) = gateways(&nats).await;
    // Q4.9
    until_problem(&one, "may not publish to `pointsman.default.v1.one`").await;
    until(&one, "/replicas", "the other is heard", |replicas| replicas["peers"][0]["name"] == "two").await;
    stays_connected(&one).await;
    let booking = book(&two);
    until_remote(&one, 1).await;
    drop(booking);
    until_remote(&one, 0).await;
    assert_eq!(get(&two, "/replicas").await["peers"], json!([]));
    nats.configure(&users(ALL)).unwrap();
    nats.reload().unwrap();
    until_peers(&two, 1).await;
    // Q4.9
    until_permitted(&one).await;
}

#[tokio::test]
async fn q4_a_user_that_may_not_subscribe_is_named_and_heard_by_the_others() {
    let only_writes = users("publish: [\"pointsman.default.v1.>\"], subscribe: [\"nothing\"]");
    let Some(nats) = Nats::start(&only_writes).await else { return };
    let (one, two, _dir) = gateways(&nats).await;
    // Q4.9
    until_problem(&one, "may not subscribe to `pointsman.default.v1.*`").await;
    until(&two, "/replicas", "it is heard", |replicas| replicas["peers"][0]["name"] == "one").await;
    stays_connected(&one).await;
    let booking = book(&one);
    until_remote(&two, 1).await;
    drop(booking);
    nats.configure(&users(ALL)).unwrap();
    nats.reload().unwrap();
    until_peers(&one, 1).await;
    // Q4.9
    until_permitted(&one).await;
}

#[tokio::test]
async fn q4_a_user_that_the_server_forgets_is_refused_until_it_is_known_again() {
    let (known, other) = (KeyPair::new_user(), KeyPair::new_user());
    let lines = |key: &KeyPair| format!("authorization {{ users = [ {{ nkey: {} }} ] }}", key.public_key());
    let Some(nats) = Nats::start(&lines(&known)).await else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("nk");
    std::fs::write(&file, known.seed().unwrap()).unwrap();
    let one = first(Replicas { nkey_file: Some(file), ..replicas("one", &nats.url()) }).await;
    until_connected(&one).await;
    nats.configure(&lines(&other)).unwrap();
    nats.reload().unwrap();
    // Q4.5
    until_refused(&one, &format!("check that the server knows the NKey {}", known.public_key())).await;
    nats.configure(&lines(&known)).unwrap();
    nats.reload().unwrap();
    // Q3.2
    until_connected(&one).await;
}

#[tokio::test]
async fn q4_a_server_that_takes_only_short_messages_is_named() {
    let Some(nats) = Nats::start("max_payload: 1024").await else { return };
    let one = first(replicas("one", &nats.url())).await;
    // Q4.10
    until_problem(&one, "messages of at most 1024 bytes").await;
    stays_connected(&one).await;
}
