//! Timings of a request. What was not measured is absent, not zero.

use std::time::Duration;

use pointsman_gateway::config::SlotEntry;
use pointsman_routing::SlotKind;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_test_guests::HOSTILE;
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder};
use serde_json::{Value, json};

fn body(stream: bool) -> String {
    let prompt = "which way does this train go, and who decides? ".repeat(8);
    json!({"model": "tiny", "prompt": prompt, "max_tokens": 8, "stream": stream}).to_string()
}

/// The workers as operators see them, by role.
async fn loads(cluster: &TestCluster, role: &str) -> Vec<Value> {
    let workers = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    let of_role =
        workers["workers"].as_array().unwrap().iter().filter(|worker| worker["spec"]["role"] == role);
    of_role.map(|worker| worker["ranks"][0].clone()).collect()
}

async fn samples(cluster: &TestCluster, name: &str) -> String {
    let text = cluster.metrics_text().await.unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    line.rsplit(' ').next().unwrap().to_owned()
}

#[tokio::test]
async fn an_answer_that_is_not_streamed_has_no_time_to_first_token() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let reply = cluster.client.post(COMPLETIONS, &[], body(false)).await.unwrap();
    assert_eq!(reply.status, 200);
    let outcome = cluster.newest_outcome().await.unwrap();
    assert_eq!((&outcome["ttft_ms"], &outcome["itl_ms"]), (&Value::Null, &Value::Null), "{outcome}");
    assert_eq!(outcome["output_tokens"], 8, "the engine's usage counts");
    let load = &loads(&cluster, "aggregated").await[0];
    assert_eq!((&load["ttft_ewma_us"], &load["itl_ewma_us"]), (&json!(0), &json!(0)), "{load}");
    assert_eq!(samples(&cluster, "pointsman_ttft_seconds_count").await, "0");
    assert_eq!(samples(&cluster, "pointsman_request_seconds_count").await, "1");
}

#[tokio::test]
async fn a_prefill_worker_s_time_is_its_own_and_not_part_of_the_decode_worker_s() {
    for stream in [true, false] {
        let slow = SimConfig {
            overhead: Duration::from_millis(120),
            ..SimConfig::instant(Dialect::Vllm, Role::Prefill)
        };
        let cluster = TestClusterBuilder::new()
            .sim_with(slow, "")
            .sim_with(SimConfig::instant(Dialect::Vllm, Role::Decode), "")
            .start()
            .await;
        let before = tokio::time::Instant::now();
        if stream {
            let events = cluster.client.stream(COMPLETIONS, &[], body(true)).await.unwrap();
            assert_eq!(events.all().await.unwrap().last().unwrap(), "[DONE]");
        } else {
            assert_eq!(cluster.client.post(COMPLETIONS, &[], body(false)).await.unwrap().status, 200);
        }
        let took = u64::try_from(before.elapsed().as_micros()).unwrap();
        cluster.at_rest().await.unwrap();
        let (prefill, decode) = (&loads(&cluster, "prefill").await[0], &loads(&cluster, "decode").await[0]);
        let ttft = |load: &Value| load["ttft_ewma_us"].as_u64().unwrap();
        // F4.6
        assert!((120_000..=took).contains(&ttft(prefill)), "stream {stream}: {prefill} of {took} us");
        let prompt = 47 * 8 / 4;
        let each_thousand = prefill["prefill_us_per_ktoken"].as_u64().unwrap();
        assert!(
            (120_000 * 1_000 / (prompt + 2)..took * 1_000 / (prompt - 20)).contains(&each_thousand),
            "{prefill}"
        );
        if stream {
            assert!(ttft(decode) > 0 && ttft(decode) < took - 120_000, "{decode} of {took} us");
        } else {
            assert_eq!(ttft(decode), 0, "{decode}");
        }
        assert_eq!(decode["prefill_us_per_ktoken"], 0, "a decode leg computes no prompt: {decode}");
    }
}

#[tokio::test]
async fn f7_a_policy_sees_how_long_a_request_waited_in_the_queue() {
    let slow =
        SimConfig { overhead: Duration::from_secs(2), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.queue.limit = 4;
            let entry: SlotEntry = toml::from_str("settings = { mode = 'tell-queue' }").unwrap();
            config.policies.slots.insert(SlotKind::Aggregated, entry);
        })
        .sim_with(slow, ",max_concurrency=1")
        .start()
        .await;
    cluster.drop_policy("aggregated.wasm", HOSTILE).unwrap();
    let report = cluster.admin.post("/policies/reload", &[], "").await.unwrap();
    assert_eq!(report.status, 200, "{:?}", report.json());
    let first = cluster.client.post(COMPLETIONS, &[], body(false));
    let second = async {
        cluster.until("the first request is booked", |cluster| cluster.booked() == 1).await.unwrap();
        let before = tokio::time::Instant::now();
        let reply = cluster.client.post(COMPLETIONS, &[], body(false)).await.unwrap();
        (reply, u64::try_from(before.elapsed().as_micros()).unwrap())
    };
    let (first, (reply, took)) = tokio::join!(first, second);
    assert_eq!(first.unwrap().status, 200, "it did not wait");
    let told = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(reply.status, 429, "{told}");
    let waited: u64 = told.split(' ').nth(2).unwrap().parse().unwrap();
    assert!((100_000..=took).contains(&waited), "it waited {waited} us of the {took} us that a client saw");
    cluster.at_rest().await.unwrap();
}
