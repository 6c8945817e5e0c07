//! Bodies of 220 KB that arrive slowly, end too early or turn out to be wrong at their end: until a body is
//! whole and checked, it holds no worker and no engine hears of it.

use std::time::Duration;

use pointsman_tests::{
    Act, CHAT, RawEngine, RawRequest, TestCluster, TestClusterBuilder, own_process,
    raw::{resident_bytes, send, until_mark},
    raw_engine::{MODELS, json},
};
use pointsman_workers::WorkerSpec;
use tokio::{io::AsyncWriteExt as _, net::TcpStream, time::sleep};

const ANSWER: &str = r#"{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}]}"#;
/// Size of a prompt, bytes. A body arrives in a dozen reads.
const PROMPT: usize = 220_000;

/// A gateway in front of two engines, which note what they get.
async fn bench() -> (TestCluster, [RawEngine; 2]) {
    let answer = |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(MODELS))],
        line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
        _ => vec![Act::Send(json(ANSWER))],
    };
    let engines = [RawEngine::start(answer).await, RawEngine::start(answer).await];
    let builder = TestClusterBuilder::new().config(|config| {
        for (place, engine) in engines.iter().enumerate() {
            let flag =
                format!("id={},role=aggregated,engine=openai,url=http://{}", place + 1, engine.address);
            config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
        }
    });
    (builder.start().await, engines)
}

fn requests(engines: &[RawEngine]) -> Vec<String> {
    engines.iter().flat_map(RawEngine::requests).map(|request| request.body).collect()
}

fn messages() -> String {
    format!(r#""messages":[{{"role":"user","content":"{}"}}]"#, "words of a prompt ".repeat(PROMPT / 18))
}

/// Sends the head of a chat, in the framing, and the beginning of its body.
async fn begin(cluster: &TestCluster, body: &[u8], chunked: bool, sent: usize) -> TcpStream {
    let framing = if chunked {
        format!("transfer-encoding: chunked\r\n\r\n{:x}\r\n", body.len())
    } else {
        format!("content-length: {}\r\n\r\n", body.len())
    };
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{framing}");
    send(cluster.gateway.address, [head.as_bytes(), &body[..sent]].concat()).await.unwrap()
}

async fn end(mut client: TcpStream, rest: &[u8], chunked: bool) -> String {
    let end: &[u8] = if chunked { b"\r\n0\r\n\r\n" } else { b"" };
    client.write_all(&[rest, end].concat()).await.unwrap();
    until_mark(&mut client, "}").await
}

async fn arrived(cluster: &TestCluster, bytes: usize) {
    let used = |cluster: &TestCluster| cluster.gateway.state().body_bytes.used() == bytes;
    cluster.until(&format!("{bytes} bytes of bodies arrived"), used).await.unwrap();
}

#[tokio::test]
async fn a_large_body_that_is_not_whole_holds_no_worker_and_reaches_no_engine() {
    let (cluster, engines) = bench().await;
    let model_last = format!(r#"{{{},"model":"tiny"}}"#, messages());
    let model_first = format!(r#"{{"model":"tiny",{}}}"#, messages());
    for body in [&model_last, &model_first] {
        for chunked in [false, true] {
            let count = requests(&engines).len();
            // One byte is missing.
            let all_but_one = body.len() - 1;
            let slow = begin(&cluster, body.as_bytes(), chunked, all_but_one).await;
            let cut = begin(&cluster, body.as_bytes(), chunked, all_but_one).await;
            arrived(&cluster, 2 * all_but_one).await;
            sleep(Duration::from_millis(100)).await;
            assert_eq!((cluster.booked(), requests(&engines).len()), (0, count));
            drop(cut);
            arrived(&cluster, all_but_one).await;
            assert_eq!((cluster.booked(), requests(&engines).len()), (0, count));
            let answer = end(slow, &body.as_bytes()[all_but_one..], chunked).await;
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            cluster.at_rest().await.unwrap();
            let got = requests(&engines);
            assert_eq!(got.len(), count + 1);
            assert!(got.contains(body), "the engine got another body than the client sent");
        }
    }
}

#[tokio::test]
async fn a_large_body_that_is_wrong_at_its_end_holds_no_worker_and_reaches_no_engine() {
    let (cluster, engines) = bench().await;
    let start = format!(r#"{{"model":"tiny",{}"#, messages());
    for (rest, status, part) in [
        // No JSON, no UTF-8, bytes after the object, a control character, a surrogate without its pair.
        (&b","[..], "400", "invalid_request"),
        (b",\"user\":\"\xc3\x28\"}", "400", "invalid_request"),
        (b"}}", "400", "invalid_request"),
        (b",\"user\":\"\x01\"}", "400", "invalid_request"),
        (b",\"us\\ud800er\":1}", "400", "invalid_request"),
        // The last one of equal keys counts, as in the engines' parsers.
        (b",\"model\":\"none\"}", "404", "model_not_found"),
        (b",\"messages\":7,\"model\":7}", "400", "invalid_request"),
    ] {
        for chunked in [false, true] {
            let body = [start.as_bytes(), rest].concat();
            let client = begin(&cluster, &body, chunked, start.len()).await;
            arrived(&cluster, start.len()).await;
            assert_eq!(cluster.booked(), 0);
            let answer = end(client, rest, chunked).await;
            let shown = String::from_utf8_lossy(rest);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{shown}: {answer}");
            assert!(answer.contains(part), "{shown}: {answer}");
            cluster.at_rest().await.unwrap();
            assert!(requests(&engines).is_empty(), "{shown}");
        }
    }
    // The same key, and the last value is served: the engine gets both, and its parser takes the same one.
    let body = format!(r#"{{"model":"none",{},"model":"tiny"}}"#, messages());
    let client = begin(&cluster, body.as_bytes(), false, body.len() - 10).await;
    let answer = end(client, &body.as_bytes()[body.len() - 10..], false).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(requests(&engines), [body]);
}

#[tokio::test]
async fn a_declared_length_takes_no_memory_before_its_bytes_arrive() {
    const CLIENTS: usize = 60;
    own_process!();
    let (cluster, _engines) = bench().await;
    let declared = vec![b' '; 30_000_000];
    let before = resident_bytes();
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(begin(&cluster, &declared, false, PROMPT).await);
    }
    arrived(&cluster, CLIENTS * PROMPT).await;
    let grown = resident_bytes().saturating_sub(before);
    // The bytes that arrived are 13 MB, the declared ones 1.8 GB.
    assert!(grown < 60_000_000, "{CLIENTS} clients took {grown} bytes");
    drop(clients);
    arrived(&cluster, 0).await;
}
