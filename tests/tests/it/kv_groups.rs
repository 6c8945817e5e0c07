//! KV events of engines with several cache groups and of adapters, published over real sockets, and what the
//! gateway says of a prompt then.

use std::time::Duration;

use bytes::Bytes;
use pointsman_gateway::config::{Config, Model, TokenSource};
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder, raw_engine};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};
use zeromq::{Endpoint, PubSocket, Socket as _, SocketSend as _, ZmqMessage};

/// An engine's publisher.
pub(crate) struct Publisher {
    socket: PubSocket,
    pub(crate) port: u16,
    seq: u64,
}

impl Publisher {
    pub(crate) async fn bind() -> Self {
        let mut socket = PubSocket::new();
        let Endpoint::Tcp(_, port) = socket.bind("tcp://127.0.0.1:0").await.unwrap() else { panic!("tcp") };
        Self { socket, port, seq: 0 }
    }

    /// Publishes a batch as the next message.
    pub(crate) async fn send(&mut self, events: &[Value]) {
        self.send_payload(rmp_serde::to_vec(&json!([1.0, events, 0])).unwrap()).await;
    }

    /// Publishes these bytes as the batch of the next message.
    pub(crate) async fn send_payload(&mut self, payload: Vec<u8>) {
        let frames: [Bytes; 3] = ["kv".into(), self.seq.to_be_bytes().to_vec().into(), payload.into()];
        self.seq += 1;
        self.socket.send(ZmqMessage::try_from(frames.to_vec()).unwrap()).await.unwrap();
    }
}

fn stored(group: u32, kind: &str, parent: Option<u64>, hashes: &[u64], tokens: &[u32], size: usize) -> Value {
    json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": size, "lora_id": null, "lora_name": null, "medium": "GPU", "group_idx": group,
        "kv_cache_spec_kind": kind,
        "kv_cache_spec_sliding_window": (kind == "sliding_window").then_some(128)})
}

fn removed(group: u32, hashes: &[u64]) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": group})
}

/// Returns how many blocks of a prompt the gateway expects at the worker.
pub(crate) async fn predicted(cluster: &TestCluster, prompt: &[u32]) -> u64 {
    predicted_of("tiny", cluster, prompt).await
}

/// Like [`predicted`], for a model.
async fn predicted_of(model: &str, cluster: &TestCluster, prompt: &[u32]) -> u64 {
    let body = json!({"model": model, "prompt": prompt}).to_string();
    let reply = cluster.client.post("/v1/route", &[], body).await.unwrap().json().unwrap();
    reply["legs"][0]["candidates"][0]["cached_blocks"]["device"].as_u64().unwrap_or_else(|| panic!("{reply}"))
}

/// An engine with two data-parallel ranks behind one port, which its metrics list as the ranks 8 and 9.
async fn two_ranks() -> RawEngine {
    let metrics = ["8", "9"].map(|rank| {
        format!("vllm:cache_config_info{{block_size=\"16\",engine=\"{rank}\",num_gpu_blocks=\"100\"}} 1\n")
    });
    let metrics = metrics.concat();
    let answer = move |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => r#"{"data":[{"id":"tiny","owned_by":"vllm"}]}"#.to_owned(),
        "GET /metrics" => metrics.clone(),
        _ => "{}".to_owned(),
    };
    RawEngine::start(move |request| vec![Act::Send(raw_engine::json(&answer(request)))]).await
}

#[tokio::test]
async fn b5_the_ranks_of_vllm_are_counted_and_the_events_of_each_are_followed() {
    let engine = two_ranks().await;
    let (first, mut second) = loop {
        let first = Publisher::bind().await;
        let mut socket = PubSocket::new();
        let port = first.port.saturating_add(1);
        if socket.bind(&format!("tcp://127.0.0.1:{port}")).await.is_ok() {
            break (first, Publisher { socket, port, seq: 0 });
        }
    };
    let flag = |more: &str| format!("id=1,role=aggregated,engine=vllm,url=http://{}{more}", engine.address);
    let start = async |flag: String| {
        let change = |config: &mut Config| config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
        TestClusterBuilder::new().config(change).start().await
    };
    let cluster = start(flag(&format!(",kv_events=tcp://127.0.0.1:{}", first.port))).await;
    let prompt: Vec<u32> = (0..32).collect();
    let body = json!({"model": "tiny", "prompt": prompt}).to_string();
    let mut of_ranks = Vec::new();
    for _ in 0..1_000 {
        second.seq = 0;
        second.send(&[json!(["BlockStored", [1, 2], null, prompt, 16, null, "GPU"])]).await;
        let told = cluster.client.post("/v1/route", &[], body.clone()).await.unwrap().json().unwrap();
        let candidates = told["legs"][0]["candidates"].as_array().unwrap().clone();
        of_ranks = candidates.iter().map(|one| one["cached_blocks"]["device"].clone()).collect();
        if of_ranks.contains(&json!(2)) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // B5.17
    assert_eq!(of_ranks, [json!(0), json!(2)]);
    let one = start(flag(",dp_size=1")).await;
    let worker = async |cluster: &TestCluster| {
        cluster.admin.get("/workers").await.unwrap().json().unwrap()["workers"][0].clone()
    };
    // B5.18
    assert_eq!(worker(&one).await["ranks"].as_array().unwrap().len(), 1);
    let registry = &one.gateway.state().registry;
    registry.upsert(WorkerSpec::parse_flag(&flag(",dp_size=4")).unwrap());
    one.until("it is refused", |_| registry.snapshot().workers()[0].contradiction().is_some()).await.unwrap();
    // B5.5
    assert_eq!(worker(&one).await["contradiction"]["reported"], "2");
}

/// Starts a gateway and one worker whose events come from the publisher. Returns when the first event has
/// arrived.
async fn start(publisher: &mut Publisher) -> TestCluster {
    let more = format!(",kv_events=tcp://127.0.0.1:{}", publisher.port);
    let sim = SimConfig { block_size: 16, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new().sim_with(sim, &more).start().await;
    subscribed(publisher, &cluster).await;
    cluster
}

/// Waits until an event has arrived, and the clearing after it.
async fn subscribed(publisher: &mut Publisher, cluster: &TestCluster) {
    // A subscription takes effect some time after its connection. A repeated number is dropped.
    let known: Vec<u32> = (0..16).collect();
    for _ in 0..1_000 {
        publisher.seq = 0;
        publisher.send(&[json!(["BlockStored", [99], null, known, 16, null, "GPU"])]).await;
        if predicted(cluster, &known).await == 1 {
            publisher.send(&[json!({"type": "AllBlocksCleared"})]).await;
            // A clearing that came later would end what the test predicts.
            return until_predicted(cluster, &known, 0).await;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the feed hears nothing");
}

async fn until_predicted(cluster: &TestCluster, prompt: &[u32], expected: u64) {
    let mut last = None;
    for _ in 0..1_000 {
        last = Some(predicted(cluster, prompt).await);
        if last == Some(expected) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{last:?} blocks instead of {expected}");
}

#[tokio::test]
async fn h6_attention_is_followed_behind_three_groups_of_mamba() {
    let mut publisher = Publisher::bind().await;
    let cluster = start(&mut publisher).await;
    let prompt: Vec<u32> = (0..7_680).map(|place| place * 7 % 50_000 + 1).collect();
    let hashes: Vec<u64> = (1_001..=1_010).collect();
    for half in 0..2_usize {
        let (own, parent) = (&hashes[half * 5..half * 5 + 5], half.checked_sub(1).map(|_| 1_005));
        let tokens = &prompt[half * 3_840..half * 3_840 + 3_840];
        let state = |group| stored(group, "mamba", parent, &own[4..], tokens, 768);
        let attention = stored(3, "mla_attention", parent, own, tokens, 768);
        publisher.send(&[state(0), state(1), state(2), attention]).await;
    }
    // H6.13
    until_predicted(&cluster, &prompt, 480).await;
    publisher.send(&[removed(2, &[1_010])]).await;
    // H6.15
    until_predicted(&cluster, &prompt, 240).await;
    publisher.send(&[removed(3, &[1_001])]).await;
    until_predicted(&cluster, &prompt, 0).await;
}

#[tokio::test]
async fn h6_a_window_that_moved_on_keeps_the_prefix_and_evicted_attention_does_not() {
    let mut publisher = Publisher::bind().await;
    let cluster = start(&mut publisher).await;
    let prompt: Vec<u32> = (0..1_024).map(|place| place * 11 % 50_000 + 1).collect();
    let hashes: Vec<u64> = (5_001..=5_064).collect();
    let all = |group, kind| stored(group, kind, None, &hashes, &prompt, 16);
    publisher.send(&[all(0, "sliding_window"), all(1, "full_attention")]).await;
    until_predicted(&cluster, &prompt, 64).await;
    publisher.send(&[removed(0, &hashes[..40])]).await;
    // A shorter prompt needs blocks of the window that are gone: the batch was applied.
    // H6.15
    until_predicted(&cluster, &prompt[..640], 0).await;
    assert_eq!(predicted(&cluster, &prompt).await, 64);
    publisher.send(&[removed(1, &hashes)]).await;
    // H6.13
    until_predicted(&cluster, &prompt, 0).await;
}

#[tokio::test]
async fn h6_pairs_of_tokens_are_read() {
    let mut publisher = Publisher::bind().await;
    let cluster = start(&mut publisher).await;
    let prompt: Vec<u32> = (0..64).map(|place| place * 17 % 50_000 + 1).collect();
    let block = |parent: Option<u64>, hash: u64, tokens: Value| {
        json!({"type": "BlockStored", "block_hashes": [hash], "parent_block_hash": parent, "token_ids": tokens,
            "block_size": 16, "lora_id": null, "medium": "GPU"})
    };
    publisher.send(&[block(None, 1, json!(prompt[..16]))]).await;
    until_predicted(&cluster, &prompt, 1).await;
    let pairs = |from: usize| prompt[from..from + 17].windows(2).map(|pair| json!(pair)).collect();
    publisher.send(&[block(Some(1), 2, pairs(16)), block(Some(2), 3, pairs(32))]).await;
    // H6.17
    until_predicted(&cluster, &prompt, 3).await;
    publisher.send(&[removed(0, &[3])]).await;
    // H6.2
    until_predicted(&cluster, &prompt, 2).await;
}

#[tokio::test]
async fn h1_a_prompt_for_an_adapter_has_the_blocks_of_the_adapter() {
    const MODELS: &str = r#"{"object":"list","data":[
        {"id":"tiny","object":"model","owned_by":"vllm","root":"tiny","parent":null},
        {"id":"of-law","object":"model","owned_by":"vllm","root":"/loras/law","parent":"tiny"}]}"#;
    const METRICS: &str = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\"} 1\n";
    let mut publisher = Publisher::bind().await;
    let engine = RawEngine::start(|request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(raw_engine::json(MODELS))],
        "GET /metrics" => vec![Act::Send(raw_engine::json(METRICS))],
        "POST /tokenize" => {
            let tokens: Vec<u32> = (0..64).map(|place| place * 13 + 7).collect();
            vec![Act::Send(raw_engine::json(&json!({ "tokens": tokens }).to_string()))]
        }
        _ => vec![Act::Send(raw_engine::json("{}"))],
    })
    .await;
    let flag = format!(
        "id=1,role=aggregated,engine=vllm,url=http://{},kv_events=tcp://127.0.0.1:{}",
        engine.address, publisher.port
    );
    let change = |config: &mut Config| {
        let model = Model { tokenizer: Some(TokenSource::Engine), ..Model::default() };
        config.models.insert("tiny".to_owned(), model);
        config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
    };
    let cluster = TestClusterBuilder::new().config(change).start().await;
    subscribed(&mut publisher, &cluster).await;
    let prompt: Vec<u32> = (0..64).map(|place| place * 13 + 7).collect();
    let of = |lora: Option<&str>, first: u64, blocks: usize| {
        let hashes: Vec<u64> = (first..).take(blocks).collect();
        json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": null,
            "token_ids": prompt[..blocks * 16], "block_size": 16, "lora_id": lora.map(|_| 1), "lora_name": lora,
            "medium": "GPU", "extra_keys": vec![lora.map(|name| vec![name]); blocks]})
    };
    publisher.send(&[of(Some("of-law"), 1, 3)]).await;
    let until = async |model: &str, expected: u64| {
        for _ in 0..1_000 {
            if predicted_of(model, &cluster, &prompt).await == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{model}: {} blocks instead of {expected}", predicted_of(model, &cluster, &prompt).await);
    };
    // H1.7
    until("of-law", 3).await;
    assert_eq!(predicted(&cluster, &prompt).await, 0, "the model has none of them");
    publisher.send(&[of(None, 11, 4)]).await;
    until("tiny", 4).await;
    // H1.7
    assert_eq!(predicted_of("of-law", &cluster, &prompt).await, 3);
    let chat = async |model: &str| {
        let body = json!({"model": model, "messages": [{"role": "user", "content": "a text"}]}).to_string();
        let told = cluster.client.post("/v1/route", &[], body).await.unwrap().json().unwrap();
        told["legs"][0]["candidates"][0]["cached_blocks"]["device"].clone()
    };
    // H7.7
    assert_eq!((chat("of-law").await, chat("tiny").await), (json!(3), json!(4)));
    let asked = engine.requests();
    assert!(asked.iter().any(|request| request.body.contains(r#""model":"of-law""#)), "{asked:?}");
}

#[tokio::test]
async fn h7_a_chat_of_gpt_oss_with_an_effort_is_routed_by_bytes() {
    for (begins, counted) in [([200_006, 17_360, 200_008], true), ([1, 2, 3], false)] {
        let engine = RawEngine::start(move |request: &RawRequest| {
            let body = match request.line.as_str() {
                "GET /v1/models" => {
                    json!({"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]})
                }
                "POST /tokenize" => json!({ "tokens": begins }),
                _ => json!({}),
            };
            vec![Act::Send(raw_engine::json(&body.to_string()))]
        })
        .await;
        let change = |config: &mut Config| {
            let model = Model { tokenizer: Some(TokenSource::Engine), ..Model::default() };
            config.models.insert("tiny".to_owned(), model);
            config.workers.push(engine.worker("id=1,role=aggregated,engine=vllm"));
        };
        let cluster = TestClusterBuilder::new().config(change).start().await;
        let is_estimated = async |effort: Value| {
            let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "a"}], "reasoning_effort": effort});
            let told = cluster.client.post("/v1/route", &[], body.to_string()).await.unwrap().json().unwrap();
            told["prompt_tokens_estimated"].clone()
        };
        let efforts = [json!("low"), json!("medium"), json!(null), json!("high"), json!("low")];
        let mut told = Vec::new();
        for effort in efforts {
            told.push(is_estimated(effort).await);
        }
        // H7.10
        assert_eq!(told, [counted, false, false, counted, counted], "{begins:?}");
        let asked = engine.requests().iter().filter(|request| request.line == "POST /tokenize").count();
        assert!(!counted || asked == 3, "asked {asked} times, once of them in vain");
    }
}

#[tokio::test]
async fn h2_a_prefix_that_an_engine_cached_before_its_events_were_followed_is_predicted_from_decisions() {
    let mut publisher = Publisher { seq: 5, ..Publisher::bind().await };
    let more = format!(",kv_events=tcp://127.0.0.1:{}", publisher.port);
    let sim = SimConfig { block_size: 16, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new().sim_with(sim, &more).start().await;
    let prompt: Vec<u32> = (0..64).map(|place| place * 13 + 7).collect();
    for _ in 0..1_000 {
        publisher.send(&[stored(0, "full_attention", Some(8), &[9], &prompt[48..], 16)]).await;
        if cluster.metric("pointsman_index_orphans_total").await.unwrap() != [0.0] {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(predicted(&cluster, &prompt).await, 0);
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 1}).to_string();
    assert_eq!(cluster.client.post("/v1/completions", &[], body).await.unwrap().status, 200);
    // H2.5
    until_predicted(&cluster, &prompt, 4).await;
}

#[tokio::test]
async fn h5_prompts_without_tokens_are_predicted_from_decisions_beside_events() {
    let mut publisher = Publisher::bind().await;
    let cluster = start(&mut publisher).await;
    let chat = json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a text ".repeat(100)}]});
    let told = async |expected: fn(u64) -> bool| {
        let mut last = Value::Null;
        for _ in 0..500 {
            let told = cluster.client.post("/v1/route", &[], chat.to_string()).await.unwrap().json().unwrap();
            last = told["legs"][0]["candidates"][0]["cached_blocks"]["device"].clone();
            if last.as_u64().is_some_and(expected) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{last} blocks");
    };
    let send = async || {
        let reply = cluster.client.post("/v1/chat/completions", &[], chat.to_string()).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
    };
    told(|blocks| blocks == 0).await;
    send().await;
    // H5.1
    told(|blocks| blocks > 9).await;
    let tokens: Vec<u32> = (0..64).collect();
    let body = json!({"model": "tiny", "prompt": tokens, "max_tokens": 1}).to_string();
    assert_eq!(cluster.client.post("/v1/completions", &[], body).await.unwrap().status, 200);
    publisher.send(&[stored(0, "full_attention", None, &[1], &tokens[..16], 16)]).await;
    until_predicted(&cluster, &tokens, 1).await;
    told(|blocks| blocks > 9).await;
    publisher.send(&[json!({"type": "AllBlocksCleared"})]).await;
    // H5.9
    told(|blocks| blocks == 0).await;
    send().await;
    told(|blocks| blocks > 9).await;
    // A lower number than the last one: the engine restarted.
    publisher.seq = 0;
    publisher.send(&[stored(0, "full_attention", None, &[2], &tokens[..16], 16)]).await;
    // H5.9
    told(|blocks| blocks == 0).await;
    assert_eq!(cluster.metric("pointsman_index_orphans_total").await.unwrap(), [0.0]);
}
