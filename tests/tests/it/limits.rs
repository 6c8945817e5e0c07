//! Limits of what one request may ask for, on real sockets: every count has a limit, and 400 names the field,
//! the value and the limit.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::time::Duration;

use pointsman_sim::{Dialect, Role};
use pointsman_tests::{CHAT, COMPLETIONS, TestCluster, TestClusterBuilder, own_process};
use tokio::time::Instant;

/// Status and message of the answer to a body.
async fn ask(cluster: &TestCluster, path: &str, body: String) -> (u16, String) {
    let reply = cluster.client.post(path, &[], body).await.unwrap();
    let message =
        reply.json().unwrap_or_default()["error"]["message"].as_str().unwrap_or_default().to_owned();
    (reply.status.as_u16(), message)
}

/// Resident memory of this process with the gateway in it, bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4_096
}

#[tokio::test]
async fn i_a_number_of_choices_beyond_the_limit_is_400_on_an_sglang_pair_and_takes_no_memory() {
    own_process!();
    // A worker that is not split serves the choices that a pair of SGLang cannot.
    let cluster =
        TestClusterBuilder::new().pair(Dialect::Sglang).sim(Dialect::Sglang, Role::Aggregated).start().await;
    let before = resident();
    for field in ["n", "best_of", "\\u006e"] {
        for n in ["4294967295", "3000000", "129", "0", "-1", "1.5", "1e400", "\"200\"", "1e9"] {
            let body = format!(r#"{{"model":"tiny","prompt":"x","max_tokens":1,"{field}":{n}}}"#);
            let (status, message) = ask(&cluster, COMPLETIONS, body).await;
            let name = if field == "best_of" { "best_of" } else { "n" };
            let expected =
                format!("{name}: `{n}` is not a whole number from 1 to 128, the limit of limits.choices");
            assert_eq!((status, message.as_str()), (400, expected.as_str()), "{field} {n}");
        }
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes more");
    let body = r#"{"model":"tiny","prompt":["a","b","c","d"],"max_tokens":1,"n":128}"#;
    assert_eq!(ask(&cluster, COMPLETIONS, body.to_owned()).await.0, 200, "at the limit");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i_a_batch_has_limits_that_the_operator_sets() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.limits.choices = 3;
            config.limits.prompts = 4;
            config.limits.sequences = 6;
        })
        .pair(Dialect::Sglang)
        .sim(Dialect::Sglang, Role::Aggregated)
        .start()
        .await;
    let batch = async |prompts: usize, n: u32| {
        let list = vec!["\"p\""; prompts].join(",");
        ask(&cluster, COMPLETIONS, format!(r#"{{"model":"tiny","prompt":[{list}],"max_tokens":1,"n":{n}}}"#))
            .await
    };
    assert_eq!(batch(4, 1).await.0, 200);
    assert_eq!(batch(2, 3).await.0, 200);
    let (status, message) = batch(5, 1).await;
    assert_eq!(status, 400);
    assert_eq!(message, "prompt: 5 prompts are more than 4, the limit of limits.prompts; split the batch");
    let (status, message) = batch(3, 3).await;
    assert!(
        status == 400 && message.contains("9 sequences, more than 6, the limit of limits.sequences"),
        "{message}"
    );
    let (status, message) = batch(1, 4).await;
    assert!(status == 400 && message.contains("from 1 to 3, the limit of limits.choices"), "{message}");
    let (status, message) =
        ask(&cluster, "/v1/embeddings", r#"{"model":"tiny","input":["a","b","c","d","e"]}"#.to_owned()).await;
    assert!(status == 400 && message.starts_with("input: 5 prompts are more than 4"), "{message}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i_thirty_megabytes_of_taints_are_400_at_once() {
    let cluster = TestCluster::disaggregated(Dialect::Sglang, 1, 1).await.unwrap();
    let taints = vec!["\"t\""; 7_500_000].join(",");
    let body = format!(r#"{{"model":"tiny","prompt":"x","nvext":{{"required_taints":[{taints}]}}}}"#);
    let before = resident();
    let begun = Instant::now();
    let (status, message) = ask(&cluster, COMPLETIONS, body).await;
    let took = begun.elapsed();
    assert_eq!(status, 400);
    assert_eq!(message, "nvext.required_taints: 7500000 elements are more than the limit of 64; send fewer");
    println!("7,500,000 taints: {took:?}, {} MB more", resident().saturating_sub(before) >> 20);
    // 4 s without optimisation on an idle machine; a step for each pair of elements would take hours.
    assert!(took < Duration::from_secs(20), "{took:?}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i_every_other_count_of_a_client_has_a_limit() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let list = |element: &str, count: usize| vec![element; count].join(",");
    let chat =
        |fields: &str| format!(r#"{{"model":"tiny","messages":[{{"role":"user","content":"x"}}],{fields}}}"#);
    let cases = [
        (format!(r#""stop":[{}]"#, list("\"s\"", 129)), "stop: 129 elements are more than the limit of 128"),
        (format!(r#""stop_token_ids":[{}]"#, list("1", 1_025)), "stop_token_ids: 1025 elements"),
        (format!(r#""bad_words":[{}]"#, list("\"s\"", 1_025)), "bad_words: 1025 elements"),
        (format!(r#""tools":[{}]"#, list("{}", 1_025)), "tools: 1025 elements"),
        (format!(r#""tools":[[{}]]"#, list("1", 300_000)), "tools: 300002 JSON values"),
        (format!(r#""documents":[{}]"#, list("{}", 1_025)), "documents: 1025 elements"),
        (format!(r#""x":{}{}"#, "[".repeat(5_000), "]".repeat(5_000)), "body: lists and objects are nested"),
        (list("\"x\":1", 1_100), "body: the object has more than 1024 keys"),
        (format!(r#""cache_salt":"{}""#, "s".repeat(1_025)), "cache_salt: a text of 1025 bytes"),
        (
            format!(r#""nvext":{{"allowed_worker_ids":[{}]}}"#, list("1", 4_097)),
            "nvext.allowed_worker_ids: 4097",
        ),
        (format!(r#""nvext":{{"lora_name":"{}"}}"#, "l".repeat(513)), "nvext.lora_name: a text of 513 bytes"),
        (format!(r#""max_tokens":{}"#, "-1"), "max_tokens: `-1`"),
        (format!(r#""max_tokens":{}"#, "1e400"), "max_tokens: `1e400`"),
        (format!(r#""stream":"{}""#, "x".repeat(1 << 20)), "stream: `\"xxx"),
    ];
    for (fields, expected) in cases {
        let (status, message) = ask(&cluster, CHAT, chat(&fields)).await;
        assert_eq!(status, 400, "{expected}");
        assert!(message.starts_with(expected) && message.len() < 1_000, "{message:.300}");
    }
    let messages = list(r#"{"role":"user","content":"x"}"#, 16_385);
    let (status, message) =
        ask(&cluster, CHAT, format!(r#"{{"model":"tiny","messages":[{messages}]}}"#)).await;
    assert!(status == 400 && message.starts_with("messages: 16385 elements"), "{message}");
    let parts = list(r#"{"type":"text","text":"x"}"#, 100_000);
    let body = format!(r#"{{"model":"tiny","messages":[{{"role":"user","content":[{parts}]}}]}}"#);
    let (status, message) = ask(&cluster, CHAT, body).await;
    assert!(status == 400 && message.starts_with("messages: 300004 JSON values"), "{message}");
    for path in ["/v1/rerank", "/v1/score"] {
        for document in [r#""d""#, r#"{"text":"d"}"#] {
            let rerank =
                |count| format!(r#"{{"model":"tiny","query":"x","documents":[{}]}}"#, list(document, count));
            // I6.19
            assert_eq!(ask(&cluster, path, rerank(2_048)).await, (200, String::new()));
            let (status, message) = ask(&cluster, path, rerank(2_049)).await;
            assert!(
                status == 400 && message.starts_with("documents: 2049 prompts are more than 2048"),
                "{message}"
            );
        }
    }
    let long = "7".repeat(600);
    for header in ["x-worker-instance-id", "x-session-id", "x-dp-rank", "x-prefill-dp-rank"] {
        let reply = cluster.client.post(CHAT, &[(header, &long)], chat("\"x\":1")).await.unwrap();
        let message = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(reply.status, 400);
        assert!(message.starts_with(&format!("{header}: a text of 600 bytes")), "{message}");
    }
    cluster.at_rest().await.unwrap();
}
