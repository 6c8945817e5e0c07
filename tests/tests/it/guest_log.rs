//! A policy's lines in the daemon's log. The test has a file of its own because a process has one log.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "helpers of tests may fail as tests do"
)]

use pointsman_routing::SlotKind;
use pointsman_sim::{Dialect, Role};
use pointsman_test_guests::{CHATTY, HOSTILE};
use pointsman_tests::{TestClusterBuilder, log::Log, own_process};
use serde_json::{Value, json};

#[tokio::test]
async fn a_policy_s_lines_carry_its_name_generation_and_request_and_are_limited() {
    own_process!();
    let lines = Log::json();
    let cluster = TestClusterBuilder::new().pair(Dialect::Vllm).start().await;
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
    let before = lines.take();
    let seconds = began.elapsed().as_secs() as usize;
    tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    cluster.client.post("/v1/route", &[], body).await.unwrap();
    let previewed = records(lines.take());
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

#[tokio::test]
async fn t6_failed_calls_and_breakers_are_logged_and_lines_of_trials_are_marked() {
    own_process!();
    let lines = Log::json();
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.policies.probation_failure_share = 1.0;
            let settings = toml::from_str("mode = \"error\"\nafter = 20").unwrap();
            config.policies.slots.insert(
                SlotKind::Aggregated,
                pointsman_gateway::config::SlotEntry { settings, ..Default::default() },
            );
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let serves = |cluster: &pointsman_tests::TestCluster, policy: &str| {
        cluster.gateway.state().policies.status().slots.iter().any(|slot| slot.policy == policy)
    };
    cluster.drop_policy("aggregated.wasm", HOSTILE).unwrap();
    cluster.until("it serves", |cluster| serves(cluster, "hostile")).await.unwrap();
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]})
        .to_string();
    let mut logged: Vec<Value> = Vec::new();
    for _ in 0..600 {
        cluster.client.post("/v1/chat/completions", &[], body.clone()).await.unwrap();
        logged.extend(lines.take());
        if logged
            .iter()
            .any(|line| line["fields"]["message"].as_str().is_some_and(|text| text.contains("opened")))
        {
            break;
        }
    }
    let of = |event: &str| {
        let same = |line: &&Value| line["fields"]["message"] == event;
        logged
            .iter()
            .filter(same)
            .map(|line| (line["level"].clone(), line["fields"].clone()))
            .collect::<Vec<_>>()
    };
    for event in ["policy call failed; later failures are counted", "policy breaker opened"] {
        let found = of(event);
        // T6.1
        let [(level, fields)] = &found[..] else { panic!("{event}: {found:?}") };
        assert_eq!(
            (level, &fields["policy"], &fields["kind"]),
            (&json!("WARN"), &json!("hostile"), &json!("error"))
        );
        assert_eq!((&fields["slot"], &fields["lane"]), (&json!("aggregated"), &json!("active")), "{fields}");
        assert!(fields["error"].as_str().unwrap().starts_with("policy error: "), "{fields}");
        // T8.3
        assert!(fields["request_id"].is_string(), "{fields}");
    }
    // What is logged in trial calls is not in the log, and has its name and a mark in the operators' API.
    cluster.drop_policy("prefill.wasm", CHATTY).unwrap();
    cluster.until("another serves", |cluster| serves(cluster, "chatty")).await.unwrap();
    let told = records(lines.take());
    assert!(told.iter().all(|line| line["fields"]["policy"] != "?"), "{told:?}");
    let trials = |line: &&Value| line["fields"]["generation"].is_null();
    // T6.3
    assert_eq!(told.iter().filter(trials).count(), 0, "{told:?}");
    let kept = cluster.admin.get("/policies/prefill/log").await.unwrap().json().unwrap();
    let trial = kept["lines"].as_array().unwrap().iter().find(|line| line["trial"] == true).unwrap();
    // T6.3
    assert_eq!((&trial["policy"], &trial["generation"]), (&json!("chatty"), &Value::Null), "{kept}");
    cluster.at_rest().await.unwrap();
}

/// Returns the lines of policies.
fn records(lines: Vec<Value>) -> Vec<Value> {
    let of_policy =
        |line: &Value| line["target"] == "pointsman::guest" && line["fields"].get("policy").is_some();
    lines.into_iter().filter(of_policy).collect()
}
