//! Prompts with images under KV events.

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{Client, TestCluster, TestClusterBuilder};
use serde_json::{Value, json};

const BLOCK: usize = 16;

async fn cluster(block_size: u32) -> TestCluster {
    let config =
        SimConfig { block_size, kv_events: true, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new().sim_with(config, "").start().await;
    cluster.kv_events_live().await.unwrap();
    cluster
}

/// A chat with an image between two texts, and what a frontend that ran the image processor knows of it.
async fn chat(cluster: &TestCluster, image: &str) -> Value {
    let text = |text: &str| json!({"type": "text", "text": text.repeat(12)});
    let content = json!([
        text("what stands on the plate? "),
        {"type": "image_url", "image_url": {"url": image}},
        text("and what is behind it? "),
    ]);
    let mut body =
        json!({"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1});
    let engine = Client::new(cluster.sims[0].addr());
    let tokens = engine.post("/tokenize", &[], body.to_string()).await.unwrap().json().unwrap();
    let ids: Vec<u64> =
        tokens["tokens"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap()).collect();
    let hash = pointsman_workers::name_hash(image.as_bytes(), 0);
    let infos: Vec<Value> = ids
        .chunks(BLOCK)
        .map(|block| {
            let has = block.contains(&127_999);
            if has { json!({"mm_objects": [{"mm_hash": hash, "offsets": []}]}) } else { Value::Null }
        })
        .collect();
    body["nvext"] = json!({"mm_routing_info": {"routing_token_ids": ids, "block_mm_infos": infos}});
    body
}

/// Returns cached tokens as predicted and as reported, in whole blocks.
async fn ask(cluster: &TestCluster, body: &Value) -> (u64, u64) {
    let reply = cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    cluster.at_rest().await.unwrap();
    cluster.kv_events_applied().await.unwrap();
    let list = cluster.admin.get("/decisions?limit=1").await.unwrap().json().unwrap();
    let cached = &list["decisions"][0]["outcome"]["cached_tokens"];
    (cached["predicted"].as_u64().unwrap(), cached["reported"].as_u64().unwrap() / 16 * 16)
}

#[tokio::test]
async fn h6_a_prompt_with_an_image_predicts_what_the_engine_has_of_it() {
    for block_size in [16, 8] {
        let cluster = cluster(block_size).await;
        let (cat, dog) = (chat(&cluster, "http://i/cat.png").await, chat(&cluster, "http://i/dog.png").await);
        assert_eq!(ask(&cluster, &cat).await, (0, 0));
        let (predicted, reported) = ask(&cluster, &cat).await;
        let tokens = cat["nvext"]["mm_routing_info"]["routing_token_ids"].as_array().unwrap().len() as u64;
        // H6.12
        assert_eq!((predicted, reported), ((tokens - 1) / 16 * 16, (tokens - 1) / 16 * 16), "{block_size}");
        let before = cat["nvext"]["mm_routing_info"]["routing_token_ids"].as_array().unwrap();
        let before = before.iter().position(|token| *token == 127_999).unwrap() as u64 / 16 * 16;
        assert_eq!(ask(&cluster, &dog).await, (before, before), "another image, the same text");
    }
}
