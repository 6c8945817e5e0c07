//! Engines with different block sizes side by side: SGLang with pages of one token beside vLLM with blocks of
//! 16.

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{TestCluster, TestClusterBuilder};
use serde_json::{Value, json};

/// Tokens in a block of the gateway's.
const BLOCK: u64 = 16;

fn engine(dialect: Dialect, role: Role, block_size: u32) -> SimConfig {
    // The cache holds 1,024 tokens: the engines evict.
    let blocks = 1_024 / block_size;
    SimConfig { block_size, blocks, kv_events: true, ..SimConfig::instant(dialect, role) }
}

/// Sends a prompt and returns the answer's cached tokens, as predicted and as the engine reported them.
async fn ask(cluster: &TestCluster, prompt: &[u32], pin: Option<u64>) -> (u64, u64) {
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 1}).to_string();
    let pin = pin.map(|id| id.to_string());
    let headers: Vec<(&str, &str)> = pin.iter().map(|id| ("x-worker-instance-id", id.as_str())).collect();
    let reply = cluster.client.post("/v1/completions", &headers, body).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    outcome(cluster).await
}

/// Returns the cached tokens of the last request, as predicted and as the engine reported them, in whole
/// blocks of the gateway.
async fn outcome(cluster: &TestCluster) -> (u64, u64) {
    cluster.at_rest().await.unwrap();
    cluster.kv_events_applied().await.unwrap();
    let list = cluster.admin.get("/decisions?limit=1").await.unwrap().json().unwrap();
    let cached = &list["decisions"][0]["outcome"]["cached_tokens"];
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{list}"));
    (number(&cached["predicted"]), number(&cached["reported"]) / BLOCK * BLOCK)
}

/// A prompt of a conversation: its first half is common to all.
fn prompt(talk: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|place| if place < 70 { place } else { 1_000 * (talk + 1) + place }).collect()
}

#[tokio::test]
async fn h2_pages_of_one_token_and_blocks_of_sixteen_predict_what_each_engine_reports() {
    let cluster = TestClusterBuilder::new()
        .sim_with(engine(Dialect::Vllm, Role::Aggregated, 16), "")
        .sim_with(engine(Dialect::Sglang, Role::Aggregated, 1), "")
        .sim_with(engine(Dialect::Vllm, Role::Aggregated, 32), "")
        .sim_with(engine(Dialect::Sglang, Role::Aggregated, 8), "")
        .start()
        .await;
    cluster.kv_events_live().await.unwrap();
    let mut hits = 0;
    for turn in [41, 100, 133, 208, 333] {
        for talk in 0..4 {
            for worker in 1..=4 {
                let (predicted, reported) = ask(&cluster, &prompt(talk, turn), Some(worker)).await;
                // H2.3, H2.4
                assert_eq!(
                    predicted,
                    reported / BLOCK * BLOCK,
                    "worker {worker}, talk {talk}, {turn} tokens"
                );
                hits += u64::from(reported > 0);
            }
        }
    }
    assert!(hits > 40, "{hits} of 80 requests found cached blocks");
    assert_eq!(cluster.metric("pointsman_predictions_total{result=\"equal\"}").await.unwrap(), [80.0]);
    assert_eq!(cluster.metric("pointsman_index_orphans_total").await.unwrap(), [0.0]);
    let evicted: u64 = cluster.sims.iter().map(|sim| u64::from(sim.state().evicted_blocks > 0)).sum();
    assert_eq!(evicted, 4, "every engine evicted");
}

#[tokio::test]
async fn h2_a_prompt_goes_to_the_engine_that_has_it_whatever_its_block_size() {
    let cluster = TestClusterBuilder::new()
        .sim_with(engine(Dialect::Vllm, Role::Aggregated, 16), "")
        .sim_with(engine(Dialect::Sglang, Role::Aggregated, 1), "")
        .start()
        .await;
    cluster.kv_events_live().await.unwrap();
    for (talk, worker) in [(0, 2), (1, 1), (2, 2), (3, 1)] {
        ask(&cluster, &prompt(talk, 200), Some(worker)).await;
    }
    for (talk, worker) in [(0, 2), (1, 1), (2, 2), (3, 1)] {
        let before = cluster.sims[worker - 1].state().prefix_hits;
        let (predicted, reported) = ask(&cluster, &prompt(talk, 230), None).await;
        assert_eq!((predicted, reported), (192, 192), "talk {talk}");
        assert!(cluster.sims[worker - 1].state().prefix_hits > before, "talk {talk} went elsewhere");
    }
}

#[tokio::test]
async fn h2_prefill_and_decode_pairs_of_both_block_sizes_serve_side_by_side() {
    let cluster = TestClusterBuilder::new()
        .sim_with(engine(Dialect::Vllm, Role::Prefill, 16), "")
        .sim_with(engine(Dialect::Vllm, Role::Decode, 16), "")
        .sim_with(engine(Dialect::Sglang, Role::Prefill, 1), "")
        .sim_with(engine(Dialect::Sglang, Role::Decode, 1), "")
        .start()
        .await;
    cluster.kv_events_live().await.unwrap();
    for (worker, cached) in [(1, 0), (3, 0), (1, 144), (3, 144)] {
        let before = cluster.sims[worker - 1].state().prefix_hits;
        let body = json!({"model": "tiny", "prompt": prompt(7, 150), "max_tokens": 3}).to_string();
        let headers = [("x-prefill-instance-id", if worker == 1 { "1" } else { "3" })];
        let reply = cluster.client.post("/v1/completions", &headers, body).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
        let found = cluster.sims[worker - 1].state().prefix_hits - before;
        let predicted = outcome(&cluster).await.0;
        assert_eq!((predicted, found / BLOCK * BLOCK), (cached, cached), "prefill worker {worker}");
    }
    // The client sees the answer of SGLang's decode worker, which does not report the prefill worker's cache.
    assert_eq!(cluster.metric("pointsman_predictions_total").await.unwrap(), [2.0], "vLLM's, all equal");
    assert_eq!(cluster.metric("pointsman_predictions_total{result=\"equal\"}").await.unwrap(), [2.0]);
}
