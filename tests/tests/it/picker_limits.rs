//! What a client may hold behind Envoy: the memory and time of its uploads, with a valid key and without one.

use std::time::Duration;

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{
    CHAT, TestCluster, TestClusterBuilder, client_keys,
    picker::{Carried, PickerClient},
};
use serde_json::json;
use tokio::time::{Instant, timeout};

const MIB: usize = 1024 * 1024;
/// Time in which each refusal has to come, many times over.
const LIMIT: Duration = Duration::from_secs(10);

fn chat_of(bytes: usize) -> String {
    json!({ "model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x".repeat(bytes)}] })
        .to_string()
}

async fn started(change: impl FnOnce(&mut Config)) -> (TestCluster, PickerClient) {
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).config(|config| {
        config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap());
        change(config);
    });
    let cluster = builder.start().await;
    let picker = PickerClient::connect(cluster.gateway.ext_proc.unwrap()).await.unwrap();
    (cluster, picker)
}

fn used(cluster: &TestCluster) -> usize {
    cluster.gateway.state().body_bytes.used()
}

/// Begins uploads of this many bytes each that do not end, and waits until they are kept or refused.
async fn uploads(
    cluster: &TestCluster,
    picker: &PickerClient,
    headers: &[(&str, &str)],
    (count, bytes): (usize, usize),
) -> Vec<Carried> {
    let mut open = Vec::new();
    for _ in 0..count {
        let carried = picker.open().await.unwrap();
        carried.head("POST", CHAT, headers, false).unwrap();
        let before = used(cluster);
        for piece in vec![b' '; bytes].chunks(100_000) {
            // A refused one has ended.
            let _ = carried.body(piece, false);
        }
        for _ in 0..20 {
            if used(cluster) == before + bytes {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        open.push(carried);
    }
    open
}

#[tokio::test]
async fn r3_a_client_without_a_key_is_refused_before_its_body_on_every_path() {
    let (cluster, picker) = started(|config| config.auth.keys = client_keys(&[("sk-a", "")])).await;
    for (method, path, status) in [
        ("POST", CHAT, 401),
        ("POST", "/v1/route", 401),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/responses/resp_1/cancel", 401),
        ("DELETE", "/v1/responses/resp_1", 401),
        ("GET", "/v1/models", 401),
        ("GET", CHAT, 405),
        ("PUT", "/v1/route", 405),
        ("POST", "/nonsense", 404),
    ] {
        let mut carried = picker.open().await.unwrap();
        carried.head(method, path, &[], false).unwrap();
        let refused = timeout(LIMIT, carried.picked()).await.expect("it does not wait for the body").unwrap();
        // R3.8
        assert_eq!(refused.refusal().0, status, "{method} {path}");
        // R3.8
        cluster
            .until("its place is free", |it| it.gateway.state().metrics.inflight.get() == 0)
            .await
            .unwrap();
        assert_eq!(cluster.metric("pointsman_ext_proc_streams ").await.unwrap(), [0.0]);
    }
    let (route, _) = picker.ask("/v1/route", &[("authorization", "Bearer sk-a")], &chat_of(9)).await.unwrap();
    // R1.7
    assert!(route.refusal().1.contains("worker_id"), "{:?}", route.refusal());
    assert_eq!(used(&cluster), 0);
}

#[tokio::test]
async fn r3_a_path_in_absolute_form_or_with_a_fragment_is_that_of_its_path() {
    let (cluster, picker) = started(|_| {}).await;
    for path in
        ["http://other.example/v1/chat/completions?a=b", "/v1/chat/completions#x", "/v1/chat/completions?"]
    {
        let (picked, _carried) = picker.ask(path, &[], &chat_of(9)).await.unwrap();
        // R3.10
        assert!(picked.endpoint().is_some(), "{path}: {:?}", picked.refusal());
    }
    for path in ["http://other.example/v1/models", "http://other.example/v1/route"] {
        let (picked, _) = picker.ask(path, &[], &chat_of(9)).await.unwrap();
        // R3.10
        assert_ne!(picked.refusal().0, 404, "{path}");
    }
    for path in ["*", "", "http://other.example", "\0"] {
        let (picked, _) = picker.ask(path, &[], &chat_of(9)).await.unwrap();
        // R3.10
        assert!((400..500).contains(&picked.refusal().0), "{path}: {:?}", picked.refusal());
    }
    // R3.10
    assert!(cluster.sims[0].state().requests.is_empty(), "the gateway called the engine itself");
}

#[tokio::test]
async fn r3_an_upload_keeps_the_rate_of_gateway_mode() {
    let (_cluster, picker) = started(|config| config.timeouts.body_idle = Duration::from_millis(400)).await;
    for (path, at_once) in [(CHAT, 1), (CHAT, 100_000), ("/v1/route", 100_000)] {
        let mut carried = picker.open().await.unwrap();
        carried.head("POST", path, &[], false).unwrap();
        carried.body(&vec![b' '; at_once], false).unwrap();
        let begun = Instant::now();
        let refused = loop {
            assert!(begun.elapsed() < LIMIT, "a byte now and then keeps {at_once} bytes to {path} alive");
            if let Ok(refused) = timeout(Duration::from_millis(100), carried.picked()).await {
                break refused.unwrap();
            }
            let _ = carried.body(b" ", false);
        };
        let (status, text) = refused.refusal();
        // R3.9, I5.7
        assert!(status == 408 && text.contains("body_too_slow"), "{status} {text}");
    }
}

#[tokio::test]
async fn l1_a_tenant_behind_envoy_leaves_room_for_the_bodies_of_others() {
    let (cluster, picker) = started(|config| {
        config.auth.keys = client_keys(&[("sk-a", "a"), ("sk-b", "b")]);
        config.server.max_body_bytes = MIB;
        config.limits.body_bytes_in_flight = 4 * MIB;
    })
    .await;
    let open = uploads(&cluster, &picker, &[("authorization", "Bearer sk-a")], (25, 200_000)).await;
    // L1.14: two thirds
    assert!(used(&cluster) > 2 * MIB && used(&cluster) <= 8 * MIB / 3, "{}", used(&cluster));
    let other = picker.ask(CHAT, &[("authorization", "Bearer sk-b")], &chat_of(120_000)).await.unwrap().0;
    // L1.14
    assert!(other.endpoint().is_some(), "{:?}", other.refusal());
    drop(open);
    cluster.until("all is given back", |cluster| used(cluster) == 0).await.unwrap();
}

#[tokio::test]
async fn r7_a_body_without_room_is_refused_and_recorded_however_its_messages_are_cut() {
    let (cluster, picker) = started(|config| {
        config.server.max_body_bytes = MIB;
        config.limits.body_bytes_in_flight = 8 * MIB;
    })
    .await;
    let open = uploads(&cluster, &picker, &[], (7, MIB)).await;
    assert_eq!(used(&cluster), 7 * MIB);
    let body = chat_of(360_000);
    for (count, piece) in [(1.0, body.len()), (2.0, 100_000)] {
        let mut carried = picker.open().await.unwrap();
        carried.head("POST", CHAT, &[], false).unwrap();
        body.as_bytes().chunks(piece).for_each(|piece| drop(carried.body(piece, false)));
        let refused = carried.picked().await.unwrap();
        let (status, text) = refused.refusal();
        // R7.5
        assert!(status == 503 && text.contains("body_bytes_in_flight"), "{status} {text}");
        let set = refused.immediate.unwrap().headers.unwrap().set_headers;
        // R7.5
        assert!(
            set.iter().any(|one| one.header.as_ref().is_some_and(|it| it.key == "retry-after")),
            "{set:?}"
        );
        let recorded = "pointsman_requests_total{endpoint=\"chat_completions\",model=\"other\",status=\"503\",\
                        code=\"body_bytes_in_flight\"";
        // R7.5
        cluster.until("it ended", |it| it.gateway.state().metrics.inflight.get() == 7).await.unwrap();
        assert_eq!(cluster.metric(recorded).await.unwrap(), [count]);
    }
    drop(open);
    cluster.until("all is given back", |cluster| used(cluster) == 0).await.unwrap();
}

#[tokio::test]
async fn r7_an_answer_without_room_for_its_message_is_recorded_as_such() {
    let (cluster, picker) = started(|config| {
        config.server.max_body_bytes = MIB;
        config.limits.body_bytes_in_flight = 8 * MIB;
    })
    .await;
    let (_, mut carried) = picker.ask(CHAT, &[], &chat_of(9)).await.unwrap();
    carried.answer_head(200, "application/json", None).unwrap();
    carried.next().await.unwrap();
    let open = uploads(&cluster, &picker, &[], (7, MIB - 1_000)).await;
    carried.answer_body(&vec![b' '; 400_000], false).unwrap();
    // R7.5
    assert_eq!(carried.picked().await.unwrap().refusal().0, 503);
    drop(open);
    let outcome = cluster.newest_outcome().await.unwrap();
    // R7.5
    assert_eq!((&outcome["status"], &outcome["code"]), (&json!(503), &json!("body_bytes_in_flight")));
    assert!(!cluster.worker(1).is_failing(), "it is not the engine's fault");
}
