//! Every fault over a real socket, activated by `POST /sim/faults`.

use std::io::ErrorKind;

use crate::client::*;
use pointsman_sim::{Dialect, Role, SimHandle};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

const PATH: &str = "/v1/chat/completions";

fn body(stream: bool) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": stream})
}

async fn sim() -> SimHandle {
    start(Dialect::Vllm, Role::Aggregated).await
}

async fn fault(sim: &SimHandle, fault: Value) {
    let answer = post(sim, "/sim/faults", &json!([fault])).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(get(sim, "/sim/faults").await.json()[0]["kind"], fault["kind"]);
}

#[tokio::test]
async fn refuse_resets_the_connection() {
    let sim = sim().await;
    fault(&sim, json!({"kind": "refuse"})).await;
    for stream in [false, true] {
        let error = try_post(sim.addr(), PATH, &body(stream)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    assert_eq!(get(&sim, "/health").await.status, 200, "probes are not hit unless named");
    fault(&sim, json!({"kind": "refuse", "leg": "health"})).await;
    assert_eq!(post(&sim, PATH, &body(false)).await.status, 200);
    let health = send(sim.addr(), "GET /health HTTP/1.1\r\nhost: sim\r\n\r\n").await;
    assert_eq!(health.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn status_has_the_engines_error_body() {
    let sim = sim().await;
    fault(&sim, json!({"kind": "status", "status": 503, "retry_after": 7})).await;
    let answer = post(&sim, PATH, &body(true)).await;
    assert_eq!(answer.status, 503);
    assert!(answer.head.contains("retry-after: 7"));
    assert_eq!(answer.json()["error"]["message"], "injected fault: status 503");
    fault(&sim, json!({"kind": "status", "status": 429, "times": 1})).await;
    assert_eq!(post(&sim, PATH, &body(false)).await.status, 429);
    assert_eq!(post(&sim, PATH, &body(false)).await.status, 200, "once only");
    fault(&sim, json!({"kind": "status", "status": 500, "leg": "decode"})).await;
    assert_eq!(post(&sim, PATH, &body(false)).await.status, 200, "another leg");
    fault(&sim, json!({"kind": "status", "status": 500, "leg": "probe"})).await;
    assert_eq!(get(&sim, "/metrics").await.status, 500);
    assert_eq!(get(&sim, "/v1/models").await.status, 500);
    assert_eq!(sim.state().requests.get("aggregated/fault"), Some(&2));
}

#[tokio::test]
async fn hanging_before_and_after_headers() {
    let sim = sim().await;
    for stream in [false, true] {
        fault(&sim, json!({"kind": "hang-before-headers"})).await;
        assert!(silent(&mut open(&sim, PATH, &body(stream)).await, 60).await);
        fault(&sim, json!({"kind": "hang-after-headers"})).await;
        let mut client = open(&sim, PATH, &body(stream)).await;
        let head = read_until(&mut client, "\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("event-stream") == stream);
        assert!(silent(&mut client, 60).await);
    }
    eventually(&sim, "all four left", |state| state.client_disconnects == 4).await;
}

#[tokio::test]
async fn a_stall_is_silent_and_holds_what_it_has() {
    let sim = sim().await;
    fault(&sim, json!({"kind": "stall", "after_tokens": 2})).await;
    let mut client = open(&sim, PATH, &body(true)).await;
    let mut text = read_until(&mut client, "\"role\"").await;
    while text.matches("data: ").count() < 3 {
        let mut buffer = [0; 4096];
        let read = client.read(&mut buffer).await.unwrap();
        text += &String::from_utf8_lossy(&buffer[..read]);
    }
    assert_eq!(text.matches("data: ").count(), 3, "role and two tokens: {text}");
    assert!(silent(&mut client, 60).await);
    assert!(sim.state().used_blocks > 0);
    drop(client);
    eventually(&sim, "all free", |state| state.used_blocks == 0 && state.client_disconnects == 1).await;
    assert!(silent(&mut open(&sim, PATH, &body(false)).await, 60).await);
}

#[tokio::test]
async fn a_cut_ends_in_the_middle_of_an_event() {
    let sim = sim().await;
    fault(&sim, json!({"kind": "cut", "after_tokens": 2})).await;
    let answer = post(&sim, PATH, &body(true)).await;
    assert_eq!((answer.status, answer.complete), (200, false));
    let text = answer.text();
    let last = text.split("\n\n").last().unwrap();
    assert_eq!(text.matches("data: ").count(), 4, "role, two tokens, half an event: {text}");
    assert!(last.starts_with("data: {") && !last.ends_with('}'), "{last}");
    let whole = post(&sim, PATH, &body(false)).await;
    assert!(whole.status == 200 && !whole.complete && whole.text().starts_with("{\"id\""));
    eventually(&sim, "all free", |state| state.used_blocks == 0).await;
}

#[tokio::test]
async fn garbage_is_not_an_event_and_the_stream_has_no_done() {
    let sim = sim().await;
    fault(&sim, json!({"kind": "garbage", "after_tokens": 1})).await;
    let answer = post(&sim, PATH, &body(true)).await;
    assert!(answer.complete && !answer.text().contains("[DONE]"));
    assert!(String::from_utf8(answer.body.clone()).is_err(), "not even UTF-8");
    let events = answer.events();
    assert_eq!(events.iter().filter(|event| serde_json::from_str::<Value>(event).is_ok()).count(), 2);
    let whole = post(&sim, PATH, &body(false)).await;
    assert!(whole.complete && serde_json::from_slice::<Value>(&whole.body).is_err());
}

#[tokio::test]
async fn the_wrong_content_type_is_an_html_page() {
    let sim = sim().await;
    fault(&sim, json!({"kind": "wrong-content-type"})).await;
    for stream in [false, true] {
        let answer = post(&sim, PATH, &body(stream)).await;
        assert_eq!(answer.status, 200);
        assert!(answer.head.contains("content-type: text/html") && answer.text().starts_with("<html>"));
    }
}

#[tokio::test]
async fn health_can_be_slow() {
    let sim = sim().await;
    fault(&sim, json!({"kind": "slow-health", "ms": 120})).await;
    let before = tokio::time::Instant::now();
    assert_eq!(get(&sim, "/health").await.status, 200);
    assert!(before.elapsed().as_millis() >= 120);
    assert_eq!(get(&sim, "/metrics").await.status, 200);
}

#[tokio::test]
async fn an_immediate_eos_is_a_response_without_text() {
    let sim = sim().await;
    fault(&sim, json!({"kind": "first-token-eos"})).await;
    let mut streamed = body(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let events = post(&sim, PATH, &streamed).await.events();
    assert_eq!(events.len(), 4, "role, end, usage, done");
    assert!(events[1].contains(r#""delta":{"content":""},"logprobs":null,"finish_reason":"stop""#));
    assert!(events[2].contains(r#""completion_tokens":1"#));
}

#[tokio::test]
async fn bad_faults_are_refused_and_change_nothing() {
    let sim = sim().await;
    fault(&sim, json!({"kind": "refuse", "leg": "decode"})).await;
    for bad in [
        json!([{"kind": "melt"}]),
        json!({"kind": "refuse"}),
        json!([{"kind": "refuse", "share": 2}]),
        json!([{"kind": "status", "status": 200}]),
    ] {
        assert_eq!(post(&sim, "/sim/faults", &bad).await.status, 400, "{bad}");
    }
    assert_eq!(sim.faults().len(), 1);
    assert_eq!(post(&sim, "/sim/faults", &json!([])).await.json(), json!([]));
}
