//! Each data thread has its own connections to engines. A socket that another thread's runtime registered
//! would wake that thread for each of its events.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::disallowed_types,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests"
)]

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use pointsman_tests::{Client, TestClusterBuilder, own_process};
use pointsman_workers::WorkerSpec;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

const DATA_THREADS: usize = 4;
const CLIENTS: usize = 32;
const BODY: &str = r#"{"model":"m","prompt":"hello","max_tokens":1}"#;

/// Addresses that generation requests came from, in order.
type Peers = Arc<Mutex<Vec<SocketAddr>>>;

/// Starts an engine that keeps connections open and notes which of them carry generation requests.
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
            peers.lock().unwrap().push(peer);
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

/// Returns the epoll instances of this process in which each socket is registered, by the socket's local
/// and remote port. The runtime of a data thread has one epoll instance, and an event of a socket wakes the
/// thread that waits on it.
fn epolls_by_ports() -> HashMap<(u16, u16), BTreeSet<u64>> {
    let mut ports_by_inode = HashMap::new();
    for line in fs::read_to_string("/proc/self/net/tcp").unwrap().lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let port = |field: &str| u16::from_str_radix(field.rsplit(':').next().unwrap(), 16).unwrap();
        if let [_, local, remote, _, _, _, _, _, _, inode, ..] = fields[..] {
            ports_by_inode.insert(inode.to_owned(), (port(local), port(remote)));
        }
    }
    let (mut ports_by_fd, mut epolls) = (BTreeMap::new(), Vec::new());
    for entry in fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let fd: u64 = entry.file_name().to_string_lossy().parse().unwrap();
        // Another thread may have closed it in between.
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let target = target.to_string_lossy();
        if target == "anon_inode:[eventpoll]" {
            epolls.push(fd);
        } else if let Some(inode) = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'))
            && let Some(ports) = ports_by_inode.get(inode)
        {
            ports_by_fd.insert(fd, *ports);
        }
    }
    let mut found: HashMap<_, BTreeSet<u64>> = HashMap::new();
    for epoll in epolls {
        let Ok(info) = fs::read_to_string(format!("/proc/self/fdinfo/{epoll}")) else { continue };
        for line in info.lines().filter_map(|line| line.strip_prefix("tfd:")) {
            let fd: u64 = line.split_whitespace().next().unwrap().parse().unwrap();
            if let Some(ports) = ports_by_fd.get(&fd) {
                found.entry(*ports).or_default().insert(epoll);
            }
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_event_of_an_engine_wakes_another_data_thread() {
    own_process!();
    const THREADS: usize = 8;
    const ROUNDS: usize = 4;
    let peers = Peers::default();
    let address = engine(peers.clone()).await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.server.threads = THREADS;
            let flag = format!("id=1,role=aggregated,engine=openai,url=http://{address},model=m");
            config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
        })
        .start()
        .await;
    let gateway = cluster.gateway.address;
    // Raw connections, so that the port of each client is known.
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(TcpStream::connect(gateway).await.unwrap());
    }
    let mut used = Vec::new();
    for _ in 0..ROUNDS {
        for client in &mut clients {
            complete(client).await;
            let engine_peer = *peers.lock().unwrap().last().unwrap();
            used.push((client.local_addr().unwrap().port(), engine_peer.port()));
        }
    }
    // All connections are still open.
    let epolls = epolls_by_ports();
    let (mut foreign, mut threads) = (Vec::new(), BTreeSet::new());
    for (client_port, engine_peer) in used {
        let downstream = &epolls[&(gateway.port(), client_port)];
        threads.insert(downstream.clone());
        if *downstream != epolls[&(engine_peer, address.port())] {
            foreign.push((client_port, engine_peer));
        }
    }
    assert!(threads.len() > 1, "several threads served the clients: {threads:?}");
    assert!(
        foreign.is_empty(),
        "{} of {} requests used a socket of another thread",
        foreign.len(),
        CLIENTS * ROUNDS
    );
}

/// Sends one completion on a connection and reads the whole answer.
async fn complete(client: &mut TcpStream) {
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ";
    client.write_all(format!("{head}{}\r\n\r\n{BODY}", BODY.len()).as_bytes()).await.unwrap();
    let (mut answer, mut buffer) = (Vec::new(), [0; 4096]);
    while !answer.ends_with(b"}") && !answer.ends_with(b"0\r\n\r\n") {
        let read = client.read(&mut buffer).await.unwrap();
        assert!(read > 0, "cut: {}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&buffer[..read]);
    }
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_thread_uses_no_connection_of_another() {
    own_process!();
    let peers = Peers::default();
    let address = engine(peers.clone()).await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.server.threads = DATA_THREADS;
            let flag = format!("id=1,role=aggregated,engine=openai,url=http://{address},model=m");
            config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
        })
        .start()
        .await;
    // One request at a time: a pool for all threads would serve them all over one connection.
    for _ in 0..CLIENTS {
        let client = Client::new(cluster.gateway.address);
        let reply = client.post("/v1/completions", &[], BODY).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    // Each client connection belongs to whichever thread accepted it, so the exact number is not known.
    let used = peers.lock().unwrap().iter().collect::<BTreeSet<_>>().len();
    assert!((2..=DATA_THREADS).contains(&used), "{used} connections to the engine");
}
