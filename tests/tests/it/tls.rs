//! TLS on the listeners, over real sockets: who may connect, what a refused client sees, and that the bounds
//! of plain connections hold.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{
    TestCluster, TestClusterBuilder,
    fountain::Fountain,
    raw::{connect_small, send, until_closed},
    tls::{Authority, Leaf, TlsFiles, connect},
};
use pointsman_workers::WorkerSpec;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

const HEALTH: &str = "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n";
const LIMIT: Duration = Duration::from_secs(10);

async fn cluster(change: impl FnOnce(&mut Config)) -> TestCluster {
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).config(change);
    builder.start().await
}

/// The answer to a request on a new connection, or why there is none.
async fn ask(address: SocketAddr, config: &Arc<ClientConfig>) -> Result<String, String> {
    let mut stream = connect(address, config).await.map_err(|error| format!("{error:#}"))?;
    stream.write_all(HEALTH.as_bytes()).await.map_err(|error| format!("{error:#}"))?;
    let mut answer = Vec::new();
    let read = timeout(LIMIT, stream.read_to_end(&mut answer)).await.map_err(|error| error.to_string())?;
    read.map_err(|error| format!("{error:#}"))?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Sum of a metric's samples whose labels contain `labels`.
async fn sum(cluster: &TestCluster, name: &str, labels: &str) -> u64 {
    let text = cluster.metrics_text().await.unwrap();
    let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(labels));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

async fn failures(cluster: &TestCluster, reason: &str) -> u64 {
    sum(cluster, "pointsman_tls_handshake_failures_total", &format!("\"{reason}\"")).await
}

async fn until_failures(cluster: &TestCluster, reason: &str, count: u64) {
    let started = Instant::now();
    while failures(cluster, reason).await < count {
        assert!(started.elapsed() < LIMIT, "no handshake failed for the reason {reason}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// A ClientHello that offers TLS 1.1 at most.
fn hello_of_tls11() -> Vec<u8> {
    let mut body = vec![3, 2];
    body.extend([7; 32]);
    body.extend([0, 0, 4, 0xC0, 0x13, 0xC0, 0x09, 1, 0]);
    let mut hello = vec![0x16, 3, 1, 0, u8::try_from(body.len() + 4).unwrap(), 1, 0, 0];
    hello.push(u8::try_from(body.len()).unwrap());
    hello.extend(body);
    hello
}

#[tokio::test]
async fn j1_a_listener_with_a_certificate_speaks_tls_and_nothing_older_than_1_2() {
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
    let cluster = cluster(|config| config.server.tls = Some(files.tls())).await;
    let address = cluster.gateway.address;
    let trusting = authority.client(None, &[]).unwrap();
    // J1.1
    assert!(ask(address, &trusting).await.unwrap().starts_with("HTTP/1.1 200"));
    let stranger = Authority::new().unwrap().client(None, &[]).unwrap();
    let refused = ask(address, &stranger).await.unwrap_err();
    assert!(refused.contains("UnknownIssuer"), "{refused}");
    until_failures(&cluster, "refused_by_client", 1).await;
    let mut old = send(address, hello_of_tls11()).await.unwrap();
    let mut alert = Vec::new();
    timeout(LIMIT, old.read_to_end(&mut alert)).await.unwrap().unwrap();
    // J1.1: the alert is fatal
    assert_eq!((alert.first(), alert.get(5)), (Some(&0x15), Some(&2)), "{alert:?}");
    until_failures(&cluster, "version", 1).await;
}

#[tokio::test]
async fn j1_a_listener_of_tls_1_3_refuses_tls_1_2() {
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
    let tls = pointsman_gateway::config::Tls { min_version: "1.3".to_owned(), ..files.tls() };
    let cluster = cluster(|config| config.server.tls = Some(tls)).await;
    let stream = connect(cluster.gateway.address, &authority.client(None, &[]).unwrap()).await.unwrap();
    assert_eq!(stream.get_ref().1.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
    // The supported versions of this hello are TLS 1.2 only, by its own version.
    let mut hello = hello_of_tls11();
    hello[10] = 3;
    let mut old = send(cluster.gateway.address, hello).await.unwrap();
    let mut alert = Vec::new();
    timeout(LIMIT, old.read_to_end(&mut alert)).await.unwrap().unwrap();
    // J1.1
    assert_eq!(alert.first(), Some(&0x15), "{alert:?}");
    until_failures(&cluster, "version", 1).await;
}

#[tokio::test]
async fn j1_who_does_not_speak_tls_is_told_or_ended() {
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
    let cluster = cluster(|config| {
        let timeout = Duration::from_millis(500);
        config.server.tls =
            Some(pointsman_gateway::config::Tls { handshake_timeout: timeout, ..files.tls() });
    })
    .await;
    let address = cluster.gateway.address;
    let mut plain = send(address, HEALTH).await.unwrap();
    let answer = until_closed(&mut plain).await;
    // J1.2
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("tls_required"), "{answer}");
    assert!(!answer.ends_with("(open)") && !answer.ends_with("(reset)"), "{answer}");
    until_failures(&cluster, "plain_http", 1).await;
    let mut garbage = send(address, [0xFF; 500]).await.unwrap();
    let _ = until_closed(&mut garbage).await;
    until_failures(&cluster, "malformed", 1).await;
    // Nothing, and half a hello.
    let mut silent = TcpStream::connect(address).await.unwrap();
    let mut half = send(address, &hello_of_tls11()[..20]).await.unwrap();
    cluster.until("both are open", |cluster| cluster.gateway.state().connections.used() == 2).await.unwrap();
    let ends = [until_closed(&mut silent).await, until_closed(&mut half).await];
    // J1.3
    assert!(!ends.iter().any(|end| end.contains("open")), "{ends:?}");
    until_failures(&cluster, "timeout", 2).await;
    let gone = send(address, &hello_of_tls11()[..20]).await.unwrap();
    drop(gone);
    // J1.3
    until_failures(&cluster, "closed", 1).await;
    let all_ended = |cluster: &TestCluster| cluster.gateway.state().connections.used() == 0;
    cluster.until("no connection is counted", all_ended).await.unwrap();
    // J1.3
    assert_eq!(sum(&cluster, "pointsman_client_connections_ended_total", "\"handshake\"").await, 5);
}

/// Connects with a receive buffer of a few kilobytes.
async fn connect_slow(address: SocketAddr, config: &Arc<ClientConfig>) -> TlsStream<TcpStream> {
    let stream = connect_small(address).await.unwrap();
    let name = ServerName::IpAddress(address.ip().into());
    TlsConnector::from(config.clone()).connect(name, stream).await.unwrap()
}

#[tokio::test]
async fn j1_clients_that_do_not_read_are_bounded_and_ended_over_tls_too() {
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
    let fountain = Fountain::start().unwrap();
    let worker = WorkerSpec::parse_flag(&fountain.flag()).unwrap();
    let builder = TestClusterBuilder::new().config(|config| {
        config.workers.push(worker);
        config.server.tls = Some(files.tls());
        config.timeouts.client_write = Duration::from_secs(3);
    });
    let cluster = builder.start().await;
    let config = authority.client(None, &[]).unwrap();
    let body = r#"{"model":"tiny","stream":true,"messages":[{"role":"user","content":"x"}]}"#;
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut clients = Vec::new();
    for _ in 0..10 {
        clients.push(connect_slow(cluster.gateway.address, &config).await);
    }
    for client in &mut clients {
        client.write_all(request.as_bytes()).await.unwrap();
        client.flush().await.unwrap();
    }
    cluster.until("every stream has begun", |_| fountain.streams() == 10).await.unwrap();
    sleep(Duration::from_millis(300)).await;
    let relayed = cluster.gateway.state().metrics.relayed_bytes.get();
    // J1.4: kernel buffers, the HTTP server's, those of TLS
    assert!(relayed < 10 * 1_500_000, "{relayed} bytes were relayed to 10 clients that read nothing");
    cluster.at_rest().await.unwrap();
    // J1.4
    let ended = "pointsman_client_connections_ended_total{reason=\"write_timeout\"}";
    assert_eq!(cluster.until_counted(ended, 10.0).await.unwrap(), 10.0);
    drop(clients);
}

#[tokio::test]
async fn j1_connections_above_the_limit_are_refused_over_tls() {
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
    let cluster = cluster(|config| {
        config.server.tls = Some(files.tls());
        config.limits.connections = 1;
    })
    .await;
    let config = authority.client(None, &["h2", "http/1.1"]).unwrap();
    let _first = connect(cluster.gateway.address, &config).await.unwrap();
    let mut second = connect(cluster.gateway.address, &config).await.unwrap();
    let mut answer = Vec::new();
    let _ = timeout(LIMIT, second.read_to_end(&mut answer)).await.unwrap();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    // J1.5
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("too_many_connections"), "{answer}");
}

#[tokio::test]
async fn j1_tls_does_not_replace_the_token_of_operators() {
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
    let mut config = Config::default();
    config.server.admin_tls = Some(files.tls());
    assert!(config.check().is_ok(), "on loopback");
    config.server.admin_listen = "0.0.0.0:0".parse().unwrap();
    // J1.6
    assert!(config.check().unwrap_err().to_string().contains("there is no admin token"));
    let cluster = cluster(|config| config.server.admin_tls = Some(files.tls())).await;
    let config = authority.client(None, &["h2", "http/1.1"]).unwrap();
    let mut stream = connect(cluster.gateway.admin, &config).await.unwrap();
    // J1.7
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    stream.write_all(HEALTH.replace("/health", "/healthz").as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = timeout(LIMIT, stream.read_to_end(&mut answer)).await.unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200"));
}

#[tokio::test]
async fn j2_the_certificate_of_a_client_is_checked() {
    let (authority, clients) = (Authority::new().unwrap(), Authority::new().unwrap());
    let files = TlsFiles::new(&authority.server().unwrap(), Some(&clients)).unwrap();
    let cluster = cluster(|config| {
        config.server.tls = Some(pointsman_gateway::config::Tls {
            require_client_cert: true,
            client_names: vec!["spiffe://prod/gateway".to_owned(), "batch.example".to_owned()],
            ..files.tls()
        });
    })
    .await;
    let address = cluster.gateway.address;
    let named = |uri| Leaf { uri: Some(uri), ..Leaf::default() };
    let with = |authority: &Authority, leaf: &Leaf| authority.issue(leaf).unwrap();
    let (right, dns) = (
        with(&clients, &named("spiffe://prod/gateway")),
        with(&clients, &Leaf { names: vec!["batch.example"], ..Leaf::default() }),
    );
    for own in [&right, &dns] {
        let answer = ask(address, &authority.client(Some(own), &[]).unwrap()).await;
        // J2.1, J2.3
        assert!(answer.as_ref().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")), "{answer:?}");
    }
    let foreign = with(&authority, &named("spiffe://prod/gateway"));
    let other = with(&clients, &named("spiffe://prod/other"));
    let expired = with(&clients, &Leaf { expired: true, ..named("spiffe://prod/gateway") });
    let cases = [
        // J2.1
        (Some(&foreign), "certificate_unknown_authority", "UnknownCA"),
        // J2.1
        (Some(&expired), "certificate_expired", "CertificateExpired"),
        // J2.3
        (Some(&other), "certificate_name", "AccessDenied"),
        // J2.2
        (None, "certificate_missing", "CertificateRequired"),
    ];
    for (own, reason, alert) in cases {
        let refused = ask(address, &authority.client(own, &[]).unwrap()).await.unwrap_err();
        // J2.1, J2.2, J2.3: the client reads why
        assert!(refused.contains(alert), "{reason}: {refused}");
        until_failures(&cluster, reason, 1).await;
    }
}

#[tokio::test]
async fn j2_a_certificate_may_be_left_to_the_client() {
    let (authority, clients) = (Authority::new().unwrap(), Authority::new().unwrap());
    let files = TlsFiles::new(&authority.server().unwrap(), Some(&clients)).unwrap();
    let cluster = cluster(|config| config.server.tls = Some(files.tls())).await;
    let address = cluster.gateway.address;
    // J2.2
    assert!(ask(address, &authority.client(None, &[]).unwrap()).await.is_ok());
    let foreign = authority.issue(&Leaf { names: vec!["x.example"], ..Leaf::default() }).unwrap();
    let refused = ask(address, &authority.client(Some(&foreign), &[]).unwrap()).await.unwrap_err();
    // J2.1
    assert!(refused.contains("UnknownCA"), "{refused}");
}
