//! Clients that do not read: their buffers are bounded, their connections are closed, and other requests
//! are not affected.

use std::time::Duration;

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    CHAT, TestCluster, TestClusterBuilder,
    fountain::Fountain,
    raw::{connect_small, send, until_closed, until_mark},
};
use pointsman_workers::WorkerSpec;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

const STREAM: &str = r#"{"model":"tiny","stream":true,"messages":[{"role":"user","content":"x"}]}"#;
/// Largest number of bytes that a client may take that reads nothing: kernel buffers and the gateway's.
const TAKEN: u64 = 1_500_000;

async fn fountain(change: impl FnOnce(&mut Config)) -> (TestCluster, Fountain) {
    let fountain = Fountain::start().unwrap();
    let worker = WorkerSpec::parse_flag(&fountain.flag()).unwrap();
    let builder = TestClusterBuilder::new().config(|config| {
        config.workers.push(worker);
        config.server.threads = 2;
        change(config);
    });
    (builder.start().await, fountain)
}

fn post(body: &str) -> String {
    format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn begin(cluster: &TestCluster, body: &str) -> TcpStream {
    let mut stream = connect_small(cluster.gateway.address).await.unwrap();
    stream.write_all(post(body).as_bytes()).await.unwrap();
    stream
}

/// Sum of a metric's samples whose labels contain `labels`.
async fn sum(cluster: &TestCluster, name: &str, labels: &str) -> u64 {
    let text = cluster.metrics_text().await.unwrap();
    let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(labels));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

#[tokio::test]
async fn clients_that_do_not_read_hold_few_bytes_and_are_ended() {
    let (cluster, fountain) = fountain(|config| config.timeouts.client_write = Duration::from_secs(4)).await;
    let mut clients = Vec::new();
    for _ in 0..25 {
        clients.push(begin(&cluster, STREAM).await);
    }
    cluster.until("every stream has begun", |_| fountain.streams() == 25).await.unwrap();
    sleep(Duration::from_millis(400)).await;
    let relayed = cluster.gateway.state().metrics.relayed_bytes.get();
    // I5.1
    assert!(relayed < 25 * TAKEN, "{relayed} bytes were relayed to 25 clients that read nothing");
    cluster.at_rest().await.unwrap();
    cluster.until("every stream has ended", |_| fountain.streams() == 0).await.unwrap();
    // I_client_too_slow, I5.2
    assert_eq!(
        sum(&cluster, "pointsman_requests_total", "status=\"499\",code=\"client_too_slow\"").await,
        25
    );
    assert_eq!(sum(&cluster, "pointsman_requests_total", "code=\"ok\"").await, 0);
    let ended = "pointsman_client_connections_ended_total{reason=\"write_timeout\"}";
    assert_eq!(cluster.until_counted(ended, 25.0).await.unwrap(), 25.0);
    drop(clients);
}

#[tokio::test]
async fn a_client_that_reads_slowly_is_not_ended() {
    let (cluster, fountain) = fountain(|config| config.timeouts.client_write = Duration::from_secs(2)).await;
    let mut client = begin(&cluster, STREAM).await;
    let started = Instant::now();
    // More than the client's window of 32 KiB in each two seconds, and less than a third of the send buffer.
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    while started.elapsed() < Duration::from_secs(9) {
        ticks.tick().await;
        let read = client.read(&mut [0; 2_400]).await.unwrap();
        // I5.6
        assert!(read > 0, "the connection was ended after {:?}", started.elapsed());
    }
    assert_eq!(fountain.streams(), 1);
}

#[tokio::test]
async fn the_deadline_ends_a_request_whose_client_does_not_read() {
    /// The limit that must not be the one that ends it.
    const CLIENT_WRITE: Duration = Duration::from_secs(30);
    let (cluster, fountain) = fountain(|config| {
        config.timeouts.request = Duration::from_secs(3);
        config.timeouts.client_write = CLIENT_WRITE;
    })
    .await;
    let started = Instant::now();
    let client = begin(&cluster, STREAM).await;
    cluster.until("the stream has begun", |_| fountain.streams() == 1).await.unwrap();
    cluster.at_rest().await.unwrap();
    cluster.until("the stream has ended", |_| fountain.streams() == 0).await.unwrap();
    // I5.2: the deadline
    assert!(started.elapsed() < CLIENT_WRITE, "{:?}", started.elapsed());
    assert_eq!(sum(&cluster, "pointsman_requests_total", "code=\"client_too_slow\"").await, 1);
    drop(client);
}

#[tokio::test]
async fn f4_the_booking_of_a_client_that_does_not_read_expires_and_is_counted() {
    let (cluster, fountain) = fountain(|config| {
        config.timeouts.booking = Duration::from_millis(300);
        config.timeouts.client_write = Duration::from_secs(3);
    })
    .await;
    let client = begin(&cluster, STREAM).await;
    cluster.until("the stream has begun", |_| fountain.streams() == 1).await.unwrap();
    cluster.until("the booking expired", |cluster| cluster.booked() == 0).await.unwrap();
    // F4.9
    assert_eq!(sum(&cluster, "pointsman_expired_bookings_total", "").await, 1);
    cluster.at_rest().await.unwrap();
    drop(client);
}

#[tokio::test]
async fn f4_the_booking_of_a_client_that_pauses_again_and_again_stays() {
    let (cluster, fountain) = fountain(|config| config.timeouts.booking = Duration::from_secs(3)).await;
    let mut client = begin(&cluster, STREAM).await;
    // More than waits between the engine and the client.
    let mut bytes = vec![0; usize::try_from(3 * TAKEN).unwrap()];
    for _ in 0..5 {
        sleep(Duration::from_secs(1)).await;
        client.read_exact(&mut bytes).await.unwrap();
    }
    // F4.9, F4.18
    assert_eq!((cluster.booked(), fountain.streams()), (1, 1));
    assert_eq!(sum(&cluster, "pointsman_expired_bookings_total", "").await, 0);
}

#[tokio::test]
async fn a_client_that_pauses_and_reads_on_gets_everything() {
    let config = SimConfig::instant(Dialect::Vllm, Role::Aggregated);
    let cluster = TestClusterBuilder::new().sim_with(config, "").start().await;
    let body = r#"{"model":"tiny","stream":true,"max_tokens":6000,"ignore_eos":true,"messages":[{"role":"user","content":"x"}]}"#;
    let mut client = begin(&cluster, body).await;
    sleep(Duration::from_millis(700)).await;
    let whole = until_mark(&mut client, "[DONE]").await;
    let tokens = whole.matches("\"content\":").count();
    assert!(whole.contains("[DONE]") && tokens >= 6_000, "{tokens} tokens of {} bytes", whole.len());
    cluster.at_rest().await.unwrap();
    assert_eq!(sum(&cluster, "pointsman_requests_total", "code=\"ok\"").await, 1);
}

#[tokio::test]
async fn e1_the_handoff_of_a_client_that_does_not_read_is_consumed() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.timeouts.client_write = Duration::from_millis(300))
        .pair(Dialect::Vllm)
        .start()
        .await;
    let body = r#"{"model":"tiny","stream":true,"max_tokens":20000,"ignore_eos":true,"messages":[{"role":"user","content":"a question"}]}"#;
    let client = begin(&cluster, body).await;
    cluster.until("it is in flight", |cluster| cluster.booked() > 0).await.unwrap();
    cluster.at_rest().await.unwrap();
    cluster.until("the engine stopped", |cluster| cluster.sims[1].state().running == 0).await.unwrap();
    let stranded: u64 = cluster.sims.iter().map(|sim| sim.state().stranded).sum();
    // I5.3
    assert_eq!((stranded, cluster.sims[1].state().dead), (0, false));
    assert_eq!(sum(&cluster, "pointsman_requests_total", "code=\"client_too_slow\"").await, 1);
    drop(client);
}

#[tokio::test]
async fn pipelined_requests_whose_answers_are_not_read_are_ended() {
    let (cluster, _fountain) = fountain(|config| {
        config.timeouts.client_write = Duration::from_millis(400);
        config.auth.keys = pointsman_tests::client_keys(&[("secret", "")]);
    })
    .await;
    // One kind is answered from a head alone, the other before its body was read.
    let refused = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx";
    for (number, request) in [(1, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n"), (2, refused)] {
        let mut client = connect_small(cluster.gateway.address).await.unwrap();
        let bytes = request.repeat(1_000);
        let flood = async {
            for _ in 0..1_000 {
                client.write_all(bytes.as_bytes()).await?;
            }
            Ok::<_, std::io::Error>(())
        };
        let ended = timeout(Duration::from_secs(20), flood).await;
        assert!(matches!(ended, Ok(Err(_))), "1,000,000 unread requests: {ended:?}");
        // The client sees the end before the gateway has counted it.
        let until = Instant::now() + Duration::from_secs(5);
        while sum(&cluster, "pointsman_client_connections_ended_total", "write_timeout").await < number {
            assert!(Instant::now() < until, "the end of connection {number} is not counted");
        }
    }
}

#[tokio::test]
async fn readers_of_events_that_do_not_read_are_ended() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.timeouts.client_write = Duration::from_millis(300))
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let mut readers = Vec::new();
    for _ in 0..4 {
        let mut reader = connect_small(cluster.gateway.admin).await.unwrap();
        reader.write_all(b"GET /events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n").await.unwrap();
        readers.push(reader);
    }
    // Each look at the decisions finds 100 others, so that every event of them is new and large.
    let started = Instant::now();
    let body = r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"x"}]}"#;
    while sum(&cluster, "pointsman_client_connections_ended_total", "write_timeout").await < 4 {
        assert!(started.elapsed() < Duration::from_secs(20), "a reader that never reads is still served");
        for _ in 0..20 {
            cluster.client.post(CHAT, &[], body).await.unwrap();
        }
    }
    drop(readers);
}

#[tokio::test]
async fn bytes_after_a_request_withhold_no_answer() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let whole = r#"{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"x"}]}"#;
    let stream =
        r#"{"model":"tiny","max_tokens":2,"stream":true,"messages":[{"role":"user","content":"x"}]}"#;
    for (body, mark) in [(whole, "\"usage\""), (stream, "[DONE]")] {
        for after in ["", "\r\n", "\n", "POST /v1/chat/comp"] {
            let mut client = send(cluster.gateway.address, post(body) + after).await.unwrap();
            let answer = until_mark(&mut client, mark).await;
            assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(mark), "after {after:?}: {answer}");
        }
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_broken_request_is_answered_before_its_connection_is_closed() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let head = |field: &str| format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\n{field}\r\n\r\n");
    let many: String = (0..500).map(|number| format!("x-{number}: y\r\n")).collect();
    let cases = [
        ("\x16\x03\x01garbage\r\n\r\n".to_owned(), "400"),
        ("GET\r\n\r\n".to_owned(), "400"),
        (head("content-length: two"), "400"),
        (head("content-length: 3\r\ncontent-length: 4"), "400"),
        (head("content-length: 3\r\ntransfer-encoding: chunked"), "400"),
        (head("transfer-encoding: gzip"), "400"),
        (head("transfer-encoding: chunked") + "zz\r\n", "400"),
        (head(&format!("x-long: {}", "y".repeat(100_000))), "431"),
        (head(many.trim_end()), "431"),
    ];
    for address in [cluster.gateway.address, cluster.gateway.admin] {
        for (request, status) in &cases {
            // These are broken only in their body, which no endpoint of operators reads on this path.
            if address == cluster.gateway.admin && request.contains("chunked") {
                continue;
            }
            // Bytes that are still unread when the gateway closes must not turn the answer into a reset.
            let mut client = send(address, request.clone() + &"z".repeat(300_000)).await.unwrap();
            let answer = until_closed(&mut client).await;
            let shown: String = request.chars().take(120).collect();
            let right = answer.starts_with(&format!("HTTP/1.1 {status}"));
            // I5.4
            assert!(
                right && !answer.ends_with("(open)") && !answer.ends_with("(reset)"),
                "{shown:?}: {answer}"
            );
        }
    }
}
