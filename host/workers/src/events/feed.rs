//! One source's KV events as they come: a subscription, a replay of what was missed, and the rules of a broken line.
//!
//! Owns the sockets and the counters. Knows no index and no worker: what comes out goes to a [`Sink`]. The sink never
//! holds more than one unbroken run of batches of one engine's life.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use tokio::{
    pin, select,
    sync::mpsc,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    decode::{Batch, decode_batch},
    sequence::{Sequencer, Step},
};

mod wire;
pub(crate) mod zmtp;

use wire::{Line, Reply, ask, frames};
use zmtp::ZmtpError;

/// Live messages that wait for the end of a replay at most.
const KEPT_MESSAGES: usize = 4096;
/// Their bytes at most.
const KEPT_BYTES: usize = 64 * 1024 * 1024;
/// Replies between the replay's socket and the sink. Each may be as large as a message.
const REPLIES: usize = 4;
/// Largest message that is taken, in bytes; a larger one ends the connection.
const MAX_MESSAGE: usize = 64 * 1024 * 1024;

/// Takes one source's events. Called from one task, one call at a time; a call must not block.
pub trait Sink: Send + Sync {
    /// Applies a batch that follows the one before it without a hole.
    fn apply(&self, batch: Batch);

    /// Drops everything learnt from this source; `why` is a stable label. May come when there is nothing to drop.
    fn forget(&self, why: &'static str);

    /// Whether the source is connected and caught up. It begins as not live.
    fn live(&self, live: bool);
}

/// Where a source is and how patient its feed is.
#[derive(Clone, Debug)]
pub struct FeedConfig {
    /// The engine's PUB socket, as `tcp://host:port`.
    pub endpoint: String,
    /// Prefix of the topics to take; empty takes all.
    pub topic: String,
    /// The engine's ROUTER socket for what was missed, as `tcp://host:port`.
    pub replay: Option<String>,
    /// Limit of one replay.
    pub replay_limit: Duration,
    /// Limit of one attempt to connect.
    pub connect_limit: Duration,
    /// Bytes of a message at most, all frames together. A peer that claims more is given up.
    pub max_message: usize,
    /// A source that is silent for so long is asked whether it lives, and given up when it says nothing for as long again:
    /// by PING where it speaks ZMTP 3.1, else its machine alone, by TCP keepalive.
    pub silence: Duration,
    /// Wait before the first new attempt to connect; it doubles up to `backoff_max`.
    pub backoff: Duration,
    /// Longest wait before a new attempt. A connection that lasted this long starts over with `backoff`.
    pub backoff_max: Duration,
    /// What the feed counts. Feeds may share it.
    pub counters: Arc<FeedCounters>,
}

/// What feeds count since they began.
#[derive(Debug, Default)]
pub struct FeedCounters {
    /// Well-formed live messages.
    pub messages: AtomicU64,
    /// Events handed to sinks.
    pub events: AtomicU64,
    /// Holes in the numbers of live messages.
    pub gaps: AtomicU64,
    /// Messages that a replay brought.
    pub replayed: AtomicU64,
    /// Messages and replies that could not be read.
    pub decode_errors: AtomicU64,
    /// Times that an engine's numbers began anew.
    pub restarts: AtomicU64,
    /// Times that sinks were told to forget.
    pub forgets: AtomicU64,
    /// Connections made.
    pub connections: AtomicU64,
    /// Connections given up because the peer broke the protocol or a limit.
    pub violations: AtomicU64,
    /// Connections given up because the peer showed no life.
    pub silences: AtomicU64,
    /// Milliseconds between the last live batch's time stamp and its arrival, by both clocks; a gauge.
    pub lag_ms: AtomicU64,
}

/// Follows a source until `stop`: connects, catches up, applies, connects again. Ends with the sink not live and told to
/// forget.
pub async fn run(config: FeedConfig, sink: Arc<dyn Sink>, stop: CancellationToken) {
    let mut backoff = config.backoff;
    let mut feed = Feed { config, sink, sequencer: Sequencer::new(KEPT_MESSAGES, KEPT_BYTES), earlier: None };
    loop {
        let began = Instant::now();
        let Some(lost) = stop.run_until_cancelled(feed.connection()).await else { return };
        feed.count(&lost);
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
    /// A feed of every topic of `endpoint`, without replay, with the usual patience.
    #[must_use]
    pub fn new(endpoint: impl Into<String>) -> Self {
        Self {
            endpoint: endpoint.into(),
            topic: String::new(),
            replay: None,
            replay_limit: Duration::from_secs(2),
            connect_limit: Duration::from_secs(2),
            max_message: MAX_MESSAGE,
            silence: Duration::from_secs(10),
            backoff: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            counters: Arc::default(),
        }
    }
}

struct Feed {
    config: FeedConfig,
    sink: Arc<dyn Sink>,
    sequencer: Sequencer<Bytes>,
    /// The last number of the connection before, until this one's first message.
    earlier: Option<u64>,
}

/// A connection as its sink sees it. Its end is told however it comes.
struct Connected {
    sink: Arc<dyn Sink>,
    counters: Arc<FeedCounters>,
}

/// Where a batch comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Live,
    Replay,
}

impl Feed {
    /// One connection from its making to its end.
    async fn connection(&mut self) -> ZmtpError {
        let mut line = match Line::connect(&self.config).await {
            Ok(line) => line,
            Err(lost) => return lost,
        };
        self.config.counters.connections.fetch_add(1, Relaxed);
        self.earlier = self.sequencer.reset().or(self.earlier);
        let connected =
            Connected { sink: Arc::clone(&self.sink), counters: Arc::clone(&self.config.counters) };
        let Err(lost) = self.follow(&mut line).await;
        drop(connected);
        lost
    }

    async fn follow(&mut self, line: &mut Line) -> Result<Infallible, ZmtpError> {
        if self.config.replay.is_some() {
            self.sequencer.open();
            self.fill(line, 0).await?;
        }
        self.sink.live(true);
        loop {
            let message = line.next().await?;
            if let Some(from) = self.on_live(&message) {
                self.fill(line, from).await?;
            }
        }
    }

    /// Takes a live message. `Some` is where a replay has to begin.
    fn on_live(&mut self, message: &[Bytes]) -> Option<u64> {
        let counters = Arc::clone(&self.config.counters);
        let Some((seq, payload)) = frames(message) else {
            // Its number is unknown: if it was one of ours, the next one shows a gap.
            counters.decode_errors.fetch_add(1, Relaxed);
            return None;
        };
        counters.messages.fetch_add(1, Relaxed);
        if self.earlier.take().is_some_and(|earlier| seq <= earlier) {
            counters.restarts.fetch_add(1, Relaxed);
        }
        let step = self.sequencer.on(seq, payload);
        if let Step::Gap { from, to } = step {
            tracing::debug!(endpoint = %self.config.endpoint, from, to, "kv events are missing");
            counters.gaps.fetch_add(1, Relaxed);
            return Some(from);
        }
        self.take(step, Origin::Live);
        None
    }

    /// Asks for everything from `from`, applies it in order, then what came live meanwhile.
    async fn fill(&mut self, line: &mut Line, from: u64) -> Result<(), ZmtpError> {
        let config = self.config.clone();
        if let Some(endpoint) = &config.replay {
            let (sender, mut replies) = mpsc::channel(REPLIES);
            let asking = timeout(config.replay_limit, ask(&config, endpoint, from, sender));
            pin!(asking);
            let mut asked = false;
            while self.sequencer.is_open() {
                select! {
                    biased;
                    reply = replies.recv() => match reply {
                        Some(reply) => self.on_reply(reply),
                        None => break,
                    },
                    result = &mut asking, if !asked => {
                        asked = true;
                        match result {
                            Ok(Ok(())) => {}
                            Ok(Err(lost)) => self.count(&lost),
                            Err(_) => tracing::debug!(%endpoint, from, "a replay of kv events was cut short"),
                        }
                        replies.close();
                    }
                    message = line.next() => {
                        // No gap opens while a replay is open.
                        _ = self.on_live(&message?);
                    }
                }
            }
        }
        for step in self.sequencer.finish() {
            self.take(step, Origin::Live);
        }
        Ok(())
    }

    fn on_reply(&mut self, reply: Reply) {
        match reply {
            Reply::Message(seq, payload) => {
                let step = self.sequencer.replayed(seq, payload);
                self.take(step, Origin::Replay);
            }
            Reply::Malformed => _ = self.config.counters.decode_errors.fetch_add(1, Relaxed),
        }
    }

    fn take(&self, step: Step<Bytes>, origin: Origin) {
        match step {
            Step::Apply(payload) => self.apply(&payload, origin),
            Step::Restarted(payload) => {
                self.config.counters.restarts.fetch_add(1, Relaxed);
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

    fn apply(&self, payload: &[u8], origin: Origin) {
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
                self.sink.apply(batch);
            }
            Err(error) => {
                tracing::debug!(endpoint = %self.config.endpoint, %error, "a kv event batch cannot be read");
                counters.decode_errors.fetch_add(1, Relaxed);
                self.forget("decode_error");
            }
        }
    }

    /// A peer that breaks the rules is worth a warning, once.
    fn count(&self, lost: &ZmtpError) {
        let (endpoint, counters) = (&self.config.endpoint, &self.config.counters);
        if lost.is_violation() && counters.violations.fetch_add(1, Relaxed) == 0 {
            tracing::warn!(%endpoint, reason = %lost, "a kv event feed broke the protocol");
            return;
        }
        if matches!(lost, ZmtpError::Silent(_)) {
            counters.silences.fetch_add(1, Relaxed);
        }
        tracing::debug!(%endpoint, reason = %lost, "no kv event feed");
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

/// Milliseconds from `ts`, in seconds since the epoch, to now; 0 when the engine's clock is ahead.
fn lag_ms(ts: f64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Duration::try_from_secs_f64(ts)
        .map_or(0, |sent| u64::try_from(now.saturating_sub(sent).as_millis()).unwrap_or(u64::MAX))
}
