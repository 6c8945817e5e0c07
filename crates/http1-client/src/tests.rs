//! Calls over real sockets, to servers with scripted answers.

#![allow(clippy::disallowed_methods, reason = "servers of tests end with them")]

use std::{io, time::Duration};

use http::{Method, Response, header};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
};

use crate::{Body, CallError, Connection, Delivery, Observer, Pool, PoolLimits, WireError, wire};

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
const LIMITS: PoolLimits = PoolLimits { idle_timeout: Duration::from_secs(30), idle_connections: 8 };

type Called<O = ()> = Result<Response<Body<TcpStream, O>>, CallError<io::Error>>;

/// A server that answers the calls of each connection with the next texts, piece by piece, and closes after
/// the last.
struct Server {
    authority: String,
    accepted: mpsc::UnboundedReceiver<()>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn server(connections: Vec<Vec<Vec<String>>>) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = listener.local_addr().unwrap().to_string();
    let (note, accepted) = mpsc::unbounded_channel();
    let task = tokio::spawn(async move {
        for answers in connections {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = note.send(());
            tokio::spawn(async move {
                for pieces in answers {
                    // The requests of these tests end in `!`.
                    let mut byte = [0];
                    while stream.read_exact(&mut byte).await.is_ok() && byte != *b"!" {}
                    for piece in pieces {
                        let _ = stream.write_all(piece.as_bytes()).await;
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                }
            });
        }
        std::future::pending::<()>().await;
    });
    Server { authority, accepted, task }
}

async fn send<O: Observer>(pool: &Pool<TcpStream, O>, authority: &str) -> Called<O> {
    deliver(pool, authority, Delivery::Repeatable).await
}

async fn deliver<O: Observer>(pool: &Pool<TcpStream, O>, authority: &str, delivery: Delivery) -> Called<O> {
    let head = wire::request(&Method::POST, authority, "/x", &[], 3).unwrap();
    let connect = || async { Ok(Connection::new(TcpStream::connect(authority).await?, authority)) };
    let call = pool.call(authority, (&head, b"{}!"), delivery, |_| true, connect);
    tokio::time::timeout(Duration::from_secs(10), call).await.expect("an answer")
}

async fn call(pool: &Pool<TcpStream>, authority: &str) -> Result<Vec<u8>, CallError<io::Error>> {
    let (mut body, mut bytes) = (send(pool, authority).await?.into_body(), Vec::new());
    while body.read(&mut bytes).await? {}
    Ok(bytes)
}

fn pool() -> Pool<TcpStream> {
    Pool::new(LIMITS, &[header::CONTENT_TYPE])
}

#[tokio::test]
async fn a_connection_serves_one_call_after_another() {
    let chunked =
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{\"\r\n4\r\na\":1\r\n1\r\n}\r\n0\r\n\r\n";
    let answers = vec![vec![OK.to_owned()], vec![chunked.to_owned()], vec![OK.to_owned()]];
    let (mut server, pool) = (server(vec![answers]).await, pool());
    assert_eq!(call(&pool, &server.authority).await.unwrap(), b"{}");
    assert_eq!(call(&pool, &server.authority).await.unwrap(), b"{\"a\":1}");
    let last = send(&pool, &server.authority).await.unwrap();
    assert_eq!(last.headers().get(header::CONTENT_TYPE).unwrap(), "application/json");
    assert!(server.accepted.recv().await.is_some() && server.accepted.try_recv().is_err(), "one connection");
}

#[tokio::test]
async fn an_idle_connection_that_was_closed_is_not_used_again() {
    let closing = vec![vec![OK.to_owned()]];
    let (mut server, pool) = (server(vec![closing.clone(), closing]).await, pool());
    assert!(call(&pool, &server.authority).await.is_ok());
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(call(&pool, &server.authority).await.is_ok());
    assert!(server.accepted.recv().await.is_some() && server.accepted.recv().await.is_some());
}

/// Idle for so long, a connection may be closed by its server.
const IDLE: Duration = Duration::from_millis(1_050);

/// Answers the first call of a connection, and closes it when the second one has arrived.
fn closing_late() -> Vec<Vec<String>> {
    vec![vec![OK.to_owned()], vec![String::new()]]
}

#[tokio::test]
async fn a_request_that_meets_the_end_of_a_reused_connection_is_sent_once_more_over_a_new_one() {
    let (mut server, pool) = (server(vec![closing_late(), closing_late()]).await, pool());
    assert!(call(&pool, &server.authority).await.is_ok());
    tokio::time::sleep(IDLE).await;
    assert!(call(&pool, &server.authority).await.is_ok());
    assert!(server.accepted.recv().await.is_some() && server.accepted.recv().await.is_some());
    let outcome = call(&pool, &server.authority).await;
    assert!(matches!(outcome, Err(CallError::Closed(WireError::Cut))), "it was just used: {outcome:?}");
}

#[tokio::test]
async fn a_call_may_ask_for_a_new_connection() {
    let answers = || vec![vec![OK.to_owned()]; 2];
    let (mut server, pool) = (server(vec![answers(), answers()]).await, pool());
    assert!(call(&pool, &server.authority).await.is_ok());
    let mut body = deliver(&pool, &server.authority, Delivery::NewConnection).await.unwrap().into_body();
    while body.read(&mut Vec::new()).await.unwrap() {}
    assert!(server.accepted.recv().await.is_some() && server.accepted.recv().await.is_some());
    assert!(call(&pool, &server.authority).await.is_ok(), "both are kept");
}

#[tokio::test]
async fn a_connection_that_ends_late_is_not_one_that_was_closed_as_idle() {
    let late = vec![vec![OK.to_owned()], vec![String::new(); 110]];
    let (server, pool) = (server(vec![late]).await, pool());
    assert!(call(&pool, &server.authority).await.is_ok());
    let outcome = call(&pool, &server.authority).await;
    assert!(matches!(outcome, Err(CallError::Wire(WireError::Cut))), "{outcome:?}");
}

#[tokio::test]
async fn a_request_that_ends_its_server_is_not_sent_again() {
    for closing in [
        // It answers neither over a reused connection nor over a new one.
        vec![closing_late(), vec![vec![String::new()]], vec![vec![OK.to_owned()]]],
        // The answer began.
        vec![vec![vec![OK.to_owned()], vec!["HTTP/1.1".to_owned()]], vec![vec![OK.to_owned()]]],
    ] {
        let (server, pool) = (server(closing).await, pool());
        assert!(call(&pool, &server.authority).await.is_ok());
        tokio::time::sleep(IDLE).await;
        let outcome = call(&pool, &server.authority).await;
        assert!(matches!(outcome, Err(CallError::Wire(WireError::Cut))), "{outcome:?}");
    }
}

#[tokio::test]
async fn a_server_that_is_gone_ended_with_the_request() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (authority, pool) = (listener.local_addr().unwrap().to_string(), pool());
    let server = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        assert!(stream.read(&mut [0; 1024]).await.unwrap() > 0);
        stream.write_all(OK.as_bytes()).await.unwrap();
        assert!(stream.read(&mut [0; 1024]).await.unwrap() > 0);
        drop(listener);
    };
    let client = async {
        assert!(call(&pool, &authority).await.is_ok());
        tokio::time::sleep(IDLE).await;
        call(&pool, &authority).await
    };
    let ((), outcome) = tokio::join!(server, client);
    assert!(matches!(outcome, Err(CallError::NotAgain { closed: WireError::Cut, .. })), "{outcome:?}");
}

#[tokio::test]
async fn the_oldest_connection_is_closed_when_enough_are_kept() {
    let one = PoolLimits { idle_connections: 1, ..LIMITS };
    let answers = || vec![vec![OK.to_owned()]; 3];
    let (mut server, pool) = (server(vec![answers(), answers()]).await, pool().limited(one));
    assert!(call(&pool, &server.authority).await.is_ok());
    tokio::time::sleep(IDLE).await;
    for _ in 0..2 {
        let mut body = deliver(&pool, &server.authority, Delivery::AtMostOnce).await.unwrap().into_body();
        while body.read(&mut Vec::new()).await.unwrap() {}
    }
    assert!(server.accepted.recv().await.is_some() && server.accepted.recv().await.is_some());
}

#[tokio::test]
async fn a_request_that_is_sent_at_most_once_takes_a_connection_that_was_just_used() {
    let answers = || vec![vec![OK.to_owned()], vec![OK.to_owned()], vec![OK.to_owned()]];
    let (mut server, pool) = (server(vec![answers(), answers()]).await, pool());
    let once = async || {
        let mut body = deliver(&pool, &server.authority, Delivery::AtMostOnce).await.unwrap().into_body();
        while body.read(&mut Vec::new()).await.unwrap() {}
    };
    once().await;
    once().await;
    tokio::time::sleep(IDLE).await;
    once().await;
    assert!(server.accepted.recv().await.is_some() && server.accepted.recv().await.is_some(), "the third");
}

#[tokio::test]
async fn what_says_close_or_too_much_is_not_used_again() {
    for first in [
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n",
        "HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    ] {
        // The first connection stays open, and would answer a second call wrongly.
        let wrong = OK.replace("{}", "xx");
        let connections = vec![vec![vec![first.to_owned()], vec![wrong]], vec![vec![OK.to_owned()]]];
        let (server, pool) = (server(connections).await, pool());
        assert_eq!(call(&pool, &server.authority).await.unwrap(), b"{}", "{first}");
        assert_eq!(call(&pool, &server.authority).await.unwrap(), b"{}", "{first}");
    }
}

#[tokio::test]
async fn an_answer_that_is_cut_is_no_answer() {
    for cut in [
        "HTTP/1.1 200",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",
        "",
    ] {
        let server = server(vec![vec![vec![cut.to_owned()]]]).await;
        let outcome = call(&pool(), &server.authority).await;
        assert!(matches!(outcome, Err(CallError::Wire(WireError::Cut))), "{cut:?}: {outcome:?}");
    }
}

#[tokio::test]
async fn an_answer_that_comes_byte_by_byte_is_the_same() {
    let text = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: 1\r\n\r\n";
    let server = server(vec![vec![text.chars().map(String::from).collect()]]).await;
    assert_eq!(call(&pool(), &server.authority).await.unwrap(), b"abc");
}

#[tokio::test]
async fn nobody_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = listener.local_addr().unwrap().to_string();
    drop(listener);
    assert!(matches!(call(&pool(), &authority).await, Err(CallError::Connect(_))));
}

#[tokio::test]
async fn an_observer_sees_reads_and_bytes_until_the_end() {
    #[derive(Default)]
    struct Counts(usize, std::cell::Cell<usize>);

    impl Observer for Counts {
        fn before_read(&mut self) {
            self.0 += 1;
        }

        fn on_bytes(&self) {
            self.1.set(self.1.get() + 1);
        }
    }

    let pieces = ["HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n", "ab", "cd"].map(str::to_owned);
    let server = server(vec![vec![pieces.to_vec()]]).await;
    let pool: Pool<TcpStream, Counts> = Pool::new(LIMITS, &[]);
    let mut body = send(&pool, &server.authority).await.unwrap().into_body();
    body.observe(Counts::default());
    let mut bytes = Vec::new();
    while bytes.len() < 4 {
        assert!(body.read(&mut bytes).await.unwrap());
    }
    let counts = body.observer().unwrap();
    assert!(counts.0 >= counts.1.get() && (1..=2).contains(&counts.1.get()));
    assert!(!body.read(&mut bytes).await.unwrap() && body.observer().is_none(), "the connection is idle");
}

#[tokio::test]
async fn idle_connections_end_at_their_time() {
    let server = server(vec![vec![vec![OK.to_owned()], vec![OK.to_owned()]]]).await;
    let pool = pool();
    assert!(call(&pool, &server.authority).await.is_ok());
    assert_eq!(pool.sweep().0, 0);
    let none = pool.limited(PoolLimits { idle_timeout: Duration::ZERO, ..LIMITS });
    assert_eq!((none.sweep().0, pool.sweep().0), (1, 0));
}
