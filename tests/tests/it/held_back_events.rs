//! Streams whose first event the gateway holds back (I3.17), and whose engine is silent after it: it
//! generates a tool call that it sends as a whole.

use std::time::Duration;

use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, TestCluster, TestClusterBuilder,
    raw_engine::{MODELS, chunk, json, status, stream_head},
};
use serde_json::json as value;
use tokio::time::Instant;

const MS: Duration = Duration::from_millis(1);
/// Each endpoint with the event that an engine sends before it generates anything, and the rest.
const STREAMS: [(&str, &str, &str); 3] = [
    (
        "/v1/chat/completions",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"good\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n",
    ),
    (
        "/v1/responses",
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"status\":\"in_progress\"},\"sequence_number\":0}\n\n",
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"good\",\"sequence_number\":1}\n\nevent: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"status\":\"completed\"},\"sequence_number\":2}\n\n",
    ),
    (
        "/v1/messages",
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"usage\":{\"input_tokens\":2,\"output_tokens\":0}}}\n\n",
        "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"good\"}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    ),
];

/// An engine with these metrics that is silent for `pause` after the first event of each stream. Completions
/// are never answered.
async fn engine(metrics: Option<&'static str>, pause: Duration) -> RawEngine {
    RawEngine::start(move |request| match request.line.as_str() {
        "GET /health" => vec![Act::Send(json("{}"))],
        "GET /v1/models" => vec![Act::Send(json(MODELS))],
        "GET /metrics" if metrics.is_some() => {
            let text = metrics.unwrap_or_default();
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {}\r\n\r\n",
                text.len()
            );
            vec![Act::Send((head + text).into())]
        }
        line if line.starts_with(&format!("POST {COMPLETIONS}")) => vec![Act::Hang],
        line if line.starts_with("POST") => {
            let stream = STREAMS.into_iter().find(|(path, ..)| line.ends_with(path)).unwrap();
            let first = Act::Send([stream_head(), chunk(stream.1.as_bytes())].concat());
            let rest = Act::Send([chunk(stream.2.as_bytes()), chunk(b"")].concat());
            vec![first, Act::Pause(pause), rest]
        }
        _ => vec![Act::Send(status("404 Not Found", "{}"))],
    })
    .await
}

/// A gateway in front of these engines, with short limits.
async fn gateway(engines: &[(&str, &RawEngine)], longest: Duration) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        config.timeouts.head = 500 * MS;
        config.timeouts.event_idle = 1_000 * MS;
        config.timeouts.event_idle_max = longest;
        for (id, (dialect, engine)) in (1..).zip(engines) {
            config.workers.push(engine.worker(&format!("id={id},role=aggregated,engine={dialect}")));
        }
    });
    builder.start().await
}

/// The text of a stream, and how long it took.
async fn stream(cluster: &TestCluster, path: &str) -> (String, Duration) {
    let begun = Instant::now();
    let key = if path == "/v1/responses" { "input" } else { "messages" };
    let mut body = value!({"model": "tiny", "max_tokens": 9, "stream": true, "store": false});
    body[key] = value!([{"role": "user", "content": "hello"}]);
    let reply = cluster.client.post(path, &[], body.to_string()).await.unwrap();
    (String::from_utf8_lossy(&reply.body).into_owned(), begun.elapsed())
}

/// Returns whether a stream ended because its engine was silent within it, without progress.
fn is_idle(text: &str) -> bool {
    let names = |key| text.contains(key);
    names("engine_timeout") && names("timeouts.event_idle") && !names("timeouts.event_idle_max")
}

#[tokio::test]
async fn i3_a_stream_whose_first_event_is_held_back_goes_on_while_health_checks_are_answered() {
    let engine = engine(None, 2_500 * MS).await;
    let cluster = gateway(&[("openai", &engine)], Duration::from_secs(20)).await;
    for (path, first, rest) in STREAMS {
        let all = tokio::join!(stream(&cluster, path), stream(&cluster, path), stream(&cluster, path));
        for (text, took) in [all.0, all.1, all.2] {
            // I3.28: more than twice timeouts.event_idle, and five times timeouts.head
            assert!(took >= 2_400 * MS && text == format!("{first}{rest}"), "{path} {took:?} {text}");
        }
        // I3.28, B7.3: none of the three counts as late.
        assert_eq!((cluster.worker(1).stuck(), cluster.worker(1).ineligible()), (None, None), "{path}");
    }
}

#[tokio::test]
async fn i3_a_stream_whose_first_event_is_held_back_ends_at_the_longest_pause_and_is_tried_elsewhere() {
    let hangs = engine(None, Duration::from_secs(60)).await;
    for (path, first, rest) in STREAMS {
        let cluster = gateway(&[("openai", &hangs)], 2_500 * MS).await;
        let (text, took) = stream(&cluster, path).await;
        // I3.28, I3.7
        assert!(is_idle(&text) && took >= 2_400 * MS, "{path} {took:?} {text}");
        assert!(!text.contains(first), "{text}");
        let good = engine(None, Duration::ZERO).await;
        let cluster = gateway(&[("openai", &hangs), ("openai", &good)], 1_500 * MS).await;
        let all = tokio::join!(stream(&cluster, path), stream(&cluster, path), stream(&cluster, path));
        for (text, _) in [all.0, all.1, all.2] {
            // I3.17
            assert_eq!(text, format!("{first}{rest}"), "{path}");
        }
    }
}

#[tokio::test]
async fn i1_an_error_behind_an_event_that_is_held_back_has_its_own_status() {
    let error = value!({"type": "error", "error": {"message": "not now", "code": 503}});
    for (path, first, _) in STREAMS {
        let name = if path.ends_with("completions") { "" } else { "event: error\n" };
        let error = format!("{name}data: {error}\n\n");
        let mut statuses = Vec::new();
        for begin in [first, ""] {
            let answer = [stream_head(), chunk(format!("{begin}{error}").as_bytes()), chunk(b"")].concat();
            let engine = RawEngine::serving(move |_| vec![Act::Send(answer.clone())]).await;
            let cluster = gateway(&[("openai", &engine)], Duration::from_secs(20)).await;
            let key = if path == "/v1/responses" { "input" } else { "messages" };
            let mut body = value!({"model": "tiny", "max_tokens": 9, "stream": true, "store": false});
            body[key] = value!([{"role": "user", "content": "hello"}]);
            let reply = cluster.client.post(path, &[], body.to_string()).await.unwrap();
            statuses.push((reply.status.as_u16(), reply.code(), engine.requests().len()));
        }
        // I1.5, I3.17
        assert_eq!(statuses[0], statuses[1], "{path}");
        assert_ne!(statuses[0].0, 200, "{path}");
    }
}

#[tokio::test]
async fn i3_a_stuck_worker_is_not_waited_for_after_an_event_that_is_held_back() {
    // It counts as working, as far as its figures say.
    let running = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n";
    let engine = engine(Some(running), Duration::from_secs(60)).await;
    let cluster = gateway(&[("vllm", &engine)], Duration::from_secs(30)).await;
    let hang = || cluster.client.post(COMPLETIONS, &[], r#"{"model":"tiny","prompt":"a","stream":true}"#);
    let ((text, took), ..) = tokio::join!(stream(&cluster, STREAMS[0].0), hang(), hang(), hang());
    // I3.28
    assert!(is_idle(&text) && took < Duration::from_secs(15), "{took:?} {text}");
}
