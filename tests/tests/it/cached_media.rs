//! Media that clients name by a `uuid` without their data (I12.11): only the engine that got the data has
//! them.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use parking_lot::Mutex;
use pointsman_gateway::config::Config;
use pointsman_tests::{
    Act, CHAT, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{json as answer, status},
};
use serde_json::{Value, json};

const ANSWER: &str = r#"{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}]}"#;
/// Answer of a vLLM prefill engine.
const PREFILLED: &str = r#"{"id":"p","choices":[{"index":0,"message":{"role":"assistant","content":""},"finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}}"#;
/// vLLM's refusal.
const MISSING: &str = r#"{"error":{"message":"Cache miss for image at index 0 but data is not provided.","type":"BadRequestError","code":400}}"#;

type Media = Arc<Mutex<BTreeSet<String>>>;

/// An engine that keeps media as vLLM does, and what it has.
async fn engine(role: &'static str) -> (RawEngine, Media) {
    let media = Media::default();
    let kept = media.clone();
    let script = move |request: &RawRequest| {
        let body: Value = serde_json::from_str(&request.body).unwrap();
        let parts = body["messages"].as_array().into_iter().flatten();
        for part in parts.filter_map(|message| message["content"].as_array()).flatten() {
            let Some(id) = part["uuid"].as_str() else { continue };
            if !part["image_url"].is_null() {
                kept.lock().insert(id.to_owned());
            } else if !kept.lock().contains(id) {
                return vec![Act::Send(status("400 Bad Request", MISSING))];
            }
        }
        vec![Act::Send(answer(if role == "prefill" { PREFILLED } else { ANSWER }))]
    };
    (RawEngine::serving(script).await, media)
}

struct Bench {
    cluster: TestCluster,
    engines: Vec<(RawEngine, Media)>,
}

async fn bench(roles: &[&'static str], change: impl FnOnce(&mut Config)) -> Bench {
    bench_of("vllm", roles, change).await
}

async fn bench_of(name: &str, roles: &[&'static str], change: impl FnOnce(&mut Config)) -> Bench {
    let mut engines = Vec::new();
    for role in roles {
        engines.push(engine(role).await);
    }
    let builder = TestClusterBuilder::new().config(|config| {
        for (id, (role, (engine, _))) in (1..).zip(roles.iter().zip(&engines)) {
            config.workers.push(engine.worker(&format!("id={id},role={role},engine={name}")));
        }
        let slot = |leg| format!("[{leg}]\nnative = \"round-robin\"\n");
        let slots: String = ["aggregated", "prefill", "decode"].map(slot).concat();
        config.policies.slots = toml::from_str(&slots).unwrap();
        config.routing.session_affinity = Duration::from_secs(60);
        change(config);
    });
    Bench { cluster: builder.start().await, engines }
}

/// Asks about an image, which is sent or only named. Returns the status and the text of the answer.
async fn ask(cluster: &TestCluster, id: &str, is_sent: bool, headers: &[(&str, &str)]) -> (u16, String) {
    let url = if is_sent { json!({"url": format!("data:image/png;base64,{id}")}) } else { Value::Null };
    let question = format!("{} {is_sent} {id}", "what is it ".repeat(id.len() * 5));
    let content =
        json!([{"type": "image_url", "image_url": url, "uuid": id}, {"type": "text", "text": question}]);
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": content}]});
    let reply = cluster.client.post(CHAT, headers, body.to_string()).await.unwrap();
    (reply.status.as_u16(), String::from_utf8_lossy(&reply.body).into_owned())
}

#[tokio::test]
async fn i12_media_that_a_client_only_names_are_looked_for_at_the_worker_that_has_them() {
    for roles in [&["aggregated"; 4][..], &["prefill", "prefill", "decode", "decode"]] {
        let Bench { cluster, engines } = bench(roles, |config| config.routing.retries = 0).await;
        let ids: Vec<String> = (0..16).map(|number| format!("img-{number}")).collect();
        for id in &ids {
            assert_eq!(ask(&cluster, id, true, &[]).await.0, 200, "{id}");
        }
        let used = engines.iter().filter(|(_, media)| !media.lock().is_empty()).count();
        assert!(used > 1, "{roles:?}: all images are at one engine");
        for id in &ids {
            for turn in 0..2 {
                // I12.11
                assert_eq!(ask(&cluster, id, false, &[]).await.0, 200, "{roles:?} {id} {turn}");
            }
            // I12.11: also in a session of another worker
            for worker in ["1", "2", "3", "4"].iter().filter(|_| roles[0] == "aggregated") {
                let session = format!("s-{worker}");
                let pin = [("x-worker-instance-id", *worker), ("x-session-id", &*session)];
                assert_eq!(ask(&cluster, "other", true, &pin).await.0, 200);
                assert_eq!(ask(&cluster, id, false, &pin[1..]).await.0, 200, "{id} {worker}");
            }
        }
    }
}

#[tokio::test]
async fn i12_media_are_noted_for_engines_that_keep_them_only() {
    for (name, asked_again) in [("vllm", [1, 2]), ("sglang", [2, 1])] {
        let Bench { cluster, engines } =
            bench_of(name, &["aggregated"; 2], |config| config.routing.retries = 0).await;
        let (session, pin) = (("x-session-id", "s"), |worker| ("x-worker-instance-id", worker));
        assert_eq!(ask(&cluster, "a", true, &[pin("2")]).await.0, 200);
        assert_eq!(ask(&cluster, "b", true, &[pin("1"), session]).await.0, 200);
        let _ = ask(&cluster, "a", false, &[session]).await;
        // I12.11: without the note, the session's worker is asked.
        assert_eq!([0, 1].map(|place| engines[place].0.requests().len()), asked_again, "{name}");
    }
}

#[tokio::test]
async fn i12_another_worker_is_asked_once_for_media_that_an_engine_lacks() {
    let Bench { cluster, engines } = bench(&["aggregated"; 3], |_| {}).await;
    let pinned = |worker: &'static str| [("x-worker-instance-id", worker)];
    let lost = |place: usize| engines[place].1.lock().clear();
    let asked = || engines.iter().map(|(engine, _)| engine.requests().len()).sum::<usize>();
    for worker in ["1", "2", "3"] {
        assert_eq!(ask(&cluster, "a", true, &pinned(worker)).await.0, 200);
    }
    lost(2);
    let before = asked();
    // I12.12
    assert_eq!((ask(&cluster, "a", false, &[]).await.0, asked() - before), (200, 2));
    let before = asked();
    // I12.11: that one is known now.
    assert_eq!((ask(&cluster, "a", false, &[]).await.0, asked() - before), (200, 1));
    (0..3).for_each(lost);
    for turn in 0..12 {
        let before = asked();
        let (status, text) = ask(&cluster, "a", false, &[]).await;
        // I12.12
        assert_eq!((status, asked() - before), (400, 2), "{turn} {text}");
        assert!(text.contains("Cache miss for image"), "{text}");
    }
    for id in 1..=3 {
        // I12.12: no worker is to blame.
        assert_eq!(cluster.worker(id).ineligible(), None);
    }
}

#[tokio::test]
async fn i12_no_other_worker_is_asked_for_media_where_there_are_tenants() {
    let change = |config: &mut Config| {
        config.server.tenant_header = "x-tenant".to_owned();
        config.auth.trusted_proxies = vec!["127.0.0.0/8".to_owned()];
    };
    let Bench { cluster, engines } = bench(&["aggregated"; 2], change).await;
    let asked = || engines.iter().map(|(engine, _)| engine.requests().len()).sum::<usize>();
    for (tenant, is_sent) in [("a", true), ("a", false), ("b", true), ("b", false)] {
        let id = format!("of-{tenant}");
        assert_eq!(ask(&cluster, &id, is_sent, &[("x-tenant", tenant)]).await.0, 200);
    }
    engines.iter().for_each(|(_, media)| media.lock().clear());
    let before = asked();
    // I12.12
    assert_eq!((ask(&cluster, "of-a", false, &[("x-tenant", "a")]).await.0, asked() - before), (400, 1));
}
