//! Clients of HTTP/1 that send bytes behind a request: requests that are pipelined, and the line end of old
//! clients.

use std::time::Duration;

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    Act, CHAT, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw::{send, until_mark},
    raw_engine::{chunk, stream_head},
    tls::{Authority, TlsFiles, connect},
};
use pointsman_workers::WorkerSpec;
use serde_json::json;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    time::sleep,
};

/// More bytes than the HTTP server reads ahead. The kernel's buffer holds them.
const LONG: usize = 48 * 1024;

fn request(content: &str, stream: bool) -> String {
    let body = json!({
        "model": "tiny", "max_tokens": 4, "stream": stream, "messages": [{"role": "user", "content": content}],
    })
    .to_string();
    format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// An engine that never answers, or never ends a stream.
async fn hung() -> RawEngine {
    let begun = || {
        let delta = json!({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]});
        Act::Send([stream_head(), chunk(format!("data: {delta}\n\n").as_bytes())].concat())
    };
    let script = move |request: &RawRequest| match request.body.contains("\"stream\":true") {
        true => vec![begun(), Act::Hang],
        false => vec![Act::Hang],
    };
    RawEngine::serving(script).await
}

fn worker(engine: &RawEngine) -> WorkerSpec {
    WorkerSpec::parse_flag(&format!("role=aggregated,engine=vllm,url=http://{}", engine.address)).unwrap()
}

/// Sends a request and bytes behind it, and leaves once the engine has the request.
async fn leave(
    cluster: &TestCluster,
    engine: &RawEngine,
    what: &str,
    rest: &[u8],
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
) {
    let text = request("hello", what.contains("stream"));
    // The first bytes come in one read with the request, the others later.
    let (with, later) = rest.split_at(rest.len().min(1));
    stream.write_all(&[text.as_bytes(), with].concat()).await.unwrap();
    stream.flush().await.unwrap();
    cluster.until("the engine has it", |_| engine.open() == 1).await.unwrap();
    stream.write_all(later).await.unwrap();
    stream.flush().await.unwrap();
    sleep(Duration::from_millis(50)).await;
    assert_eq!(engine.open(), 1, "{what}: the client is still there");
    stream.shutdown().await.unwrap();
    cluster.until("the engine is free", |_| engine.open() == 0).await.unwrap();
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i7_a_client_that_leaves_is_noticed_although_bytes_behind_its_request_are_unread() {
    let engine = hung().await;
    let spec = worker(&engine);
    let cluster = TestClusterBuilder::new().config(|config| config.workers.push(spec)).start().await;
    let next = request("next", false).into_bytes();
    let long = request(&"x".repeat(LONG), false).into_bytes();
    for (name, rest) in [("line end", b"\r\n".to_vec()), ("request", next), ("long request", long)] {
        for kind in ["whole", "stream"] {
            let mut client = send(cluster.gateway.address, "").await.unwrap();
            // I7.14
            leave(&cluster, &engine, &format!("{name}, {kind}"), &rest, &mut client).await;
        }
    }
}

#[tokio::test]
async fn i7_the_same_holds_over_tls() {
    let engine = hung().await;
    let spec = worker(&engine);
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.workers.push(spec);
            config.server.tls = Some(files.tls());
        })
        .start()
        .await;
    let config = authority.client(None, &["http/1.1"]).unwrap();
    let long = request(&"x".repeat(LONG), false).into_bytes();
    for (name, rest) in [("line end", b"\r\n".to_vec()), ("long request", long)] {
        let mut client = connect(cluster.gateway.address, &config).await.unwrap();
        // I7.14
        leave(&cluster, &engine, name, &rest, &mut client).await;
    }
}

#[tokio::test]
async fn f7_a_client_that_leaves_gives_its_place_back_although_bytes_behind_its_request_are_unread() {
    let engine = hung().await;
    let spec = worker(&engine);
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.workers.push(spec);
            (config.queue.limit, config.queue.max_inflight) = (8, 1);
        })
        .start()
        .await;
    let runs = send(cluster.gateway.address, request("runs", false)).await.unwrap();
    cluster.until("the engine has it", |_| engine.open() == 1).await.unwrap();
    let waits = send(cluster.gateway.address, request("waits", true) + "\r\n").await.unwrap();
    cluster.until_counted("pointsman_queued_requests", 1.0).await.unwrap();
    drop(waits);
    let is_one = |cluster: &TestCluster| cluster.gateway.state().metrics.inflight.get() == 1;
    // F7.4
    cluster.until("the place is free", is_one).await.unwrap();
    drop(runs);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i7_requests_that_are_pipelined_while_another_runs_are_answered_in_turn() {
    let slow = SimConfig {
        overhead: Duration::from_millis(300),
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    let cluster = TestClusterBuilder::new().sim_with(slow, "").start().await;
    let mut client = send(cluster.gateway.address, request("first", false) + "\r\n").await.unwrap();
    cluster.until("it runs", |cluster| cluster.booked() == 1).await.unwrap();
    for content in ["second", &"x".repeat(LONG), &"y".repeat(LONG)] {
        client.write_all((request(content, false) + "\r\n").as_bytes()).await.unwrap();
        sleep(Duration::from_millis(20)).await;
    }
    let mut text = String::new();
    for _ in 0..4 {
        text += &until_mark(&mut client, "\"usage\"").await;
    }
    // I7.14
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 4, "{text}");
    client.shutdown().await.unwrap();
    client.read_to_end(&mut Vec::new()).await.unwrap();
    cluster.at_rest().await.unwrap();
}
