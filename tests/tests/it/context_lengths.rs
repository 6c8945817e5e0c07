//! Workers of one model whose engines take prompts of different lengths (F6.12, I17.6).

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder, client::Reply};
use serde_json::{Value, json};

/// A gateway in front of an engine with a short context, which is preferred, and one with a longer one.
async fn cluster(lengths: [u32; 2]) -> TestCluster {
    let sim = |max_model_len| SimConfig {
        max_model_len,
        record: 100,
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    let cost = "[aggregated]\nbuiltin = 'formula'\nsettings = { cost = \"label_number('turn')\" }";
    TestClusterBuilder::new()
        .sim_with(sim(lengths[0]), ",label.turn=1")
        .sim_with(sim(lengths[1]), ",label.turn=2")
        .config(|config| config.policies.slots = toml::from_str(cost).unwrap())
        .start()
        .await
}

async fn ask(cluster: &TestCluster, prompt: Value, max_tokens: u32) -> Reply {
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": max_tokens}).to_string();
    cluster.client.post(COMPLETIONS, &[], body).await.unwrap()
}

fn posts(cluster: &TestCluster) -> [usize; 2] {
    [0, 1].map(|sim| cluster.sims[sim].recorded().iter().filter(|seen| seen.path == COMPLETIONS).count())
}

#[tokio::test]
async fn f6_a_prompt_of_known_length_goes_to_a_worker_that_takes_it() {
    let cluster = cluster([400, 3_000]).await;
    let ids = |length: u32, first: u32| -> Value { (first..first + length).collect() };
    for round in 0..3 {
        // F6.12
        assert_eq!(ask(&cluster, ids(800, 7 * round), 5).await.status, 200);
        assert_eq!(ask(&cluster, ids(40, 9 * round), 500).await.status, 200, "with a long answer");
    }
    assert_eq!(posts(&cluster), [0, 6]);
    // F6.12: the length of the prompt is not known
    assert_eq!(ask(&cluster, json!("some words"), 500).await.status, 200);
    assert_eq!(ask(&cluster, json!(["some", "words"]), 500).await.status, 200);
    assert_eq!(posts(&cluster), [0, 8]);
    assert_eq!(ask(&cluster, ids(390, 1), 5).await.status, 200);
    assert_eq!(posts(&cluster), [1, 8], "both take it");
    let reply = ask(&cluster, ids(3_500, 1), 5).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    // F6.12: if none takes it, the engine says so
    assert_eq!(reply.status, 400, "{text}");
    assert!(text.contains("maximum context length is 3000 tokens"), "{text}");
    let body = json!({"model": "tiny", "prompt": ids(800, 2), "max_tokens": 5}).to_string();
    let reply = cluster.client.post(COMPLETIONS, &[("x-worker-instance-id", "1")], body).await.unwrap();
    assert_eq!(reply.status, 400, "a pin is obeyed: {reply:?}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i17_a_refusal_for_the_context_is_tried_once_on_a_worker_with_a_longer_one() {
    let cluster = cluster([400, 3_000]).await;
    let text = |words: usize, round: usize| json!(format!("{round} {}", "word ".repeat(words)));
    for round in 0..8 {
        // I17.6
        let reply = ask(&cluster, text(600, round), 5).await;
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    assert_eq!(posts(&cluster), [8, 8]);
    let told = cluster.admin.get("/workers/1").await.unwrap().json().unwrap()["worker"].clone();
    assert_eq!((&told["ineligible"], &told["reason"]), (&Value::Null, &Value::Null), "it works");
    let reply = ask(&cluster, text(5_000, 0), 5).await;
    assert_eq!(reply.status, 400, "too long for both");
    assert_eq!(posts(&cluster), [9, 9]);
    cluster.at_rest().await.unwrap();
}
