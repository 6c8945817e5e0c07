//! The end of a gateway while a client is still uploading its request.

use std::{net::SocketAddr, time::Duration};

use pointsman_sim::{Dialect, Role};
use pointsman_tests::{TestCluster, TestClusterBuilder};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{sleep, timeout},
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
        .unwrap()
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
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await.unwrap();
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
