//! Sessions that SGLang engines keep (`session_params`): each engine knows its own.

use std::collections::HashSet;

use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{json as json_answer, status},
};
use serde_json::{Value, json};

const ANSWER: &str = r#"{"text":"hi","meta_info":{"id":"g","finish_reason":{"type":"stop"},"prompt_tokens":1,"completion_tokens":1}}"#;

/// An engine on which the sessions `own` were opened.
async fn engine(own: HashSet<&'static str>) -> RawEngine {
    RawEngine::serving(move |request: &RawRequest| {
        let body: Value = serde_json::from_str(&request.body).unwrap_or_default();
        let session = body["session_params"]["id"].as_str();
        vec![Act::Send(match session {
            Some(id) if !own.contains(id) => {
                let message = format!("Invalid request: session id {id} does not exist");
                status("400 Bad Request", &json!({ "error": { "message": message } }).to_string())
            }
            _ => json_answer(ANSWER),
        })]
    })
    .await
}

async fn ask(cluster: &TestCluster, session: &str) -> Reply {
    ask_with(cluster, session, &[]).await
}

async fn ask_with(cluster: &TestCluster, session: &str, headers: &[(&str, &str)]) -> Reply {
    let body = json!({
        "text": "which way does this train go?", "sampling_params": { "max_new_tokens": 3 },
        "session_params": { "id": session },
    });
    cluster.client.post("/generate", headers, body.to_string()).await.unwrap()
}

#[tokio::test]
async fn i12_requests_of_an_engine_s_session_go_to_the_engine_that_has_it() {
    let sessions = [["a1", "a2", "a3", "a4"], ["b1", "b2", "b3", "b4"]];
    let engines = [engine(HashSet::from(sessions[0])).await, engine(HashSet::from(sessions[1])).await];
    let builder = TestClusterBuilder::new().config(|config| {
        for engine in &engines {
            config.workers.push(engine.worker("role=aggregated,engine=sglang"));
        }
    });
    let cluster = builder.start().await;
    let asked = || engines.iter().map(|engine| engine.requests().len()).sum::<usize>();
    for session in sessions.as_flattened() {
        let reply = ask(&cluster, session).await;
        // I12.10: an engine that lacks the session is not the only one.
        assert_eq!(reply.status, 200, "{session}: {reply:?}");
    }
    let before = asked();
    for _ in 0..3 {
        for session in sessions.as_flattened() {
            assert_eq!(ask(&cluster, session).await.status, 200, "{session}");
        }
    }
    // I12.10: each request went to the right engine at once.
    assert_eq!(asked() - before, 24);
    let unknown = ask(&cluster, "c1").await;
    // I12.10: the engines' own answer
    assert!(
        unknown.status == 400 && String::from_utf8_lossy(&unknown.body).contains("does not exist"),
        "{unknown:?}"
    );
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i12_an_engine_that_never_had_a_session_makes_the_gateway_not_forget_the_one_that_has_it() {
    let sessions = ["a1", "a2", "a3", "a4"];
    let none = HashSet::new;
    let engines = [engine(HashSet::from(sessions)).await, engine(none()).await, engine(none()).await];
    let builder = TestClusterBuilder::new().config(|config| {
        for (id, engine) in (1..).zip(&engines) {
            config.workers.push(engine.worker(&format!("id={id},role=aggregated,engine=sglang")));
        }
        let slots = "[aggregated]\nnative = \"round-robin\"\n";
        config.policies.slots = toml::from_str(slots).unwrap();
        config.routing.retries = 0;
    });
    let cluster = builder.start().await;
    for (worker, status) in [("1", 200), ("2", 400)] {
        for session in sessions {
            let pinned = ask_with(&cluster, session, &[("x-worker-instance-id", worker)]).await;
            assert_eq!(pinned.status, status, "{session} {worker}: {pinned:?}");
        }
    }
    for session in sessions {
        // I12.10
        assert_eq!(ask(&cluster, session).await.status, 200, "{session}");
    }
}

#[tokio::test]
async fn i12_a_session_of_one_tenant_does_not_exist_for_another() {
    let engines = [engine(HashSet::from(["a1"])).await, engine(HashSet::from(["b1"])).await];
    let builder = TestClusterBuilder::new().config(|config| {
        config.auth.keys = pointsman_tests::client_keys(&[("sk-1", "one"), ("sk-2", "two"), ("sk-3", "")]);
        for (id, engine) in (1..).zip(&engines) {
            config.workers.push(engine.worker(&format!("id={id},role=aggregated,engine=sglang")));
        }
    });
    let cluster = builder.start().await;
    let asked = || engines.iter().map(|engine| engine.requests().len()).sum::<usize>();
    let key = |key: &'static str| ("authorization", key);
    let (one, two, none) = (key("Bearer sk-1"), key("Bearer sk-2"), key("Bearer sk-3"));
    for (session, owner, others) in [("a1", one, [two, none]), ("b1", none, [one, two])] {
        assert_eq!(ask_with(&cluster, session, &[owner]).await.status, 200, "{session}");
        let before = asked();
        for other in others {
            for worker in ["1", "2"].map(|id| ("x-worker-instance-id", id)) {
                let refused = ask_with(&cluster, session, &[other, worker]).await;
                let text = String::from_utf8_lossy(&refused.body).into_owned();
                // I12.14: a hint does not replace the owner.
                assert_eq!(
                    (refused.status.as_u16(), refused.code().as_str()),
                    (400, "invalid_request"),
                    "{text}"
                );
                assert!(text.contains(&format!("session id {session} does not exist")), "{text}");
            }
            assert_eq!(ask_with(&cluster, session, &[other]).await.status, 400, "{session}");
            // A batch, and keys of which engines take the last one.
            for params in
                [format!(r#"[{{}},{{"id":"{session}"}}]"#), format!(r#"{{"id":"own","id":"{session}"}}"#)]
            {
                let body = format!(r#"{{"text":"hi","session_params":{params}}}"#);
                // I12.14
                assert_eq!(cluster.client.post("/generate", &[other], body).await.unwrap().status, 400);
            }
        }
        // I12.14: no engine was asked.
        assert_eq!(asked(), before, "{session}");
        assert_eq!(ask_with(&cluster, session, &[owner]).await.status, 200, "{session}");
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i12_a_session_that_its_engine_lost_is_anyone_s_to_open() {
    let engine = RawEngine::serving(move |request: &RawRequest| {
        let body: Value = serde_json::from_str(&request.body).unwrap_or_default();
        vec![Act::Send(if body["text"] == "lost" {
            let error = json!({ "error": { "message": "Invalid request: session id s does not exist" } });
            status("400 Bad Request", &error.to_string())
        } else {
            json_answer(ANSWER)
        })]
    });
    let engine = engine.await;
    let builder = TestClusterBuilder::new().config(|config| {
        config.auth.keys = pointsman_tests::client_keys(&[("sk-1", "one"), ("sk-2", "two")]);
        config.workers.push(engine.worker("id=1,role=aggregated,engine=sglang"));
    });
    let cluster = builder.start().await;
    let ask = async |key: &str, text: &str| {
        let body = json!({ "text": text, "session_params": { "id": "s" } }).to_string();
        let header = ("authorization", &*format!("Bearer {key}"));
        cluster.client.post("/generate", &[header], body).await.unwrap().status.as_u16()
    };
    assert_eq!([ask("sk-1", "hello").await, ask("sk-2", "hello").await], [200, 400]);
    assert_eq!(ask("sk-1", "lost").await, 400);
    // I12.14
    assert_eq!([ask("sk-2", "hello").await, ask("sk-1", "hello").await], [200, 400]);
}
