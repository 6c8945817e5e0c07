//! Each data thread has connections of its own: a socket that another thread's runtime registered would wake that thread
//! for each of its events.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::disallowed_types,
    missing_docs,
    reason = "tests"
)]

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use pointsman_tests::{Client, TestClusterBuilder};
use pointsman_workers::WorkerSpec;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

const DATA_THREADS: usize = 4;
const CLIENTS: usize = 32;
const BODY: &str = r#"{"model":"m","prompt":"hello","max_tokens":1}"#;

/// Addresses that generation requests came from.
type Peers = Arc<Mutex<BTreeSet<SocketAddr>>>;

/// An engine that keeps connections open and notes which of them carry generation requests.
async fn engine(peers: Peers) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, peer)) = listener.accept().await {
            tokio::spawn(serve(stream, peer, peers.clone()));
        }
    });
    address
}

async fn serve(mut stream: TcpStream, peer: SocketAddr, peers: Peers) {
    let mut request = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(read) = stream.read(&mut buffer).await {
        if read == 0 {
            return;
        }
        request.extend_from_slice(buffer.get(..read).unwrap());
        let generation = request.starts_with(b"POST /v1/completions");
        if generation && !request.ends_with(b"}") {
            continue;
        }
        let body = if generation {
            peers.lock().unwrap().insert(peer);
            r#"{"id":"c","object":"text_completion","model":"m","choices":[{"index":0,"text":"t","finish_reason":"stop"}]}"#
        } else {
            r#"{"object":"list","data":[{"id":"m","object":"model"}]}"#
        };
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
        let answer = format!("{head}{}\r\n\r\n{body}", body.len());
        stream.write_all(answer.as_bytes()).await.unwrap();
        request.clear();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_thread_uses_no_connection_of_another() {
    let peers = Peers::default();
    let address = engine(peers.clone()).await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.server.threads = DATA_THREADS;
            let flag = format!("id=1,role=aggregated,engine=openai,url=http://{address},model=m");
            config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
        })
        .start()
        .await
        .unwrap();
    // One request at a time: a pool for all threads would serve them all over one connection.
    for _ in 0..CLIENTS {
        let client = Client::new(cluster.gateway.address);
        let reply = client.post("/v1/completions", &[], BODY).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    // Each client connection belongs to whichever thread accepted it, so the exact number is not known.
    let used = peers.lock().unwrap().len();
    assert!((2..=DATA_THREADS).contains(&used), "{used} connections to the engine");
}
