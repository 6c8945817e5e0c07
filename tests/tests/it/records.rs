//! Predictions from the gateway's own decisions: of prompts that workers took, not of those they refused.

use std::collections::BTreeMap;

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{self, chunk, status, stream_head},
};
use serde_json::{Value, json};

const ANSWER: &str =
    r#"{"id":"1","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}"#;
const ERROR: &str = r#"{"error":{"message":"no","code":500}}"#;

fn take() -> Vec<Act> {
    vec![Act::Send(raw_engine::json(ANSWER))]
}

/// Takes prompts, except those that say how to refuse them.
fn answer(request: &RawRequest) -> Vec<Act> {
    let refusals = [
        ("refuse by 400", vec![Act::Send(status("400 Bad Request", ERROR))]),
        ("refuse by 500", vec![Act::Send(status("500 Internal Server Error", ERROR))]),
        ("refuse by 503", vec![Act::Send(status("503 Service Unavailable", ERROR))]),
        ("refuse by an answer", vec![Act::Send(raw_engine::json(ERROR))]),
        ("refuse by an event", vec![Act::Send([stream_head(), chunk(b"data: {\"error\":{}}\n\n")].concat())]),
        ("refuse by a reset", vec![Act::Reset]),
    ];
    let refused = refusals.into_iter().find(|(text, _)| request.body.contains(text));
    refused.map_or_else(take, |(_, acts)| acts)
}

/// Adds a worker to the configuration.
fn worker(config: &mut Config, engine: &RawEngine, more: &str) {
    config.workers.push(engine.worker(more));
}

async fn ask(cluster: &TestCluster, prompt: &str) -> u16 {
    let stream = prompt.contains("by an event");
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 1, "stream": stream}).to_string();
    cluster.client.post("/v1/completions", &[], body).await.unwrap().status.as_u16()
}

/// Returns how many blocks the index has, once it knows all decisions.
async fn blocks(cluster: &TestCluster) -> f64 {
    cluster.at_rest().await.unwrap();
    // The index is told by a queue.
    cluster.gateway.state().router.index().flush();
    cluster.metric("pointsman_index_blocks").await.unwrap()[0]
}

/// Returns how many blocks of a prompt the gateway expects at each worker that may serve it.
async fn expected(cluster: &TestCluster, prompt: &str) -> BTreeMap<u64, u64> {
    let body = json!({"model": "tiny", "prompt": prompt}).to_string();
    let told = cluster.client.post("/v1/route", &[], body).await.unwrap().json().unwrap();
    let legs = told["legs"].as_array().unwrap_or_else(|| panic!("{told}")).iter();
    let all = legs.flat_map(|leg| leg["candidates"].as_array().unwrap());
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{told}"));
    all.map(|one| (number(&one["worker"]), number(&one["cached_blocks"]["device"]))).collect()
}

/// A prompt of some twenty blocks, half of which all prompts have.
fn prompt(end: &str) -> String {
    let (common, own) = ("a common beginning. ".repeat(32), "and a part of its own. ".repeat(28));
    format!("{common}{own}{end}")
}

#[tokio::test]
async fn f5_a_prompt_that_its_worker_refused_is_not_expected_there() {
    for how in ["400", "500", "503", "an answer", "an event", "a reset"] {
        let engine = RawEngine::serving(answer).await;
        let change = |config: &mut Config| worker(config, &engine, "id=1,role=aggregated,engine=openai");
        let cluster = TestClusterBuilder::new().config(change).start().await;
        assert_eq!(ask(&cluster, &prompt("")[..640]).await, 200);
        let before = blocks(&cluster).await;
        assert!(before > 5.0, "{before}");
        assert!(ask(&cluster, &prompt(&format!("refuse by {how}"))).await >= 400, "{how}");
        // F5.4
        assert_eq!(blocks(&cluster).await, before, "{how}");
    }
    let engine = RawEngine::serving(answer).await;
    let change = |config: &mut Config| worker(config, &engine, "id=1,role=aggregated,engine=openai");
    let cluster = TestClusterBuilder::new().config(change).start().await;
    assert_eq!(ask(&cluster, &prompt("")).await, 200);
    assert!(blocks(&cluster).await > 15.0);
}

#[tokio::test]
async fn f5_a_prompt_that_another_worker_took_is_expected_at_that_one_only() {
    let engines = [RawEngine::serving(answer).await, RawEngine::serving(|_| take()).await];
    let change = |config: &mut Config| {
        let by_turn = "[aggregated]\nbuiltin = 'formula'\nsettings = { cost = \"label_number('turn')\" }";
        config.policies.slots = toml::from_str(by_turn).unwrap();
        for (engine, turn) in engines.iter().zip(1..) {
            worker(config, engine, &format!("id={turn},role=aggregated,engine=openai,label.turn={turn}"));
        }
    };
    let cluster = TestClusterBuilder::new().config(change).start().await;
    let prompt = prompt("refuse by 500");
    assert_eq!(ask(&cluster, &prompt).await, 200);
    assert_eq!(engines.each_ref().map(|engine| engine.requests().len()), [1, 1]);
    blocks(&cluster).await;
    let expected = expected(&cluster, &prompt).await;
    // F5.4
    assert!(expected[&1] == 0 && expected[&2] > 15, "{expected:?}");
}

#[tokio::test]
async fn f5_each_leg_of_a_pair_is_recorded_when_its_worker_took_it() {
    let pair = |sim: Role, raw: &str, engine: &RawEngine| {
        let more = format!("id=9,role={raw},engine=vllm,transport=nixl");
        let change = |config: &mut Config| worker(config, engine, &more);
        TestClusterBuilder::new().sim(Dialect::Vllm, sim).config(change).start()
    };
    let engine = RawEngine::serving(answer).await;
    let prompt = prompt("refuse by 400");
    let cluster = pair(Role::Decode, "prefill", &engine).await;
    assert_eq!(ask(&cluster, &prompt).await, 400);
    // F5.4
    assert_eq!(blocks(&cluster).await, 0.0);
    let cluster = pair(Role::Prefill, "decode", &engine).await;
    assert_eq!(ask(&cluster, &prompt).await, 400);
    blocks(&cluster).await;
    let expected = expected(&cluster, &prompt).await;
    // F5.4
    assert!(expected[&1] > 15 && expected[&9] == 0, "{expected:?}");
}
