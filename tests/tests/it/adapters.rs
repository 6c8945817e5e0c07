//! LoRA adapters that engines list with their model: real sockets.

use pointsman_gateway::config::Config;
use pointsman_tests::{
    Act, CHAT, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw::{send, until_mark},
    raw_engine::json,
};
use serde_json::{Value, json};

const MODELS: &str =
    r#"{"data":[{"id":"org/m"},{"id":"law","parent":"org/m"},{"id":"own","parent":"org/m"}]}"#;
const ANSWER: &str = r#"{"id":"a","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,
    "message":{"role":"assistant","content":"x"},"finish_reason":"stop"}],"data":[],
    "usage":{"prompt_tokens":1,"completion_tokens":1}}"#;

/// Starts an engine with a model and two adapters.
async fn engine() -> RawEngine {
    RawEngine::start(|request: &RawRequest| {
        vec![Act::Send(match request.line.as_str() {
            "GET /v1/models" => json(MODELS),
            line if line.starts_with("GET") => json("{}"),
            _ => json(ANSWER),
        })]
    })
    .await
}

async fn start(flag: &str, engine: &RawEngine, config: &str) -> TestCluster {
    let more: Config = toml::from_str(config).unwrap();
    let change = |config: &mut Config| {
        (config.models, config.tenants) = (more.models, more.tenants);
        config.workers.push(engine.worker(&format!("role=aggregated,{flag}")));
    };
    TestClusterBuilder::new().config(change).start().await
}

async fn ask(cluster: &TestCluster, model: &str) -> (u16, Value) {
    let body = json!({"model": model, "messages": [{"role": "user", "content": "hello"}]});
    let reply = cluster.client.post(CHAT, &[], body.to_string()).await.unwrap();
    (reply.status.as_u16(), reply.json().unwrap())
}

#[tokio::test]
async fn b3_sglang_gets_an_adapter_by_its_name_and_takes_it_with_its_model() {
    let engine = engine().await;
    let cluster = start("engine=sglang", &engine, "").await;
    // B3.9, B3.10
    for (model, adapter) in [("org/m:law", json!("law")), ("law", json!("law")), ("org/m", Value::Null)] {
        assert_eq!(ask(&cluster, model).await.0, 200, "{model}");
        let sent: Value = serde_json::from_str(&engine.requests().pop().unwrap().body).unwrap();
        assert_eq!((&sent["model"], &sent["lora_path"]), (&json!(model), &adapter));
    }
    let message =
        json!({"model": "law", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]});
    cluster.client.post("/v1/messages", &[], message.to_string()).await.unwrap();
    // What this engine answers is no stream, so the request is aborted as well.
    let is_abort = |request: &RawRequest| request.line.contains("/abort_request");
    let sent = engine.requests().into_iter().rfind(|request| !is_abort(request)).unwrap().body;
    assert!(sent.contains(r#""model":"org/m:law""#), "{sent}");
    let request = "GET /v1/realtime?model=org/m:law HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\n\
         upgrade: websocket\r\nsec-websocket-key: a\r\nsec-websocket-version: 13\r\n\r\n";
    let mut client = send(cluster.gateway.address, request).await.unwrap();
    let answer = until_mark(&mut client, "}").await;
    assert!(answer.starts_with("HTTP/1.1 502"), "the engine is asked, and does not upgrade: {answer}");
    for model in ["org/m:none", "m:law", "law:org/m"] {
        assert_eq!(ask(&cluster, model).await.0, 404, "{model}");
    }
    let other = start("engine=vllm", &engine, "").await;
    assert_eq!((ask(&other, "law").await.0, ask(&other, "org/m:law").await.0), (200, 404));
    assert!(!engine.requests().pop().unwrap().body.contains("lora_path"), "vLLM knows the adapter's name");
}

#[tokio::test]
async fn b3_the_rules_of_a_model_hold_for_its_adapters_unless_they_have_their_own() {
    const RULES: &str = r#"
        models."org/m" = { enforce_disagg = true }
        models.own = { enforce_disagg = false }"#;
    let engine = engine().await;
    let plain = start("engine=vllm", &engine, "").await;
    for model in ["org/m", "law", "own"] {
        assert_eq!(ask(&plain, model).await.0, 200, "{model}, by default");
    }
    let cluster = start("engine=vllm", &engine, RULES).await;
    let status = async |model| ask(&cluster, model).await.0;
    // B3.7
    assert_eq!((status("org/m").await, status("law").await, status("own").await), (503, 503, 200));
    let list = cluster.client.get("/v1/models").await.unwrap().json().unwrap();
    assert_eq!((list["data"].as_array().unwrap().len(), &list["data"][0]["id"]), (1, &json!("own")));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b3_an_adapter_whose_parent_is_the_path_of_its_model_has_its_rules() {
    const MODELS: &str = r#"{"data":[{"id":"llama3","root":"meta/llama-3","parent":null},
        {"id":"sql","root":"/l/sql","parent":"meta/llama-3"}]}"#;
    let engine = RawEngine::start(|request: &RawRequest| {
        vec![Act::Send(match request.line.as_str() {
            "GET /v1/models" => json(MODELS),
            line if line.starts_with("GET") => json("{}"),
            _ => json(ANSWER),
        })]
    })
    .await;
    let cluster = start("engine=vllm", &engine, "models.llama3 = { enforce_disagg = true }").await;
    // B3.13
    assert_eq!((ask(&cluster, "llama3").await.0, ask(&cluster, "sql").await.0), (503, 503));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b3_a_slot_of_a_model_decides_for_its_adapters() {
    const SLOTS: &str = r#"models."org/m".slots.aggregated = { builtin = "least-loaded" }"#;
    let engine = engine().await;
    let cluster = start("engine=vllm", &engine, SLOTS).await;
    let policy = async |model: &str| {
        let body = json!({"model": model, "messages": [{"role": "user", "content": "hello"}]}).to_string();
        let reply = cluster.client.post(CHAT, &[("x-pointsman-decision", "1")], body).await.unwrap();
        let told = reply.headers["x-pointsman-decision"].to_str().unwrap().to_owned();
        told.split_once(' ')
            .unwrap()
            .1
            .split(' ')
            .skip_while(|word| word.starts_with("id="))
            .collect::<String>()
    };
    let of_model = policy("org/m").await;
    // B3.7
    assert_eq!(policy("law").await, of_model);
    assert!(!of_model.contains("predicted-latency"), "the default: {of_model}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b3_a_request_for_an_adapter_counts_for_the_limit_of_its_model() {
    const LIMITS: &str = r#"tenants."*".models."org/m" = { requests_per_minute = 3 }"#;
    let engine = engine().await;
    let cluster = start("engine=vllm", &engine, LIMITS).await;
    let mut statuses = Vec::new();
    for model in ["law", "org/m", "own", "org/m", "law"] {
        statuses.push(ask(&cluster, model).await.0);
    }
    // B3.8
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b3_an_adapter_for_hints_is_no_model_and_the_refusal_says_what_to_do() {
    let engine = engine().await;
    let cluster = start("engine=vllm,lora=later", &engine, "").await;
    let message = async |model: &str| {
        let (status, body) = ask(&cluster, model).await;
        (status, body["error"]["message"].as_str().unwrap_or_default().to_owned())
    };
    let advice = "`loras` of a worker has it, and its `models` must have it, too; ";
    let served = "use one that is served: ";
    // B3.12
    let (status, text) = message("later").await;
    assert_eq!(status, 404);
    assert!(text.starts_with(&format!("the model `later` does not exist; {advice}{served}")), "{text}");
    let (status, text) = message("unknown").await;
    assert_eq!(status, 404);
    assert!(text.starts_with(&format!("the model `unknown` does not exist; {served}")), "{text}");
}

#[tokio::test]
async fn a1_sglang_s_lora_path_names_an_adapter_of_the_model_on_each_endpoint() {
    let without = RawEngine::start(|request: &RawRequest| {
        vec![Act::Send(match request.line.as_str() {
            "GET /v1/models" => json(r#"{"data":[{"id":"org/m"}]}"#),
            line if line.starts_with("GET") => json("{}"),
            _ => json(ANSWER),
        })]
    });
    let (with, without) = (engine().await, without.await);
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.workers.push(without.worker("role=aggregated,engine=sglang"));
            config.workers.push(with.worker("role=aggregated,engine=sglang"));
        })
        .start()
        .await;
    let messages = json!([{"role": "user", "content": "hello"}]);
    for _ in 0..4 {
        for (path, model, served) in [
            (CHAT, json!("org/m"), "law"),
            ("/v1/completions", json!("org/m"), "law"),
            ("/v1/embeddings", json!("org/m"), "law"),
            (CHAT, json!(null), "law"),
            // SGLang prefers the adapter that the model names.
            (CHAT, json!("org/m:own"), "own"),
            (CHAT, json!("own"), "own"),
        ] {
            let body = json!({"model": model, "lora_path": "law", "messages": messages, "prompt": "x", "input": "x"});
            let reply = cluster.client.post(path, &[], body.to_string()).await.unwrap();
            assert_eq!(reply.status, 200, "{path}: {reply:?}");
            let sent: Value = serde_json::from_str(&with.requests().pop().unwrap().body).unwrap();
            // A1.16
            assert_eq!((&sent["model"], &sent["lora_path"]), (&model, &json!(served)), "{path}");
        }
    }
    assert!(!without.requests().iter().any(|request| request.line.starts_with("POST")));
    let vllm = start("engine=vllm", &with, "").await;
    let body = json!({"model": "org/m", "lora_path": "law", "messages": messages}).to_string();
    assert_eq!(vllm.client.post(CHAT, &[], body).await.unwrap().status, 200);
    vllm.at_rest().await.unwrap();
    let list = vllm.admin.get("/decisions?ended=true&limit=1").await.unwrap().json().unwrap();
    assert_eq!(list["decisions"][0]["model"], "org/m", "vLLM does not read the field");
}

#[tokio::test]
async fn i7_models_are_listed_before_adapters() {
    let engine = engine().await;
    let cluster = start("engine=vllm", &engine, "").await;
    let list = cluster.client.get("/v1/models").await.unwrap().json().unwrap();
    let ids: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    // I7.12
    assert_eq!(ids, ["org/m", "law", "own"]);
    let message = ask(&cluster, "nope").await.1["error"]["message"].clone();
    assert_eq!(message, "the model `nope` does not exist; use one that is served: org/m, law, own");
}

#[tokio::test]
async fn l1_requests_that_waited_for_a_worker_are_within_the_limits_of_the_adapter_that_they_name() {
    const SECTIONS: &str = "[models.'org/m']\nwait_for_workers = '60s'\n\
                            [tenants.'*'.models.law]\nrequests_per_minute = 1\n";
    let more: Config = toml::from_str(SECTIONS).unwrap();
    let builder = TestClusterBuilder::new().config(|config| {
        config.queue.limit = 20;
        (config.models, config.tenants) = (more.models, more.tenants);
    });
    let cluster = builder.start().await;
    let body =
        json!({"model": "org/m", "lora_path": "law", "messages": [{"role": "user", "content": "hello"}]});
    let mut asked = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let (client, body) = (cluster.client.clone(), body.to_string());
        asked.spawn(async move { client.post(CHAT, &[], body).await.unwrap().status.as_u16() });
    }
    cluster.until_counted("pointsman_requests_waiting_for_workers", 3.0).await.unwrap();
    let engine = engine().await;
    let worker = json!({"id": 1, "role": "aggregated", "engine": "sglang", "url": format!("http://{}", engine.address)});
    let reply = cluster.admin.post("/workers", &[], worker.to_string()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    let mut statuses = asked.join_all().await;
    statuses.sort_unstable();
    // L1.12
    assert_eq!(statuses, [200, 429, 429]);
    cluster.at_rest().await.unwrap();
    assert_eq!(engine.requests().len(), 1);
}
