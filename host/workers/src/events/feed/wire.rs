//! The sockets of a feed: the subscription, which knows when its connection ends, and the question for a replay.
//!
//! Owns the frames. Knows no order of numbers and no msgpack.

use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream::BoxStream};
use tokio::{select, sync::mpsc};
use zeromq::{
    DealerSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend, SubSocket, ZmqError, ZmqMessage,
};

use super::FeedConfig;

/// The number that ends a replay.
const END: [u8; 8] = [0xff; 8];

/// A connected subscription.
pub(super) struct Line {
    socket: SubSocket,
    /// The socket connects again by itself and says so here only. A new connection must be a new `Line`.
    events: BoxStream<'static, SocketEvent>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum Lost {
    #[error("cannot connect: {0}")]
    Connect(#[source] ZmqError),
    #[error("broken connection: {0}")]
    Broken(#[source] ZmqError),
    #[error("the engine closed the connection")]
    Closed,
}

/// One answer of a replay.
#[derive(Debug)]
pub(super) enum Reply {
    Message(u64, Bytes),
    Malformed,
}

impl Line {
    pub(super) async fn connect(config: &FeedConfig) -> Result<Self, Lost> {
        let mut socket = SubSocket::with_options(options(config.connect_limit));
        let events = socket.monitor().boxed();
        socket.subscribe(&config.topic).await.map_err(Lost::Connect)?;
        socket.connect(&config.endpoint).await.map_err(Lost::Connect)?;
        Ok(Self { socket, events })
    }

    /// The next message. Dropping the future loses none.
    pub(super) async fn next(&mut self) -> Result<ZmqMessage, Lost> {
        loop {
            select! {
                biased;
                message = self.socket.recv() => return message.map_err(Lost::Broken),
                event = self.events.next() => match event {
                    None | Some(SocketEvent::Disconnected(_) | SocketEvent::Closed) => return Err(Lost::Closed),
                    Some(_) => {}
                },
            }
        }
    }
}

/// Asks `endpoint` for every message from number `from` on and passes the answers on until the end marker. The caller
/// sets the limit of the whole.
pub(super) async fn ask(
    endpoint: &str,
    connect_limit: Duration,
    from: u64,
    replies: mpsc::Sender<Reply>,
) -> Result<(), ZmqError> {
    let mut socket = DealerSocket::with_options(options(connect_limit));
    socket.connect(endpoint).await?;
    let mut question = ZmqMessage::from(Bytes::new());
    question.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
    socket.send(question).await?;
    loop {
        let message = socket.recv().await?;
        if is_end(&message) {
            return Ok(());
        }
        let reply = frames(&message).map_or(Reply::Malformed, |(seq, payload)| Reply::Message(seq, payload));
        if replies.send(reply).await.is_err() {
            return Ok(());
        }
    }
}

/// The number and the payload of a message: its last two frames, whatever topic and delimiter stand before them.
pub(super) fn frames(message: &ZmqMessage) -> Option<(u64, Bytes)> {
    let payload = message.get(message.len().checked_sub(1)?)?;
    let seq = message.get(message.len().checked_sub(2)?)?;
    let seq: [u8; 8] = seq.as_ref().try_into().ok()?;
    (seq != END).then(|| (u64::from_be_bytes(seq), payload.clone()))
}

/// The end marker is the number's frame, with or without a payload after it.
fn is_end(message: &ZmqMessage) -> bool {
    let frame = |back: usize| message.len().checked_sub(back).and_then(|at| message.get(at));
    [1, 2].into_iter().any(|back| frame(back).is_some_and(|bytes| bytes.as_ref() == END))
}

fn options(connect_limit: Duration) -> SocketOptions {
    let mut options = SocketOptions::default();
    options.connect_timeout(connect_limit);
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(parts: &[&[u8]]) -> ZmqMessage {
        let parts: Vec<Bytes> = parts.iter().map(|part| Bytes::copy_from_slice(part)).collect();
        ZmqMessage::try_from(parts).expect("frames")
    }

    #[test]
    fn h6_the_last_two_frames_count() {
        let seq = 7_u64.to_be_bytes();
        #[rustfmt::skip]
        let table: [(&[&[u8]], Option<u64>); 8] = [
            (&[b"kv", &seq, b"p"], Some(7)),
            (&[b"", &seq, b"p"], Some(7)),
            (&[b"", b"kv", &seq, b"p"], Some(7)),
            (&[&seq, b"p"], Some(7)),
            (&[b"p"], None),
            (&[b"kv", b"p"], None),
            (&[b"kv", &seq[1..], b"p"], None),
            (&[b"kv", &END, b"p"], None),
        ];
        for (parts, expected) in table {
            let found = frames(&message(parts));
            assert_eq!(found.as_ref().map(|(seq, _)| *seq), expected, "{parts:?}");
            assert!(found.is_none_or(|(_, payload)| payload.as_ref() == b"p"));
        }
    }

    #[test]
    fn h6_the_end_of_a_replay_has_many_forms() {
        for parts in [[b"".as_slice(), &END].as_slice(), &[b"", &END, b""], &[b"", b"kv", &END, b""], &[&END]]
        {
            assert!(is_end(&message(parts)), "{parts:?}");
        }
        assert!(!is_end(&message(&[b"", &7_u64.to_be_bytes(), b"p"])));
    }
}
