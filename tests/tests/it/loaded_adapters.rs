//! Adapters that engines load and unload at run time, at one engine after the other: real sockets.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_tests::{
    Act, CHAT, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{json, status},
};
use pointsman_workers::{Leg, ModelName, WorkerSpec};
use serde_json::{Value, json};
use tokio::time::Instant;

/// More than the time between two readings of the engines' models.
const PAUSE: Duration = Duration::from_millis(2_100);

/// An engine with the model `m`, and with adapters that change.
struct Engine {
    raw: RawEngine,
    flag: String,
    adapters: Arc<Mutex<Vec<&'static str>>>,
    /// Number of answers to `GET /v1/models`.
    readings: Arc<AtomicUsize>,
}

impl Engine {
    async fn start(flag: &str, adapters: &[&'static str]) -> Self {
        let loaded = Arc::new(Mutex::new(adapters.to_vec()));
        let readings = Arc::new(AtomicUsize::new(0));
        let (listed, read, is_sglang) = (loaded.clone(), readings.clone(), flag.contains("sglang"));
        let script = move |request: &RawRequest| {
            vec![Act::Send(match request.line.as_str() {
                "GET /v1/models" => {
                    read.fetch_add(1, Ordering::SeqCst);
                    json(&list(&listed.lock()))
                }
                line if line.starts_with("GET") => json("{}"),
                _ => answer(request, &listed.lock(), is_sglang),
            })]
        };
        let raw = RawEngine::start(script).await;
        let flag = format!("{flag},url=http://{}", raw.address);
        Self { raw, flag, adapters: loaded, readings }
    }

    fn load(&self, adapter: &'static str) {
        self.adapters.lock().push(adapter);
    }

    fn unload(&self) {
        self.adapters.lock().clear();
    }

    fn readings(&self) -> usize {
        self.readings.load(Ordering::SeqCst)
    }

    fn requests(&self) -> usize {
        self.raw.requests().iter().filter(|request| !request.line.contains("abort")).count()
    }
}

fn list(adapters: &[&str]) -> String {
    let model = |(id, parent): (&str, Option<&str>)| json!({ "id": id, "object": "model", "parent": parent });
    let all = [("m", None)].into_iter().chain(adapters.iter().map(|adapter| (*adapter, Some("m"))));
    json!({ "data": all.map(model).collect::<Vec<_>>() }).to_string()
}

/// Answers as vLLM or SGLang does: each has its own way to say that it lacks an adapter.
fn answer(request: &RawRequest, adapters: &[&str], is_sglang: bool) -> Vec<u8> {
    let body: Value = serde_json::from_str(&request.body).unwrap_or_default();
    let named = if is_sglang { &body["lora_path"] } else { &body["model"] };
    match named.as_str().filter(|named| *named != "m" && !adapters.contains(named)) {
        Some(named) if is_sglang => {
            let text =
                format!("Got LoRA adapter that has never been loaded: {named}\nAll loaded adapters: .");
            let error = json!({"object": "error", "message": text, "type": "BadRequestError", "code": 400});
            return status("400 Bad Request", &error.to_string());
        }
        Some(named) => {
            let text = format!("The model `{named}` does not exist.");
            return status("404 Not Found", &json!({"error": {"message": text, "code": 404}}).to_string());
        }
        None => {}
    }
    let handoff = (body["kv_transfer_params"]["do_remote_decode"] == true).then(|| {
        json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "e",
            "remote_block_ids": [1], "remote_host": "127.0.0.1", "remote_port": 5600,
            "remote_request_id": "cmpl-1", "tp_size": 1,
        })
    });
    let message = json!({ "role": "assistant", "content": "x" });
    let end = if handoff.is_some() { "length" } else { "stop" };
    let choice = json!({ "index": 0, "message": message, "finish_reason": end });
    let usage = json!({ "prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2 });
    json(
        &json!({
            "id": "a", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice],
            "usage": usage, "kv_transfer_params": handoff, "text": "x",
        })
        .to_string(),
    )
}

/// Starts a gateway that checks its engines so rarely that no check finds what they load.
async fn start(engines: &[&Engine]) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        config.probe.interval = Duration::from_secs(60);
        config.workers.extend(engines.iter().map(|engine| WorkerSpec::parse_flag(&engine.flag).unwrap()));
    });
    let cluster = builder.start().await;
    for engine in engines {
        let read = |_: &TestCluster| engine.readings() > 0;
        cluster.until("the engine's models are read", read).await.unwrap();
    }
    cluster.until("all workers serve", |cluster| cluster.ineligible() == 0).await.unwrap();
    cluster
}

async fn post(cluster: &TestCluster, path: &str, model: &str) -> Reply {
    let body = json!({"model": model, "messages": [{"role": "user", "content": "hello"}]});
    cluster.client.post(path, &[], body.to_string()).await.unwrap()
}

async fn ask(cluster: &TestCluster, model: &str) -> u16 {
    post(cluster, CHAT, model).await.status.as_u16()
}

fn lists(cluster: &TestCluster, leg: Leg, model: &str) -> usize {
    cluster.gateway.state().registry.snapshot().pool(&ModelName::new(model), leg).len()
}

#[tokio::test]
async fn b5_an_adapter_that_the_other_leg_loads_later_is_found_by_a_request() {
    let prefill = Engine::start("role=prefill,engine=vllm", &[]).await;
    let decode = Engine::start("role=decode,engine=vllm,local_prefill=false", &[]).await;
    let cluster = start(&[&prefill, &decode]).await;
    prefill.load("ad");
    assert_eq!(ask(&cluster, "ad").await, 503, "decode lacks it");
    let before = decode.readings();
    for _ in 0..20 {
        assert_eq!(ask(&cluster, "ad").await, 503);
    }
    // B5.16: not with each of them
    assert!(decode.readings() <= before + 1, "{before} {}", decode.readings());
    tokio::time::sleep(PAUSE).await;
    decode.load("ad");
    // B5.16
    assert_eq!(ask(&cluster, "ad").await, 200);
    assert_eq!((prefill.requests(), decode.requests()), (1, 1));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b5_an_adapter_whose_only_worker_is_down_is_found_at_another() {
    let (one, other) = (
        Engine::start("role=aggregated,engine=vllm,id=1", &["ad"]).await,
        Engine::start("role=aggregated,engine=vllm,id=2", &[]).await,
    );
    let cluster = start(&[&one, &other]).await;
    other.load("ad");
    drop(one);
    let worker = cluster.gateway.state().registry.snapshot().workers()[0].clone();
    worker.note_connect_failed();
    // B5.16
    assert_eq!(ask(&cluster, "ad").await, 200);
    assert_eq!(other.requests(), 1);
}

#[tokio::test]
async fn i2_an_adapter_that_moved_to_another_worker_is_found_by_the_request_that_misses_it() {
    let prefill = Engine::start("role=prefill,engine=vllm", &["ad"]).await;
    let decode = [
        Engine::start("role=decode,engine=vllm", &["ad"]).await,
        Engine::start("role=decode,engine=vllm", &[]).await,
    ];
    let cluster = start(&[&prefill, &decode[0], &decode[1]]).await;
    decode[0].unload();
    decode[1].load("ad");
    // I2.16
    assert_eq!(ask(&cluster, "ad").await, 200);
    assert_eq!((prefill.requests(), decode[0].requests(), decode[1].requests()), (1, 1, 1));
    let other = Engine::start("role=aggregated,engine=vllm", &["ad"]).await;
    let cluster = start(&[&other]).await;
    other.unload();
    let before = other.readings();
    let reply = post(&cluster, CHAT, "ad").await;
    assert_eq!((reply.status.as_u16(), other.requests()), (404, 1), "no engine has it: {reply:?}");
    assert!(String::from_utf8_lossy(&reply.body).contains("The model `ad` does not exist."), "{reply:?}");
    cluster.until("it is known", |cluster| lists(cluster, Leg::Aggregated, "ad") == 0).await.unwrap();
    assert!(other.readings() <= before + 2, "{before} {}", other.readings());
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b5_the_prefill_leg_of_an_adapter_is_found_while_decode_workers_prefill_it() {
    let prefill = Engine::start("role=prefill,engine=vllm", &[]).await;
    let decode = Engine::start("role=decode,engine=vllm", &["ad"]).await;
    let cluster = start(&[&prefill, &decode]).await;
    let ask_for = async |time: Duration| {
        let begun = Instant::now();
        while begun.elapsed() < time && prefill.requests() == 0 {
            assert_eq!(ask(&cluster, "ad").await, 200);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let before = prefill.readings();
    ask_for(Duration::from_secs(3)).await;
    // B5.23: the readings begin after 0 s and 4 s.
    assert_eq!(prefill.readings() - before, 1);
    prefill.load("ad");
    ask_for(Duration::from_secs(10)).await;
    // B5.23
    assert_eq!(prefill.requests(), 1);
}

#[tokio::test]
async fn i2_sglang_s_400_for_an_adapter_that_it_lacks_is_tried_elsewhere() {
    let engines = [
        Engine::start("role=aggregated,engine=sglang", &["ad"]).await,
        Engine::start("role=aggregated,engine=sglang", &["ad"]).await,
    ];
    let cluster = start(&[&engines[0], &engines[1]]).await;
    assert_eq!(ask(&cluster, "ad").await, 200);
    engines[0].unload();
    for _ in 0..6 {
        // I2.4
        assert_eq!(ask(&cluster, "ad").await, 200);
        assert_eq!(ask(&cluster, "m").await, 200);
    }
    // B5.7
    cluster.until("it is read again", |cluster| lists(cluster, Leg::Aggregated, "ad") == 1).await.unwrap();
    engines[1].unload();
    let reply = post(&cluster, CHAT, "ad").await;
    let text = String::from_utf8_lossy(&reply.body);
    // I2.4: the last answer passes unchanged
    assert_eq!(reply.status, 400, "{text}");
    assert!(text.contains("Got LoRA adapter that has never been loaded: ad"), "{text}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i2_sglang_s_400_of_a_decode_leg_is_tried_elsewhere() {
    let facts = |role: &str| format!("role={role},engine=sglang,bootstrap_port=8998");
    let prefill = Engine::start(&facts("prefill"), &["ad"]).await;
    let decode =
        [Engine::start(&facts("decode"), &["ad"]).await, Engine::start(&facts("decode"), &["ad"]).await];
    let cluster = start(&[&prefill, &decode[0], &decode[1]]).await;
    decode[0].unload();
    for _ in 0..4 {
        // I2.4
        assert_eq!(ask(&cluster, "ad").await, 200);
        assert_eq!(ask(&cluster, "m").await, 200);
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b5_each_endpoint_finds_an_adapter_that_was_loaded_a_moment_ago() {
    const FORM: &str = "multipart/form-data; boundary=cut";
    const AUDIO: &str = "--cut\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nad\r\n\
        --cut\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\nabc\r\n--cut--\r\n";
    for path in ["/v1/audio/transcriptions", "/v1/route", "/v1/models/ad"] {
        let engine = Engine::start("role=aggregated,engine=vllm", &[]).await;
        let cluster = start(&[&engine]).await;
        engine.load("ad");
        let send = async |name: &str| match path {
            "/v1/route" => post(&cluster, path, name).await,
            "/v1/models/ad" => cluster.client.get(&format!("/v1/models/{name}")).await.unwrap(),
            _ => {
                let form = AUDIO.replace("\r\nad\r\n", &format!("\r\n{name}\r\n"));
                cluster.client.post_as(FORM, path, &[], form).await.unwrap()
            }
        };
        // B5.16
        assert_eq!(send("ad").await.status, 200, "{path}");
        let before = engine.readings();
        for _ in 0..20 {
            let reply = send("other").await;
            assert_eq!((reply.status.as_u16(), reply.code().as_str()), (404, "model_not_found"), "{path}");
        }
        // B5.16: not with each of them
        assert!(engine.readings() <= before + 1, "{path}: {before} {}", engine.readings());
    }
}

#[tokio::test]
async fn b5_an_adapter_that_was_loaded_after_the_last_reading_is_found_at_once() {
    let engine = Engine::start("role=aggregated,engine=vllm", &[]).await;
    let cluster = start(&[&engine]).await;
    assert_eq!(ask(&cluster, "ad").await, 404);
    engine.load("ad");
    // B5.16: a client that got the 404 itself
    assert_eq!(ask(&cluster, "ad").await, 200);
    engine.load("other");
    let before = engine.readings();
    let replies = tokio::join!(ask(&cluster, "other"), ask(&cluster, "gone"), ask(&cluster, "other"));
    // B5.16: requests share a reading, or two if one of them came late
    assert_eq!(replies, (200, 404, 200));
    assert!(engine.readings() <= before + 2, "{before} {}", engine.readings());
}

#[tokio::test]
async fn b3_an_adapter_with_the_name_of_another_workers_model_is_left_out() {
    let base = |adapters: &'static str| {
        move |request: &RawRequest| {
            vec![Act::Send(match request.line.as_str() {
                "GET /v1/models" => json(adapters),
                line if line.starts_with("GET") => json("{}"),
                _ => answer(request, &["base"], false),
            })]
        }
    };
    let one = RawEngine::start(base(r#"{"data":[{"id":"m","parent":null}]}"#)).await;
    let other = RawEngine::start(base(r#"{"data":[{"id":"base"},{"id":"m","parent":"base"}]}"#)).await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.workers.extend(
                [(7, &other), (8, &one)]
                    .map(|(id, engine)| engine.worker(&format!("id={id},role=aggregated,engine=vllm"))),
            );
        })
        .start()
        .await;
    cluster.until("both are read", |cluster| lists(cluster, Leg::Aggregated, "base") == 1).await.unwrap();
    cluster.until("one is left out", |cluster| lists(cluster, Leg::Aggregated, "m") == 1).await.unwrap();
    cluster.until("both serve", |cluster| cluster.ineligible() == 0).await.unwrap();
    for _ in 0..6 {
        assert_eq!(ask(&cluster, "m").await, 200);
    }
    // B3.15
    assert_eq!((one.requests().len(), other.requests().len()), (6, 0));
    let model = cluster.client.get("/v1/models/m").await.unwrap().json().unwrap();
    assert_eq!(model["parent"], Value::Null, "{model}");
    let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
    let told = "worker 8 lists `m` as a model and worker 7 as an adapter of `base`: requests for it go to the \
                workers that list it as a model; give the adapter another name, or drain or remove worker 8";
    assert_eq!(status["reasons"], json!([told]));
    // B3.15
    assert_eq!(cluster.admin.post("/workers/8/drain", &[], String::new()).await.unwrap().status, 200);
    assert_eq!((ask(&cluster, "m").await, other.requests().len()), (200, 1), "its model drains");
    assert_eq!(cluster.admin.delete("/workers/8/drain").await.unwrap().status, 200);
    assert_eq!((ask(&cluster, "m").await, one.requests().len()), (200, 7), "its model is back");
    assert_eq!(cluster.admin.delete("/workers/8").await.unwrap().status, 200);
    assert_eq!((ask(&cluster, "m").await, other.requests().len()), (200, 2), "its own worker serves it now");
    let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
    assert_eq!(status["reasons"], json!([]));
    cluster.at_rest().await.unwrap();
}
