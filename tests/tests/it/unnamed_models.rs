//! Requests without a model, lists of models, and what else clients and engines leave out or add: real
//! sockets.

use std::time::Duration;

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{json, status},
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};

const ANSWER: &str = r#"{"id":"a","object":"text_completion","created":1,"model":"tiny","content":[],"choices":[{"index":0,
    "text":"x","finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#;

/// Starts an engine that lists these models.
async fn engine(models: &'static str) -> RawEngine {
    RawEngine::start(move |request: &RawRequest| {
        vec![Act::Send(match request.line.as_str() {
            "GET /v1/models" => json(models),
            line if line.starts_with("GET") => json("{}"),
            _ => json(ANSWER),
        })]
    })
    .await
}

async fn cluster_of(engines: &[(&RawEngine, &str)]) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        for (engine, flag) in engines {
            config.workers.push(engine.worker(&format!("{flag},role=aggregated")));
        }
    });
    builder.start().await
}

async fn ask(cluster: &TestCluster, path: &str, body: &str) -> (u16, Value) {
    let reply = cluster.client.post(path, &[], body.to_owned()).await.unwrap();
    (reply.status.as_u16(), reply.json().unwrap())
}

#[tokio::test]
async fn a1_a_request_without_a_model_is_for_the_only_one() {
    for dialect in ["vllm", "sglang", "trtllm", "openai"] {
        let engine = engine(r#"{"data":[{"id":"tiny"},{"id":"fr","parent":"tiny"}]}"#).await;
        let cluster = cluster_of(&[(&engine, &format!("engine={dialect}"))]).await;
        for model in ["", r#""model":null,"#, r#""model":"","#] {
            let body = format!(r#"{{{model}"prompt":"one two",  "max_tokens":2}}"#);
            let (status, answer) = ask(&cluster, COMPLETIONS, &body).await;
            assert_eq!(status, 200, "{dialect}: {answer}");
            let sent = engine.requests().pop().unwrap().body;
            let read: Value = serde_json::from_str(&sent).unwrap();
            // A1.9
            match dialect {
                "vllm" => assert_eq!(sent, body),
                "sglang" => {
                    assert_eq!(read.get("model"), serde_json::from_str::<Value>(&body).unwrap().get("model"))
                }
                _ => assert_eq!(read["model"], "tiny", "{sent}"),
            }
            let (status, route) = ask(&cluster, "/v1/route", &body).await;
            assert_eq!(status, 200, "{route}");
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn a1_without_a_model_a_pair_serves_and_the_only_model_s_limits_hold() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    let body = r#"{"prompt":"a prompt that is long enough to be handed over, in blocks","max_tokens":4}"#;
    let (status, answer) = ask(&cluster, COMPLETIONS, body).await;
    // A1.9
    assert_eq!((status, &answer["model"]), (200, &json!("tiny")), "{answer}");
    assert_eq!(cluster.sims[0].state().handoffs.pulled, 1);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a1_with_several_models_the_missing_one_is_asked_for_by_name() {
    let other =
        SimConfig { model: "other".to_owned(), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).sim_with(other, "");
    let cluster = builder.start().await;
    for path in [COMPLETIONS, "/v1/embeddings", "/v1/route"] {
        let (status, answer) = ask(&cluster, path, r#"{"prompt":"x","input":"x"}"#).await;
        let message = answer["error"]["message"].as_str().unwrap().to_owned();
        // A1.9
        assert_eq!(
            (status, message.as_str()),
            (400, "model: is missing: expected one of other, tiny"),
            "{path}"
        );
    }
    let empty = TestClusterBuilder::new().start().await;
    let (status, answer) = ask(&empty, COMPLETIONS, r#"{"prompt":"x"}"#).await;
    assert_eq!(status, 503, "{answer}");
}

#[tokio::test]
async fn i1_a_model_that_is_not_served_is_answered_with_those_that_are() {
    let many: Vec<Value> = (10..31).map(|number| json!({"id": format!("m{number}")})).collect();
    let many = json!({ "data": many }).to_string().leak();
    for (models, listed) in [
        (r#"{"data":[{"id":"tiny"}]}"#, "tiny".to_owned()),
        (many, (10..30).map(|number| format!("m{number}, ")).collect::<String>() + "…"),
    ] {
        let engine = engine(models).await;
        let cluster = cluster_of(&[(&engine, "engine=vllm")]).await;
        let (status, answer) = ask(&cluster, COMPLETIONS, r#"{"model":"nope","prompt":"x"}"#).await;
        let expected = format!("the model `nope` does not exist; use one that is served: {listed}");
        // I1.8
        assert_eq!((status, &answer["error"]["message"]), (404, &json!(expected)));
        let one = cluster.client.get("/v1/models/nope").await.unwrap().json().unwrap();
        assert_eq!(one["error"]["message"], expected);
        // A worker that has not finished loading may serve it.
        let loading = RawEngine::start(|_: &RawRequest| vec![Act::Hang]).await;
        let registry = &cluster.gateway.state().registry;
        registry.upsert(loading.worker("id=9,engine=vllm,role=aggregated"));
        let (status, answer) = ask(&cluster, COMPLETIONS, r#"{"model":"nope","prompt":"x"}"#).await;
        let message = answer["error"]["message"].as_str().unwrap();
        // I1.8
        assert!(
            status == 503 && message.ends_with(&format!("or use one that is served: {listed}")),
            "{message}"
        );
    }
}

#[tokio::test]
async fn i1_workers_that_cannot_pair_are_named() {
    let engines = [engine(r#"{"data":[{"id":"tiny"}]}"#).await, engine(r#"{"data":[{"id":"tiny"}]}"#).await];
    for (decode, code) in [("sglang", 503), ("vllm,kv_compatibility=0.32.0", 200)] {
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                let prefill = "id=1,role=prefill,engine=vllm,kv_compatibility=0.33.0".to_owned();
                let workers = [prefill, format!("id=2,role=decode,engine={decode}")];
                for (worker, engine) in workers.iter().zip(&engines) {
                    config.workers.push(engine.worker(worker));
                }
            })
            .start()
            .await;
        let (status, answer) = ask(&cluster, COMPLETIONS, r#"{"model":"tiny","prompt":"x"}"#).await;
        let decode = if code == 503 { "sglang" } else { "vllm over nixl (0.32.0)" };
        let why = format!(
            "no prefill worker of 'tiny' can pair with a decode worker: for example, worker 1 hands over by vllm over \
             nixl (0.33.0) and worker 2 hands over by {decode}"
        );
        // I1.9
        assert_eq!(status, code, "{answer}");
        assert!(code == 200 || answer["error"]["message"] == why.as_str(), "{answer}");
        let told = cluster.admin.get("/status").await.unwrap().json().unwrap();
        assert!(told["reasons"].as_array().unwrap().contains(&json!(why)), "{told}");
        assert_eq!(told["remote_prefill"]["tiny"], "pending", "{told}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn b3_adapters_have_their_parent_and_entries_without_a_name_are_left_out() {
    let list = r#"{"data":[{"id":null,"owned_by":"vllm"},{"id":"tiny","root":"/models/tiny","parent":null},
        {"id":"fr","root":"/adapters/fr","parent":"tiny"}]}"#;
    let engine = engine(list).await;
    let cluster = cluster_of(&[(&engine, "engine=vllm")]).await;
    let list = cluster.client.get("/v1/models").await.unwrap().json().unwrap();
    let shown: Vec<_> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| json!([model["id"], model["root"], model["parent"]]))
        .collect();
    // B3.6, B5.15
    assert_eq!(shown, [json!(["tiny", "tiny", null]), json!(["fr", "tiny", "tiny"])]);
    let one = cluster.client.get("/v1/models/fr").await.unwrap().json().unwrap();
    assert_eq!((&one["parent"], one.to_string().contains('/')), (&json!("tiny"), false));
}

#[tokio::test]
async fn i6_the_query_of_a_request_reaches_no_engine() {
    let engine = engine(r#"{"data":[{"id":"tiny"}]}"#).await;
    let cluster = cluster_of(&[(&engine, "engine=vllm")]).await;
    let body = r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hello"}]}"#;
    let reply = cluster.client.post("/v1/messages?beta=true&key=geheim", &[], body).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    // I6.10
    assert_eq!(engine.requests().pop().unwrap().line, "POST /v1/messages");
}

#[tokio::test]
async fn i2_a_redirect_of_an_engine_is_a_failure_of_the_worker() {
    for location in ["", "location: http://10.9.8.7/internal\r\n"] {
        let redirecting = RawEngine::start(move |request: &RawRequest| {
            let moved = format!("HTTP/1.1 307 Temporary Redirect\r\n{location}content-length: 0\r\n\r\n");
            vec![Act::Send(match request.line.as_str() {
                "GET /v1/models" => json(r#"{"data":[{"id":"tiny"}]}"#),
                line if line.starts_with("GET") => status("200 OK", "{}"),
                _ => moved.into_bytes(),
            })]
        })
        .await;
        let good = engine(r#"{"data":[{"id":"tiny"}]}"#).await;
        let body = r#"{"model":"tiny","prompt":"x"}"#;
        let alone = cluster_of(&[(&redirecting, "engine=openai")]).await;
        let reply = alone.client.post(COMPLETIONS, &[], body).await.unwrap();
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        // I2.12
        assert_eq!((reply.status.as_u16(), reply.headers.get("location")), (502, None), "{text}");
        assert!(text.contains("unexpected status 307") && !text.contains("10.9.8.7"), "{text}");
        let both = cluster_of(&[(&redirecting, "engine=openai"), (&good, "engine=openai")]).await;
        for _ in 0..6 {
            assert_eq!(ask(&both, COMPLETIONS, body).await.0, 200);
        }
    }
}

#[tokio::test]
async fn i2_a_worker_is_reached_by_a_name_whose_first_address_may_be_another() {
    let engine = engine(r#"{"data":[{"id":"tiny"}]}"#).await;
    let port = engine.address.port();
    for url in [
        format!("HTTP://localhost:{port}/"),
        format!("http://LOCALHOST:{port}"),
        format!("http://127.0.0.1:{port}//"),
    ] {
        let spec = WorkerSpec::parse_flag(&format!("engine=vllm,role=aggregated,url={url}")).unwrap();
        let builder = TestClusterBuilder::new().config(|config| {
            config.timeouts.connect = Duration::from_secs(2);
            config.workers.push(spec);
        });
        let cluster = builder.start().await;
        // I2.13
        assert_eq!(ask(&cluster, COMPLETIONS, r#"{"model":"tiny","prompt":"x"}"#).await.0, 200, "{url}");
    }
}
