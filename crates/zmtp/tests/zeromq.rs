//! The client beside an independent implementation of the protocol.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use tokio::time::timeout;
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};
use zmtp::{Connection, Limits, SocketType};

const LIMITS: Limits =
    Limits { message: 1 << 20, connect: Duration::from_secs(20), silence: Duration::from_secs(20) };

fn message(parts: &[&[u8]]) -> ZmqMessage {
    let parts: Vec<bytes::Bytes> = parts.iter().map(|part| bytes::Bytes::copy_from_slice(part)).collect();
    ZmqMessage::try_from(parts).unwrap()
}

#[tokio::test]
async fn a_subscriber_gets_the_messages_of_its_topic() {
    let mut publisher = PubSocket::new();
    let endpoint = publisher.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let mut subscriber = Connection::open(&endpoint, SocketType::Sub, LIMITS).await.unwrap();
    subscriber.subscribe("kv").await.unwrap();
    let received = async {
        // A subscription takes effect some time after it was sent.
        loop {
            publisher.send(message(&[b"other", b"1"])).await.unwrap();
            publisher.send(message(&[b"kv", b"2"])).await.unwrap();
            if let Ok(frames) = timeout(Duration::from_millis(50), subscriber.recv()).await {
                return frames.unwrap();
            }
        }
    };
    let frames = timeout(Duration::from_secs(20), received).await.unwrap();
    assert_eq!(frames, [b"kv".as_slice(), b"2"]);
}

#[tokio::test]
async fn a_dealer_gets_the_reply_of_a_router() {
    let mut router = RouterSocket::new();
    let endpoint = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let mut dealer = Connection::open(&endpoint, SocketType::Dealer, LIMITS).await.unwrap();
    let answer = async {
        let request = router.recv().await.unwrap().into_vec();
        assert_eq!(request.last().unwrap().as_ref(), b"question");
        let identity = request.first().unwrap().clone();
        router.send(message(&[&identity, b"", b"answer"])).await.unwrap();
    };
    dealer.send(&[b"", b"question"]).await.unwrap();
    let ((), reply) = tokio::join!(answer, dealer.recv());
    assert_eq!(reply.unwrap(), [b"".as_slice(), b"answer"]);
}
