//! Answers of engines, byte by byte: server-sent events as the standard has them, errors in disguise, and
//! answers that break HTTP. Connections that are out of step are not used again.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use pointsman_gateway::config::Config;
use pointsman_tests::{
    Act, COMPLETIONS, Client, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{ANSWER, MODELS, chunk, json, stream_head},
};
use pointsman_workers::WorkerSpec;
use serde_json::Value;
use tokio::time::Instant;

const TOKEN: &str = r#"data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}"#;
const LAST: &str = r#"data: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}"#;

const MS: Duration = Duration::from_millis(1);

fn body(stream: bool, good: bool) -> String {
    let prompt = if good { "good" } else { "bad" };
    format!(r#"{{"model":"tiny","prompt":"{prompt}","stream":{stream}}}"#)
}

/// A gateway in front of one engine that answers as it is told, and prompts with `good` as it should.
struct Bench {
    engine: RawEngine,
    cluster: TestCluster,
    acts: Arc<Mutex<Vec<Act>>>,
}

impl Bench {
    fn answer(&self, acts: Vec<Act>) {
        *self.acts.lock() = acts;
    }
}

async fn bench(change: impl FnOnce(&mut Config)) -> Bench {
    let acts = Arc::new(Mutex::new(Vec::new()));
    let told = acts.clone();
    let engine = RawEngine::start(move |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(MODELS))],
        line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
        _ if request.body.contains("good") => vec![Act::Send(json(ANSWER))],
        _ => told.lock().clone(),
    })
    .await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.workers.push(engine.worker("id=1,role=aggregated,engine=openai"));
            config.server.threads = 1;
            config.timeouts.head = Duration::from_secs(1);
            config.timeouts.whole_head = Duration::from_secs(1);
            config.timeouts.event_idle = Duration::from_secs(1);
            config.routing.quarantine = Duration::ZERO;
            change(config);
        })
        .start()
        .await;
    Bench { engine, cluster, acts }
}

fn events(parts: &[&str]) -> Vec<Act> {
    vec![Act::Send([stream_head(), chunk(parts.concat().as_bytes()), b"0\r\n\r\n".to_vec()].concat())]
}

/// The whole text of a streamed answer.
async fn streamed(cluster: &TestCluster) -> (u16, String) {
    let started = Instant::now();
    let reply = cluster.client.post(COMPLETIONS, &[], body(true, false)).await.unwrap();
    // An endless answer has to be ended. The limit is generous, for busy machines.
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    (reply.status.as_u16(), String::from_utf8_lossy(&reply.body).into_owned())
}

async fn serves_on(cluster: &TestCluster) {
    let reply = cluster.client.post(COMPLETIONS, &[], body(false, true)).await.unwrap();
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!((reply.status.as_u16(), text.as_str()), (200, ANSWER), "the next request");
}

#[tokio::test]
async fn a_stream_is_read_as_the_standard_has_it() {
    let done = "data: [DONE]";
    let joined = |end: &str| format!("{TOKEN}{end}{end}{LAST}{end}{end}{done}{end}{end}");
    let cases = [
        ("LF", joined("\n")),
        ("CRLF", joined("\r\n")),
        ("CR", joined("\r")),
        ("a BOM", format!("\u{feff}{TOKEN}\n\n{LAST}\n\n{done}\n\n")),
        ("comments", format!(": hello\n\n{TOKEN}\n\n:\n\n{LAST}\n: x\n\n{done}\n\n")),
        (
            "event and id",
            format!("event: token\nid: 1\n{TOKEN}\n\nid: 2\n{LAST}\n\nevent: end\nid\n{done}\n\n"),
        ),
        ("fields behind data", format!("retry: 10\n\n{TOKEN}\nid: 7\n\n{LAST}\nevent: last\n\n{done}\n\n")),
        ("an empty name and id", format!("event:\nid:\n{TOKEN}\n\n{LAST}\n\n{done}\n\n")),
        ("data in two lines", format!("data: {{\"choices\":\ndata: []}}\n\n{LAST}\n\n{done}\n\n")),
    ];
    let bench = bench(|_| {}).await;
    let cluster = &bench.cluster;
    let (mut complete, mut bytes) = (0, 0);
    for (name, text) in cases {
        for pieces in [false, true] {
            let acts = if pieces {
                let bytes = text.bytes().map(|byte| Act::Send(chunk(&[byte])));
                [Act::Send(stream_head())]
                    .into_iter()
                    .chain(bytes)
                    .chain([Act::Send(b"0\r\n\r\n".to_vec())])
                    .collect()
            } else {
                events(&[&text])
            };
            bench.answer(acts);
            let (status, seen) = streamed(cluster).await;
            // I3.3, I3.4, I3.5
            assert_eq!((status, seen.as_str()), (200, text.trim_start_matches('\u{feff}')), "{name}");
            let metrics = cluster.metrics_text().await.unwrap();
            complete += 1;
            let line = format!(r#"status="200",code="ok"}} {complete}"#);
            assert!(metrics.contains(&line), "{name}: the stream is complete");
            bytes += text.len();
            let line = format!("pointsman_relayed_bytes_total {bytes}\n");
            assert!(metrics.contains(&line), "{name}: its bytes are counted when it has ended");
        }
    }
}

#[tokio::test]
async fn i3_a_whole_answer_may_have_numbers_that_json_lacks() {
    let bench = bench(|config| config.routing.retries = 0).await;
    let whole = ANSWER.replace(r#""finish"#, r#""logprobs":[-Infinity,NaN],"finish"#);
    bench.answer(vec![Act::Send(json(&whole))]);
    let reply = bench.cluster.client.post(COMPLETIONS, &[], body(false, false)).await.unwrap();
    // I3.14
    assert_eq!((reply.status.as_u16(), reply.body.as_ref()), (200, whole.as_bytes()));
    bench.answer(vec![Act::Send(json(&whole[..whole.len() - 1]))]);
    let reply = bench.cluster.client.post(COMPLETIONS, &[], body(false, false)).await.unwrap();
    // I3.14
    assert_eq!(reply.status, 502, "{reply:?}");
}

/// A client that reads gets events of any size: a whole tool call, or the ids of a long prompt.
#[tokio::test]
async fn i5_a_large_event_reaches_a_client_that_reads() {
    let bench = bench(|config| config.timeouts.event_idle = Duration::from_secs(30)).await;
    for mib in [1, 15] {
        let large = TOKEN.replace(r#""a""#, &format!(r#""{}""#, "a".repeat(mib << 20)));
        let whole = format!("{TOKEN}\n\n{large}\n\n{LAST}\n\ndata: [DONE]\n\n");
        bench.answer(events(&[&whole]));
        let (status, seen) = streamed(&bench.cluster).await;
        // I5.5
        assert!((status, seen.len()) == (200, whole.len()) && seen == whole, "{mib} MiB: {}", seen.len());
    }
    bench.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i3_a_whole_answer_may_lack_its_last_blank_line_or_its_end_mark() {
    let whole = format!("{TOKEN}\n\n{LAST}\n\ndata: [DONE]\n\n");
    let cases = [
        ("no blank line", format!("{TOKEN}\n\n{LAST}\n\ndata: [DONE]")),
        ("half of it", format!("{TOKEN}\n\n{LAST}\n\ndata: [DONE]\n")),
        ("no end mark", format!("{TOKEN}\n\n{LAST}\n\n")),
        ("neither", format!("{TOKEN}\n\n{LAST}")),
        ("empty keep-alives", format!("data:\n\n{TOKEN}\n\ndata: \n\n{LAST}\n\ndata: [DONE]\n\n")),
    ];
    let bench = bench(|config| config.routing.retries = 0).await;
    for (count, (name, text)) in (1..).zip(cases) {
        bench.answer(events(&[&text]));
        // I3.9, I3.10
        assert_eq!(streamed(&bench.cluster).await, (200, whole.clone()), "{name}");
        let ok =
            bench.cluster.metric(r#"pointsman_legs_total{leg="aggregated",engine="openai",outcome="ok"}"#);
        assert_eq!(ok.await.unwrap(), [f64::from(count)], "{name}");
    }
    // The connection may break after a whole answer.
    let whole_body =
        [stream_head(), chunk(format!("{TOKEN}\n\n{LAST}\n\ndata: [DONE]\n").as_bytes())].concat();
    bench.answer(vec![Act::Send(whole_body), Act::Close]);
    // I3.1, I3.9
    assert_eq!(streamed(&bench.cluster).await, (200, whole));
    bench.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i3_a_stream_that_lacks_a_part_of_its_answer_is_not_completed() {
    let ended = format!("{TOKEN}\n\n{LAST}\n\n");
    let empty_reason = TOKEN.replace("null", "\"\"");
    assert_ne!(empty_reason, TOKEN);
    let cases = [
        // Which of several choices is whole is not known.
        (ended.clone(), r#""n":2"#),
        // The usage that was asked for.
        (ended, r#""stream_options":{"include_usage":true}"#),
        // An empty reason is not a reason.
        (format!("{empty_reason}\n\n"), r#""n":1"#),
        (format!("{TOKEN}\n\n"), r#""n":1"#),
        (format!("{TOKEN}\n\ndata: {{\"choices\":[{{\"text\":\"cut"), r#""n":1"#),
    ];
    let bench = bench(|config| config.routing.retries = 0).await;
    for (text, fields) in cases {
        bench.answer(events(&[&text]));
        let body = format!(r#"{{"model":"tiny","prompt":"bad","stream":true,{fields}}}"#);
        let reply = bench.cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
        let seen = String::from_utf8_lossy(&reply.body).into_owned();
        // I3.9
        assert!(seen.contains("bad_upstream") && !seen.contains("[DONE]"), "{text} {fields}: {seen}");
    }
    for (path, name) in [("/v1/responses", "response.completed"), ("/v1/messages", "message_stop")] {
        for data in [format!("data: {{\"type\":\"{name}\",\"resp"), String::new()] {
            bench.answer(events(&[&format!("event: {name}\n{data}")]));
            let body = r#"{"model":"tiny","max_tokens":9,"stream":true,"input":"a",
                "messages":[{"role":"user","content":"a"}]}"#;
            let reply = bench.cluster.client.post(path, &[], body).await.unwrap();
            // I3.9
            let seen = String::from_utf8_lossy(&reply.body).into_owned();
            assert!(seen.contains("before its last event") || seen.contains("within an event"), "{seen}");
        }
    }
    bench.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i3_blanks_before_a_whole_answer_keep_its_connection_alive() {
    let bench = bench(|config| config.routing.retries = 0).await;
    let blanks = || Act::Send(chunk(b"\n"));
    let end = [chunk(ANSWER.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    bench.answer(vec![Act::Send(head.to_vec()), blanks(), Act::Pause(20 * MS), blanks(), Act::Send(end)]);
    let reply = bench.cluster.client.post(COMPLETIONS, &[], body(false, false)).await.unwrap();
    // I3.11
    assert_eq!((reply.status.as_u16(), reply.body.trim_ascii()), (200, ANSWER.as_bytes()));
}

#[tokio::test]
async fn i3_a_whole_answer_to_a_request_for_a_stream_passes() {
    let bench = bench(|_| {}).await;
    bench.answer(vec![Act::Send(json(ANSWER))]);
    for _ in 0..3 {
        let reply = bench.cluster.client.post(COMPLETIONS, &[], body(true, false)).await.unwrap();
        // I3.12
        assert_eq!((reply.status.as_u16(), &*reply.body), (200, ANSWER.as_bytes()));
        assert_eq!(reply.headers["content-type"], "application/json");
    }
    bench.cluster.at_rest().await.unwrap();
    let ok = "pointsman_legs_total{leg=\"aggregated\",engine=\"openai\",outcome=\"ok\"}";
    assert_eq!(bench.cluster.metric(ok).await.unwrap(), [3.0], "the engine works");
    for broken in ["[]", "{\"choices\":[", "\"text\""] {
        bench.answer(vec![Act::Send(json(broken))]);
        assert_eq!(streamed(&bench.cluster).await.0, 502, "{broken}");
    }
    bench.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn the_content_type_of_a_stream_is_read_in_any_case_and_with_parameters() {
    let bench = bench(|_| {}).await;
    for content_type in
        ["Text/Event-Stream", "TEXT/EVENT-STREAM ; charset=utf-8", "text/event-stream;charset=UTF-8"]
    {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nConnection: close\r\n\r\n");
        let acts = vec![Act::Send(format!("{head}{LAST}\n\ndata: [DONE]\n\n").into_bytes()), Act::Close];
        bench.answer(acts);
        let (status, text) = streamed(&bench.cluster).await;
        assert!(status == 200 && text.ends_with("[DONE]\n\n"), "{content_type}: {status} {text}");
    }
}

#[tokio::test]
async fn i3_a_stream_is_known_by_its_first_bytes_where_its_content_type_does_not_say_it() {
    let whole = format!("{TOKEN}\n\n{LAST}\n\ndata: [DONE]\n\n");
    let bench = bench(|_| {}).await;
    for kind in ["", "Content-Type: text/plain; charset=utf-8\r\n", "Content-Type: application/json\r\n"] {
        for begin in ["", ": hello\n\n", "event: token\n", "id: 1\n", "\n\n", "\u{feff}"] {
            for piece in [1, 7, 4096] {
                let head = format!("HTTP/1.1 200 OK\r\n{kind}transfer-encoding: chunked\r\n\r\n");
                let text = format!("{begin}{whole}");
                let pieces = text.as_bytes().chunks(piece).map(|piece| Act::Send(chunk(piece)));
                let mut acts = vec![Act::Send(head.into_bytes()), Act::Pause(5 * MS)];
                acts.extend(pieces.chain([Act::Send(b"0\r\n\r\n".to_vec())]));
                bench.answer(acts);
                let reply = bench.cluster.client.post(COMPLETIONS, &[], body(true, false)).await.unwrap();
                let seen = String::from_utf8_lossy(&reply.body).into_owned();
                // I3.13
                let expected = text.trim_start_matches('\u{feff}');
                assert_eq!((reply.status.as_u16(), seen.as_str()), (200, expected), "{kind:?} {begin:?}");
                assert_eq!(reply.headers["content-type"], "text/event-stream", "{kind:?}");
            }
        }
        // What is not a stream is read as before.
        let length = ANSWER.len();
        let head = format!("HTTP/1.1 200 OK\r\n{kind}content-length: {length}\r\n\r\n");
        bench.answer(vec![Act::Send(head.into_bytes()), Act::Pause(5 * MS), Act::Send(ANSWER.into())]);
        let (status, text) = streamed(&bench.cluster).await;
        // I3.12, I3.13
        assert_eq!((status, text.as_str()), (200, ANSWER), "{kind:?}");
        for (page, status) in [("<html>no</html>", 502), ("dat", 502), ("data", 502), ("", 502), (" \n", 502)]
        {
            let head = format!("HTTP/1.1 200 OK\r\n{kind}content-length: {}\r\n\r\n{page}", page.len());
            bench.answer(vec![Act::Send(head.into_bytes())]);
            assert_eq!(streamed(&bench.cluster).await.0, status, "{kind:?} {page:?}");
        }
        // Endless blanks are not waited for.
        let head = format!("HTTP/1.1 200 OK\r\n{kind}transfer-encoding: chunked\r\n\r\n");
        bench.answer(vec![Act::Send(head.clone().into_bytes()), Act::Repeat(chunk(&[b'\n'; 4096]))]);
        assert_eq!(streamed(&bench.cluster).await.0, 502, "{kind:?}");
        bench.answer(vec![Act::Send(head.into_bytes()), Act::Hang]);
        assert_eq!(streamed(&bench.cluster).await.0, 504, "{kind:?}");
    }
    serves_on(&bench.cluster).await;
    bench.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn done_ends_a_stream_whatever_the_body_does_afterwards() {
    let all = format!("{TOKEN}\n\n{LAST}\n\ndata: [DONE]\n\n");
    let start = || Act::Send([stream_head(), chunk(all.as_bytes())].concat());
    let more = chunk(format!("{TOKEN}\n\n").as_bytes());
    let cases = [
        ("is kept open", vec![start(), Act::Hang]),
        ("is reset", vec![start(), Act::Pause(20 * MS), Act::Reset]),
        ("is closed", vec![start(), Act::Pause(20 * MS), Act::Close]),
        (
            "goes on at once",
            vec![Act::Send([stream_head(), chunk(all.as_bytes()), more.clone()].concat()), Act::Hang],
        ),
        ("goes on for ever", vec![start(), Act::Repeat(more.clone())]),
        ("goes on with garbage", vec![start(), Act::Send(b"zzzz\r\n".to_vec()), Act::Hang]),
        (
            "ends, and another answer follows",
            vec![start(), Act::Send([b"0\r\n\r\n".to_vec(), json("{}")].concat())],
        ),
        (
            "stands in the event of the last token",
            vec![
                Act::Send(
                    [
                        stream_head(),
                        chunk(format!("{TOKEN}\n\n{LAST}\n\ndata: [DONE]\n\n{TOKEN}\n\n").as_bytes()),
                    ]
                    .concat(),
                ),
                Act::Hang,
            ],
        ),
    ];
    let Bench { engine, cluster, acts: told } = bench(|_| {}).await;
    serves_on(&cluster).await;
    for (name, acts) in cases {
        let before = engine.connections();
        *told.lock() = acts;
        let (status, text) = streamed(&cluster).await;
        // I3.1
        assert_eq!((status, text.as_str()), (200, all.as_str()), "{name}");
        serves_on(&cluster).await;
        // I3.2
        assert_eq!(engine.connections() - before, 1, "{name}: the connection is not used again");
        cluster.at_rest().await.unwrap();
    }
    // A body that ends as it should leaves its connection for the next request, also if the end comes late.
    let before = engine.connections();
    *told.lock() = vec![start(), Act::Pause(20 * MS), Act::Send(b"0\r\n\r\n".to_vec())];
    assert_eq!(streamed(&cluster).await, (200, all));
    serves_on(&cluster).await;
    // I3.2
    assert_eq!(engine.connections(), before);
}

#[tokio::test]
async fn a_200_that_carries_an_error_is_an_error_streamed_or_not() {
    let server = r#"{"error":{"message":"out of blocks","type":"InternalServerError","code":500}}"#;
    let client = r#"{"error":{"message":"too long","type":"BadRequestError","code":400}}"#;
    let bench = bench(|config| config.routing.retries = 0).await;
    let cluster = &bench.cluster;
    let older = r#"{"object":"error","message":"too long","type":"BadRequestError","code":400}"#;
    let beside = r#"{"choices":[],"error":{"message":"too long","code":"400"}}"#;
    let plain = r#"{"error":"plain text"}"#;
    let twice = r#"{"error":{"message":"too long","code":null},"code":400}"#;
    let word = r#"{"error":{"message":"a","type":"invalid_request_error","code":"context_length_exceeded"}}"#;
    for (error, expected) in
        [(server, 502), (client, 400), (older, 400), (beside, 400), (plain, 502), (twice, 400), (word, 400)]
    {
        let event = format!("data: {error}\n\n");
        for acts in [vec![Act::Send(json(error))], events(&[&event, "data: [DONE]\n\n"])] {
            bench.answer(acts);
            let (status, text) = streamed(cluster).await;
            // I1.4, I1.5
            assert_eq!(status, expected, "{error}: {text}");
            assert!(text.contains("\"error\""), "{text}");
            serves_on(cluster).await;
        }
        bench.answer(vec![Act::Send(json(error))]);
        let reply = cluster.client.post(COMPLETIONS, &[], body(false, false)).await.unwrap();
        assert_eq!(reply.status.as_u16(), expected, "{error}: {reply:?}");
    }
    // An error of a filter of contents, say, is a part of an event.
    let filter = r#"data: {"choices":[],"filters":[{"error":{"code":"x"}}]}"#;
    let passes = format!("{filter}\n\n{TOKEN}\n\n{LAST}\n\ndata: [DONE]\n\n");
    bench.answer(events(&[&passes]));
    // I1.4
    assert_eq!(streamed(cluster).await, (200, passes));
    // In the last event, its blank line may be missing.
    bench.answer(events(&[TOKEN, "\n\ndata: ", client]));
    let (_, text) = streamed(cluster).await;
    // I3.9
    assert!(text.contains("too long"), "{text}");
    // After the first token it is one error event, and nothing follows.
    bench.answer(events(&[TOKEN, "\n\ndata: ", server, "\n\ndata: [DONE]\n\n"]));
    let (status, text) = streamed(cluster).await;
    // I1.5
    assert!(status == 200 && text.contains("out of blocks") && !text.contains("[DONE]"), "{text}");
    let last: Value = serde_json::from_str(text.trim_end().rsplit_once("data: ").unwrap().1).unwrap();
    assert_eq!(last["error"]["code"], "bad_upstream");
    cluster.at_rest().await.unwrap();
}

/// Answers that were tried on the gateway, each with the statuses that a request for a whole answer may get.
#[expect(clippy::too_many_lines, reason = "a table of answers")]
fn broken() -> Vec<(&'static str, Vec<Act>, &'static [u16])> {
    let head = |lines: &str| format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{lines}\r\n");
    let send = |text: String| Act::Send(text.into_bytes());
    let length = ANSWER.len();
    vec![
        (
            "a length that is too long",
            vec![send(head(&format!("content-length: {}\r\n", length + 9)) + ANSWER), Act::Close],
            &[502],
        ),
        (
            "a length that is too short",
            vec![send(head(&format!("content-length: {}\r\n", length - 9)) + ANSWER)],
            &[502],
        ),
        (
            "a length and more behind it",
            vec![send(head(&format!("content-length: {length}\r\n")) + ANSWER + "garbage")],
            &[200],
        ),
        ("two lengths", vec![send(head("content-length: 5\r\ncontent-length: 6\r\n") + ANSWER)], &[502]),
        ("a negative length", vec![send(head("content-length: -1\r\n") + ANSWER)], &[502]),
        (
            "a length over 64 bits",
            vec![send(head("content-length: 99999999999999999999\r\n") + ANSWER)],
            &[502],
        ),
        (
            "a garbage chunk size",
            vec![send(head("transfer-encoding: chunked\r\n") + "zz\r\n" + ANSWER)],
            &[502],
        ),
        (
            "a chunk size over 64 bits",
            vec![send(head("transfer-encoding: chunked\r\n") + "fffffffffffffffff\r\n" + ANSWER)],
            &[502],
        ),
        (
            "a chunk of 16 EiB",
            vec![send(head("transfer-encoding: chunked\r\n") + "ffffffffffffffff\r\n" + ANSWER), Act::Hang],
            &[504],
        ),
        (
            "endless chunk extensions",
            vec![send(head("transfer-encoding: chunked\r\n") + "5;"), Act::Repeat(vec![b'x'; 4096])],
            &[502],
        ),
        (
            "endless trailers",
            vec![send(head("transfer-encoding: chunked\r\n") + "0\r\n"), Act::Repeat(b"a: b\r\n".to_vec())],
            &[502],
        ),
        ("an unknown coding", vec![send(head("transfer-encoding: gzip, chunked\r\n") + "5\r\n")], &[502]),
        (
            "a compressed body",
            vec![send(head("content-encoding: gzip\r\ncontent-length: 3\r\n") + "\u{1f}aa")],
            &[502],
        ),
        ("a head of 200 KB", vec![send(head(&format!("x: {}\r\n", "y".repeat(200_000))) + ANSWER)], &[502]),
        (
            "an endless head",
            vec![send("HTTP/1.1 200 OK\r\nx: ".to_owned()), Act::Repeat(vec![b'y'; 4096])],
            &[502],
        ),
        ("101 headers", vec![send(head(&"x: y\r\n".repeat(101)))], &[502]),
        ("a flood of 1xx heads", vec![Act::Repeat(b"HTTP/1.1 100 Continue\r\n\r\n".to_vec())], &[502]),
        ("a switch of protocols", vec![send("HTTP/1.1 101 Switching Protocols\r\n\r\n".to_owned())], &[502]),
        ("another protocol", vec![send("220 mail ready\r\n".to_owned()), Act::Hang], &[502]),
        ("a head that comes in pieces and stops", vec![send("HTTP/1.1 200 O".to_owned()), Act::Hang], &[504]),
        ("NUL in a header", vec![send(head("x: \0\r\ncontent-length: 2\r\n") + "{}")], &[502]),
        ("an endless body", vec![send(head("")), Act::Repeat(vec![b' '; 65_536])], &[502]),
        (
            "an endless error body",
            vec![send("HTTP/1.1 500 No\r\n\r\n".to_owned()), Act::Repeat(vec![b'e'; 65_536])],
            &[502],
        ),
        ("a body of NUL", vec![Act::Send(json("\0\0\0\0"))], &[502]),
        (
            "a body that is cut with the right length",
            vec![Act::Send(json(ANSWER.get(..length / 2).unwrap()))],
            &[502],
        ),
        ("an empty body", vec![Act::Send(json(""))], &[502]),
        ("no content", vec![send("HTTP/1.1 204 No Content\r\n\r\n".to_owned())], &[502]),
        (
            "a redirect",
            vec![send("HTTP/1.1 302 Found\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n".to_owned())],
            &[502],
        ),
    ]
}

#[tokio::test]
async fn answers_that_break_http_are_errors_and_their_connections_are_not_used_again() {
    let Bench { engine, cluster, acts: told } = bench(|config| config.routing.retries = 0).await;
    serves_on(&cluster).await;
    for (name, acts, expected) in broken() {
        let before = engine.connections();
        *told.lock() = acts;
        let started = Instant::now();
        let reply = cluster.client.post(COMPLETIONS, &[], body(false, false)).await.unwrap();
        assert!(expected.contains(&reply.status.as_u16()), "{name}: {reply:?}");
        assert!(started.elapsed() < Duration::from_secs(30), "{name}: {:?}", started.elapsed());
        serves_on(&cluster).await;
        let reused = engine.connections() == before;
        let intact =
            ["a body of NUL", "a body that is cut with the right length", "an empty body", "no content"];
        assert_eq!(reused, intact.contains(&name), "{name}: is the connection used again?");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i3_an_answer_whose_content_coding_changes_nothing_has_none() {
    let bench = bench(|config| config.routing.retries = 0).await;
    for (lines, expected) in [
        ("content-encoding: \r\n", 200),
        ("content-encoding: identity\r\n", 200),
        ("content-encoding: Identity , identity,\r\n", 200),
        ("content-encoding:\r\ncontent-encoding: identity\r\n", 200),
        ("content-encoding: identity, gzip\r\n", 502),
        ("content-encoding: identity\r\ncontent-encoding: gzip\r\n", 502),
    ] {
        let length = ANSWER.len();
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{lines}content-length: {length}\r\n\r\n"
        );
        bench.answer(vec![Act::Send((head + ANSWER).into_bytes())]);
        let reply = bench.cluster.client.post(COMPLETIONS, &[], body(false, false)).await.unwrap();
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        // I3.26
        assert_eq!(reply.status.as_u16(), expected, "{lines}: {text}");
        assert_eq!(text.contains("content coding `gzip`"), expected == 502, "{lines}: {text}");
        bench.cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn streams_that_break_end_with_one_error_event() {
    let megabyte = chunk(&[b'x'; 1 << 20]);
    let start = |text: &str| Act::Send([stream_head(), chunk(text.as_bytes())].concat());
    let first = format!("{TOKEN}\n\n");
    let cases = [
        ("an event of 100 MB", vec![start("data: "), Act::Repeat(megabyte.clone())]),
        ("a body without events", vec![Act::Send(stream_head()), Act::Repeat(megabyte)]),
        ("NUL between events", vec![start(&first), start_chunk("\0\0\n\n"), Act::Hang]),
        ("half an event", vec![start(&first), start_chunk("data: {\"choices\":[\n\n"), Act::Hang]),
        ("a page", vec![start(&first), start_chunk("<html></html>\n\n"), Act::Hang]),
        ("an end without [DONE]", vec![start(&first), Act::Send(b"0\r\n\r\n".to_vec())]),
        ("a cut within an event", vec![start(&first), start_chunk("data: {\"cho"), Act::Close]),
        ("silence", vec![start(&first), Act::Hang]),
        ("an event byte by byte that never ends", drip()),
    ];
    let bench = bench(|config| config.timeouts.request = Duration::from_secs(20)).await;
    let cluster = &bench.cluster;
    for (name, acts) in cases {
        bench.answer(acts);
        let (status, text) = streamed(cluster).await;
        let last: Value = serde_json::from_str(text.trim_end().rsplit_once("data: ").unwrap().1).unwrap();
        // I1.2
        assert!(status == 200 && last["error"]["code"].is_string(), "{name}: {text}");
        serves_on(cluster).await;
        cluster.at_rest().await.unwrap();
    }
}

fn start_chunk(text: &str) -> Act {
    Act::Send(chunk(text.as_bytes()))
}

/// Bytes every 100 ms, and never an event.
fn drip() -> Vec<Act> {
    let drops = (0..60).flat_map(|_| [Act::Send(chunk(b"x")), Act::Pause(100 * MS)]);
    [Act::Send([stream_head(), chunk(b"data: ")].concat())].into_iter().chain(drops).collect()
}

#[tokio::test]
async fn idle_connections_are_closed_by_time_and_their_number_is_bounded() {
    let acts = vec![Act::Pause(100 * MS), Act::Send(json(ANSWER))];
    let Bench { engine, cluster, acts: told } = bench(|config| {
        config.upstream.idle_connections = 3;
        config.upstream.idle_timeout = 600 * MS;
        config.timeouts.whole_head = Duration::from_secs(5);
    })
    .await;
    *told.lock() = acts;
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..12 {
        let client = Client::new(cluster.gateway.address);
        clients.spawn(async move { client.post(COMPLETIONS, &[], body(false, false)).await.unwrap().status });
    }
    assert!(clients.join_all().await.iter().all(|status| status.as_u16() == 200));
    assert_eq!(engine.connections(), 12);
    cluster.until("no more than three are kept", |_| engine.open() <= 3).await.unwrap();
    assert_eq!(engine.open(), 3);
    // Nothing uses them: time alone closes them.
    cluster.until("all are closed", |_| engine.open() == 0).await.unwrap();
}

#[tokio::test]
async fn an_abort_that_is_never_answered_leaves_no_connection() {
    let probes = |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => Some(vec![Act::Send(json(MODELS))]),
        line if line.starts_with("GET") => Some(vec![Act::Send(json("{}"))]),
        _ => None,
    };
    let hang = move |request: &RawRequest| probes(request).unwrap_or(vec![Act::Hang]);
    let (prefill, decode) = (RawEngine::start(hang).await, RawEngine::start(hang).await);
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.timeouts.abort = 200 * MS;
            config.timeouts.request = Duration::from_secs(2);
            for (role, engine) in [("prefill", &prefill), ("decode", &decode)] {
                config.workers.push(engine.worker(&format!("role={role},engine=sglang")));
            }
        })
        .start()
        .await;
    let sent = |engine: &RawEngine| {
        engine.requests().iter().filter(|request| request.line.contains(COMPLETIONS)).count()
    };
    for turn in 1..=5 {
        let leaving = cluster.client.post(COMPLETIONS, &[], body(true, false));
        let both = |_: &TestCluster| [&prefill, &decode].into_iter().all(|engine| sent(engine) == turn);
        tokio::select! {
            reply = leaving => panic!("the engine never answers: {reply:?}"),
            sent = cluster.until("both legs are sent", both) => sent.unwrap(),
        }
        // The client leaves.
    }
    let aborts = || {
        [&prefill, &decode].map(|engine| {
            engine.requests().iter().filter(|request| request.line.contains("/abort_request")).count()
        })
    };
    cluster.until("aborts were sent to both", |_| aborts().iter().all(|count| *count >= 5)).await.unwrap();
    cluster.at_rest().await.unwrap();
    cluster.until("no connection is open", |_| prefill.open() + decode.open() == 0).await.unwrap();
}

#[tokio::test]
async fn a_url_without_a_port_means_port_80() {
    let answer = |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(MODELS))],
        line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
        _ => vec![Act::Send(json(ANSWER))],
    };
    // Not every machine lets a test listen there.
    let Ok(engine) = RawEngine::start_at("127.0.0.77:80", answer).await else { return };
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            let flag = "id=1,role=aggregated,engine=openai,url=http://127.0.0.77";
            config.workers.push(WorkerSpec::parse_flag(flag).unwrap());
        })
        .start()
        .await;
    serves_on(&cluster).await;
    assert_eq!(engine.requests().len(), 1);
}
