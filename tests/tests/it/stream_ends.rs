//! The events that end a stream, for each kind of stream: what follows them is no failure.

use pointsman_tests::{
    Act, RawEngine, TestCluster, TestClusterBuilder,
    raw_engine::{chunk, stream_head},
};
use serde_json::json;

const FORM: &str = "multipart/form-data; boundary=cut";
const AUDIO: [&str; 2] = ["/v1/audio/transcriptions", "/v1/audio/translations"];
const OK: &str = r#"pointsman_legs_total{leg="aggregated",engine="openai",outcome="ok"}"#;

fn form() -> String {
    let field = |name: &str, value: &str| {
        format!("--cut\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
    };
    format!("{}{}--cut--\r\n", field("model", "tiny"), field("stream", "true"))
}

/// A gateway in front of an engine that answers with these events, and then does what `end` says.
async fn streaming(events: &str, end: Act) -> (RawEngine, TestCluster) {
    let acts = vec![Act::Send(stream_head()), Act::Send(chunk(events.as_bytes())), end];
    let engine = RawEngine::serving(move |_| acts.clone()).await;
    let builder = TestClusterBuilder::new().in_turn([&engine]).config(|config| config.routing.retries = 0);
    let cluster = builder.start().await;
    (engine, cluster)
}

fn ends_in_time() -> Act {
    Act::Send(b"0\r\n\r\n".to_vec())
}

async fn post(cluster: &TestCluster, path: &str, kind: &str, body: String) -> String {
    let reply = cluster.client.post_as(kind, path, &[], body).await.unwrap();
    cluster.at_rest().await.unwrap();
    assert_eq!(reply.status, 200);
    String::from_utf8(reply.body.to_vec()).unwrap()
}

#[tokio::test]
async fn i6_a_transcript_in_openai_s_form_ends_with_its_last_event() {
    let delta = r#"data: {"type":"transcript.text.delta","delta":"Hello"}"#;
    let usage = r#""usage":{"type":"tokens","input_tokens":73,"output_tokens":16,"total_tokens":89}"#;
    let last = format!(r#"data: {{"type":"transcript.text.done","text":"Hello",{usage}}}"#);
    let plain = format!("{delta}\n\n{last}\n\n");
    let named = format!("event: transcript.text.delta\n{delta}\n\nevent: transcript.text.done\n{last}\n\n");
    let behind = format!(
        "{delta}\n\ndata: {{\"text\":\"\\\"type\\\":\",{usage},\"type\":\"transcript.text.done\"}}\n\n"
    );
    let marked = format!("{plain}data: [DONE]\n\n");
    for (path, events, end) in [
        (AUDIO[0], &plain, ends_in_time()),
        (AUDIO[1], &plain, ends_in_time()),
        (AUDIO[0], &named, ends_in_time()),
        (AUDIO[0], &behind, ends_in_time()),
        (AUDIO[0], &marked, ends_in_time()),
        (AUDIO[0], &plain, Act::Close),
        (AUDIO[0], &plain, Act::Hang),
    ] {
        let (_engine, cluster) = streaming(events, end).await;
        // I6.20
        assert_eq!(post(&cluster, path, FORM, form()).await, **events);
        assert_eq!(cluster.metric(OK).await.unwrap(), [1.0], "{events}");
        // I6.9
        assert_eq!(cluster.metric("pointsman_prompt_tokens_total").await.unwrap(), [73.0], "{events}");
    }
    let (_engine, cluster) = streaming(&format!("{delta}\n\n"), ends_in_time()).await;
    let text = post(&cluster, AUDIO[0], FORM, form()).await;
    // I6.20: the last event is missing
    assert!(text.starts_with(delta) && text.contains(r#""code":"bad_upstream""#), "{text}");
}

#[tokio::test]
async fn i6_an_event_without_a_name_is_known_by_its_type_wherever_that_stands() {
    let item = r#"{"a":"\"type\":\"error\"","type":"x","b":[{"type":"error"}]}"#;
    let responses = [
        r#"{"sequence_number":0,"response":{"id":"r","output":[]},"type":"response.created"}"#.to_owned(),
        format!(r#"{{"delta":"a","item":{item},"type":"response.output_text.delta"}}"#),
        format!(
            r#"{{"response":{{"type":"error","output":[{item}],"usage":{{"input_tokens":5,"output_tokens":1}}}},"type":"response.completed"}}"#
        ),
    ];
    let messages = [
        r#"{"message":{"type":"message","usage":{"input_tokens":5,"output_tokens":0}},"type":"message_start"}"#
            .to_owned(),
        r#"{"index":0,"delta":{"type":"text_delta","text":"he"},"type":"content_block_delta"}"#.to_owned(),
        r#"{"delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":1},"type":"message_delta"}"#.to_owned(),
        r#"{"more":{"type":"error"},"type":"message_stop"}"#.to_owned(),
    ];
    let message = json!({ "model": "tiny", "max_tokens": 4, "messages": [], "stream": true });
    let response = json!({ "model": "tiny", "input": "hi", "stream": true });
    for (path, body, events) in
        [("/v1/responses", response, &responses[..]), ("/v1/messages", message, &messages[..])]
    {
        let events: String = events.iter().map(|data| format!("data: {data}\n\n")).collect();
        let (_engine, cluster) = streaming(&events, ends_in_time()).await;
        // I6.4
        assert_eq!(post(&cluster, path, "application/json", body.to_string()).await, events);
        assert_eq!(cluster.metric(OK).await.unwrap(), [1.0], "{path}");
        // I6.9
        assert_eq!(cluster.metric("pointsman_prompt_tokens_total").await.unwrap(), [5.0], "{path}");
        assert_eq!(cluster.metric("pointsman_output_tokens_total").await.unwrap(), [1.0], "{path}");
    }
}
