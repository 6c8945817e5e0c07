//! Answers that say 200 and have no result (I3.20, I3.21): another worker is tried.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use pointsman_tests::{
    Act, CHAT, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{DONE, chunk, json, stream_head},
};
use serde_json::{Value, json};

const MS: Duration = Duration::from_millis(1);
const ANSWER: &str = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"good"},"finish_reason":"stop"}],"data":[],"content":[],"output":[]}"#;
const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";

/// A gateway in front of an engine that answers as it is told, which is preferred, and one that answers well.
struct Bench {
    engines: [RawEngine; 2],
    cluster: TestCluster,
    acts: Arc<Mutex<Vec<Act>>>,
}

async fn bench() -> Bench {
    let acts = Arc::new(Mutex::new(Vec::new()));
    let told = acts.clone();
    let odd = RawEngine::serving(move |_| told.lock().clone()).await;
    let good = RawEngine::serving(|request: &RawRequest| {
        let events = format!("{ROLE}{}{DONE}", ROLE.replace("\"content\":\"\"", "\"content\":\"good\""));
        let stream = [stream_head(), chunk(events.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
        vec![Act::Send(if request.body.contains("\"stream\":true") { stream } else { json(ANSWER) })]
    });
    let engines = [odd, good.await];
    let cluster = TestClusterBuilder::new().in_turn(&engines).start().await;
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
    let pause = || Act::Pause(30 * MS);
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
    let engines = [RawEngine::serving(move |_| events.clone()).await];
    let cluster = TestClusterBuilder::new().in_turn(&engines).start().await;
    let body = json!({"model": "tiny", "stream": true, "messages": [{"role": "user", "content": "hello"}]});
    let reply = cluster.client.post(CHAT, &[], body.to_string()).await.unwrap();
    // I3.25
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (502, "bad_upstream"), "{reply:?}");
    cluster.at_rest().await.unwrap();
}

/// What engines send at the beginning of a response and of a message, before they generate anything.
fn announced(path: &str) -> [&'static str; 2] {
    match path {
        "/v1/responses" => [
            "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"object\":\"response\",\"status\":\"in_progress\"},\"sequence_number\":0}\n\n",
            "event: response.in_progress\ndata: {\"type\":\"response.in_progress\",\"response\":{\"id\":\"r\"},\"sequence_number\":1}\n\n",
        ],
        _ => [
            "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"usage\":{\"input_tokens\":2,\"output_tokens\":0}}}\n\n",
            "event: ping\ndata: {\"type\":\"ping\"}\n\n",
        ],
    }
}

/// The token and the end of such an answer.
fn answer_events(path: &str) -> String {
    match path {
        "/v1/responses" => "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"good\",\"sequence_number\":2}\n\nevent: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"object\":\"response\",\"status\":\"completed\"},\"sequence_number\":3}\n\n",
        _ => "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"good\"}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    }
    .to_owned()
}

const ANNOUNCED: [&str; 2] = ["/v1/responses", "/v1/messages"];

/// A gateway in front of an engine that announces an answer and then does as it is told, and one that
/// answers.
async fn announcing(path: &'static str, comment: Duration) -> Bench {
    let acts = Arc::new(Mutex::new(Vec::new()));
    let told: Arc<Mutex<Vec<Act>>> = acts.clone();
    let odd = RawEngine::serving(move |_| {
        let [first, second] = announced(path).map(|event| Act::Send(chunk(event.as_bytes())));
        let begin = [Act::Send(stream_head()), first, Act::Pause(30 * MS), second];
        begin.into_iter().chain(told.lock().iter().cloned()).collect()
    });
    let good = move |_: &RawRequest| {
        let events = announced(path).concat() + &answer_events(path);
        vec![Act::Send([stream_head(), chunk(events.as_bytes()), b"0\r\n\r\n".to_vec()].concat())]
    };
    let engines = [odd.await, RawEngine::serving(good).await];
    let cluster = TestClusterBuilder::new()
        .in_turn(&engines)
        .config(|config| config.timeouts.stream_comment = comment)
        .start()
        .await;
    Bench { engines, cluster, acts }
}

fn named_body(path: &str, more: Value) -> String {
    let mut body = json!({"model": "tiny", "max_tokens": 9, "stream": true, "store": false, "input": "a",
        "messages": [{"role": "user", "content": "hello"}]});
    body.as_object_mut().unwrap().remove(if path == "/v1/messages" { "input" } else { "messages" });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

#[tokio::test]
async fn i3_a_response_or_message_that_was_only_announced_is_tried_elsewhere() {
    let error = |path: &str| match path {
        "/v1/responses" => "event: error\ndata: {\"type\":\"error\",\"code\":500,\"message\":\"x\"}\n\n",
        _ => {
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"x\"}}\n\n"
        }
    };
    for path in ANNOUNCED {
        let bench = announcing(path, Duration::ZERO).await;
        for then in [
            vec![Act::Pause(50 * MS), Act::Reset],
            vec![Act::Pause(50 * MS), Act::Send(b"0\r\n\r\n".to_vec())],
            vec![Act::Send(chunk(error(path).as_bytes())), Act::Send(b"0\r\n\r\n".to_vec())],
        ] {
            *bench.acts.lock() = then.clone();
            let reply = bench.cluster.client.post(path, &[], named_body(path, json!({}))).await.unwrap();
            let text = String::from_utf8_lossy(&reply.body).into_owned();
            // I3.17
            assert_eq!(text, announced(path).concat() + &answer_events(path), "{path} {then:?}");
        }
        bench.cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i3_an_announcement_waits_for_the_answer_while_comments_keep_the_connection() {
    for path in ANNOUNCED {
        let ping = chunk(b"event: ping\ndata: {\"type\":\"ping\"}\n\n");
        // Its pings come more often than keep-alives are due.
        let silence = (0..30).flat_map(|_| [Act::Pause(50 * MS), Act::Send(ping.clone())]);
        let rest = [Act::Send(chunk(answer_events(path).as_bytes())), Act::Send(b"0\r\n\r\n".to_vec())];
        let Bench { engines, cluster, acts } = announcing(path, 400 * MS).await;
        *acts.lock() = silence.chain(rest).collect();
        let reply = cluster.client.post(path, &[], named_body(path, json!({}))).await.unwrap();
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        let (keep_alives, events) = text.split_at(text.find(announced(path)[0]).unwrap());
        let keep_alive =
            if path == "/v1/messages" { "event: ping\ndata: {\"type\": \"ping\"}\n\n" } else { " \n" };
        // I3.8, I3.17
        assert!(keep_alives.matches(keep_alive).count() >= 3, "{text}");
        assert_eq!(keep_alives.replace(keep_alive, ""), "");
        assert!(events.starts_with(announced(path)[0]) && events.ends_with(&answer_events(path)), "{text}");
        assert_eq!(engines[1].requests().iter().filter(|seen| seen.line.starts_with("POST")).count(), 0);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i3_an_announcement_does_not_wait_for_long() {
    for (path, comment) in ANNOUNCED.into_iter().map(|path| (path, 50 * MS)) {
        let ping = chunk(b"event: ping\ndata: {\"type\":\"ping\"}\n\n");
        let pings = (0..200).flat_map(|_| [Act::Pause(20 * MS), Act::Send(ping.clone())]);
        for silence in [vec![Act::Hang], pings.chain([Act::Hang]).collect()] {
            let bench = announcing(path, comment).await;
            *bench.acts.lock() = silence;
            let mut stream =
                bench.cluster.client.stream(path, &[], named_body(path, json!({}))).await.unwrap();
            let [first, second] = announced(path).map(str::trim_end);
            let read = async {
                let mut read = Vec::new();
                while !read.iter().any(|event| event == second) {
                    read.push(stream.next().await.unwrap().unwrap());
                }
                read
            };
            // I3.17: the engine's second event is sent at once, and nothing of an answer follows
            let read = tokio::time::timeout(Duration::from_secs(10), read).await.unwrap();
            assert!(read.iter().any(|event| event == first), "{path}: {read:?}");
        }
    }
}

#[tokio::test]
async fn i3_a_response_in_the_background_is_announced_at_once() {
    let bench = announcing(ANNOUNCED[0], Duration::ZERO).await;
    *bench.acts.lock() = vec![Act::Hang];
    let body = named_body(ANNOUNCED[0], json!({"background": true}));
    let mut stream = bench.cluster.client.stream(ANNOUNCED[0], &[], body).await.unwrap();
    // I3.17: its client needs the id.
    let first = tokio::time::timeout(Duration::from_secs(10), stream.next()).await.unwrap().unwrap();
    assert!(format!("{first:?}").contains("response.created"), "{first:?}");
}

/// Both legs of SGLang run together, and the prefill engine has sampled the first token.
#[tokio::test]
async fn i3_a_decode_engine_of_sglang_that_answers_without_a_choice_has_failed() {
    let acts = Arc::new(Mutex::new(Vec::new()));
    let told = acts.clone();
    let prefill = RawEngine::serving(|_| vec![Act::Send(json(ANSWER))]).await;
    let decode = RawEngine::serving(move |_| told.lock().clone()).await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            for (id, role, engine) in [(1, "prefill", &prefill), (2, "decode", &decode)] {
                config
                    .workers
                    .push(engine.worker(&format!("id={id},role={role},engine=sglang,bootstrap_port=8998")));
            }
        })
        .start()
        .await;
    let stream = [events(DONE), late(&[DONE]), events(&format!("{ROLE}{DONE}")), late(&[ROLE])];
    let stream = stream.into_iter().map(|acts| (true, acts));
    for (stream, what) in stream.chain([(false, vec![Act::Send(json("{}"))])]) {
        *acts.lock() = what.clone();
        let body = json!({"model": "tiny", "max_tokens": 9, "stream": stream,
            "messages": [{"role": "user", "content": "hello"}]});
        let reply = cluster.client.post(CHAT, &[], body.to_string()).await.unwrap();
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        // I3.20, I3.21
        assert!(text.contains(r#""error""#) && !text.contains("[DONE]"), "{what:?}: {reply:?}");
        assert!(reply.status == 502 || stream, "{what:?}: {reply:?}");
    }
    cluster.at_rest().await.unwrap();
}
