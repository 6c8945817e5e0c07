//! Answers that say 200 and have no result (I3.20, I3.21): another worker is tried.

use std::sync::Arc;

use parking_lot::Mutex;
use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{chunk, json, stream_head},
};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";
const ANSWER: &str = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"good"},"finish_reason":"stop"}],"data":[],"content":[],"output":[]}"#;
const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";

/// A gateway in front of an engine that answers as it is told, which is preferred, and one that answers well.
struct Bench {
    engines: [RawEngine; 2],
    cluster: TestCluster,
    acts: Arc<Mutex<Vec<Act>>>,
}

async fn bench() -> Bench {
    let acts = Arc::new(Mutex::new(Vec::new()));
    let told = acts.clone();
    let odd = RawEngine::serving(move |_| told.lock().clone()).await.unwrap();
    let good = RawEngine::serving(|request: &RawRequest| {
        let events = format!("{ROLE}{}{DONE}", ROLE.replace("\"content\":\"\"", "\"content\":\"good\""));
        let stream = [stream_head(), chunk(events.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
        vec![Act::Send(if request.body.contains("\"stream\":true") { stream } else { json(ANSWER) })]
    });
    let engines = [odd, good.await.unwrap()];
    let cluster = TestClusterBuilder::new().in_turn(&engines).start().await.unwrap();
    Bench { engines, cluster, acts }
}

impl Bench {
    /// Asks, and returns the reply, and whether the second engine was asked, too.
    async fn ask(&self, path: &str, stream: bool, acts: &[Act]) -> (Reply, bool) {
        // An answer before each failure: the first engine is never left out.
        *self.acts.lock() = vec![Act::Send(json(ANSWER))];
        assert_eq!(self.post(CHAT, false).await.status, 200);
        *self.acts.lock() = acts.to_vec();
        let posts = || {
            self.engines.each_ref().map(|engine| {
                engine.requests().iter().filter(|request| request.line.starts_with("POST")).count()
            })
        };
        let before = posts();
        let reply = self.post(path, stream).await;
        let after = posts();
        assert_eq!(after[0], before[0] + 1, "the first engine is asked");
        (reply, after[1] > before[1])
    }

    async fn post(&self, path: &str, stream: bool) -> Reply {
        let messages = json!([{"role": "user", "content": "hello"}]);
        let body = json!({"model": "tiny", "max_tokens": 9, "messages": messages, "input": "a",
            "prompt": "a", "stream": stream});
        self.cluster.client.post(path, &[], body.to_string()).await.unwrap()
    }
}

fn events(text: &str) -> Vec<Act> {
    vec![Act::Send([stream_head(), chunk(text.as_bytes()), b"0\r\n\r\n".to_vec()].concat())]
}

#[tokio::test]
async fn i3_a_whole_answer_without_results_is_tried_elsewhere() {
    let bench = bench().await;
    for (path, body) in [
        (CHAT, "{}"),
        (CHAT, r#"{"id":"x","choices":null}"#),
        ("/v1/completions", r#"{"detail":"Internal"}"#),
        (CHAT, r#"{"message":"upstream unavailable"}"#),
        ("/v1/embeddings", r#"{"detail":"Not Found"}"#),
        ("/v1/messages", "{}"),
        ("/v1/responses", r#"{"message":"x"}"#),
    ] {
        let (reply, retried) = bench.ask(path, false, &[Act::Send(json(body))]).await;
        // I3.20
        assert_eq!((reply.status.as_u16(), &*reply.body), (200, ANSWER.as_bytes()), "{path} {body}");
        assert!(retried);
    }
    let (reply, _) = bench.ask(CHAT, true, &[Act::Send(json(r#"{"detail":"Not Found"}"#))]).await;
    assert!(String::from_utf8_lossy(&reply.body).contains("good"), "a stream was asked for: {reply:?}");
    let empty = r#"{"id":"x","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":0}}"#;
    for body in [empty, r#"{"choices":[],"logprob":NaN}"#, r#"{"data":[],"choices":[NaN]}"#] {
        let (reply, retried) = bench.ask(CHAT, false, &[Act::Send(json(body))]).await;
        assert_eq!((reply.status.as_u16(), &*reply.body, retried), (200, body.as_bytes(), false));
    }
    let failed =
        bench.cluster.metric(r#"pointsman_legs_total{leg="aggregated",engine="openai",outcome="protocol"}"#);
    assert_eq!(failed.await.unwrap(), [8.0]);
    bench.cluster.at_rest().await.unwrap();
}

/// Sends each part a while after the one before it, and the first one after the head.
fn late(parts: &[&str]) -> Vec<Act> {
    let pause = || Act::Pause(std::time::Duration::from_millis(30));
    let parts = parts.iter().flat_map(|part| [pause(), Act::Send(chunk(part.as_bytes()))]);
    [Act::Send(stream_head())].into_iter().chain(parts).chain([Act::Send(b"0\r\n\r\n".to_vec())]).collect()
}

#[tokio::test]
async fn i3_a_stream_that_ends_before_any_choice_is_tried_elsewhere() {
    let bench = bench().await;
    for acts in [
        events(DONE),
        late(&[DONE]),
        events(&format!("{ROLE}{DONE}")),
        late(&[ROLE, DONE]),
        late(&[ROLE]),
        late(&["data: {\"detail\":\"x\"}\n\n", DONE]),
    ] {
        let (reply, retried) = bench.ask(CHAT, true, &acts).await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        // I3.21
        assert!(reply.status == 200 && text.contains("good") && text.ends_with(DONE), "{acts:?}: {text}");
        assert!(retried && text.matches("[DONE]").count() == 1, "{text}");
    }
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":0}}\n\n";
    let (reply, retried) = bench.ask(CHAT, true, &late(&[usage, DONE])).await;
    assert_eq!((&*reply.body, retried), (format!("{usage}{DONE}").as_bytes(), false));
    bench.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i3_a_stream_that_begins_with_bytes_that_are_not_an_event_is_tried_elsewhere() {
    let bench = bench().await;
    let page = "<html>\n<h1>502 Bad Gateway</h1>\n</html>\n\n";
    let in_data = "data: <h1>502 Bad Gateway</h1>\n\n";
    for acts in [
        events(in_data),
        late(&[in_data]),
        events(&format!("{in_data}{DONE}")),
        events(&format!("{page}{ROLE}{DONE}")),
        late(&[": comment\n\n", page, DONE]),
        late(&[ROLE, in_data, DONE]),
        late(&["data: Internal ", "Server Error\n\n"]),
        events("event: error\ndata: <h1>502 Bad Gateway</h1>\n\n"),
    ] {
        let (reply, retried) = bench.ask(CHAT, true, &acts).await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        // I3.25
        assert!(reply.status == 200 && text.contains("good") && text.ends_with(DONE), "{acts:?}: {text}");
        assert!(retried && !text.contains("502") && !text.contains("error"), "{text}");
    }
    // A readable error of the client is the client's.
    let (reply, retried) =
        bench.ask(CHAT, true, &events("data: {\"error\":{\"message\":\"bad\",\"code\":400}}\n\n")).await;
    assert_eq!((reply.status.as_u16(), retried), (400, false), "{reply:?}");
    bench.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i3_bytes_that_are_not_an_event_have_a_status_where_no_other_worker_is_left() {
    let events = events("data: <h1>502 Bad Gateway</h1>\n\n");
    let engines = [RawEngine::serving(move |_| events.clone()).await.unwrap()];
    let cluster = TestClusterBuilder::new().in_turn(&engines).start().await.unwrap();
    let body = json!({"model": "tiny", "stream": true, "messages": [{"role": "user", "content": "hello"}]});
    let reply = cluster.client.post(CHAT, &[], body.to_string()).await.unwrap();
    // I3.25
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (502, "bad_upstream"), "{reply:?}");
    cluster.at_rest().await.unwrap();
}
