//! Copies bytes between two ends of an upgraded connection, unchanged, within limits of time.
//!
//! It knows of WebSocket frames only where they end, so that it can say goodbye between two of them.

use std::io;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    time::{Duration, Instant, sleep, sleep_until, timeout},
};

/// Bytes that wait for one end.
const BUFFER: usize = 16 * 1024;
/// How long the other direction may stay open after one end closed, or after the goodbye.
const LINGER: Duration = Duration::from_secs(1);
/// A close frame with the code 1001, "going away".
const GOING_AWAY: [u8; 4] = [0x88, 2, 0x03, 0xE9];

/// Limits of time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// How long both ends may be silent.
    pub(super) idle: Duration,
    /// How long one end may accept no byte.
    pub(super) write: Duration,
}

/// Why a tunnel ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// One end closed it.
    Closed,
    /// Nothing was sent for too long.
    Idle,
    /// The client did not read in time.
    ClientSlow,
    /// The engine did not read in time.
    EngineSlow,
    /// The gateway stops.
    GoingAway,
}

impl Ended {
    /// Stable label.
    pub(super) fn code(self) -> &'static str {
        match self {
            Self::Closed => "ok",
            Self::Idle => "realtime_idle",
            Self::ClientSlow => "client_too_slow",
            Self::EngineSlow => "engine_timeout",
            Self::GoingAway => "draining",
        }
    }
}

/// What both directions know of each other.
#[derive(Debug)]
struct Activity(Mutex<Moved>);

#[derive(Debug)]
struct Moved {
    /// When bytes moved last.
    at: Instant,
    bytes: u64,
    /// Whether the client does not accept bytes of the engine now.
    client_blocks: bool,
    /// When it last did not.
    client_blocked: Option<Instant>,
}

impl Activity {
    fn new() -> Self {
        let moved = Moved { at: Instant::now(), bytes: 0, client_blocks: false, client_blocked: None };
        Self(Mutex::new(moved))
    }

    fn moved(&self, bytes: usize) {
        let mut moved = self.0.lock();
        (moved.at, moved.bytes) = (Instant::now(), moved.bytes.saturating_add(bytes as u64));
    }

    /// Waits until nothing moved for `idle`.
    async fn idle(&self, idle: Duration) {
        loop {
            let until = self.0.lock().at + idle;
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }

    /// Sends bytes of the engine to the client, and notes while it does not accept them.
    async fn to_client<T>(&self, sending: impl Future<Output = T>) -> T {
        tokio::pin!(sending);
        if let Some(sent) = sending.as_mut().now_or_never() {
            return sent;
        }
        self.0.lock().client_blocks = true;
        let sent = sending.await;
        let mut moved = self.0.lock();
        (moved.client_blocks, moved.client_blocked) = (false, Some(Instant::now()));
        sent
    }

    /// Returns when the client last did not accept bytes; this is `now` while it does not.
    fn client_blocked(&self, now: Instant) -> Option<Instant> {
        let moved = self.0.lock();
        if moved.client_blocks { Some(now) } else { moved.client_blocked }
    }

    /// Waits until the engine had `limit` to accept bytes. While the client accepts nothing, the gateway
    /// reads nothing of the engine, which may then read nothing either: this time does not count.
    async fn engine_too_slow(&self, limit: Duration) {
        let begun = Instant::now();
        loop {
            let now = Instant::now();
            let until = self.client_blocked(now).map_or(begun, |blocked| blocked.max(begun)) + limit;
            if until <= now {
                return;
            }
            sleep_until(until).await;
        }
    }
}

/// Copies until one end closes, nothing moves for too long, or `stop` is over. Returns why, and how many
/// bytes moved.
pub(super) async fn tunnel(
    client: impl AsyncRead + AsyncWrite,
    engine: impl AsyncRead + AsyncWrite,
    patience: Patience,
    stop: impl Future<Output = ()>,
) -> (Ended, u64) {
    let activity = Activity::new();
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_engine, mut to_engine) = tokio::io::split(engine);
    let over = async {
        tokio::select! {
            () = stop => Ended::GoingAway,
            () = activity.idle(patience.idle) => Ended::Idle,
        }
    };
    let upwards = async {
        let copied = up(&mut from_client, &mut to_engine, &activity, patience.write).await;
        if copied.is_err() { Ended::EngineSlow } else { Ended::Closed }
    };
    let downwards = down(&mut from_engine, &mut to_client, &activity, patience.write, over);
    tokio::pin!(upwards, downwards);
    let ended = tokio::select! {
        ended = &mut downwards => {
            // The client answers the goodbye, or reads the last bytes.
            let _ = timeout(LINGER, &mut upwards).await;
            ended
        }
        ended = &mut upwards => {
            let _ = timeout(LINGER, &mut downwards).await;
            ended
        }
    };
    let moved = activity.0.lock().bytes;
    (ended, moved)
}

/// Copies from the client to the engine.
///
/// # Errors
/// The engine did not read in time.
async fn up(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    activity: &Activity,
    write: Duration,
) -> Result<(), TooSlow> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let length = from.read(&mut buffer).await.unwrap_or(0);
        let Some(bytes) = buffer.get(..length).filter(|bytes| !bytes.is_empty()) else { break };
        if !send(to, bytes, activity.engine_too_slow(write)).await? {
            break;
        }
        activity.moved(length);
    }
    let _ = timeout(write, to.shutdown()).await;
    Ok(())
}

/// Copies from the engine to the client until `over`, and then says goodbye between two frames.
async fn down(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    activity: &Activity,
    write: Duration,
    over: impl Future<Output = Ended>,
) -> Ended {
    let (mut buffer, mut frames) = (vec![0; BUFFER], Frames::default());
    tokio::pin!(over);
    let mut ending = None;
    loop {
        if let Some(ended) = ending.filter(|_| frames.between) {
            // The client closes, or the caller does so in a moment.
            let _ = send(to, &GOING_AWAY, sleep(write)).await;
            return ended;
        }
        let read = if ending.is_some() {
            // The rest of a frame may not keep the gateway from stopping.
            timeout(LINGER, from.read(&mut buffer)).await.unwrap_or(Ok(0))
        } else {
            tokio::select! {
                biased;
                ended = &mut over => {
                    ending = Some(ended);
                    continue;
                }
                read = from.read(&mut buffer) => read,
            }
        };
        let Some(bytes) = buffer.get(..read.unwrap_or(0)).filter(|bytes| !bytes.is_empty()) else { break };
        frames.track_bytes(bytes);
        match activity.to_client(send(to, bytes, sleep(write))).await {
            Ok(true) => activity.moved(bytes.len()),
            Ok(false) => break,
            Err(TooSlow) => return Ended::ClientSlow,
        }
    }
    let _ = timeout(write, to.shutdown()).await;
    ending.unwrap_or(Ended::Closed)
}

/// One end did not read in time.
#[derive(Debug)]
struct TooSlow;

/// Writes all of `bytes`; `false` when the other end is gone. `too_slow` is ready when that end had its time.
async fn send(
    to: &mut (impl AsyncWrite + Unpin),
    bytes: &[u8],
    too_slow: impl Future<Output = ()>,
) -> Result<bool, TooSlow> {
    let written = async {
        to.write_all(bytes).await?;
        to.flush().await
    };
    let written = tokio::select! {
        biased;
        written = written => written,
        () = too_slow => return Err(TooSlow),
    };
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(TooSlow),
        Err(_) => Ok(false),
    }
}

/// Finds the ends of a WebSocket's frames (RFC 6455, section 5.2).
#[derive(Debug)]
struct Frames {
    /// Whether a frame ended, and none began since.
    between: bool,
    head: Vec<u8>,
    /// Bytes of the frame's payload that are still to come.
    payload: u64,
}

impl Default for Frames {
    fn default() -> Self {
        Self { between: true, head: Vec::with_capacity(14), payload: 0 }
    }
}

impl Frames {
    fn track_bytes(&mut self, mut bytes: &[u8]) {
        while let Some((first, rest)) = bytes.split_first() {
            if self.payload > 0 {
                let skipped = usize::try_from(self.payload).unwrap_or(usize::MAX).min(bytes.len());
                self.payload -= skipped as u64;
                bytes = bytes.get(skipped..).unwrap_or_default();
            } else {
                self.head.push(*first);
                bytes = rest;
                let Some(payload) = payload(&self.head) else {
                    self.between = false;
                    continue;
                };
                self.payload = payload;
                self.head.clear();
            }
            self.between = self.payload == 0 && self.head.is_empty();
        }
    }
}

/// The length of a frame's payload, once its head is whole.
fn payload(head: &[u8]) -> Option<u64> {
    let second = *head.get(1)?;
    let (extended, mask) = (second & 0x7F, usize::from(second >> 7) * 4);
    let bytes = match extended {
        126 => 2,
        127 => 8,
        _ => 0,
    };
    let length = head.get(2..2 + bytes)?;
    if head.len() < 2 + bytes + mask {
        return None;
    }
    let number = length.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
    Some(if bytes == 0 { extended.into() } else { number })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_end_where_their_heads_say_in_pieces_of_any_size() {
        let mut frames = vec![0x81, 3, b'a', b'b', b'c', 0x82, 0x80, 1, 2, 3, 4, 0x82, 126, 1, 0];
        frames.extend([7; 256]);
        frames.extend([0x82, 127, 0, 0, 0, 0, 0, 0, 0, 2, 1, 2]);
        let ends = [5, 11, 15 + 256, 15 + 256 + 12];
        for step in 1..20 {
            let (mut tracked, mut at) = (Frames::default(), 0);
            for piece in frames.chunks(step) {
                tracked.track_bytes(piece);
                at += piece.len();
                assert_eq!(tracked.between, ends.contains(&at), "{step} {at}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_tunnel_ends_with_a_goodbye_between_frames() {
        let ((mut client, near), (far, mut engine)) = (tokio::io::duplex(64), tokio::io::duplex(64));
        let patience = Patience { idle: Duration::from_secs(5), write: Duration::from_secs(1) };
        let running = async { tunnel(near, far, patience, std::future::pending()).await };
        let ends = async {
            engine.write_all(&[0x81, 1, b'x']).await.unwrap();
            let mut all = Vec::new();
            client.read_to_end(&mut all).await.unwrap();
            all
        };
        let ((ended, bytes), all) = tokio::join!(running, ends);
        assert_eq!((ended, bytes, all), (Ended::Idle, 3, vec![0x81, 1, b'x', 0x88, 2, 3, 0xE9]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_ends_its_tunnel() {
        let ((_client, near), (far, mut engine)) = (tokio::io::duplex(64), tokio::io::duplex(64));
        let patience = Patience { idle: Duration::from_secs(50), write: Duration::from_secs(1) };
        let running = async { tunnel(near, far, patience, std::future::pending()).await };
        let flood = async { engine.write_all(&vec![0x81; 100_000]).await.is_err() };
        let ((ended, _), failed) = tokio::join!(running, flood);
        assert_eq!((ended, failed), (Ended::ClientSlow, true));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_is_not_taken_for_a_slow_engine() {
        let ((mut client, near), (far, mut engine)) = (tokio::io::duplex(64), tokio::io::duplex(64));
        let patience = Patience { idle: Duration::from_secs(50), write: Duration::from_secs(1) };
        let running = async { (tunnel(near, far, patience, std::future::pending()).await.0, Instant::now()) };
        // It reads after it has written.
        let answers = async { engine.write_all(&[0x82, 0].repeat(10_000)).await };
        let floods_and_reads = async {
            let mut flooded = client.write(&[0x81; 64]).await;
            while flooded.is_ok() {
                tokio::time::sleep(Duration::from_millis(500)).await;
                let mut read = [0; 640];
                if client.read(&mut read).await.unwrap_or(0) == 0 {
                    break;
                }
                flooded = client.write(&[0x81; 64]).now_or_never().unwrap_or(Ok(0));
            }
        };
        let begun = Instant::now();
        let ((ended, at), ..) = tokio::join!(running, answers, floods_and_reads);
        // The engine has written all after 20,000 bytes, 64 each half a second, and reads nothing then.
        assert_eq!(ended, Ended::EngineSlow);
        // I8.6
        assert!(at - begun > Duration::from_secs(150), "{:?}", at - begun);
    }
}
