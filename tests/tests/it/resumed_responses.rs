//! `GET /v1/responses/{id}?stream=true`: the events of a response that runs in the background (I12.9).

use std::time::Duration;

use pointsman_gateway::config::Config;
use pointsman_tests::{
    Act, RawEngine, TestCluster, TestClusterBuilder,
    raw_engine::{RawRequest, chunk, json, stream_head},
};
use serde_json::Value;
use tokio::time::Instant;

const PATH: &str = "/v1/responses/resp_1?stream=true";
const CREATED: &str = "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\
                       \"response\":{\"id\":\"resp_1\",\"object\":\"response\",\"status\":\"in_progress\"}}\n\n";
const DELTA: &str = "event: response.output_text.delta\n\
                     data: {\"type\":\"response.output_text.delta\",\"sequence_number\":1,\"delta\":\"he\"}\n\n";
const COMPLETED: &str = "event: response.completed\n\
                         data: {\"type\":\"response.completed\",\"sequence_number\":2,\"response\":{}}\n\n";
const HALF: &str = "event: response.output_text.delta\ndata: {\"type\":\"response.output_te";
const COMMENT: &str = " \n";
const MS: Duration = Duration::from_millis(1);

/// A gateway in front of an engine that answers a call about a stored response with `acts`.
async fn cluster(acts: Vec<Act>, change: impl FnOnce(&mut Config)) -> (RawEngine, TestCluster) {
    let engine = RawEngine::start(move |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(r#"{"object":"list","data":[{"id":"tiny"}]}"#))],
        line if line.starts_with("GET /v1/responses/resp_1") => {
            [Act::Send(stream_head())].into_iter().chain(acts.clone()).collect()
        }
        _ => vec![Act::Send(json("{}"))],
    })
    .await;
    let cluster = TestClusterBuilder::new().in_turn([&engine]).config(change).start().await;
    (engine, cluster)
}

fn send(events: &str) -> Act {
    Act::Send(chunk(events.as_bytes()))
}

fn end() -> Act {
    Act::Send(b"0\r\n\r\n".to_vec())
}

/// What the client reads, and with which code the request is counted.
async fn read(cluster: &TestCluster, path: &str) -> (String, String) {
    let reply = cluster.client.send("GET", path, &[]).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    cluster.at_rest().await.unwrap();
    let metrics = cluster.metrics_text().await.unwrap();
    let is_counted = |line: &&str| line.starts_with("pointsman_requests_total{endpoint=\"stored_responses\"");
    let line = metrics.lines().find(is_counted).unwrap();
    let code = line.split("code=\"").nth(1).unwrap().split('"').next().unwrap();
    (String::from_utf8(reply.body.to_vec()).unwrap(), code.to_owned())
}

/// Returns the error that follows the events of a text.
#[track_caller]
fn error_behind(text: &str, events: &str) -> Value {
    let rest = text.strip_prefix(events).unwrap_or_else(|| panic!("{text}"));
    let data = rest.strip_prefix("event: error\ndata: ").unwrap_or_else(|| panic!("{rest}"));
    serde_json::from_str(data.strip_suffix("\n\n").unwrap()).unwrap()
}

#[tokio::test]
async fn i12_a_resumed_stream_that_fails_ends_with_one_error_behind_whole_events() {
    let begin = [CREATED, DELTA].concat();
    let cases = [
        (
            vec![send(&begin), Act::Pause(50 * MS), send(HALF), Act::Pause(50 * MS), Act::Close],
            "within an event",
        ),
        (vec![send(&begin), send(HALF), end()], "the stream ended within an event"),
        (vec![send(&begin), end()], "the stream ended before its last event"),
        (vec![send(&begin), Act::Close], ""),
        (vec![send(&begin), Act::Hang], "timeouts.event_idle"),
    ];
    for (acts, message) in cases {
        let is_silent = matches!(acts.last(), Some(Act::Hang));
        let (_engine, cluster) = cluster(acts, |config| {
            config.timeouts.event_idle = 500 * MS;
            config.timeouts.event_idle_max = 500 * MS;
            config.timeouts.stream_comment = if is_silent { 100 * MS } else { Duration::ZERO };
        })
        .await;
        let (text, code) = read(&cluster, PATH).await;
        let error = error_behind(&text.replace(COMMENT, ""), &begin);
        // I12.9, I6.5
        assert_eq!((&error["type"], &error["sequence_number"]), (&"error".into(), &2.into()), "{error}");
        let expected = if is_silent { "engine_timeout" } else { "bad_upstream" };
        assert_eq!((code.as_str(), error["error"]["code"].as_str()), (expected, Some(expected)), "{error}");
        let is_close = message == "within an event";
        assert!(is_close || error["message"].as_str().unwrap().contains(message), "{error}");
    }
}

#[tokio::test]
async fn i12_a_resumed_stream_is_complete_with_its_last_event() {
    let all = [CREATED, DELTA, COMPLETED].concat();
    let marked = format!("{all}data: [DONE]\n\n");
    let cancelled = all.replace("response.completed", "response.cancelled");
    for (acts, path, expected) in [
        (vec![send(&all), end()], PATH, all.as_str()),
        (vec![send(&all), Act::Hang], PATH, &all),
        (vec![send(&all), Act::Reset], PATH, &all),
        (vec![send(&cancelled), end()], PATH, &cancelled),
        (vec![send(all.trim_end()), end()], PATH, &all),
        (vec![send(&marked), end()], PATH, &marked),
        (vec![send(&all), Act::Pause(50 * MS), send("data: [DONE]\n\n"), end()], PATH, &marked),
        (vec![end()], "/v1/responses/resp_1?stream=true&starting_after=2", ""),
    ] {
        let (_engine, cluster) = cluster(acts.clone(), |_| {}).await;
        let began = Instant::now();
        let (text, code) = read(&cluster, path).await;
        // I12.9
        assert_eq!((text.as_str(), code.as_str()), (expected, "ok"), "{acts:?}");
        assert!(began.elapsed() < Duration::from_secs(30), "{acts:?}");
    }
}

#[tokio::test]
async fn i12_an_engine_s_own_error_ends_a_resumed_stream_and_is_counted() {
    let error =
        "event: error\ndata: {\"type\":\"error\",\"code\":\"server_error\",\"message\":\"out of luck\"}\n\n";
    let (_engine, cluster) = cluster(vec![send(&[CREATED, error].concat()), end()], |_| {}).await;
    let (text, code) = read(&cluster, PATH).await;
    // I12.9
    assert_eq!((text, code.as_str()), ([CREATED, error].concat(), "bad_upstream"));
}

#[tokio::test]
async fn i3_a_resumed_stream_that_is_silent_gets_comments_between_events() {
    let half = DELTA.len() / 2;
    let acts = vec![
        send(CREATED),
        send(&DELTA[..half]),
        Act::Pause(600 * MS),
        send(&DELTA[half..]),
        send(COMPLETED),
        end(),
    ];
    let (_engine, cluster) = cluster(acts, |config| config.timeouts.stream_comment = 100 * MS).await;
    let (text, code) = read(&cluster, PATH).await;
    let rest = text.strip_prefix(CREATED).unwrap_or_else(|| panic!("{text}"));
    // I3.8
    assert!(rest.starts_with(COMMENT), "{text}");
    assert_eq!((rest.replace(COMMENT, ""), code.as_str()), ([DELTA, COMPLETED].concat(), "ok"));
}

#[tokio::test]
async fn i12_a_resumed_stream_that_waits_for_room_gets_comments_and_has_the_deadline() {
    let large = format!("data: {}", "x".repeat(600_000));
    let (_engine, cluster) = cluster(vec![send(CREATED), send(&large), Act::Hang], |config| {
        (config.limits.body_bytes_in_flight, config.server.max_body_bytes) = (300_000, 100_000);
        (config.timeouts.request, config.timeouts.stream_comment) = (1_000 * MS, 100 * MS);
    })
    .await;
    let (text, code) = read(&cluster, PATH).await;
    // I3.8
    assert!(text.contains(COMMENT), "{text}");
    let error = error_behind(&text.replace(COMMENT, ""), CREATED);
    // I12.9
    assert_eq!((&error["error"]["code"], code.as_str()), (&"deadline".into(), "deadline"));
    cluster.until("nothing is held", |cluster| cluster.gateway.state().body_bytes.used() == 0).await.unwrap();
}
