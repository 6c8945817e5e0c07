//! Well-behaved and misbehaving peers on real sockets.

use tokio::{net::TcpListener, task::JoinHandle};
use tokio_util::task::TaskTracker;

use super::*;

const LIMITS: Limits =
    Limits { message: 1 << 20, connect: Duration::from_secs(5), silence: Duration::from_secs(1) };
const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB";

/// Connects to a peer that performs the handshake of a publisher with this minor version.
async fn peer(minor: u8, limits: Limits) -> (Result<Connection, Error>, TcpStream) {
    let mut greeting = greeting::ours();
    greeting[11] = minor;
    connect_to_bytes([greeting.as_slice(), READY].concat(), limits).await
}

/// Connects to a peer that sends these bytes.
async fn connect_to_bytes(sent: Vec<u8>, limits: Limits) -> (Result<Connection, Error>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
    let accepted: JoinHandle<TcpStream> = TaskTracker::new().spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&sent).await.unwrap();
        stream
    });
    let connection = Connection::open(&endpoint, SocketType::Sub, limits).await;
    (connection, accepted.await.unwrap())
}

/// Receives the messages in `bytes`, up to the error that ends the connection.
async fn after(bytes: &[u8], close: bool) -> (Vec<Vec<Bytes>>, Error, Connection) {
    let (connection, mut stream) = peer(1, LIMITS).await;
    let mut connection = connection.unwrap();
    stream.write_all(bytes).await.unwrap();
    if close {
        stream.shutdown().await.unwrap();
    }
    let mut messages = Vec::new();
    loop {
        match connection.recv().await {
            Ok(message) => messages.push(message),
            Err(error) => {
                drop(stream);
                return (messages, error, connection);
            }
        }
    }
}

fn long(flags: u8, length: u64) -> Vec<u8> {
    [[flags].as_slice(), &length.to_be_bytes()].concat()
}

#[tokio::test]
async fn a_claimed_length_over_the_limit_is_refused_from_the_header_alone() {
    for length in [1 << 63, u64::MAX, (1 << 20) + 1] {
        let (_, error, connection) = after(&long(2, length), false).await;
        assert!(matches!(error, Error::Frame(FrameError::Message { .. })), "{error}");
        assert!(error.is_violation());
        assert!(connection.unread.capacity() <= 2 * READ_BYTES, "{}", connection.unread.capacity());
    }
    let (_, error, _) = after(&long(6, 1 << 63), false).await;
    assert!(matches!(error, Error::Frame(FrameError::Command(_))), "{error}");
}

#[tokio::test]
async fn memory_grows_with_received_bytes_not_with_claimed_ones() {
    let mut said = long(2, 1 << 20);
    said.extend(vec![0; 100_000]);
    let (messages, error, connection) = after(&said, true).await;
    assert!(messages.is_empty());
    assert!(matches!(error, Error::Closed), "{error}");
    assert!((100_000..400_000).contains(&connection.unread.capacity()), "{}", connection.unread.capacity());
}

#[tokio::test]
async fn the_buffer_of_a_large_message_is_freed() {
    let limits = Limits { message: 8 << 20, ..LIMITS };
    let (connection, mut stream) = peer(1, limits).await;
    let mut connection = connection.unwrap();
    let said = [long(2, 8 << 20), vec![0; 8 << 20]].concat();
    let writing = TaskTracker::new().spawn(async move {
        stream.write_all(&said).await.unwrap();
        stream
    });
    assert_eq!(connection.recv().await.unwrap()[0].len(), 8 << 20);
    let mut stream = writing.await.unwrap();
    for _ in 0..2 {
        stream.write_all(b"\x00\x01x").await.unwrap();
        assert_eq!(connection.recv().await.unwrap(), [b"x".as_slice()]);
    }
    assert!(connection.unread.capacity() <= MAX_IDLE_BUFFER, "{}", connection.unread.capacity());
}

#[tokio::test]
async fn too_many_frames_are_refused() {
    let (_, error, _) = after(&b"\x01\x00".repeat(1000), false).await;
    assert!(matches!(error, Error::Frame(FrameError::Frames)), "{error}");
    let (_, error, _) = after(&b"\x01\x01x".repeat(1000), false).await;
    assert!(matches!(error, Error::Frame(FrameError::Frames)), "{error}");
}

#[tokio::test]
async fn an_unsuitable_peer_is_refused_during_the_handshake() {
    let error =
        |said: &'static [u8]| async move { connect_to_bytes(said.to_vec(), LIMITS).await.0.unwrap_err() };
    let http = error(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    assert!(matches!(http, Error::Greeting(GreetingError::Signature)), "{http}");
    let mut plain = greeting::ours();
    plain[12..17].copy_from_slice(b"PLAIN");
    let (plain, _) = connect_to_bytes(plain.to_vec(), LIMITS).await;
    assert_eq!(plain.unwrap_err().to_string(), "the peer requires the mechanism `PLAIN`: expected NULL");
    let (other, _) = connect_to_bytes(
        [greeting::ours().as_slice(), b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04PULL"].concat(),
        LIMITS,
    )
    .await;
    assert_eq!(other.unwrap_err().to_string(), "unsuitable socket type `PULL` of the peer");
    let (early, _) = connect_to_bytes([greeting::ours().as_slice(), b"\x00\x01x"].concat(), LIMITS).await;
    assert!(matches!(early.unwrap_err(), Error::Early));
    let (refused, _) =
        connect_to_bytes([greeting::ours().as_slice(), b"\x04\x09\x05ERROR\x02no"].concat(), LIMITS).await;
    assert_eq!(refused.unwrap_err().to_string(), "the peer refused the connection: no");
    let hasty = Limits { connect: Duration::from_millis(100), ..LIMITS };
    let (mute, _) = connect_to_bytes(greeting::ours()[..40].to_vec(), hasty).await;
    assert!(matches!(mute.unwrap_err(), Error::Handshake(_)));
}

#[tokio::test]
async fn a_close_within_a_frame_ends_the_connection() {
    let (messages, error, _) = after(b"\x00\x01a\x01\x05kv-ev", true).await;
    assert_eq!(messages, [[b"a".as_slice()]]);
    assert!(matches!(error, Error::Closed), "{error}");
    assert!(!error.is_violation());
}

#[tokio::test]
async fn slow_bytes_become_messages_and_dropped_futures_lose_none() {
    let (connection, mut stream) = peer(1, LIMITS).await;
    let mut connection = connection.unwrap();
    let said = b"\x01\x02kv\x04\x05\x04PONG\x02\0\0\0\0\0\0\0\x03abc".repeat(2);
    let dripping = TaskTracker::new().spawn(async move {
        for byte in said {
            stream.write_all(&[byte]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        stream
    });
    let mut messages = Vec::new();
    while messages.len() < 2 {
        if let Ok(message) = timeout(Duration::from_millis(1), connection.recv()).await {
            messages.push(message.unwrap());
        }
    }
    assert_eq!(messages, [[b"kv".as_slice(), b"abc"], [b"kv", b"abc"]]);
    drop(dripping.await);
}

#[tokio::test(start_paused = true)]
async fn an_incomplete_message_ends_the_connection_after_its_time_limit() {
    // ZMTP 3.0 has no PING, so only the time limit of the message applies.
    let (connection, mut stream) = peer(0, LIMITS).await;
    let mut connection = connection.unwrap();
    TaskTracker::new().spawn(async move {
        stream.write_all(&long(2, 1 << 19)).await.unwrap();
        while stream.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    let began = Instant::now();
    let error = connection.recv().await.unwrap_err();
    assert!(matches!(error, Error::Slow), "{error}");
    assert!((MESSAGE_LIMIT..MESSAGE_LIMIT * 2).contains(&began.elapsed()));
}

#[tokio::test]
async fn a_silent_peer_with_3_1_gets_a_ping_and_is_then_disconnected() {
    let (connection, mut stream) = peer(1, LIMITS).await;
    let mut connection = connection.unwrap();
    let began = Instant::now();
    let error = connection.recv().await.unwrap_err();
    assert!(matches!(error, Error::Silent(_)), "{error}");
    assert!(began.elapsed() >= LIMITS.silence * 2, "the ping has its time, too");
    drop(connection);
    let mut said = Vec::new();
    stream.read_to_end(&mut said).await.unwrap();
    assert!(said.ends_with(b"\x04\x07\x04PING\0\0"), "{}", said.escape_ascii());
}

#[tokio::test]
async fn a_peer_that_sends_pongs_stays_connected_and_so_does_one_with_3_0() {
    let (connection, mut stream) = peer(1, LIMITS).await;
    let mut connection = connection.unwrap();
    let answering = TaskTracker::new().spawn(async move {
        let (mut said, mut answered) = (BytesMut::new(), 0);
        while stream.read_buf(&mut said).await.unwrap() > 0 {
            while said.windows(6).filter(|at| *at == b"\x04PING\0").count() > answered {
                answered += 1;
                stream.write_all(b"\x04\x05\x04PONG").await.unwrap();
            }
        }
        answered
    });
    let (without_pings, _stream) = peer(0, LIMITS).await;
    let mut without_pings = without_pings.unwrap();
    let time = LIMITS.silence * 8;
    let ended = tokio::join!(timeout(time, connection.recv()), timeout(time, without_pings.recv()));
    assert!(ended.0.is_err() && ended.1.is_err(), "{ended:?}");
    drop(connection);
    assert!(answering.await.unwrap() >= 2);
}

#[tokio::test]
async fn a_ping_gets_a_pong_with_its_context_and_a_flood_ends_the_connection() {
    let (connection, mut stream) = peer(1, LIMITS).await;
    let mut connection = connection.unwrap();
    stream.write_all(b"\x04\x0a\x04PING\0\x0aabc\x00\x01x").await.unwrap();
    assert_eq!(connection.recv().await.unwrap(), [b"x".as_slice()]);
    assert!(timeout(Duration::from_millis(20), connection.recv()).await.is_err());
    drop(connection);
    let mut said = Vec::new();
    stream.read_to_end(&mut said).await.unwrap();
    assert!(said.ends_with(b"\x04\x08\x04PONGabc"), "{}", said.escape_ascii());

    let (connection, mut stream) = peer(1, LIMITS).await;
    let mut connection = connection.unwrap();
    let flooding = TaskTracker::new().spawn(async move {
        let pings = b"\x04\x07\x04PING\0\0".repeat(1000);
        while stream.write_all(&pings).await.is_ok() {}
    });
    let error = connection.recv().await.unwrap_err();
    assert!(matches!(error, Error::Flood | Error::Io(_)), "{error}");
    drop(connection);
    flooding.await.unwrap();
}
