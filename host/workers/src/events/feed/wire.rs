//! Sockets of a feed: subscription and replay request.
//!
//! Owns the frame layout of messages. Knows neither the order of sequence numbers nor msgpack.

use std::{io, time::Duration};

use bytes::Bytes;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use zmtp::{Connection, Limits, SocketType};

use super::FeedConfig;
use crate::resolver::Peer;

/// How often a subscription looks whether the name of its endpoint has other addresses.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(5);
/// Sequence number that marks the end of a replay.
const END: [u8; 8] = [0xff; 8];

/// Why a message is malformed when [`frames`] finds nothing in it.
pub(super) const NOT_FRAMES: &str =
    "the last two frames of a message are not a sequence number (8 bytes) and a batch";

/// A connected subscription.
pub(super) struct Subscription {
    socket: Connection,
    /// `None` for an IP address.
    peer: Option<Peer>,
    /// When the name was last followed.
    followed: Instant,
}

/// One reply of a replay.
#[derive(Debug)]
pub(super) enum Reply {
    Message(u64, Bytes),
    Malformed,
}

impl Subscription {
    pub(super) async fn connect(config: &FeedConfig) -> Result<Self, zmtp::Error> {
        let (mut socket, peer) = open(config, &config.endpoint, SocketType::Sub).await?;
        let limit = config.connect_limit;
        let subscribed = timeout(limit, socket.subscribe(&config.topic)).await;
        subscribed.unwrap_or(Err(zmtp::Error::Handshake(limit)))?;
        Ok(Self { socket, peer, followed: Instant::now() })
    }

    /// Returns the next message. Cancel-safe.
    ///
    /// # Errors
    /// The connection failed, or the name of its endpoint leads elsewhere now.
    pub(super) async fn next(&mut self) -> Result<Vec<Bytes>, zmtp::Error> {
        let Some(peer) = &self.peer else { return self.socket.recv().await };
        loop {
            if self.followed.elapsed() >= FOLLOW_INTERVAL {
                self.followed = Instant::now();
                peer.follow();
            }
            if !peer.is_current() {
                return Err(zmtp::Error::Connect(io::Error::other("its name has other addresses now")));
            }
            if let Ok(received) = timeout(FOLLOW_INTERVAL, self.socket.recv()).await {
                return received;
            }
        }
    }
}

/// Requests every message from sequence number `from` on from the replay server at `endpoint`, and forwards
/// the replies until the end marker. Fails if the next reply takes longer than `reply_limit`; the caller
/// limits the whole.
pub(super) async fn ask(
    config: &FeedConfig,
    endpoint: &str,
    from: u64,
    replies: mpsc::Sender<Reply>,
) -> Result<(), zmtp::Error> {
    let (mut socket, _) = open(config, endpoint, SocketType::Dealer).await?;
    socket.send(&[b"", &from.to_be_bytes()]).await?;
    loop {
        let message = timeout(config.reply_limit, socket.recv()).await;
        let message = message.unwrap_or(Err(zmtp::Error::Silent(config.reply_limit)))?;
        if is_end(&message) {
            return Ok(());
        }
        let reply = frames(&message).map_or(Reply::Malformed, |(seq, payload)| Reply::Message(seq, payload));
        if replies.send(reply).await.is_err() {
            return Ok(());
        }
    }
}

/// Connects to the first address of `endpoint` that takes the connection.
async fn open(
    config: &FeedConfig,
    endpoint: &str,
    socket_type: SocketType,
) -> Result<(Connection, Option<Peer>), zmtp::Error> {
    let mut failed = zmtp::Error::Address(endpoint.to_owned());
    let Some(authority) = endpoint.strip_prefix("tcp://") else { return Err(failed) };
    let limits =
        Limits { message: config.max_message, connect: config.connect_limit, silence: config.silence };
    let addresses = timeout(limits.connect, config.resolver.addresses(authority)).await;
    let addresses = addresses.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    for address in addresses.map_err(zmtp::Error::Connect)? {
        match Connection::open(&format!("tcp://{address}"), socket_type, limits).await {
            // The second one: the address is silent.
            Err(error @ (zmtp::Error::Connect(_) | zmtp::Error::Handshake(_))) => failed = error,
            opened => return Ok((opened?, config.resolver.peer(authority, address))),
        }
    }
    Err(failed)
}

/// Returns the sequence number and the payload of a message: its last two frames. Topic and delimiter frames
/// may precede them.
pub(super) fn frames(message: &[Bytes]) -> Option<(u64, Bytes)> {
    let payload = message.get(message.len().checked_sub(1)?)?;
    let seq = message.get(message.len().checked_sub(2)?)?;
    let seq: [u8; 8] = seq.as_ref().try_into().ok()?;
    (seq != END).then(|| (u64::from_be_bytes(seq), payload.clone()))
}

/// Returns whether a message is the end marker: its sequence number is [`END`], with or without a payload
/// after it.
fn is_end(message: &[Bytes]) -> bool {
    let frame = |back: usize| message.len().checked_sub(back).and_then(|at| message.get(at));
    [1, 2].into_iter().any(|back| frame(back).is_some_and(|bytes| bytes.as_ref() == END))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(parts: &[&[u8]]) -> Vec<Bytes> {
        parts.iter().map(|part| Bytes::copy_from_slice(part)).collect()
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
            // H6.1
            assert_eq!(found.as_ref().map(|(seq, _)| *seq), expected, "{parts:?}");
            assert!(found.is_none_or(|(_, payload)| payload.as_ref() == b"p"));
        }
    }

    #[test]
    fn h6_the_end_marker_of_a_replay_may_have_several_forms() {
        for parts in [[b"".as_slice(), &END].as_slice(), &[b"", &END, b""], &[b"", b"kv", &END, b""], &[&END]]
        {
            assert!(is_end(&message(parts)), "{parts:?}");
        }
        assert!(!is_end(&message(&[b"", &7_u64.to_be_bytes(), b"p"])));
    }
}
