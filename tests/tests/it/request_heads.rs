//! Heads of requests in which a proxy and the gateway may read different things.

use pointsman_sim::{Dialect, Role};
use pointsman_tests::{
    TestClusterBuilder, client_keys,
    raw::{send, until_closed},
};

#[tokio::test]
async fn i7_a_request_names_one_host() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    for (version, host, status) in [
        ("1.1", "host: a\r\nhost: b\r\n", "400"),
        ("1.1", "host: a\r\nhost: a\r\n", "400"),
        ("1.0", "host: a\r\nhost: b\r\n", "400"),
        ("1.1", "", "400"),
        ("1.1", "host: a b\r\n", "400"),
        ("1.1", "host: a/b\r\n", "400"),
        ("1.1", "host: u@a\r\n", "400"),
        ("1.1", "host: a, b\r\n", "400"),
        ("1.1", "host: \u{e9}\r\n", "400"),
        ("1.1", "host: a:80\r\n", "200"),
        ("1.1", "host: [::1]:80\r\n", "200"),
        ("1.1", "host:\r\n", "200"),
        ("1.0", "", "200"),
    ] {
        let request = format!("GET /version HTTP/{version}\r\n{host}\r\n");
        let next = "GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
        let mut client = send(cluster.gateway.address, format!("{request}{next}")).await.unwrap();
        let answer = until_closed(&mut client).await;
        // I7.7
        assert_eq!(answer.get(9..12), Some(status), "{version} {host:?}: {answer}");
        let answers = if status == "400" || version == "1.0" { 1 } else { 2 };
        assert_eq!(answer.matches("HTTP/1.").count(), answers, "{host:?}: {answer}");
        assert!(status == "200" || answer.contains("\"code\":\"invalid_request\""), "{answer}");
    }
    let two = "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: 127.0.0.1\r\n\r\n";
    let answer = until_closed(&mut send(cluster.gateway.admin, two).await.unwrap()).await;
    assert!(answer.starts_with("HTTP/1.1 400"), "operators, too: {answer}");
}

#[tokio::test]
async fn i7_a_body_has_one_length() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let smuggled = "GET /version HTTP/1.1\r\nhost: a\r\n\r\n";
    for (lengths, body) in [
        ("content-length: 2\r\ncontent-length: 3\r\n", "{}"),
        ("content-length: +2\r\n", "{}"),
        ("content-length: 2, 3\r\n", "{}"),
        ("transfer-encoding: chunked, identity\r\n", "2\r\n{}\r\n0\r\n\r\n"),
        ("transfer-encoding: xchunked\r\n", "2\r\n{}\r\n0\r\n\r\n"),
        ("transfer-encoding: identity, chunked\r\n", "2\r\n{}\r\n0\r\n\r\n"),
        ("transfer-encoding: gzip, chunked\r\n", "2\r\n{}\r\n0\r\n\r\n"),
        ("transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", "2\r\n{}\r\n0\r\n\r\n"),
        ("transfer-encoding: chunked, chunked\r\n", "2\r\n{}\r\n0\r\n\r\n"),
        ("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", "2\r\n{}\r\n0\r\n\r\n"),
        ("content-length: 2\r\ntransfer-encoding: chunked\r\n", "2\r\n{}\r\n0\r\n\r\n"),
        ("transfer-encoding: chunked\r\ncontent-length: 2\r\n", "2\r\n{}\r\n0\r\n\r\n"),
    ] {
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\n{lengths}\r\n");
        let mut client = send(cluster.gateway.address, format!("{head}{body}{smuggled}")).await.unwrap();
        let answer = until_closed(&mut client).await;
        // I7.8
        assert!(answer.starts_with("HTTP/1.1 400"), "{lengths:?}: {answer}");
        assert_eq!(answer.matches("HTTP/1.").count(), 1, "{lengths:?}: {answer}");
    }
    let last = "GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    for (lengths, body) in [
        ("content-length: 2\r\ncontent-length: 2\r\n", "{}"),
        ("transfer-encoding: CHUNKED\r\n", "2\r\n{}\r\n0\r\n\r\n"),
    ] {
        let head = format!("GET /version HTTP/1.1\r\nhost: a\r\n{lengths}\r\n");
        let mut client = send(cluster.gateway.address, format!("{head}{body}{last}")).await.unwrap();
        let answer = until_closed(&mut client).await;
        // I7.8
        assert_eq!(answer.matches("HTTP/1.1 200").count(), 2, "{lengths:?}: {answer}");
    }
    let gzip = "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n";
    let answer = until_closed(&mut send(cluster.gateway.admin, gzip).await.unwrap()).await;
    assert!(answer.starts_with("HTTP/1.1 400"), "operators, too: {answer}");
}

/// The head of a POST request to a path.
fn post(path: &str, headers: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{headers}\r\n")
}

#[tokio::test]
async fn i7_an_answer_before_the_body_was_read_says_that_its_connection_ends() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.auth.keys = client_keys(&[("alpha", "")]))
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let (clients, operators) = (cluster.gateway.address, cluster.gateway.admin);
    let (path, key) = ("/v1/completions", "authorization: Bearer alpha\r\n");
    for (to, request, status) in [
        (clients, post("/v1/nope", "content-length: 200000\r\n") + &"x".repeat(200_000), "404"),
        (clients, post("/v1/nope", "content-length: 2\r\n") + "{", "404"),
        (clients, post("/v1/models", "transfer-encoding: chunked\r\n") + "2\r\n{}\r\n", "405"),
        (clients, post(path, "content-length: 2\r\n") + "{", "401"),
        (clients, post(path, &format!("{key}content-length: 99999999\r\n")) + "{", "413"),
        (clients, post(path, &format!("{key}content-length: 2\r\ncontent-encoding: x\r\n")) + "{", "415"),
        (clients, post(path, "content-length: 2\r\nexpect: 100-continue\r\n"), "401"),
        (clients, post(path, &format!("{key}transfer-encoding: chunked\r\n")) + "2\r\n{}\r\nz\r\n", "400"),
        (operators, post("/workers", "content-length: 2\r\ncontent-encoding: x\r\n") + "{", "415"),
    ] {
        let answer = until_closed(&mut send(to, &request).await.unwrap()).await;
        let head = answer.split("\r\n\r\n").next().unwrap();
        // I7.11
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{request:.150}: {answer}");
        assert!(head.contains("connection: close"), "{request:.150}: {answer}");
    }
}

#[tokio::test]
async fn i7_a_connection_stays_after_an_early_answer_when_the_body_was_short() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let long = "x".repeat(60_000);
    let whole = post("/v1/nope", "content-length: 60000\r\n") + &long;
    let chunked = post("/v1/nope", "transfer-encoding: chunked\r\n") + "2\r\n{}\r\n2\r\n{}\r\n0\r\n\r\n";
    let coded = post("/v1/completions", "content-encoding: x\r\ncontent-length: 60000\r\n") + &long;
    let last = "GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    for early in [whole, chunked, coded] {
        let mut client = send(cluster.gateway.address, format!("{early}{early}{last}")).await.unwrap();
        let answer = until_closed(&mut client).await;
        // I7.11
        assert_eq!(answer.matches("HTTP/1.1 4").count(), 2, "{answer}");
        assert!(answer.contains("HTTP/1.1 200"), "{answer}");
        assert_eq!(answer.matches("connection: close").count(), 1, "{answer}");
    }
}
