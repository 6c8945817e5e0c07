//! A feed against real sockets: a publisher and its replay server in this process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::{
    io::Read as _,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use pointsman_workers::{
    Resolver,
    events::{FeedConfig, FeedCounters, Sink, run},
};
use prefix_index::events::{Batch, KvEvent};
use serde_json::json;
use tokio::{
    io::AsyncWriteExt as _,
    sync::Notify,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use zeromq::{Endpoint, PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

const LOCAL: &str = "tcp://127.0.0.1:0";
/// Generous limit of every wait, because the machine may be busy.
const WAIT_LIMIT: Duration = Duration::from_secs(20);

/// A call of a sink.
#[derive(Clone, Debug, PartialEq)]
enum Call {
    /// A batch, identified by the hash of its only removal.
    Batch(u64),
    /// A batch with nothing but an event of an unknown type.
    Unknown,
    Forget(&'static str),
    Live(bool),
}
use Call::{Batch as Got, Forget, Live, Unknown};

#[derive(Default)]
struct Recorder {
    calls: Mutex<Vec<Call>>,
    news: Notify,
}

impl Recorder {
    fn push(&self, call: Call) {
        self.calls.lock().push(call);
        self.news.notify_one();
    }
}

impl Sink for Recorder {
    fn apply(&self, batch: Batch) {
        match batch.events.as_slice() {
            [.., KvEvent::Removed { hashes, .. }] => self.push(Got(hashes[0])),
            [KvEvent::Unknown(_)] => self.push(Unknown),
            other => panic!("unexpected events: {other:?}"),
        }
    }

    fn forget(&self, why: &'static str) {
        self.push(Forget(why));
    }

    fn live(&self, live: bool) {
        self.push(Live(live));
    }
}

/// A feed under test.
struct Fixture {
    sink: Arc<Recorder>,
    counters: Arc<FeedCounters>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Fixture {
    fn start(endpoint: &str, replay: Option<&str>, limit: Duration) -> Self {
        let mut config = FeedConfig::new(endpoint);
        config.replay = replay.map(str::to_owned);
        config.reply_limit = limit;
        config.silence = Duration::from_millis(500);
        Self::of(config)
    }

    fn of(mut config: FeedConfig) -> Self {
        config.backoff = Duration::from_millis(10);
        config.backoff_max = Duration::from_millis(50);
        let (sink, counters) = (Arc::<Recorder>::default(), Arc::clone(&config.counters));
        let stop = CancellationToken::new();
        let task = TaskTracker::new().spawn(run(config, Arc::<Recorder>::clone(&sink), stop.clone()));
        Self { sink, counters, stop, task }
    }

    /// Waits for exactly these calls of the sink, then clears them.
    async fn expect(&self, expected: &[Call]) {
        let waited = timeout(WAIT_LIMIT, async {
            while self.sink.calls.lock().len() < expected.len() {
                self.sink.news.notified().await;
            }
        });
        let waited = waited.await;
        let told = std::mem::take(&mut *self.sink.calls.lock());
        assert!(waited.is_ok(), "wanted {expected:?}, got {told:?}");
        assert_eq!(told, expected);
    }

    /// Waits for these calls of the sink; more may follow.
    async fn expect_first(&self, expected: &[Call]) {
        let told = || self.sink.calls.lock().iter().take(expected.len()).cloned().collect::<Vec<_>>();
        let waited = timeout(WAIT_LIMIT, async {
            while told().len() < expected.len() {
                self.sink.news.notified().await;
            }
        });
        let waited = waited.await;
        assert_eq!(told(), expected);
        waited.expect("in time");
    }

    /// Publishes message `seq` until it arrives: a subscription takes effect some time after its connection.
    /// A repeated number is a duplicate and dropped.
    async fn first(&self, engine: &mut Engine, seq: u64, expected: &[Call]) {
        timeout(WAIT_LIMIT, async {
            while self.sink.calls.lock().len() < expected.len() {
                engine.publish(seq).await;
                _ = timeout(Duration::from_millis(20), self.sink.news.notified()).await;
            }
        })
        .await
        .expect("the first message");
        self.expect(expected).await;
    }

    /// Publishes these messages, with the last of which the feed becomes live again.
    async fn recovers(&self, engine: &mut Engine, seqs: Range<u64>) {
        for seq in seqs.clone() {
            engine.publish(seq).await;
        }
        self.expect(&seqs.map(Got).chain([Live(true)]).collect::<Vec<_>>()).await;
    }

    async fn end(self) {
        self.stop.cancel();
        timeout(WAIT_LIMIT, self.task).await.expect("ends in time").expect("ends well");
    }
}

/// An engine's publisher.
struct Engine {
    publisher: PubSocket,
    endpoint: String,
}

impl Engine {
    async fn bind(endpoint: &str) -> Self {
        // The port of a publisher that was just closed may stay busy for a moment.
        for _ in 0..200 {
            let mut publisher = PubSocket::new();
            if let Ok(bound) = publisher.bind(endpoint).await {
                return Self { publisher, endpoint: bound.to_string() };
            }
            sleep(Duration::from_millis(20)).await;
        }
        panic!("{endpoint} stays busy");
    }

    async fn publish(&mut self, seq: u64) {
        self.send(&[b"kv-events", &seq.to_be_bytes(), &batch(seq)]).await;
    }

    async fn send(&mut self, parts: &[&[u8]]) {
        self.publisher.send(message(parts)).await.expect("publish");
    }

    async fn close(self) -> String {
        self.publisher.close().await;
        self.endpoint
    }
}

/// Reply of a replay server to a request.
#[derive(Clone, Copy)]
enum Reply {
    /// All messages from the requested number up to this one.
    UpTo(u64),
    /// The same without topic frames.
    Bare(u64),
    /// The same with a pause of 200 ms before each message.
    Slow(u64),
    /// A malformed message, then all messages up to the first number except the second.
    Without(u64, u64),
    /// A malformed message, and two whose batch is.
    Unreadable,
    /// The end marker only.
    Nothing,
    /// No reply.
    Silence,
}

/// Starts a replay server that sends the n-th reply to the n-th request. Returns its endpoint and the
/// requested numbers.
async fn replays(replies: Vec<Reply>) -> (String, Arc<Mutex<Vec<u64>>>) {
    let mut router = RouterSocket::new();
    let endpoint: Endpoint = router.bind(LOCAL).await.expect("bind");
    let requested = Arc::<Mutex<Vec<u64>>>::default();
    let log = Arc::clone(&requested);
    TaskTracker::new().spawn(async move {
        for reply in replies {
            let request = router.recv().await.expect("a request").into_vec();
            let [client, empty, from] = request.as_slice() else { panic!("{request:?}") };
            assert!(empty.is_empty());
            let from = u64::from_be_bytes(from.as_ref().try_into().expect("8 bytes"));
            log.lock().push(from);
            let (to, without) = match reply {
                Reply::UpTo(to) | Reply::Bare(to) | Reply::Slow(to) => (to + 1, None),
                Reply::Without(to, without) => (to + 1, Some(without)),
                Reply::Nothing => (0, None),
                Reply::Unreadable => (2, Some(u64::MAX)),
                Reply::Silence => continue,
            };
            if without.is_some() {
                router.send(message(&[client, b"", b"nonsense?!"])).await.expect("garbage");
            }
            for seq in (from..to).filter(|seq| Some(*seq) != without) {
                let number = seq.to_be_bytes();
                if matches!(reply, Reply::Slow(_)) {
                    sleep(Duration::from_millis(200)).await;
                }
                let response = match reply {
                    Reply::Bare(_) => message(&[client, b"", &number, &batch(seq)]),
                    Reply::Unreadable => message(&[client, b"", &number, b"{}"]),
                    _ => message(&[client, b"", b"kv-events", &number, &batch(seq)]),
                };
                router.send(response).await.expect("a reply");
            }
            router.send(message(&[client, b"", &[0xff; 8], b""])).await.expect("the end");
        }
        std::future::pending::<()>().await;
    });
    (endpoint.to_string(), requested)
}

fn message(parts: &[&[u8]]) -> ZmqMessage {
    let parts: Vec<Bytes> = parts.iter().map(|part| Bytes::copy_from_slice(part)).collect();
    ZmqMessage::try_from(parts).expect("frames")
}

fn batch(seq: u64) -> Vec<u8> {
    let event = json!({"type": "BlockRemoved", "block_hashes": [seq], "medium": "GPU"});
    rmp_serde::to_vec(&json!([1.0, [event], 0])).expect("msgpack")
}

#[tokio::test]
async fn h6_a_gap_is_filled_by_replay() {
    let mut engine = Engine::bind(LOCAL).await;
    let (replay, requested) = replays(vec![Reply::Nothing, Reply::UpTo(5), Reply::Bare(9)]).await;
    let feed = Fixture::start(&engine.endpoint, Some(&replay), WAIT_LIMIT);
    feed.expect(&[Live(true)]).await;
    feed.first(&mut engine, 0, &[Got(0)]).await;
    engine.publish(1).await;
    engine.publish(4).await;
    engine.publish(5).await;
    engine.publish(6).await;
    // H6.6
    feed.expect(&[Got(1), Got(2), Got(3), Got(4), Got(5), Got(6)]).await;
    engine.publish(9).await;
    feed.expect(&[Got(7), Got(8), Got(9)]).await;
    // H6.6
    assert_eq!(*requested.lock(), [0, 2, 7]);
    assert_eq!(feed.counters.gaps.load(Relaxed), 2);
    assert_eq!(feed.counters.events.load(Relaxed), 10);
    assert!(feed.counters.replayed.load(Relaxed) >= 4);
    assert!(feed.counters.lag_ms.load(Relaxed) > 1_000_000_000_000);
    assert_eq!((feed.counters.decode_errors.load(Relaxed), feed.counters.restarts.load(Relaxed)), (0, 0));
    feed.end().await;
}

#[tokio::test]
async fn h6_the_first_connection_requests_a_replay_of_everything() {
    let mut engine = Engine::bind(LOCAL).await;
    let (replay, requested) = replays(vec![Reply::UpTo(3)]).await;
    let feed = Fixture::start(&engine.endpoint, Some(&replay), WAIT_LIMIT);
    feed.expect(&[Got(0), Got(1), Got(2), Got(3), Live(true)]).await;
    feed.first(&mut engine, 4, &[Got(4)]).await;
    assert_eq!((feed.counters.replayed.load(Relaxed), feed.counters.gaps.load(Relaxed)), (4, 0));
    assert_eq!(*requested.lock(), [0]);
    feed.end().await;
}

#[tokio::test]
async fn h2_a_feed_that_missed_events_and_cannot_ask_for_them_warns_once() {
    for (first, warnings) in [(0, 0), (7, 1)] {
        let (mut read, written) = std::io::pipe().unwrap();
        let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::new(written)).finish();
        let lines = tracing::subscriber::set_default(lines);
        let mut engine = Engine::bind(LOCAL).await;
        let feed = Fixture::start(&engine.endpoint, None, WAIT_LIMIT);
        feed.first(&mut engine, first, &[Live(true), Got(first)]).await;
        engine.publish(first + 1).await;
        feed.expect(&[Got(first + 1)]).await;
        feed.end().await;
        drop(lines);
        let mut log = String::new();
        read.read_to_string(&mut log).unwrap();
        // H2.6
        assert_eq!(log.matches("set kv_replay").count(), warnings, "{log}");
    }
}

#[tokio::test]
async fn h6_a_gap_without_replay_forgets() {
    let mut engine = Engine::bind(LOCAL).await;
    let feed = Fixture::start(&engine.endpoint, None, WAIT_LIMIT);
    feed.first(&mut engine, 7, &[Live(true), Got(7)]).await;
    engine.publish(8).await;
    engine.publish(10).await;
    engine.publish(11).await;
    // H6.8
    feed.expect(&[Got(8), Forget("gap"), Got(10), Got(11)]).await;
    assert_eq!((feed.counters.gaps.load(Relaxed), feed.counters.forgets.load(Relaxed)), (1, 1));
    feed.end().await;
}

#[tokio::test]
async fn h6_a_replay_that_does_not_fill_the_gap_forgets() {
    let mut engine = Engine::bind(LOCAL).await;
    let without = Reply::Without(9, 7);
    let replies_sent = vec![Reply::Nothing, Reply::Nothing, without, without, Reply::Silence];
    let (replay, requested) = replays(replies_sent).await;
    let feed = Fixture::start(&engine.endpoint, Some(&replay), Duration::from_millis(500));
    feed.expect(&[Live(true)]).await;
    feed.first(&mut engine, 0, &[Got(0)]).await;
    engine.publish(5).await;
    feed.expect(&[Forget("gap"), Got(5)]).await;
    engine.publish(9).await;
    feed.expect(&[Got(6), Forget("gap"), Got(8), Got(9)]).await;
    assert_eq!(feed.counters.decode_errors.load(Relaxed), 2);
    engine.publish(12).await;
    engine.publish(13).await;
    feed.expect(&[Forget("gap"), Got(12), Got(13)]).await;
    assert_eq!(*requested.lock(), [0, 1, 6, 7, 10]);
    feed.end().await;
}

#[tokio::test]
async fn h6_a_replay_may_take_longer_than_a_reply() {
    let mut engine = Engine::bind(LOCAL).await;
    let (replay, requested) = replays(vec![Reply::Nothing, Reply::Slow(7)]).await;
    let feed = Fixture::start(&engine.endpoint, Some(&replay), Duration::from_millis(700));
    feed.expect(&[Live(true)]).await;
    feed.first(&mut engine, 0, &[Got(0)]).await;
    engine.publish(8).await;
    // H6.19
    feed.expect(&(1..=8).map(Got).collect::<Vec<_>>()).await;
    assert_eq!(*requested.lock(), [0, 1]);
    feed.end().await;
}

#[tokio::test]
async fn h6_a_replay_that_ends_early_goes_on() {
    let mut engine = Engine::bind(LOCAL).await;
    let mut replies_sent = vec![Reply::Nothing, Reply::UpTo(2)];
    replies_sent.extend([Reply::Without(6, 4), Reply::Slow(5), Reply::UpTo(7)]);
    let (replay, requested) = replays(replies_sent).await;
    let feed = Fixture::start(&engine.endpoint, Some(&replay), WAIT_LIMIT);
    feed.expect(&[Live(true)]).await;
    feed.first(&mut engine, 0, &[Got(0)]).await;
    for seq in [6, 8, 9] {
        engine.publish(seq).await;
    }
    // H6.19
    feed.expect(&(1..=9).map(Got).collect::<Vec<_>>()).await;
    assert_eq!(*requested.lock(), [0, 1, 3, 4, 7]);
    assert_eq!(feed.counters.failed_replays.load(Relaxed), 0);
    feed.end().await;
}

#[tokio::test]
async fn h6_a_replay_that_is_given_up_warns_until_one_succeeds() {
    let (mut read, written) = std::io::pipe().unwrap();
    let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::new(written)).finish();
    let lines = tracing::subscriber::set_default(lines);
    let mut engine = Engine::bind(LOCAL).await;
    let replies_sent = [Some(2), None, None, Some(10), None];
    let replies_sent = replies_sent.map(|to| to.map_or(Reply::Nothing, Reply::UpTo));
    let (replay, _) = replays(replies_sent.to_vec()).await;
    let feed = Fixture::start(&engine.endpoint, Some(&replay), WAIT_LIMIT);
    feed.expect(&[Got(0), Got(1), Got(2), Live(true)]).await;
    feed.first(&mut engine, 3, &[Got(3)]).await;
    for seq in [5, 7] {
        engine.publish(seq).await;
        feed.expect(&[Forget("gap"), Got(seq)]).await;
    }
    engine.publish(11).await;
    feed.expect(&[Got(8), Got(9), Got(10), Got(11)]).await;
    engine.publish(13).await;
    feed.expect(&[Forget("gap"), Got(13)]).await;
    // H6.19
    assert_eq!(feed.counters.failed_replays.load(Relaxed), 3);
    feed.end().await;
    drop(lines);
    let mut log = String::new();
    read.read_to_string(&mut log).unwrap();
    assert_eq!(log.matches("replay given up").count(), 2, "{log}");
}

#[tokio::test]
async fn h6_without_a_reachable_replay_server_live_messages_still_apply() {
    let mut engine = Engine::bind(LOCAL).await;
    let feed = Fixture::start(&engine.endpoint, Some("tcp://127.0.0.1:1"), Duration::from_millis(100));
    feed.expect(&[Live(true)]).await;
    feed.first(&mut engine, 3, &[Got(3)]).await;
    feed.end().await;
}

#[tokio::test]
async fn h6_live_messages_wait_for_a_replay() {
    let mut engine = Engine::bind(LOCAL).await;
    let (replay, _) = replays(vec![Reply::Nothing, Reply::Silence]).await;
    let feed = Fixture::start(&engine.endpoint, Some(&replay), Duration::from_millis(500));
    feed.expect(&[Live(true)]).await;
    feed.first(&mut engine, 0, &[Got(0)]).await;
    for seq in [2, 3, 4] {
        engine.publish(seq).await;
    }
    timeout(WAIT_LIMIT, async {
        while feed.counters.messages.load(Relaxed) < 4 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the messages come while the replay is open");
    assert!(feed.sink.calls.lock().is_empty());
    feed.expect(&[Forget("gap"), Got(2), Got(3), Got(4)]).await;
    feed.end().await;
}

#[tokio::test]
async fn h6_a_restarted_engine_is_forgotten() {
    let mut engine = Engine::bind(LOCAL).await;
    let feed = Fixture::start(&engine.endpoint, None, WAIT_LIMIT);
    feed.first(&mut engine, 5, &[Live(true), Got(5)]).await;
    // Falling numbers on the same connection, as behind a proxy.
    engine.publish(0).await;
    engine.publish(1).await;
    // H6.7
    feed.expect(&[Forget("restarted"), Got(0), Got(1)]).await;
    assert_eq!(feed.counters.restarts.load(Relaxed), 1);
    // A new process on the same port.
    let endpoint = engine.close().await;
    feed.expect(&[Live(false), Forget("disconnected")]).await;
    let mut engine = Engine::bind(&endpoint).await;
    feed.first(&mut engine, 0, &[Live(true), Got(0)]).await;
    engine.publish(1).await;
    feed.expect(&[Got(1)]).await;
    assert_eq!(feed.counters.restarts.load(Relaxed), 2);
    assert_eq!((feed.counters.connections.load(Relaxed), feed.counters.gaps.load(Relaxed)), (2, 0));
    feed.end().await;
}

#[tokio::test]
async fn h6_malformed_messages_are_counted_and_the_feed_continues() {
    let mut engine = Engine::bind(LOCAL).await;
    let feed = Fixture::start(&engine.endpoint, None, WAIT_LIMIT);
    feed.first(&mut engine, 0, &[Live(true), Got(0)]).await;
    // No sequence number, so a loss would only show as a gap.
    engine.send(&[b"alone"]).await;
    engine.send(&[b"kv-events", b"short", b"payload"]).await;
    engine.send(&[b"kv-events", &[0xff; 8], b""]).await;
    // H6.22
    feed.expect(&[Live(false)]).await;
    feed.recovers(&mut engine, 1..15).await;
    // A sequence number with a malformed batch: its events are lost.
    engine.send(&[b"kv-events", &15_u64.to_be_bytes(), b"\xc1 no msgpack"]).await;
    engine.send(&[b"kv-events", &16_u64.to_be_bytes(), &batch(3)[..20]]).await;
    engine.publish(17).await;
    // H6.8
    feed.expect(&[Forget("decode_error"), Forget("decode_error"), Got(17)]).await;
    assert_eq!(feed.counters.decode_errors.load(Relaxed), 5);
    assert_eq!(feed.counters.gaps.load(Relaxed), 0);
    feed.end().await;
}

#[tokio::test]
async fn h6_a_feed_is_not_live_while_three_of_its_last_sixteen_messages_cannot_be_read() {
    let mut engine = Engine::bind(LOCAL).await;
    let (replay, _) = replays(vec![Reply::Unreadable, Reply::Nothing]).await;
    let feed = Fixture::start(&engine.endpoint, Some(&replay), WAIT_LIMIT);
    let unreadable = [Live(false), Forget("decode_error")];
    // H6.22
    feed.expect(&[&[Forget("decode_error")], &unreadable[..]].concat()).await;
    feed.first(&mut engine, 2, &[Got(2)]).await;
    feed.recovers(&mut engine, 3..16).await;
    // Two of three.
    for seq in 16..22_u64 {
        let payload = if seq % 3 == 0 { batch(seq) } else { b"{}".to_vec() };
        engine.send(&[b"kv-events", &seq.to_be_bytes(), &payload]).await;
        let calls: &[Call] = match seq {
            18 | 21 => &[Got(seq)],
            16 | 17 => &unreadable[1..],
            _ => &unreadable,
        };
        // H6.22
        feed.expect(calls).await;
    }
    feed.recovers(&mut engine, 22..34).await;
    for seq in 34..37 {
        engine.publish(seq).await;
        feed.expect(&[Got(seq)]).await;
    }
    // Stored blocks that cannot be read are lost.
    let lost = json!({"type": "BlockStored", "block_hashes": "x", "token_ids": [1], "block_size": 1});
    let lost = rmp_serde::to_vec(&json!([1.0, [lost], 0])).expect("msgpack");
    for seq in 37..40_u64 {
        engine.send(&[b"kv-events", &seq.to_be_bytes(), &lost]).await;
        feed.expect(if seq < 39 { &[Unknown] } else { &[Live(false), Unknown] }).await;
    }
    // An event that is skipped was read.
    let skipped = rmp_serde::to_vec(&json!([1.0, [{"type": "BlockMoved"}], 0])).expect("msgpack");
    for seq in 40..54_u64 {
        engine.send(&[b"kv-events", &seq.to_be_bytes(), &skipped]).await;
        feed.expect(if seq < 53 { &[Unknown] } else { &[Unknown, Live(true)] }).await;
    }
    // A new connection does not end it.
    for seq in 54..57_u64 {
        engine.send(&[b"kv-events", &seq.to_be_bytes(), b"{}"]).await;
        feed.expect(if seq < 56 { &unreadable[1..] } else { &unreadable }).await;
    }
    let endpoint = engine.close().await;
    feed.expect(&[Live(false), Forget("disconnected")]).await;
    let mut engine = Engine::bind(&endpoint).await;
    feed.first(&mut engine, 0, &[Got(0)]).await;
    feed.recovers(&mut engine, 1..14).await;
    feed.end().await;
}

#[tokio::test]
async fn h6_events_of_a_newer_engine_forget_nothing() {
    let mut engine = Engine::bind(LOCAL).await;
    let feed = Fixture::start(&engine.endpoint, None, WAIT_LIMIT);
    feed.first(&mut engine, 0, &[Live(true), Got(0)]).await;
    let newer = [
        json!({"type": "BlockMoved", "block_hashes": {"from": [1]}, "medium": 7}),
        json!({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": [1, 2],
            "block_size": 2, "extra_keys": [[{"type": "CacheSaltKey", "salt": "a"}]], "newer": {"a": [1.5]}}),
        json!({"type": "BlockStored", "block_hashes": [null], "token_ids": {"packed": "AAEC"}, "block_size": "2"}),
    ];
    for (seq, event) in (1_u64..).zip(newer) {
        let removed = json!({"type": "BlockRemoved", "block_hashes": [seq], "medium": "GPU", "newer": [{}]});
        let batch = json!({"version": 2, "ts": 1.5, "events": [event, removed], "data_parallel_rank": "0"});
        let payload = rmp_serde::to_vec(&batch).expect("msgpack");
        engine.send(&[b"kv-events", &seq.to_be_bytes(), &payload]).await;
    }
    // H6.5, H6.18
    feed.expect(&[Got(1), Got(2), Got(3)]).await;
    // A removal that cannot be read leaves blocks that the engine no longer has.
    let removed = json!([1.5, [{"type": "BlockRemoved", "block_hashes": {"packed": "AAEC"}}]]);
    let payload = rmp_serde::to_vec(&removed).expect("msgpack");
    engine.send(&[b"kv-events", &4_u64.to_be_bytes(), &payload]).await;
    engine.publish(5).await;
    feed.expect(&[Forget("decode_error"), Got(5)]).await;
    feed.end().await;
}

#[tokio::test]
async fn h6_a_feed_waits_for_its_engine_and_ends_when_stopped() {
    let engine = Engine::bind(LOCAL).await;
    let endpoint = engine.close().await;
    let feed = Fixture::start(&endpoint, None, WAIT_LIMIT);
    let mut engine = Engine::bind(&endpoint).await;
    feed.first(&mut engine, 0, &[Live(true), Got(0)]).await;
    let sink = Arc::clone(&feed.sink);
    feed.end().await;
    assert_eq!(*sink.calls.lock(), [Live(false), Forget("disconnected")]);
}

/// Returns the handshake of a publisher with ZMTP 3.1.
fn handshake() -> Vec<u8> {
    let mut greeting = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x01NULL".to_vec();
    greeting.resize(64, 0);
    [greeting.as_slice(), b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"].concat()
}

/// Starts a publisher that sends these bytes on every connection, then nothing.
async fn publisher_of(bytes: Vec<u8>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let endpoint = format!("tcp://{}", listener.local_addr().expect("address"));
    TaskTracker::new().spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            stream.write_all(&bytes).await.expect("write");
            open.push(stream);
        }
    });
    endpoint
}

/// Returns a complete message in wire format.
fn wire(seq: u64) -> Vec<u8> {
    let payload = batch(seq);
    let length = [u8::try_from(payload.len()).expect("short")];
    [b"\x01\x02kv\x01\x08".as_slice(), &seq.to_be_bytes(), b"\x00", &length, &payload].concat()
}

#[tokio::test]
async fn h6_a_protocol_violation_forgets_the_engine_is_counted_and_the_feed_reconnects() {
    let overlong = [b"\x02".as_slice(), &(1_u64 << 63).to_be_bytes()].concat();
    for broken in [overlong, b"\x01\x00".repeat(100), vec![0xff; 50], b"\x04\x07\x05READY\x01".to_vec()] {
        let endpoint = publisher_of([handshake(), wire(7), broken].concat()).await;
        let feed = Fixture::start(&endpoint, None, WAIT_LIMIT);
        let once = [Live(true), Got(7), Live(false), Forget("disconnected")];
        feed.expect_first(&[once.clone(), once].concat()).await;
        assert!(feed.counters.violations.load(Relaxed) >= 1);
        assert!(feed.counters.connections.load(Relaxed) >= 2);
        feed.end().await;
    }
}

#[tokio::test]
async fn h6_a_silent_engine_is_disconnected_and_forgotten() {
    let endpoint = publisher_of([handshake(), wire(7)].concat()).await;
    let feed = Fixture::start(&endpoint, None, WAIT_LIMIT);
    feed.expect_first(&[Live(true), Got(7), Live(false), Forget("disconnected")]).await;
    assert_eq!(feed.counters.silences.load(Relaxed), 1);
    assert_eq!(feed.counters.violations.load(Relaxed), 0);
    feed.end().await;
}

#[tokio::test]
async fn i18_5_a_feed_follows_the_name_of_its_endpoint() {
    let mut old = Engine::bind("tcp://127.0.0.2:0").await;
    let port = old.endpoint.rsplit_once(':').unwrap().1.to_owned();
    let mut new = Engine::bind(&format!("tcp://127.0.0.3:{port}")).await;
    let last = Arc::new(AtomicU8::new(2));
    let address = last.clone();
    let answer = move |_: &str| Ok(vec![([127, 0, 0, address.load(Relaxed)], 0).into()]);
    let resolver = Resolver::with_stay(Duration::ZERO, answer);
    let mut config = FeedConfig::new(format!("tcp://engine:{port}"));
    config.resolver = resolver.clone();
    let feed = Fixture::of(config);
    feed.first(&mut old, 1, &[Live(true), Got(1)]).await;
    last.store(3, Relaxed);
    let begin = tokio::time::Instant::now();
    while resolver.addresses("engine:1").await.unwrap() != [([127, 0, 0, 3], 1).into()] {
        assert!(begin.elapsed() < Duration::from_secs(60));
        sleep(Duration::from_millis(50)).await;
    }
    // I18.5
    feed.expect(&[Live(false), Forget("disconnected"), Live(true)]).await;
    feed.first(&mut new, 2, &[Got(2)]).await;
    feed.end().await;
}
