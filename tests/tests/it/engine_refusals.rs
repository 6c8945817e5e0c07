//! Refusals of engines (table I), and engines that are not ready or not the configured ones (B5).

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_sim::{Dialect, Role, Sim, SimConfig};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    log::Log,
    own_process,
    raw_engine::{self, json},
};
use pointsman_workers::{ModelName, WorkerSpec};
use serde_json::{Value, json};

fn retry_after(reply: &Reply) -> Option<&str> {
    reply.headers.get("retry-after").map(|value| value.to_str().unwrap())
}

#[tokio::test]
async fn i_every_4xx_of_an_engine_reaches_the_client_with_its_code_and_body() {
    let engine = RawEngine::start(|request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(r#"{"data":[{"id":"tiny"}]}"#))],
        line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
        _ => {
            let (_, code) = request.body.split_once("status-").unwrap();
            let body = format!(r#"{{"error": {{"message":"it is {0}","code":{0}}} }}"#, &code[..3]);
            vec![Act::Send(raw_engine::status(&format!("{} Refused", &code[..3]), &body))]
        }
    })
    .await;
    let worker = engine.worker("id=1,role=aggregated,engine=openai");
    let cluster = TestClusterBuilder::new().config(|config| config.workers.push(worker)).start().await;
    // 429 is back-pressure.
    for code in [400, 402, 403, 404, 405, 409, 413, 415, 422, 451] {
        for stream in [false, true] {
            let prompt = format!("status-{code}");
            let body = json!({"model": "tiny", "prompt": prompt, "stream": stream}).to_string();
            let before = engine.requests().len();
            let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
            let expected = format!(r#"{{"error": {{"message":"it is {code}","code":{code}}} }}"#);
            let text = String::from_utf8_lossy(&reply.body).into_owned();
            assert_eq!((reply.status.as_u16(), text), (code, expected), "stream: {stream}");
            assert_eq!(retry_after(&reply), None, "the engine sent none");
            assert_eq!(engine.requests().len() - before, 1, "{code} is not retried");
        }
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i1_a_refusal_of_more_than_a_mebibyte_reaches_the_client_as_a_valid_error() {
    let engine = RawEngine::start(|request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(r#"{"data":[{"id":"tiny"}]}"#))],
        line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
        _ => {
            let (_, size) = request.body.split_once("quote ").unwrap();
            let quote = "word ".repeat(size.split('"').next().unwrap().parse().unwrap());
            let body = json!({"error": {"message": format!("bad input: {quote}"), "code": 400}});
            vec![Act::Send(raw_engine::status("400 Bad Request", &body.to_string()))]
        }
    })
    .await;
    let flag = format!("id=1,role=aggregated,engine=openai,url=http://{}", engine.address);
    let worker = WorkerSpec::parse_flag(&flag).unwrap();
    let cluster = TestClusterBuilder::new().config(|config| config.workers.push(worker)).start().await;
    for (words, begins) in [
        (100_000, "bad input: word word "),
        (
            400_000,
            "the engine's error has more than 1048576 bytes, and begins with: \
             {\"error\":{\"code\":400,\"message\":\"bad input: word word ",
        ),
    ] {
        for stream in [false, true] {
            let prompt = format!("quote {words}");
            let body = json!({"model": "tiny", "prompt": prompt, "stream": stream}).to_string();
            let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
            let error = reply.json().unwrap()["error"].clone();
            // I1.3
            assert_eq!((reply.status.as_u16(), &error["code"]), (400, &json!(400)), "{words} {stream}");
            let message = error["message"].as_str().unwrap();
            // I1.3
            assert!(message.starts_with(begins), "{}", &message[..200]);
        }
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i2_a_refusal_of_the_gateways_key_is_an_error_of_the_gateway() {
    let refuses = Arc::new(AtomicBool::new(true));
    let script = {
        let refuses = refuses.clone();
        move |request: &RawRequest| match request.line.as_str() {
            "GET /v1/models" => vec![Act::Send(json(r#"{"data":[{"id":"tiny"}]}"#))],
            line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
            _ if refuses.load(Ordering::Relaxed) => {
                let status = if request.body.contains("407") { "407 Refused" } else { "401 Unauthorized" };
                vec![Act::Send(raw_engine::status(status, r#"{"error":"Unauthorized"}"#))]
            }
            _ => vec![Act::Send(json(r#"{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}"#))],
        }
    };
    let engine = RawEngine::start(script).await;
    let start = async |key: &str, forwards: bool| {
        let flag = format!("id=1,role=aggregated,engine=openai,url=http://{}{key}", engine.address);
        let worker = WorkerSpec::parse_flag(&flag).unwrap();
        let builder = TestClusterBuilder::new().config(|config| {
            config.workers.push(worker);
            config.upstream.forward_authorization = forwards;
        });
        builder.start().await
    };
    let post = async |cluster: &TestCluster, prompt: &str| {
        let body = json!({"model": "tiny", "prompt": prompt}).to_string();
        let reply =
            cluster.client.post(COMPLETIONS, &[("authorization", "Bearer mine")], body).await.unwrap();
        assert_eq!(reply.headers.get("www-authenticate"), None, "the engine sent none");
        // I1.12
        assert_eq!(reply.headers.contains_key("x-should-retry"), reply.status == 502);
        (reply.status.as_u16(), String::from_utf8_lossy(&reply.body).into_owned())
    };
    let reasons = async |cluster: &TestCluster| {
        cluster.admin.get("/status").await.unwrap().json().unwrap()["reasons"].to_string()
    };
    for (key, forwards) in [("", false), (",api_key=old", false), (",api_key=old", true)] {
        let cluster = start(key, forwards).await;
        for prompt in ["401", "407"] {
            let (status, text) = post(&cluster, prompt).await;
            // I2.15
            assert!(
                status == 502 && text.contains("the engine refused the gateway's key"),
                "{status} {text}"
            );
        }
        let told = "the engine of worker 1 refuses the gateway's key: check `api_key`";
        assert!(reasons(&cluster).await.contains(told), "{}", reasons(&cluster).await);
        refuses.store(false, Ordering::Relaxed);
        assert_eq!(post(&cluster, "401").await.0, 200);
        assert!(!reasons(&cluster).await.contains("refuses the gateway's key"));
        refuses.store(true, Ordering::Relaxed);
        cluster.at_rest().await.unwrap();
    }
    // I2.15: the client's own key
    let cluster = start("", true).await;
    assert_eq!(post(&cluster, "401").await, (401, r#"{"error":"Unauthorized"}"#.to_owned()));
    assert!(!reasons(&cluster).await.contains("refuses the gateway's key"));
}

#[tokio::test]
async fn i2_a_501_of_an_engine_passes_as_a_4xx_does() {
    let answer = r#"{"error":{"message":"The model does not support Embeddings API","code":501}}"#;
    let script = move |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(r#"{"data":[{"id":"tiny"}]}"#))],
        line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
        _ if request.body.contains("in the body") => vec![Act::Send(json(answer))],
        _ => vec![Act::Send(raw_engine::status("501 Not Implemented", answer))],
    };
    let engines = [RawEngine::start(script).await, RawEngine::start(script).await];
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.workers.extend(engines.iter().map(|engine| engine.worker("role=aggregated,engine=vllm")));
        })
        .start()
        .await;
    let is_post = |request: &RawRequest| request.line.starts_with("POST");
    let posts = || engines.iter().flat_map(RawEngine::requests).filter(is_post).count();
    for round in 0..12 {
        let place = if round % 3 == 2 { "in the body" } else { "in the head" };
        let body = json!({"model": "tiny", "input": format!("{place} {}", round / 4)}).to_string();
        let before = posts();
        let reply = cluster.client.post("/v1/embeddings", &[], body).await.unwrap();
        // I2.4
        assert_eq!((reply.status.as_u16(), &*reply.body), (501, answer.as_bytes()), "{round}");
        assert_eq!(posts() - before, 1, "it is not retried");
    }
    let workers = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    for worker in workers["workers"].as_array().unwrap() {
        assert_eq!(worker["ineligible"], Value::Null, "it is no failure of the worker: {worker}");
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i2_a_refusal_is_not_hidden_by_a_worker_that_does_not_answer() {
    const UNLOADED: &str = r#"{"error":{"message":"The model `tiny` does not exist.","code":404}}"#;
    let engine = async |end: Act| {
        let script = move |request: &RawRequest| match request.line.as_str() {
            "GET /v1/models" => vec![Act::Send(json(r#"{"data":[{"id":"tiny"}]}"#))],
            line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
            _ => vec![end.clone()],
        };
        RawEngine::start(script).await
    };
    for order in [[0, 1], [1, 0]] {
        let refusing = engine(Act::Send(raw_engine::status("404 Not Found", UNLOADED))).await;
        let engines = [refusing, engine(Act::Reset).await];
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                let by_turn =
                    "[aggregated]\nbuiltin = 'formula'\nsettings = { cost = \"label_number('turn')\" }";
                config.policies.slots = toml::from_str(by_turn).unwrap();
                config.workers.extend(engines.iter().zip(order).map(|(engine, turn)| {
                    let url = format!("url=http://{},label.turn={turn}", engine.address);
                    WorkerSpec::parse_flag(&format!("role=aggregated,engine=openai,{url}")).unwrap()
                }));
            })
            .start()
            .await;
        let reply = ask(&cluster, "tiny").await;
        // I2.4: whichever was asked first
        assert_eq!(
            (reply.status.as_u16(), String::from_utf8_lossy(&reply.body)),
            (404, UNLOADED.into()),
            "{order:?}"
        );
        assert!(engines.iter().all(|engine| !engine.requests().is_empty()), "both were asked");
        cluster.at_rest().await.unwrap();
    }
}

async fn ask(cluster: &TestCluster, model: &str) -> Reply {
    let body = json!({"model": model, "prompt": "hello", "max_tokens": 2}).to_string();
    cluster.client.post(COMPLETIONS, &[], body).await.unwrap()
}

async fn join(cluster: &TestCluster, worker: Value) {
    let reply = cluster.admin.post("/workers", &[], worker.to_string()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
}

async fn worker(cluster: &TestCluster, id: u64) -> Value {
    let list = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    let mut workers = list["workers"].as_array().unwrap().iter();
    workers.find(|worker| worker["id"] == id).unwrap().clone()
}

#[tokio::test]
async fn i_while_a_worker_loads_an_unknown_model_is_503_and_afterwards_404() {
    let loaded = Arc::new(AtomicBool::new(false));
    let is_loaded = loaded.clone();
    let engine = RawEngine::start(move |request: &RawRequest| {
        let answer = if is_loaded.load(Ordering::SeqCst) {
            json(r#"{"data":[{"id":"big","object":"model"}],"choices":[{"index":0,"text":"a"}]}"#)
        } else {
            raw_engine::status("503 Service Unavailable", "loading")
        };
        vec![Act::Send(if request.line == "GET /health" { json("{}") } else { answer })]
    })
    .await;
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    assert_eq!(ask(&cluster, "big").await.code(), "model_not_found", "no worker loads");
    let url = format!("http://{}", engine.address);
    join(&cluster, json!({"id": 9, "role": "aggregated", "engine": "openai", "url": url})).await;
    for path in ["/v1/completions", "/v1/route"] {
        let body = json!({"model": "big", "prompt": "hello"}).to_string();
        let reply = cluster.client.post(path, &[], body).await.unwrap();
        // I1.6
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (503, "no_worker"), "{path}: {reply:?}");
        assert_eq!(retry_after(&reply), Some("1"), "{path}");
    }
    let told = worker(&cluster, 9).await;
    assert_eq!(told["ineligible"], "not_ready");
    assert!(told["reason"].as_str().unwrap().contains("status 503"), "{told}");
    assert_eq!(ask(&cluster, "tiny").await.status, 200, "the other model is served");
    loaded.store(true, Ordering::SeqCst);
    for _ in 0..200 {
        if ask(&cluster, "big").await.status == 200 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(ask(&cluster, "big").await.status, 200, "{}", worker(&cluster, 9).await);
    assert_eq!(worker(&cluster, 9).await["reason"], Value::Null);
    let reply = ask(&cluster, "bigger").await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (404, "model_not_found"), "all have loaded");
}

/// An engine that lists `models`, counts how often it does, and answers every completion.
async fn lists(models: &Arc<Mutex<Vec<&'static str>>>, readings: &Arc<AtomicUsize>) -> RawEngine {
    let (models, readings) = (models.clone(), readings.clone());
    let script = move |request: &RawRequest| {
        readings.fetch_add(usize::from(request.line == "GET /v1/models"), Ordering::SeqCst);
        let models: Vec<_> = models.lock().iter().map(|id| json!({"id": id, "object": "model"})).collect();
        let answer = json!({"data": models, "choices": [{"index": 0, "text": "a"}]}).to_string();
        vec![Act::Send(json(&answer))]
    };
    RawEngine::start(script).await
}

#[tokio::test]
async fn i_a_model_that_an_engine_loads_is_served_at_once() {
    let (models, readings) = (Arc::new(Mutex::new(vec!["base"])), Arc::default());
    let engine = lists(&models, &readings).await;
    let builder = TestClusterBuilder::new().config(|config| {
        config.workers.push(engine.worker("id=1,role=aggregated,engine=openai"));
        config.probe.interval = Duration::from_secs(60);
    });
    let cluster = builder.start().await;
    models.lock().push("adapter");
    let (one, other) = tokio::join!(ask(&cluster, "adapter"), ask(&cluster, "adapter"));
    // B5.16
    assert_eq!((one.status.as_u16(), other.status.as_u16()), (200, 200), "{one:?}");
    let before = readings.load(Ordering::SeqCst);
    for _ in 0..20 {
        let reply = ask(&cluster, "unknown").await;
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (404, "model_not_found"), "{reply:?}");
    }
    // B5.16: not with each of them
    let again = readings.load(Ordering::SeqCst) - before;
    assert!(before >= 2 && again <= 1, "{before} {again}");
}

#[tokio::test]
async fn i_a_model_whose_workers_left_is_503_and_one_that_was_unloaded_is_404() {
    let models = Arc::new(Mutex::new(vec!["base", "adapter"]));
    let engine = lists(&models, &Arc::default()).await;
    let builder = TestClusterBuilder::new()
        .sim(Dialect::Vllm, Role::Aggregated)
        .config(|config| drop(config.models.insert("scaled-to-zero".to_owned(), Default::default())));
    let cluster = builder.start().await;
    let url = format!("http://{}", engine.address);
    join(&cluster, json!({"id": 9, "role": "aggregated", "engine": "openai", "url": url})).await;
    cluster.until("it joins", |cluster| serves(cluster, "adapter")).await.unwrap();
    models.lock().pop();
    // A model that no worker serves makes the gateway read what they have.
    assert_eq!(ask(&cluster, "unknown").await.status, 404);
    cluster.until("it is unloaded", |cluster| !serves(cluster, "adapter")).await.unwrap();
    let seen = async |model: &str| {
        let reply = ask(&cluster, model).await;
        let retry = retry_after(&reply).map(str::to_owned);
        (reply.status.as_u16(), reply.code(), retry)
    };
    let away = (503, "no_worker".to_owned(), Some("1".to_owned()));
    // I1.7: it is known by the configuration
    assert_eq!(seen("scaled-to-zero").await, away);
    assert_eq!(cluster.admin.delete("/workers/9").await.unwrap().status, 200);
    cluster.until("it left", |cluster| !serves(cluster, "base")).await.unwrap();
    // I1.7: it was served
    assert_eq!(seen("base").await, away);
    assert_eq!(seen("adapter").await, (404, "model_not_found".to_owned(), None));
}

fn serves(cluster: &TestCluster, model: &str) -> bool {
    cluster.gateway.state().registry.snapshot().serves(&ModelName::new(model))
}

#[tokio::test]
async fn b5_an_engine_that_is_another_than_configured_is_an_error_that_an_operator_sees() {
    own_process!();
    let log = Log::start();
    let config = SimConfig { model: "big".to_owned(), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let sim = Sim::start(config).await.unwrap();
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    join(&cluster, json!({"id": 9, "role": "aggregated", "engine": "sglang", "url": sim.url()})).await;
    let seen = || log.text();
    cluster.until("it is logged", |_| seen().contains("/v1/models reports")).await.unwrap();
    let told = worker(&cluster, 9).await;
    // B5.2
    assert_eq!(told["ineligible"], "misconfigured", "{told}");
    // B5.3
    let reason = told["reason"].as_str().unwrap();
    assert!(reason.contains("`sglang`") && reason.contains("`vllm`"), "{reason}");
    let metrics = cluster.metrics_text().await.unwrap();
    for (id, value) in [(9, 1), (1, 0)] {
        let line = format!(r#"pointsman_worker_misconfigured{{worker="{id}",role="aggregated"}} {value}"#);
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
    let reply = ask(&cluster, "big").await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (404, "model_not_found"), "it does not load");
    let lines = seen().lines().filter(|line| line.contains("/v1/models reports")).count();
    assert!(seen().lines().any(|line| line.contains("ERROR") && line.contains("`vllm`")), "{}", seen());
    tokio::time::sleep(std::time::Duration::from_millis(1_200)).await;
    let again = seen().lines().filter(|line| line.contains("/v1/models reports")).count();
    assert_eq!((lines, again), (1, 1), "it is logged once");
}
