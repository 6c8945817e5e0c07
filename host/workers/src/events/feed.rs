//! Feed of one source's KV events: subscription, replay of missed messages, reconnects.
//!
//! Owns the sockets and the counters, and knows neither index nor workers. It hands batches to a [`Sink`],
//! which never holds more than a gapless sequence of batches from one run of the engine.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use prefix_index::events::{Batch, KvEvent, Sequencer, Step, decode_batch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::{
    resolver::Resolver,
    unix_time::{millis, unix_time},
};

mod replay;
mod wire;

use wire::{NOT_FRAMES, Subscription, frames};

/// Maximum number of live messages that wait for the end of a replay.
const KEPT_MESSAGES: usize = 4096;
/// Maximum size of these messages, bytes.
const KEPT_BYTES: usize = 64 * 1024 * 1024;
/// Largest message in bytes. A larger one ends the connection.
const MAX_MESSAGE: usize = 64 * 1024 * 1024;
/// A feed is not live while as many of the last 16 messages and replies cannot be decoded. Each of them made
/// the feed forget what its engine had reported, or lacks blocks that the engine stored.
const MAX_UNREADABLE: u32 = 3;

/// Receives one source's events. Called from one task, one call at a time.
pub trait Sink: Send + Sync {
    /// Applies a batch that directly follows the previous one.
    fn apply(&self, batch: Batch);

    /// Forgets everything that this source reported. `why` is a stable label. May be called when there is
    /// nothing to forget.
    fn forget(&self, why: &'static str);

    /// Reports that the source's engine is another process than before, with an empty cache.
    fn restarted(&self) {}

    /// Reports whether the source is connected, readable and caught up. Initially it is not.
    fn live(&self, live: bool);

    /// Reports that the source is not live, because too many of the last messages could not be decoded, and
    /// why the last one could not. Called again for each further one.
    fn unreadable(&self, _error: &str) {
        self.live(false);
    }

    /// Reports that an attempt to connect failed or a connection ended. The next attempt follows.
    fn lost(&self, _reason: &zmtp::Error) {}
}

/// Address of a source, and limits of its feed.
#[derive(Clone, Debug)]
pub struct FeedConfig {
    /// Address of the engine's PUB socket, as `tcp://host:port`.
    pub endpoint: String,
    /// Prefix of the topics to subscribe to; empty for all.
    pub topic: String,
    /// Address of the engine's ROUTER socket for replays, as `tcp://host:port`.
    pub replay: Option<String>,
    /// Longest wait for a reply of a replay.
    pub reply_limit: Duration,
    /// Time limit of a replay and of those that follow it because it was cut short, together.
    pub replay_limit: Duration,
    /// Time limit of an attempt to connect.
    pub connect_limit: Duration,
    /// Maximum size of a message, all frames together, bytes. A larger one ends the connection.
    pub max_message: usize,
    /// Idle time after which the feed probes the source. If the source stays silent for as long again, the
    /// connection ends. The probe is a PING with ZMTP 3.1; with 3.0 it is TCP keepalive, which notices a dead
    /// machine only.
    pub silence: Duration,
    /// Delay before the first reconnect; it doubles up to `backoff_max`.
    pub backoff: Duration,
    /// Longest delay before a reconnect. After a connection that lasted this long, the delay starts again
    /// with `backoff`.
    pub backoff_max: Duration,
    /// The feed's counters. Feeds may share them.
    pub counters: Arc<FeedCounters>,
    /// Finds the addresses of the names in both endpoints.
    pub resolver: Resolver,
}

/// Counters of feeds.
#[derive(Debug, Default)]
pub struct FeedCounters {
    /// Well-formed live messages.
    pub messages: AtomicU64,
    /// Events handed to sinks.
    pub events: AtomicU64,
    /// Gaps in the sequence numbers of live messages.
    pub gaps: AtomicU64,
    /// Messages received by replays.
    pub replayed: AtomicU64,
    /// Replays given up although messages were missing.
    pub failed_replays: AtomicU64,
    /// Messages and replies that could not be decoded.
    pub decode_errors: AtomicU64,
    /// Restarts of an engine's sequence numbers.
    pub restarts: AtomicU64,
    /// Calls of [`Sink::forget`].
    pub forgets: AtomicU64,
    /// Connections established.
    pub connections: AtomicU64,
    /// Connections closed because the peer violated the protocol or a limit.
    pub violations: AtomicU64,
    /// Connections closed because the peer was silent.
    pub silences: AtomicU64,
    /// Milliseconds from the time stamp of the last live batch to its arrival, which includes the clocks'
    /// difference. A gauge.
    pub lag_ms: AtomicU64,
}

/// Follows a source until `stop` is cancelled: connects, catches up, applies events, reconnects. At the end
/// the sink is not live and has forgotten the source.
pub async fn run(config: FeedConfig, sink: Arc<dyn Sink>, stop: CancellationToken) {
    let mut backoff = config.backoff;
    let mut feed = Feed {
        config,
        sink,
        sequencer: Sequencer::new(KEPT_MESSAGES, KEPT_BYTES),
        previous: None,
        heard: false,
        gave_up: false,
        unread: 0,
        live: false,
    };
    loop {
        let began = Instant::now();
        let Some(lost) = stop.run_until_cancelled(feed.connection()).await else { return };
        feed.count(&lost);
        feed.sink.lost(&lost);
        if began.elapsed() > feed.config.backoff_max {
            backoff = feed.config.backoff;
        }
        if stop.run_until_cancelled(sleep(backoff)).await.is_none() {
            return;
        }
        backoff = backoff.saturating_mul(2).min(feed.config.backoff_max);
    }
}

impl FeedConfig {
    /// Returns the configuration of a feed of all topics of `endpoint`, without replay and with default
    /// limits.
    #[must_use]
    pub fn new(endpoint: impl Into<String>) -> Self {
        Self {
            endpoint: endpoint.into(),
            topic: String::new(),
            replay: None,
            reply_limit: Duration::from_secs(2),
            replay_limit: Duration::from_mins(2),
            connect_limit: Duration::from_secs(2),
            max_message: MAX_MESSAGE,
            silence: Duration::from_secs(10),
            backoff: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            counters: Arc::default(),
            resolver: Resolver::default(),
        }
    }
}

struct Feed {
    config: FeedConfig,
    sink: Arc<dyn Sink>,
    sequencer: Sequencer<Bytes>,
    /// Last sequence number of the previous connection, until this connection's first message.
    previous: Option<u64>,
    /// Whether a message of this source arrived in any connection.
    heard: bool,
    /// Whether the last replay was given up.
    gave_up: bool,
    /// Which of the last 16 messages and replies could not be decoded, also of earlier connections: one bit
    /// each, the last one in the lowest.
    unread: u16,
    /// Whether the sink was told that the source is live.
    live: bool,
}

/// Guard of a connection: dropping it reports the end of the connection to the sink.
struct Connected {
    sink: Arc<dyn Sink>,
    counters: Arc<FeedCounters>,
}

/// Source of a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Live,
    Replay,
}

impl Feed {
    /// Runs one connection from connect to its end.
    async fn connection(&mut self) -> zmtp::Error {
        let mut subscription = match Subscription::connect(&self.config).await {
            Ok(subscription) => subscription,
            Err(lost) => return lost,
        };
        self.config.counters.connections.fetch_add(1, Relaxed);
        self.previous = self.sequencer.reset().or(self.previous);
        let connected =
            Connected { sink: Arc::clone(&self.sink), counters: Arc::clone(&self.config.counters) };
        let Err(lost) = self.follow(&mut subscription).await;
        self.live = false;
        drop(connected);
        lost
    }

    async fn follow(&mut self, subscription: &mut Subscription) -> Result<Infallible, zmtp::Error> {
        if self.config.replay.is_some() {
            self.sequencer.open();
            self.fill(subscription, 0).await?;
        }
        loop {
            if self.is_readable() && !std::mem::replace(&mut self.live, true) {
                self.sink.live(true);
            }
            let message = subscription.next().await?;
            if let Some(from) = self.on_live(&message) {
                self.fill(subscription, from).await?;
            }
        }
    }

    /// Handles a live message. After a gap, returns the sequence number that a replay has to start from.
    fn on_live(&mut self, message: &[Bytes]) -> Option<u64> {
        let counters = Arc::clone(&self.config.counters);
        let Some((seq, payload)) = frames(message) else {
            // Its sequence number is unknown. If it was lost from ours, the next message reveals a gap.
            self.note_unreadable(NOT_FRAMES);
            return None;
        };
        counters.messages.fetch_add(1, Relaxed);
        if !std::mem::replace(&mut self.heard, true) && seq > 0 && self.config.replay.is_none() {
            let endpoint = &self.config.endpoint;
            tracing::warn!(
                %endpoint, seq,
                "earlier kv events were missed: set kv_replay, so that the gateway learns what the engine has cached"
            );
        }
        if self.previous.take().is_some_and(|previous| seq <= previous) {
            self.restarted();
        }
        let step = self.sequencer.on(seq, payload);
        if let Step::Gap { from, to } = step {
            tracing::debug!(endpoint = %self.config.endpoint, from, to, "kv events missing");
            counters.gaps.fetch_add(1, Relaxed);
            return Some(from);
        }
        self.apply_step(step, Origin::Live);
        None
    }

    fn apply_step(&mut self, step: Step<Bytes>, origin: Origin) {
        match step {
            Step::Apply(payload) => self.apply(&payload, origin),
            Step::Restarted(payload) => {
                self.restarted();
                self.forget("restarted");
                self.apply(&payload, origin);
            }
            Step::Lost(payload) => {
                self.forget("gap");
                self.apply(&payload, origin);
            }
            Step::Duplicate | Step::Kept | Step::Gap { .. } => {}
        }
    }

    fn apply(&mut self, payload: &[u8], origin: Origin) {
        let counters = &self.config.counters;
        if origin == Origin::Replay {
            counters.replayed.fetch_add(1, Relaxed);
        }
        match decode_batch(payload) {
            Ok(batch) => {
                counters.events.fetch_add(batch.events.len() as u64, Relaxed);
                if origin == Origin::Live {
                    counters.lag_ms.store(lag_ms(batch.ts), Relaxed);
                }
                match batch.events.iter().find_map(unread_blocks) {
                    Some(name) => self.note_unreadable(name),
                    None => self.unread <<= 1,
                }
                self.sink.apply(batch);
            }
            Err(error) => {
                self.note_unreadable(&error.to_string());
                self.forget("decode_error");
            }
        }
    }

    /// Counts a message or reply that cannot be decoded, or not what it says of stored blocks.
    fn note_unreadable(&mut self, error: &str) {
        tracing::debug!(endpoint = %self.config.endpoint, error, "kv event batch malformed");
        self.config.counters.decode_errors.fetch_add(1, Relaxed);
        self.unread = (self.unread << 1) | 1;
        if !self.is_readable() {
            self.live = false;
            self.sink.unreadable(error);
        }
    }

    /// Counts and logs the end of a connection. Only the first violation of a feed is a warning.
    fn count(&self, lost: &zmtp::Error) {
        let (endpoint, counters) = (&self.config.endpoint, &self.config.counters);
        if lost.is_violation() && counters.violations.fetch_add(1, Relaxed) == 0 {
            tracing::warn!(%endpoint, reason = %lost, "kv event feed violated the protocol");
            return;
        }
        if matches!(lost, zmtp::Error::Silent(_)) {
            counters.silences.fetch_add(1, Relaxed);
        }
        tracing::debug!(%endpoint, reason = %lost, "kv event feed disconnected");
    }

    fn is_readable(&self) -> bool {
        self.unread.count_ones() < MAX_UNREADABLE
    }

    fn restarted(&self) {
        self.config.counters.restarts.fetch_add(1, Relaxed);
        self.sink.restarted();
    }

    fn forget(&self, why: &'static str) {
        self.config.counters.forgets.fetch_add(1, Relaxed);
        self.sink.forget(why);
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.sink.live(false);
        self.counters.forgets.fetch_add(1, Relaxed);
        self.sink.forget("disconnected");
    }
}

/// Returns the milliseconds from `ts`, in seconds since the Unix epoch, to now; 0 if the engine's clock is
/// ahead.
fn lag_ms(ts: f64) -> u64 {
    Duration::try_from_secs_f64(ts).map_or(0, |sent| millis(unix_time().saturating_sub(sent)))
}

/// The name of an event of stored blocks in an unknown form: what the engine has cached stays unknown.
fn unread_blocks(event: &KvEvent) -> Option<&str> {
    match event {
        KvEvent::Unknown(name) if name.starts_with("BlockStored ") => Some(name),
        _ => None,
    }
}
