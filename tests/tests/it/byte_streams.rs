//! Audio and other bodies that pass byte by byte as they come (I6.16).

use std::time::Duration;

use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder, raw,
    raw_engine::{chunk, json},
};
use tokio::time::Instant;

const SPEECH: (&str, &str) = ("/v1/audio/speech", r#"{"model":"tiny","input":"hi","voice":"a"}"#);
const PAUSE: Duration = Duration::from_millis(400);

fn head(kind: &str) -> Act {
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n");
    Act::Send(head.into_bytes())
}

async fn cluster(engines: &[&RawEngine], retries: u32) -> TestCluster {
    let builder = TestClusterBuilder::new().in_turn(engines.iter().copied()).config(|config| {
        config.routing.retries = retries;
        config.timeouts.event_idle = 3 * PAUSE;
        config.timeouts.event_idle_max = 3 * PAUSE;
        config.timeouts.stream_comment = PAUSE / 4;
    });
    builder.start().await
}

async fn engine(acts: Vec<Act>) -> RawEngine {
    RawEngine::serving(move |_: &RawRequest| acts.clone()).await
}

/// Sends a request and returns the text up to `mark`, the time until it came, and all of the text.
async fn read(cluster: &TestCluster, (path, body): (&str, &str), mark: &str) -> (String, Duration, String) {
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let began = Instant::now();
    let mut stream = raw::send(cluster.gateway.address, request).await.unwrap();
    let first = raw::until_mark(&mut stream, mark).await;
    let took = began.elapsed();
    let rest = raw::until_closed(&mut stream).await;
    (first.clone(), took, first + &rest)
}

#[tokio::test]
async fn i6_audio_and_events_of_images_pass_as_they_come() {
    let event = |n: usize| format!("data: {{\"type\":\"image_generation.partial_image\",\"n\":{n}}}\n\n");
    let images = ("/v1/images/generations", r#"{"model":"tiny","prompt":"x","stream":true}"#);
    let sse = (SPEECH.0, r#"{"model":"tiny","input":"hi","voice":"a","stream_format":"sse"}"#);
    for (request, kind) in [(SPEECH, "audio/pcm"), (sse, "text/event-stream"), (images, "text/event-stream")]
    {
        let piece = |n| if kind == "audio/pcm" { format!("PCM{n}") } else { event(n) };
        let pieces = (0..3).flat_map(|n| [Act::Send(chunk(piece(n).as_bytes())), Act::Pause(PAUSE)]);
        let acts = [head(kind)].into_iter().chain(pieces).chain([Act::Send(b"0\r\n\r\n".to_vec())]);
        let engine = engine(acts.collect()).await;
        let cluster = cluster(&[&engine], 0).await;
        let (first, took, all) = read(&cluster, request, &piece(0)).await;
        // I6.16
        assert!(
            first.contains(&piece(0)) && !first.contains(&piece(2)) && took < 2 * PAUSE,
            "{took:?}: {first}"
        );
        assert!(first.contains(&format!("content-type: {kind}")), "{first}");
        // I6.18
        assert!(first.contains("\r\nx-accel-buffering: no\r\n"), "{first}");
        assert!(all.ends_with("0\r\n\r\n") && (0..3).all(|n| all.contains(&piece(n))), "{all}");
        assert!(!all.contains(": waiting") && !all.contains("[DONE]"), "nothing is added: {all}");
        cluster.at_rest().await.unwrap();
        let ok = r#"pointsman_legs_total{leg="aggregated",engine="openai",outcome="ok"}"#;
        assert_eq!(cluster.metric(ok).await.unwrap(), [1.0]);
    }
}

#[tokio::test]
async fn i6_a_body_that_breaks_off_is_cut_for_the_client_and_ends_with_an_error_event_if_it_has_events() {
    for (kind, end) in [
        ("audio/mpeg", Act::Close),
        ("audio/mpeg", Act::Hang),
        ("text/event-stream", Act::Close),
        ("text/event-stream", Act::Hang),
    ] {
        let is_silent = matches!(end, Act::Hang);
        let engine =
            engine(vec![head(kind), Act::Send(chunk(b"data: {\"a\":1}")), Act::Pause(PAUSE), end]).await;
        let cluster = cluster(&[&engine], 1).await;
        let (_, _, all) = read(&cluster, SPEECH, "data: {").await;
        let code = if is_silent { "engine_timeout" } else { "bad_upstream" };
        // I6.16
        assert!(!all.contains("(open)"), "{all}");
        let has_event = all.contains(&format!("\"code\":\"{code}\""));
        assert_eq!(
            (has_event, all.ends_with("0\r\n\r\n")),
            [(false, false), (true, true)][usize::from(kind.starts_with("text"))],
            "{all}"
        );
        let reply = cluster.client.stream(SPEECH.0, &[], SPEECH.1).await;
        drop(reply);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i6_until_the_first_byte_of_audio_another_worker_may_answer() {
    let error = json(r#"{"error":{"message":"out of memory","code":500}}"#);
    for acts in
        [vec![Act::Reset], vec![head("audio/mpeg"), Act::Pause(PAUSE), Act::Reset], vec![Act::Send(error)]]
    {
        let bad = engine(acts.clone()).await;
        let audio = [head("audio/mpeg"), Act::Send(chunk(b"MP3")), Act::Send(b"0\r\n\r\n".to_vec())];
        let good = engine(audio.to_vec()).await;
        let cluster = cluster(&[&bad, &good], 1).await;
        let reply = cluster.client.post(SPEECH.0, &[], SPEECH.1).await.unwrap();
        // I6.16
        assert_eq!((reply.status.as_u16(), &*reply.body), (200, b"MP3".as_slice()), "{acts:?}");
        assert!(!bad.requests().is_empty());
        cluster.at_rest().await.unwrap();
    }
}
