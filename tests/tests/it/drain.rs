//! The end of a gateway with open requests: they finish, or end with an error and a record.

#![allow(clippy::disallowed_methods, reason = "clients of tests end with them")]

use std::{fs, net::SocketAddr, path::Path, time::Duration};

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{CHAT, Client, TestCluster, TestClusterBuilder, fountain::Fountain};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

const BODY: &str =
    r#"{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"a slow upload"}]}"#;

/// Sends the head of a request and waits until the gateway asks for the body: the request is admitted then.
async fn begin_upload(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n\
         expect: 100-continue\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        BODY.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut line = [0; 25];
    timeout(Duration::from_secs(10), stream.read_exact(&mut line)).await.unwrap().unwrap();
    assert_eq!(&line, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream
}

async fn cluster(drain: Duration) -> TestCluster {
    TestClusterBuilder::new()
        .config(move |config| config.timeouts.drain = drain)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await
}

#[tokio::test]
async fn an_upload_that_began_before_the_drain_is_served() {
    let TestCluster { gateway, sims, .. } = cluster(Duration::from_secs(20)).await;
    let mut upload = begin_upload(gateway.address).await;
    let draining = gateway.state().draining.clone();
    let finish = async {
        draining.cancelled().await;
        for piece in BODY.as_bytes().chunks(30) {
            // Longer than the interval at which the drain counts requests in flight.
            sleep(Duration::from_millis(50)).await;
            upload.write_all(piece).await.unwrap();
        }
        let mut answer = String::new();
        upload.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let ((), answer) =
        timeout(Duration::from_secs(30), async { tokio::join!(gateway.drain(), finish) }).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("\"choices\""), "{answer}");
    assert_eq!(sims[0].state().requests.values().sum::<u64>(), 1);
}

/// Reads until the gateway closes the connection.
async fn rest(stream: &mut TcpStream) -> String {
    let mut text = String::new();
    timeout(Duration::from_secs(10), stream.read_to_string(&mut text)).await.unwrap().unwrap();
    text
}

/// Clients that keep connections would otherwise send all their requests to a gateway that refuses them.
#[tokio::test]
async fn i7_kept_connections_end_when_the_drain_begins() {
    let TestCluster { gateway, sims: _sims, .. } = cluster(Duration::from_secs(20)).await;
    let address = gateway.address;
    let mut upload = begin_upload(address).await;
    let models = "GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n";
    let mut kept = TcpStream::connect(address).await.unwrap();
    kept.write_all(models.as_bytes()).await.unwrap();
    let mut begin = [0; 15];
    kept.read_exact(&mut begin).await.unwrap();
    assert_eq!(&begin, b"HTTP/1.1 200 OK");
    let draining = gateway.state().draining.clone();
    let finish = async {
        draining.cancelled().await;
        // I7.5
        assert!(!rest(&mut kept).await.contains("connection: close"), "it was idle");
        let mut new = TcpStream::connect(address).await.unwrap();
        let post = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-length: {}\r\n\r\n{BODY}",
            BODY.len()
        );
        new.write_all(post.as_bytes()).await.unwrap();
        let refused = rest(&mut new).await;
        assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
        // I7.5
        assert!(refused.contains("\r\nconnection: close\r\n"), "{refused}");
        upload.write_all(BODY.as_bytes()).await.unwrap();
        let served = rest(&mut upload).await;
        assert!(served.starts_with("HTTP/1.1 200 OK\r\n"), "{served}");
    };
    timeout(Duration::from_secs(30), async { tokio::join!(gateway.drain(), finish) }).await.unwrap();
}

/// Asks on a kept connection as the drain begins. Returns what the gateway sends until the connection ends;
/// `None`: it ended without an answer, when a busy machine had used up the second.
async fn ask_as_the_drain_begins() -> Option<String> {
    let TestCluster { gateway, sims: _sims, .. } = cluster(Duration::from_secs(20)).await;
    let mut kept = TcpStream::connect(gateway.address).await.unwrap();
    kept.write_all(b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n").await.unwrap();
    let mut begin = [0; 15];
    kept.read_exact(&mut begin).await.unwrap();
    let draining = gateway.state().draining.clone();
    let begun = Instant::now();
    let ask = async {
        draining.cancelled().await;
        // No request is in flight. The pause outlasts the interval at which the drain counts them.
        sleep(Duration::from_millis(100)).await;
        let head = format!("POST {CHAT} HTTP/1.1\r\nhost: gateway\r\ncontent-length: {}\r\n\r\n", BODY.len());
        kept.write_all((head + BODY).as_bytes()).await?;
        let mut text = String::new();
        kept.read_to_string(&mut text).await?;
        std::io::Result::Ok(text)
    };
    let ask = async { (ask.await, begun.elapsed() >= Duration::from_secs(1)) };
    let both = timeout(Duration::from_secs(30), async { tokio::join!(gateway.drain(), ask) });
    let ((), (answers, is_late)) = both.await.unwrap();
    let has_answer = answers.as_ref().is_ok_and(|text| text.contains("HTTP/1.1 "));
    (has_answer || !is_late).then(|| answers.unwrap())
}

/// Proxies repeat no POST that was on its way when its kept connection ended.
#[tokio::test]
async fn i7_a_request_that_comes_on_a_kept_connection_as_the_drain_begins_is_answered() {
    for _ in 0..10 {
        let Some(answers) = ask_as_the_drain_begins().await else { continue };
        // I7.5
        let (_, last) = answers.rsplit_once("HTTP/1.1 ").expect("the connection ended before the answer");
        assert!(last.starts_with("503 ") && last.contains("\r\nconnection: close\r\n"), "{answers}");
        return;
    }
    panic!("the machine was too busy ten times");
}

#[tokio::test]
async fn an_upload_that_does_not_end_holds_the_drain_no_longer_than_its_limit() {
    let TestCluster { gateway, sims, .. } = cluster(Duration::from_millis(300)).await;
    let mut upload = begin_upload(gateway.address).await;
    upload.write_all(&BODY.as_bytes()[..20]).await.unwrap();
    // The limit is 0.3 s, and half a second for connections to close. The rest is for a machine that is busy.
    timeout(Duration::from_secs(10), gateway.drain()).await.expect("the drain ends");
    assert_eq!(sims[0].state().requests.values().sum::<u64>(), 0, "half a request reached an engine");
}

#[tokio::test]
async fn a_gateway_that_is_dropped_stops_to_listen() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let (clients, operators) = (cluster.gateway.address, cluster.gateway.admin);
    drop(cluster);
    for address in [clients, operators] {
        let ended = async {
            while TcpStream::connect(address).await.is_ok() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(Duration::from_secs(10), ended).await.expect("the listener is closed");
    }
}

/// A chat for an engine that makes a token every 20 ms.
fn long_chat(stream: bool, tokens: u32) -> String {
    json!({
        "model": "tiny", "stream": stream, "max_tokens": tokens, "ignore_eos": true,
        "messages": [{ "role": "user", "content": "x" }],
    })
    .to_string()
}

/// Code and output tokens of each request in a decision log, sorted.
pub(crate) fn outcomes(log: &Path) -> Vec<(String, u64)> {
    let mut files: Vec<_> = fs::read_dir(log).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "zst"));
    let text = files.iter().flat_map(|file| zstd::stream::decode_all(fs::File::open(file).unwrap()).unwrap());
    let text = String::from_utf8(text.collect()).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let one = |line: Value| {
        let code = line.pointer("/outcome/code")?.as_str()?.to_owned();
        Some((code, line["output_tokens"].as_u64().unwrap_or(0)))
    };
    let mut outcomes: Vec<_> = lines.filter_map(one).collect();
    outcomes.sort();
    outcomes
}

#[tokio::test]
async fn i7_requests_that_outlast_the_drain_end_with_an_error_and_a_record() {
    let dir = tempfile::tempdir().unwrap();
    let itl = Duration::from_millis(20);
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.timeouts.drain = Duration::from_secs(3);
            config.decisions.log_dir = Some(dir.path().to_owned());
            config.queue.limit = 4;
        })
        .sim_with(
            SimConfig { itl, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) },
            ",max_concurrency=3",
        )
        .start()
        .await;
    let address = cluster.gateway.address;
    let post = |tokens| {
        let answer = async move { Client::new(address).post(CHAT, &[], long_chat(false, tokens)).await };
        tokio::spawn(answer)
    };
    let stream = cluster.client.stream(CHAT, &[], long_chat(true, 5_000)).await.unwrap();
    let (short, whole) = (post(40), post(5_000));
    cluster.until("three run", |cluster| cluster.booked() == 3).await.unwrap();
    // One of them runs when the short one has ended.
    let waiting = [post(5_000), post(5_000)];
    cluster.until("two wait", |cluster| cluster.gateway.state().queue.waiting() == 2).await.unwrap();
    let mut upload = begin_upload(address).await;
    let TestCluster { gateway, sims: _sims, .. } = cluster;
    timeout(Duration::from_secs(20), gateway.drain()).await.unwrap();
    // I7.13
    assert_eq!(short.await.unwrap().unwrap().status, 200);
    for answer in [whole].into_iter().chain(waiting) {
        let answer = answer.await.unwrap().unwrap();
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (503, "draining"));
    }
    let events = stream.all().await.unwrap();
    let (last, before) = events.split_last().unwrap();
    assert!(last.contains(r#""code":"draining""#) && before.len() > 10, "{last}");
    let refused = rest(&mut upload).await;
    assert!(refused.starts_with("HTTP/1.1 503 ") && refused.contains("draining"), "{refused}");
    // I7.13
    let recorded = outcomes(dir.path());
    let codes: Vec<&str> = recorded.iter().map(|(code, _)| code.as_str()).collect();
    assert_eq!(codes, ["draining", "draining", "draining", "draining", "ok"]);
    assert!(recorded[3].1 > 10 && recorded[4].1 == 40, "the stream and the short one: {recorded:?}");
}

/// Nothing can be told to a client that does not read.
#[tokio::test]
async fn i7_a_client_that_does_not_read_ends_with_the_drain_and_is_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let fountain = Fountain::start().unwrap();
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.timeouts.drain = Duration::from_millis(600);
            config.decisions.log_dir = Some(dir.path().to_owned());
            config.workers.push(WorkerSpec::parse_flag(&fountain.flag()).unwrap());
        })
        .start()
        .await;
    let mut client = TcpStream::connect(cluster.gateway.address).await.unwrap();
    let body = long_chat(true, 5_000);
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: gateway\r\ncontent-length: {}\r\n\r\n", body.len());
    client.write_all((head + &body).as_bytes()).await.unwrap();
    client.read_exact(&mut [0; 15]).await.unwrap();
    let mut before = 0;
    while fountain.written() != before {
        before = fountain.written();
        sleep(Duration::from_millis(300)).await;
    }
    timeout(Duration::from_secs(10), cluster.gateway.drain()).await.expect("the drain ends");
    // I7.13
    assert_eq!(outcomes(dir.path()).first().map(|(code, _)| code.as_str()), Some("draining"));
}
