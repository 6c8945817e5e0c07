//! A policy's lines in the daemon's log. The test has a file of its own because a process has one log.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::{
    io::{self, Write},
    sync::{OnceLock, mpsc},
};

use pointsman_sim::{Dialect, Role};
use pointsman_test_guests::CHATTY;
use pointsman_tests::{TestClusterBuilder, own_process};
use serde_json::{Value, json};
use tracing_subscriber::fmt::MakeWriter;

static LINES: OnceLock<mpsc::Sender<Vec<u8>>> = OnceLock::new();

/// Forwards each line to the test.
struct Pipe;

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = LINES.get().unwrap().send(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Pipe {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        Self
    }
}

#[tokio::test]
async fn a_policy_s_lines_carry_its_name_generation_and_request_and_are_limited() {
    if !own_process(concat!(
        module_path!(),
        "::a_policy_s_lines_carry_its_name_generation_and_request_and_are_limited"
    )) {
        return;
    }
    let (sender, lines) = mpsc::channel();
    LINES.set(sender).unwrap();
    tracing_subscriber::fmt().json().with_writer(Pipe).init();
    let cluster = TestClusterBuilder::new()
        .sim(Dialect::Vllm, Role::Prefill)
        .sim(Dialect::Vllm, Role::Decode)
        .start()
        .await
        .unwrap();
    cluster.drop_policy("prefill.wasm", CHATTY).unwrap();
    let serves = |cluster: &pointsman_tests::TestCluster| {
        cluster.gateway.state().policies.status().slots[0].policy == "chatty"
    };
    cluster.until("it serves", serves).await.unwrap();
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]})
        .to_string();
    let began = tokio::time::Instant::now();
    for number in 0..200 {
        let id = format!("request-{number}");
        let reply = cluster.client.post("/v1/chat/completions", &[("x-request-id", &id)], body.clone()).await;
        assert_eq!(reply.unwrap().status, 200);
    }
    // Log lines of a preview do not belong to a request.
    let before = lines.try_iter().collect::<Vec<_>>();
    let seconds = began.elapsed().as_secs() as usize;
    tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    cluster.client.post("/v1/route", &[], body).await.unwrap();
    let previewed = records(lines.try_iter().collect());
    assert!(previewed.iter().any(|line| line["fields"].get("request").is_none()), "{previewed:?}");

    let logged = records(before);
    let mut requests: Vec<String> = Vec::new();
    for line in &logged {
        let fields = &line["fields"];
        let Some(request) = fields["request"].as_str() else { continue };
        assert_eq!((&fields["policy"], &fields["generation"]), (&json!("chatty"), &json!(2)), "{line}");
        assert_eq!(fields["message"], "choosing among 1 rows", "{line}");
        requests.push(request.to_owned());
    }
    // Fifty a second of a slot; the first and the last second need not be whole.
    assert!(requests.len() <= 50 * (seconds + 2), "{} lines in {seconds} s", requests.len());
    let number = |request: &String| request.strip_prefix("request-").unwrap().parse::<u32>().unwrap();
    let numbers: Vec<u32> = requests.iter().map(number).collect();
    assert!(numbers.len() >= 10 && numbers[0] == 0, "{numbers:?}");
    assert!(
        numbers.is_sorted() && numbers.iter().all(|number| *number < 200),
        "each with its own: {numbers:?}"
    );
    // The operators' API has the last of them.
    let log = async |after: &str| {
        cluster.admin.get(&format!("/policies/prefill/log{after}")).await.unwrap().json().unwrap()
    };
    let kept = log("").await;
    let newest = kept["lines"].as_array().unwrap().last().unwrap();
    assert_eq!((&newest["policy"], &newest["level"]), (&json!("chatty"), &json!("error")), "{newest}");
    assert_eq!((&newest["generation"], &newest["number"]), (&json!(2), &kept["last"]), "{newest}");
    // O5.8
    assert_eq!((&newest["request_id"], &newest["text"]), (&Value::Null, &json!("choosing among 1 rows")));
    let of_requests = kept["lines"].as_array().unwrap().iter().filter(|line| !line["request_id"].is_null());
    assert!(of_requests.count() >= 10, "{kept}");
    let last = kept["last"].as_u64().unwrap();
    assert_eq!(log(&format!("?after={last}")).await["lines"], json!([]));
    assert_eq!(log(&format!("?after={}", last - 1)).await["lines"].as_array().unwrap().len(), 1);
    cluster.at_rest().await.unwrap();
}

/// Returns the lines of policies.
fn records(lines: Vec<Vec<u8>>) -> Vec<Value> {
    let parsed = lines.iter().filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    parsed
        .filter(|line| line["target"] == "pointsman::guest" && line["fields"].get("policy").is_some())
        .collect()
}
