//! Bounds of uploads and of connections: size, rate, bytes in flight, number of connections, time without a
//! request.

use std::time::Duration;

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{
    CHAT, TestCluster, TestClusterBuilder,
    raw::{resident_bytes, send, until_closed, until_mark},
};
use tokio::{io::AsyncWriteExt as _, net::TcpStream, time::sleep};

const BODY: &str = r#"{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"hello"}]}"#;

pub(crate) async fn cluster(change: impl FnOnce(&mut Config)) -> TestCluster {
    let builder = TestClusterBuilder::new().config(change).sim(Dialect::Vllm, Role::Aggregated);
    builder.start().await
}

fn head(fields: &str) -> String {
    format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{fields}\r\n\r\n")
}

#[tokio::test]
async fn a_declared_length_above_the_limit_is_413_before_the_body_is_asked_for() {
    let cluster = cluster(|config| config.server.max_body_bytes = 1_000_000).await;
    for expect in ["", "\r\nexpect: 100-continue"] {
        let request = head(&format!("content-length: 1000001{expect}"));
        let mut client = send(cluster.gateway.address, request).await.unwrap();
        let answer = until_closed(&mut client).await;
        assert!(answer.starts_with("HTTP/1.1 413"), "{expect:?}: {answer}");
        assert!(answer.contains("payload_too_large") && !answer.contains("100 Continue"), "{answer}");
    }
    let request = head(&format!("content-length: {}\r\nexpect: 100-continue", BODY.len()));
    let mut client = send(cluster.gateway.address, request).await.unwrap();
    assert!(until_mark(&mut client, "\r\n\r\n").await.starts_with("HTTP/1.1 100"));
    client.write_all(BODY.as_bytes()).await.unwrap();
    assert!(until_mark(&mut client, "\"usage\"").await.starts_with("HTTP/1.1 200"));
}

/// Writes one byte every 20 ms until the peer answers, for at most five seconds; returns the answer.
async fn trickle(mut client: TcpStream) -> String {
    let mut buffer = [0; 4096];
    for _ in 0..250 {
        let _ = client.write_all(b" ").await;
        sleep(Duration::from_millis(20)).await;
        if let Ok(read @ 1..) = client.try_read(&mut buffer) {
            return String::from_utf8_lossy(&buffer[..read]).into_owned();
        }
    }
    "(no answer)".to_owned()
}

#[tokio::test]
async fn an_upload_below_the_smallest_rate_is_408() {
    let change = |config: &mut Config| {
        config.timeouts.body_idle = Duration::from_millis(300);
        config.limits.min_body_rate = 1_000;
    };
    let cluster = cluster(change).await;
    for fields in ["content-length: 100000", "transfer-encoding: chunked"] {
        let mut client = send(cluster.gateway.address, head(fields)).await.unwrap();
        if fields.contains("chunked") {
            client.write_all(b"186a0\r\n").await.unwrap();
        }
        let answer = trickle(client).await;
        assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
        // I_body_too_slow
        assert!(answer.contains("body_too_slow") && answer.contains("limits.min_body_rate"), "{answer}");
    }
    cluster.at_rest().await.unwrap();
    // Operators' bodies have the same limits.
    let request = "POST /workers HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n";
    let answer = trickle(send(cluster.gateway.admin, request).await.unwrap()).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
}

#[tokio::test]
async fn the_bodies_in_flight_have_a_limit_together() {
    let change = |config: &mut Config| {
        config.server.max_body_bytes = 1_000_000;
        config.limits.body_bytes_in_flight = 1_200_000;
    };
    let cluster = cluster(change).await;
    let used = |cluster: &TestCluster| cluster.gateway.state().body_bytes.used();
    // The declared length counts for nothing before its bytes arrived.
    let declared = send(cluster.gateway.address, head("content-length: 1000000")).await.unwrap();
    let begun = head("content-length: 1000000") + &" ".repeat(900_000);
    let first = send(cluster.gateway.address, &begun).await.unwrap();
    cluster.until("the first upload arrived", |cluster| used(cluster) == 900_000).await.unwrap();
    let mut second = send(cluster.gateway.address, &begun).await.unwrap();
    let answer = until_mark(&mut second, "\"request_id\"").await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    // I_body_bytes_in_flight
    assert!(answer.contains("body_bytes_in_flight") && answer.contains("retry-after: 1"), "{answer}");
    // Part of the limit is left to small bodies.
    let reply = cluster.client.post(CHAT, &[], BODY).await.unwrap();
    assert_eq!(reply.status, 200);
    drop((first, second, declared));
    cluster.until("the bytes are free again", |cluster| used(cluster) == 0).await.unwrap();
    cluster.at_rest().await.unwrap();
    let again = send(cluster.gateway.address, &begun).await.unwrap();
    cluster.until("another upload is taken", |cluster| used(cluster) == 900_000).await.unwrap();
    drop(again);
}

#[tokio::test]
async fn a_body_stays_counted_while_its_request_runs() {
    let cluster = cluster(|_| {}).await;
    let used = |cluster: &TestCluster| cluster.gateway.state().body_bytes.used();
    let body = r#"{"model":"tiny","stream":true,"max_tokens":100000,"ignore_eos":true,"messages":[{"role":"user","content":"x"}]}"#;
    let mut stream = cluster.client.stream(CHAT, &[], body).await.unwrap();
    stream.next().await.unwrap();
    assert_eq!(used(&cluster), body.len());
    drop(stream);
    cluster.until("the bytes are free again", |cluster| used(cluster) == 0).await.unwrap();
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn one_byte_segments_cost_no_page_each() {
    let cluster = cluster(|_| {}).await;
    let segments = 20_000;
    for (address, path) in [(cluster.gateway.address, CHAT), (cluster.gateway.admin, "/workers")] {
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            segments + 1
        );
        let mut client = send(address, request).await.unwrap();
        let before = resident_bytes();
        for _ in 0..segments {
            client.write_all(b" ").await.unwrap();
            // The gateway reads each byte on its own.
            tokio::task::yield_now().await;
        }
        let grown = resident_bytes().saturating_sub(before);
        assert!(grown < 20_000_000, "{path}: {segments} bytes cost {grown}");
    }
}

#[tokio::test]
async fn connections_are_bounded() {
    let cluster = cluster(|config| config.limits.connections = 3).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        let mut client =
            send(cluster.gateway.address, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        assert!(until_mark(&mut client, "ok").await.contains("200 OK"));
        open.push(client);
    }
    let mut refused = send(cluster.gateway.address, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let answer = until_closed(&mut refused).await;
    // I_too_many_connections
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("retry-after: 1"), "{answer}");
    // I_too_many_connections
    assert!(answer.contains("too_many_connections") && answer.contains("limits.connections"), "{answer}");
    // Operators are not refused.
    let counted = cluster.metrics_text().await.unwrap();
    assert!(counted.contains("client_connections_ended_total{reason=\"too_many\"} 1"));
    drop(open);
    let used = |cluster: &TestCluster| cluster.gateway.state().connections.used();
    cluster.until("the connections are free again", |cluster| used(cluster) == 0).await.unwrap();
    assert_eq!(cluster.client.get("/health").await.unwrap().status, 200);
}

#[tokio::test]
async fn a_connection_without_a_request_is_closed() {
    let cluster = cluster(|config| config.timeouts.client_idle = Duration::from_millis(300)).await;
    for address in [cluster.gateway.address, cluster.gateway.admin] {
        for bytes in ["", "GET /hea", "GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"] {
            let mut client = send(address, bytes).await.unwrap();
            let text = until_closed(&mut client).await;
            assert!(!text.contains("(open)"), "{bytes:?}: {text}");
        }
    }
    let counted = cluster.metrics_text().await.unwrap();
    assert!(counted.contains("client_connections_ended_total{reason=\"idle\"} 6"));
}
