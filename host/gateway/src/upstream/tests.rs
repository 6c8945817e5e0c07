//! Calls over real sockets, to engines with scripted answers.

#![allow(clippy::disallowed_methods, reason = "engines of tests end with them")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use pointsman_workers::{EngineTls, Resolver, TlsClient};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
};

use super::{CallError, ConnectionPool, Upstream};

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

/// An engine that answers the calls of each connection with the next texts, piece by piece, and closes after
/// the last.
struct Engine {
    url: String,
    accepted: mpsc::UnboundedReceiver<()>,
    task: JoinHandle<()>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn engine(connections: Vec<Vec<Vec<String>>>) -> Engine {
    engine_at(TcpListener::bind("127.0.0.1:0").await.unwrap(), connections)
}

fn engine_at(listener: TcpListener, connections: Vec<Vec<Vec<String>>>) -> Engine {
    let url = format!("http://{}/v1/completions", listener.local_addr().unwrap());
    let (note, accepted) = mpsc::unbounded_channel();
    let task = tokio::spawn(async move {
        for answers in connections {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = note.send(());
            tokio::spawn(async move {
                for pieces in answers {
                    take_request(&mut stream).await;
                    for piece in pieces {
                        let _ = stream.write_all(piece.as_bytes()).await;
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                }
            });
        }
        std::future::pending::<()>().await;
    });
    Engine { url, accepted, task }
}

/// Reads a request of these tests: their bodies end in `!`.
async fn take_request(stream: &mut TcpStream) {
    let mut byte = [0];
    while stream.read_exact(&mut byte).await.is_ok() && byte != *b"!" {}
}

fn once(answer: &str) -> Vec<Vec<Vec<String>>> {
    vec![vec![vec![answer.to_owned()]]]
}

async fn call(upstream: &Upstream, url: &str) -> Result<Bytes, CallError> {
    let (headers, to) = (Vec::new(), url.into());
    let called = upstream.whole(&to, &headers, Bytes::from_static(b"{}!"));
    let answer = tokio::time::timeout(Duration::from_secs(10), called).await.expect("an answer");
    answer.map(|answer| answer.into_body())
}

fn upstream() -> Upstream {
    Upstream::new(ConnectionPool::from(Arc::<EngineTls>::default()), Duration::from_secs(5), 64 << 20)
}

#[tokio::test]
async fn a_connection_serves_one_call_after_another() {
    let chunked =
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{\"\r\n4\r\na\":1\r\n1\r\n}\r\n0\r\n\r\n";
    let answers = vec![vec![OK.to_owned()], vec![chunked.to_owned()], vec![OK.to_owned()]];
    let (mut engine, upstream) = (engine(vec![answers]).await, upstream());
    assert_eq!(call(&upstream, &engine.url).await, Ok(Bytes::from_static(b"{}")));
    assert_eq!(call(&upstream, &engine.url).await, Ok(Bytes::from_static(b"{\"a\":1}")));
    assert_eq!(call(&upstream, &engine.url).await, Ok(Bytes::from_static(b"{}")));
    assert!(engine.accepted.recv().await.is_some() && engine.accepted.try_recv().is_err(), "one connection");
}

#[tokio::test]
async fn the_future_of_a_call_has_no_room_for_a_connect() {
    let (upstream, headers, to) = (upstream(), Vec::new(), "http://x".into());
    let size = size_of_val(&upstream.head(&to, &headers, Bytes::new()));
    assert!(size <= 680, "{size} bytes: box what few calls wait for");
}

#[tokio::test]
async fn an_answer_that_comes_byte_by_byte_is_the_same() {
    let text = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: 1\r\n\r\n";
    let bytes = text.chars().map(String::from).collect();
    let engine = engine(vec![vec![bytes]]).await;
    assert_eq!(call(&upstream(), &engine.url).await, Ok(Bytes::from_static(b"abc")));
}

#[tokio::test]
async fn an_idle_connection_that_was_closed_is_not_used_again() {
    let closing = vec![vec![OK.to_owned()]];
    let (mut engine, upstream) = (engine(vec![closing.clone(), closing]).await, upstream());
    assert!(call(&upstream, &engine.url).await.is_ok());
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(call(&upstream, &engine.url).await.is_ok());
    assert!(
        engine.accepted.recv().await.is_some() && engine.accepted.recv().await.is_some(),
        "two connections"
    );
}

#[tokio::test]
async fn what_says_close_or_too_much_is_not_used_again() {
    for first in [
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n",
        "HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    ] {
        // The first connection stays open, and would give a wrong answer to a second call.
        let wrong = OK.replace("{}", "xx");
        let connections = vec![vec![vec![first.to_owned()], vec![wrong]], vec![vec![OK.to_owned()]]];
        let (engine, upstream) = (engine(connections).await, upstream());
        assert_eq!(call(&upstream, &engine.url).await, Ok(Bytes::from_static(b"{}")), "{first}");
        assert_eq!(call(&upstream, &engine.url).await, Ok(Bytes::from_static(b"{}")), "{first}");
    }
}

#[tokio::test]
async fn a_body_without_length_ends_with_its_connection() {
    let engine = engine(once("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nto the end")).await;
    assert_eq!(call(&upstream(), &engine.url).await, Ok(Bytes::from_static(b"to the end")));
}

#[tokio::test]
async fn an_answer_that_is_cut_is_no_answer() {
    for cut in [
        "HTTP/1.1 200",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",
        "",
    ] {
        let engine = engine(once(cut)).await;
        let outcome = call(&upstream(), &engine.url).await;
        assert_eq!(
            outcome,
            Err(CallError::Broken("the engine closed the connection within its answer".to_owned())),
            "{cut:?}"
        );
    }
}

#[tokio::test]
async fn garbage_is_told() {
    let head = engine(once("220 smtp ready\r\n\r\n")).await;
    let outcome = call(&upstream(), &head.url).await.unwrap_err();
    assert!(
        outcome.to_string().contains("not HTTP/1.1") && outcome.began() && outcome.retryable(),
        "{outcome}"
    );
    let chunk = engine(once("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")).await;
    let outcome = call(&upstream(), &chunk.url).await.unwrap_err();
    assert!(outcome.to_string().contains("invalid chunk"), "{outcome}");
}

#[tokio::test]
async fn a_refusal_that_comes_before_the_request_is_sent_whole_is_read() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let engine = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        // Reads a little of the body, refuses, and stops reading.
        let _ = stream.read(&mut [0; 1024]).await;
        let refusal = "HTTP/1.1 413 Payload Too Large\r\ncontent-length: 5\r\n\r\nlarge";
        stream.write_all(refusal.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
    });
    let large = Bytes::from(vec![b' '; 32 << 20]);
    let (upstream, headers) = (upstream(), Vec::new());
    let to = url.as_str().into();
    let called = upstream.whole(&to, &headers, large);
    let outcome = tokio::time::timeout(Duration::from_secs(5), called).await.expect("an answer").unwrap_err();
    assert!(matches!(&outcome, CallError::Status { status, .. } if status.as_u16() == 413), "{outcome}");
    engine.abort();
}

#[tokio::test]
async fn an_unreachable_engine_differs_from_a_broken_call() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    drop(listener);
    let outcome = call(&upstream(), &url).await.unwrap_err();
    assert!(!outcome.began() && outcome.kind() == "connect", "{outcome}");
    let outcome = call(&upstream(), "http://127.0.0.1:1\r\nx: y/").await.unwrap_err();
    assert_eq!(outcome.kind(), "protocol", "{outcome}");
}

#[tokio::test]
async fn a_large_body_arrives_as_it_is() {
    let body = "0123456789abcdef".repeat(1 << 17);
    let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let engine = engine(once(&answer)).await;
    assert_eq!(call(&upstream(), &engine.url).await, Ok(Bytes::from(body)));
}

/// TLS of a server with a certificate of its own, and of a client that trusts it.
fn tls_of_both() -> (Arc<ServerConfig>, Arc<EngineTls>) {
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap().der().clone();
    let provider = Arc::new(ring::default_provider());
    let server = ServerConfig::builder_with_provider(provider.clone());
    let server = server.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let server = server.with_single_cert(vec![certificate.clone()], key).unwrap();
    let tls = EngineTls::default();
    tls.install(TlsClient::new(move || {
        let mut roots = RootCertStore::empty();
        roots.add(certificate.clone()).unwrap();
        let client = ClientConfig::builder_with_provider(provider.clone());
        let client = client.with_safe_default_protocol_versions().unwrap();
        Ok(Arc::new(client.with_root_certificates(roots).with_no_client_auth()))
    }));
    (Arc::new(server), Arc::new(tls))
}

#[tokio::test]
async fn j4_an_answer_without_a_length_needs_the_end_of_tls() {
    let (server, tls) = tls_of_both();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}/", listener.local_addr().unwrap());
    let engine = tokio::spawn(async move {
        for is_whole in [true, false] {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = tokio_rustls::TlsAcceptor::from(server.clone()).accept(stream).await.unwrap();
            let mut byte = [0];
            while stream.read_exact(&mut byte).await.is_ok() && byte != *b"!" {}
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nto the end").await.unwrap();
            stream.flush().await.unwrap();
            if is_whole {
                stream.shutdown().await.unwrap();
            }
        }
    });
    let upstream = Upstream::new(ConnectionPool::from(tls), Duration::from_secs(5), 1024);
    assert_eq!(call(&upstream, &url).await, Ok(Bytes::from_static(b"to the end")));
    let cut = call(&upstream, &url).await.unwrap_err();
    // J4.7: somebody between the two may have closed the socket
    assert!(matches!(&cut, CallError::Broken(text) if text.contains("closed the connection")), "{cut}");
    engine.await.unwrap();
}

#[tokio::test]
async fn i18_5_a_pooled_connection_to_an_address_that_its_name_no_longer_has_is_not_used() {
    let old = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let port = old.local_addr().unwrap().port();
    let new = TcpListener::bind(("127.0.0.3", port)).await.unwrap();
    let answers = || vec![vec![vec![OK.to_owned()]; 3]; 2];
    let (mut old, mut new) = (engine_at(old, answers()), engine_at(new, answers()));
    let last = Arc::new(AtomicU8::new(2));
    let address = last.clone();
    let answer = move |_: &str| Ok(vec![([127, 0, 0, address.load(Relaxed)], 0).into()]);
    let resolver = Resolver::with_stay(Duration::ZERO, answer);
    let pool = ConnectionPool::from((Arc::<EngineTls>::default(), resolver.clone()));
    let upstream = Upstream::new(pool, Duration::from_secs(5), 64 << 20);
    let url = format!("http://engine:{port}/v1/completions");
    for _ in 0..2 {
        call(&upstream, &url).await.unwrap();
    }
    last.store(3, Relaxed);
    let begin = tokio::time::Instant::now();
    while resolver.addresses("engine:1").await.unwrap() != [([127, 0, 0, 3], 1).into()] {
        assert!(begin.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    call(&upstream, &url).await.unwrap();
    // I18.5
    assert!(new.accepted.try_recv().is_ok());
    // One connection served the calls before.
    assert!(old.accepted.try_recv().is_ok() && old.accepted.try_recv().is_err());
}
