//! Times of a request count from its first byte, and its place in the queue from its last one: uploads,
//! deadlines, and clients that leave before anything was sent.

use std::time::Duration;

use bytes::Bytes;
use pointsman_gateway::config::{Config, Model, TokenSource};
use pointsman_sim::{Dialect, Fault, FaultKind, FaultLeg, Role, SimConfig};
use pointsman_tests::{
    CHAT, TestCluster, TestClusterBuilder,
    http2::Http2Client,
    raw::until_mark,
    tls::{Authority, TlsFiles, connect},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::sleep,
};

const BODY: &str =
    r#"{"model":"tiny","max_tokens":2,"stream":true,"messages":[{"role":"user","content":"hello"}]}"#;

/// Sends the head of a chat and the first bytes of its body.
async fn begin(cluster: &TestCluster, bytes: usize) -> TcpStream {
    let mut stream = TcpStream::connect(cluster.gateway.address).await.unwrap();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{}",
        BODY.len(),
        &BODY[..bytes]
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

async fn answer(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

/// Value of a metric without labels.
async fn metric(cluster: &TestCluster, name: &str) -> f64 {
    let text = cluster.metrics_text().await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} is missing")).parse().unwrap()
}

fn inflight(cluster: &TestCluster) -> i64 {
    cluster.gateway.state().metrics.inflight.get()
}

async fn aggregated(change: impl FnOnce(&mut Config)) -> TestCluster {
    let engine = SimConfig { record: 100, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let builder = TestClusterBuilder::new().config(change).sim_with(engine, "");
    builder.start().await
}

#[tokio::test]
async fn a_slow_upload_counts_as_in_flight_and_into_ttft_and_duration() {
    let cluster = aggregated(|_| {}).await;
    let mut stream = begin(&cluster, 10).await;
    cluster.until("the upload is in flight", |cluster| inflight(cluster) == 1).await.unwrap();
    sleep(Duration::from_millis(600)).await;
    stream.write_all(&BODY.as_bytes()[10..]).await.unwrap();
    let answer = answer(stream).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    cluster.at_rest().await.unwrap();
    // The engine itself answers at once: without the upload both would be a few milliseconds.
    for name in ["pointsman_ttft_seconds_sum", "pointsman_request_seconds_sum"] {
        let seconds = metric(&cluster, name).await;
        assert!(seconds >= 0.6, "{name} {seconds}");
    }
}

#[tokio::test]
async fn the_deadline_covers_the_upload() {
    let cluster = aggregated(|config| config.timeouts.request = Duration::from_millis(500)).await;
    let mut stream = begin(&cluster, 10).await;
    // It never pauses for long, and is still late.
    for byte in &BODY.as_bytes()[10..] {
        sleep(Duration::from_millis(20)).await;
        if stream.write_all(&[*byte]).await.is_err() {
            break;
        }
    }
    let answer = answer(stream).await;
    assert!(answer.starts_with("HTTP/1.1 504") && answer.contains(r#""code":"deadline""#), "{answer}");
    assert!(cluster.sims[0].recorded().iter().all(|request| request.path != CHAT));
}

#[tokio::test]
async fn a_client_that_pauses_within_its_body_gets_408() {
    let cluster = aggregated(|config| config.timeouts.body_idle = Duration::from_millis(200)).await;
    let answer = answer(begin(&cluster, 10).await).await;
    // I_request_timeout
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    // I_request_timeout
    assert!(answer.contains(r#""code":"request_timeout""#), "{answer}");
    assert!(answer.contains(r#""type":"invalid_request_error""#), "{answer}");
    cluster.at_rest().await.unwrap();
    let line = "pointsman_requests_total{endpoint=\"chat_completions\",model=\"other\",status=\"408\",code=\"request_timeout\"} 1";
    let text = cluster.metrics_text().await.unwrap();
    assert!(text.contains(line), "{text}");
}

#[tokio::test]
async fn a_client_that_leaves_during_its_upload_is_recorded() {
    let cluster = aggregated(|_| {}).await;
    let stream = begin(&cluster, 10).await;
    cluster.until("the upload is in flight", |cluster| inflight(cluster) == 1).await.unwrap();
    drop(stream);
    cluster.at_rest().await.unwrap();
    let text = cluster.metrics_text().await.unwrap();
    assert!(text.contains("status=\"499\",code=\"client_closed\"} 1"), "{text}");
}

#[tokio::test]
async fn a_client_that_leaves_during_tokenization_causes_no_prefill() {
    let cluster = aggregated(|config| {
        let model = Model {
            tokenizer: Some(TokenSource::Engine),
            tokenizer_timeout: Duration::from_secs(1),
            tokenizer_cache_bytes: 1 << 20,
            ..Model::default()
        };
        config.models.insert("tiny".to_owned(), model);
    })
    .await;
    let hang = Fault { leg: Some(FaultLeg::Tokenize), ..Fault::always(FaultKind::HangBeforeHeaders) };
    cluster.sims[0].set_faults(vec![hang]);
    let stream = begin(&cluster, BODY.len()).await;
    cluster.until("the request is in flight", |cluster| inflight(cluster) == 1).await.unwrap();
    // Less than the tokenizer timeout: the request still waits for its tokens.
    sleep(Duration::from_millis(200)).await;
    drop(stream);
    cluster.at_rest().await.unwrap();
    // More than the tokenizer timeout, after which the request would continue without tokens.
    sleep(Duration::from_millis(1_300)).await;
    let recorded = cluster.sims[0].recorded();
    assert!(recorded.iter().all(|request| request.path != CHAT), "{recorded:?}");
    assert!(cluster.metrics_text().await.unwrap().contains("status=\"499\",code=\"client_closed\"} 1"));
}

/// A whole request.
fn request(connection: &str) -> String {
    let length = BODY.len();
    format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\ncontent-length: {length}\r\n\r\n{BODY}"
    )
}

#[tokio::test]
async fn i7_an_empty_line_before_a_request_is_no_part_of_it() {
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
    let limit = |config: &mut Config| config.timeouts.request = Duration::from_secs(2);
    let plain = aggregated(limit).await;
    let tls = aggregated(|config| {
        limit(config);
        config.server.tls = Some(files.tls());
    })
    .await;
    let mut stream = TcpStream::connect(plain.gateway.address).await.unwrap();
    stream.write_all(request("keep-alive").as_bytes()).await.unwrap();
    until_mark(&mut stream, "[DONE]").await;
    let client = authority.client(None, &["http/1.1"]).unwrap();
    let mut secured = connect(tls.gateway.address, &client).await.unwrap();
    for empty in ["\r\n", "\n"] {
        stream.write_all(empty.as_bytes()).await.unwrap();
        secured.write_all(empty.as_bytes()).await.unwrap();
    }
    sleep(Duration::from_millis(2_100)).await;
    stream.write_all(request("close").as_bytes()).await.unwrap();
    secured.write_all(request("close").as_bytes()).await.unwrap();
    let mut text = String::new();
    secured.read_to_string(&mut text).await.unwrap();
    for text in [answer(stream).await, text] {
        // I7.17
        assert!(text.contains("HTTP/1.1 200 OK"), "{text}");
    }
}

#[tokio::test]
async fn f7_a_request_has_its_place_in_the_queue_from_when_it_was_read_whole() {
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
    let slow = SimConfig {
        record: 100,
        itl: Duration::from_millis(10),
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    let builder = TestClusterBuilder::new().sim_with(slow, "").config(|config| {
        (config.queue.limit, config.queue.max_inflight) = (8, 1);
        config.server.tls = Some(files.tls());
    });
    let cluster = builder.start().await;
    let address = cluster.gateway.address;
    let mut of_h2 = Http2Client::connect(address, &authority.client(None, &["h2"]).unwrap()).await.unwrap();
    let running = of_h2.send("POST", CHAT, &BODY.replace(":2,", ":2000,")).await.unwrap();
    let client = authority.client(None, &["http/1.1"]).unwrap();
    let [mut early, mut whole] =
        [connect(address, &client).await.unwrap(), connect(address, &client).await.unwrap()];
    let of_early = request("close").replace("hello", "early");
    let (first, last) = of_early.split_at(of_early.len() - 1);
    early.write_all(first.as_bytes()).await.unwrap();
    let (of_upload, mut upload) = of_h2.begin_upload(CHAT).await.unwrap();
    cluster.until("both uploads are in flight", |cluster| inflight(cluster) == 3).await.unwrap();
    let waiting = |cluster: &TestCluster, count| cluster.gateway.state().queue.waiting() == count;
    whole.write_all(request("close").replace("hello", "whole").as_bytes()).await.unwrap();
    cluster.until("the whole request waits", |cluster| waiting(cluster, 1)).await.unwrap();
    early.write_all(last.as_bytes()).await.unwrap();
    upload.send_data(Bytes::from_static(BODY.as_bytes()), true).unwrap();
    cluster.until("all wait", |cluster| waiting(cluster, 3)).await.unwrap();
    drop(running);
    let mut texts = [String::new(), String::new()];
    let [of_early, of_whole] = &mut texts;
    let (read_early, read_whole, answered) =
        tokio::join!(early.read_to_string(of_early), whole.read_to_string(of_whole), of_upload);
    assert!(read_early.is_ok() && read_whole.is_ok() && answered.unwrap().status() == 200);
    let served = cluster.sims[0].recorded();
    let second = served.iter().filter(|request| request.path == CHAT).nth(1).unwrap();
    // F7.2
    assert!(second.body.contains("whole"), "{second:?}");
}
