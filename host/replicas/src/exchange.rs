//! Connects the outbox and the table of peers to NATS, and connects again when the server is away.
//!
//! Runs on a thread of its own. While there is no connection, journals are still read and leases still end.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering::Relaxed, mpsc::Receiver},
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use pointsman_orchestration::{SessionChange, Sessions};
use pointsman_workers::{Journal, JournalEntry, LogLimit, Registry};
use prefix_index::PrefixIndex;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::{
    bindings::Bindings,
    config::ReplicasConfig,
    outbox::Outbox,
    peers::{Effect, PeerLimits, Peers, Refused, writer_of},
    shared_states::SharedStates,
    status::{Status, StatusView},
};

mod bound;
mod connect;
mod connection_events;
mod denials;
mod link;
mod state;
mod times;

use bound::SentBindings;
use denials::Denials;
use link::Link;
use times::Times;

/// Bounds of the data that is kept about other gateways.
const LIMITS: PeerLimits = PeerLimits { peers: 64, bookings: 65_536, hashes: 8_000_000 };
/// Maximum size of the messages that wait for the connection, bytes. Beyond it the gateway drops them and
/// sends a snapshot later.
const MAX_WAITING: usize = 32 * 1024 * 1024;
/// Time between two looks at leases, snapshots and changed sessions.
const LOOK: Duration = Duration::from_millis(20);
/// Pauses between two attempts to connect.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Shortest pause between two snapshots that others ask for.
const ASKED_INTERVAL: Duration = Duration::from_millis(200);
/// Longest age of the view that operators see.
const VIEW_INTERVAL: Duration = Duration::from_millis(200);
/// How long the last message may take when the gateway stops.
const BYE_TIMEOUT: Duration = Duration::from_millis(500);

/// The exchange of bookings with the other gateways of the fleet.
pub struct Exchange {
    config: ReplicasConfig,
    journal: Arc<Journal>,
    sessions: Arc<Sessions>,
    session_changes: Receiver<SessionChange>,
    bindings: Bindings,
    /// This gateway as the writer of bindings.
    writer: u64,
    states: SharedStates,
    /// Keeps the states equal to the bucket while there is a connection.
    state_link: Option<JoinSet<()>>,
    outbox: Outbox,
    peers: Peers,
    registry: Arc<Registry>,
    index: Arc<PrefixIndex>,
    status: Arc<Status>,
    link: Link,
    /// Numbered messages that were not handed to the connection.
    waiting: VecDeque<Bytes>,
    waiting_bytes: usize,
    times: Times,
    /// Changes that the journal lost, when last looked at.
    journal_lost: u64,
    problem: Option<String>,
    denials: Denials,
    /// The name that two gateways use, and when that was noticed last.
    name_conflict: Option<(String, Instant)>,
    refusals: LogLimit,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Exchange {
    /// Creates the exchange of a process that began at `incarnation`, in microseconds since 1970.
    #[must_use]
    pub fn new(
        config: ReplicasConfig,
        (journal, changed): (Arc<Journal>, Receiver<Arc<JournalEntry>>),
        (sessions, session_changes): (Arc<Sessions>, Receiver<SessionChange>),
        states: SharedStates,
        incarnation: u64,
        (registry, index): (Arc<Registry>, Arc<PrefixIndex>),
        status: Arc<Status>,
    ) -> Self {
        let lease_ms = u64::try_from(config.lease.as_millis()).unwrap_or(u64::MAX);
        let name: Arc<str> = config.name.as_str().into();
        let writer = writer_of(&name);
        sessions.set_writer(writer);
        states.share(&name, incarnation);
        let now = Instant::now();
        Self {
            outbox: Outbox::new(changed, incarnation, lease_ms, config.block_size),
            denials: Denials::new(config.lease / 4),
            peers: Peers::new((name, incarnation), config.block_size, LIMITS, status.counters.clone()),
            config,
            journal,
            sessions,
            session_changes,
            bindings: Bindings::new(writer),
            writer,
            states,
            state_link: None,
            registry,
            index,
            status,
            link: Link::Waiting(now),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            times: Times::new(now),
            journal_lost: 0,
            problem: None,
            name_conflict: None,
            refusals: LogLimit::new(Duration::from_secs(60)),
        }
    }

    /// Runs until `stop`, then notifies the others that this gateway stops.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut changes = self.registry.subscribe();
        let journal = self.journal.clone();
        let (mut has_changes, mut next_batch) = (false, Instant::now());
        let mut tick = tokio::time::interval(LOOK.max(self.config.interval));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.set_workers(Instant::now());
        self.show(Instant::now());
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                changed = changed(&mut changes) => {
                    if changed {
                        self.set_workers(Instant::now());
                    }
                }
                // The first change is sent at once, and those that follow within the interval are sent
                // together.
                () = journal.changed(), if !has_changes => has_changes = true,
                () = sleep_until(next_batch), if has_changes => {
                    has_changes = false;
                    next_batch = Instant::now() + self.config.interval;
                    self.tell_changes();
                }
                _ = tick.tick() => self.look(Instant::now()),
                event = self.link.event() => self.on_event(event),
            }
        }
        self.say_bye().await;
    }

    /// Applies a message of another gateway.
    fn receive(&mut self, subject: &str, payload: &[u8], now: Instant) {
        let counters = &self.status.counters;
        counters.received.fetch_add(1, Relaxed);
        counters.received_bytes.fetch_add(payload.len() as u64, Relaxed);
        let from = subject.rsplit('.').next().unwrap_or_default();
        match self.peers.receive(from, payload, now) {
            Ok(effects) => effects.into_iter().for_each(|effect| self.on_effect(effect, now)),
            Err(refused) => {
                counters.refused.fetch_add(1, Relaxed);
                if matches!(refused, Refused::OwnName | Refused::NameOfTwo) {
                    self.name_conflict = Some((from.to_owned(), now));
                }
                if let Some(suppressed) = self.refusals.due() {
                    let peer: String = from.chars().take(crate::names::MAX_NAME).collect();
                    tracing::warn!(peer, error = %refused, suppressed, "message of another gateway refused");
                }
            }
        }
    }

    fn on_effect(&mut self, effect: Effect, now: Instant) {
        match effect {
            Effect::Asked { all } => {
                let which = if all { SentBindings::Known } else { SentBindings::Own };
                self.times.snapshot_due = true;
                self.times.bindings_due = which.max(self.times.bindings_due);
                return;
            }
            Effect::Session(change) => {
                self.apply_change(change, now);
                return;
            }
            Effect::Sent { worker, rank, prefix } => {
                self.index.record(worker, rank, &prefix, now);
                return;
            }
            Effect::Joined(peer) => tracing::info!(%peer, "gateway joined the fleet"),
            Effect::Restarted(peer) => {
                tracing::info!(%peer, "gateway was restarted: its bookings are forgotten")
            }
            Effect::Left(peer) => tracing::info!(%peer, "gateway left the fleet"),
            Effect::Silent(peer) => {
                tracing::warn!(%peer, "gateway was silent for its lease: its bookings are forgotten");
            }
        }
        self.show(now);
    }

    /// Sends what changed; without a connection it is forgotten, since a new one begins with a snapshot.
    fn tell_changes(&mut self) {
        let sessions = self.take_own_changes(Instant::now());
        if matches!(self.link, Link::Up(_)) {
            let messages = self.outbox.batch(sessions);
            self.enqueue(messages);
            self.send(Instant::now());
        } else {
            self.outbox.skip();
        }
    }

    /// Runs the tasks that are due.
    fn look(&mut self, now: Instant) {
        self.tell_changes();
        for effect in self.peers.expire(now) {
            self.on_effect(effect, now);
        }
        let lost = self.journal.lost();
        if lost != self.journal_lost {
            self.journal_lost = lost;
            self.times.snapshot_due = true;
        }
        self.look_at_denials(now);
        if matches!(self.link, Link::Up(_)) {
            for peer in self.peers.to_ask(now) {
                let ask = self.outbox.ask(&peer);
                self.enqueue(vec![ask]);
            }
            let since = now.saturating_duration_since(self.times.snapshot);
            let due = if self.times.snapshot_due { ASKED_INTERVAL } else { self.config.snapshot_interval };
            if since >= due {
                self.send_snapshot(now);
            }
            if now.saturating_duration_since(self.times.sent) >= self.config.lease / 4 {
                let heartbeat = self.outbox.heartbeat();
                self.enqueue(vec![heartbeat]);
            }
            self.send(now);
        }
        if now.saturating_duration_since(self.times.view) >= VIEW_INTERVAL {
            self.show(now);
        }
    }

    fn send_snapshot(&mut self, now: Instant) {
        // The connection is behind: a snapshot would make it worse, and be old when it is sent.
        if !self.waiting.is_empty() {
            self.times.snapshot_due = true;
            return;
        }
        self.times.snapshot = now;
        self.times.snapshot_due = false;
        self.status.counters.snapshots.fetch_add(1, Relaxed);
        let which = std::mem::take(&mut self.times.bindings_due);
        let bindings = self.bindings_to_send(which, now);
        let messages = self.outbox.snapshot(bindings);
        self.enqueue(messages);
        self.send(now);
    }

    fn enqueue(&mut self, messages: Vec<Bytes>) {
        for message in messages {
            self.waiting_bytes += message.len();
            self.waiting.push_back(message);
        }
        if self.waiting_bytes > MAX_WAITING {
            self.status.counters.unsent.fetch_add(self.waiting.len() as u64, Relaxed);
            self.waiting.clear();
            self.waiting_bytes = 0;
            self.times.snapshot_due = true;
        }
    }

    /// Hands messages to the connection as long as it takes them at once.
    fn send(&mut self, now: Instant) {
        let Link::Up(connection) = &self.link else { return };
        let counters = &self.status.counters;
        while let Some(message) = self.waiting.front() {
            let publish = connection.client.publish(connection.subject.clone(), message.clone());
            let sent = match publish.now_or_never() {
                None => break,
                Some(sent) => sent,
            };
            let length = message.len();
            self.waiting.pop_front();
            self.waiting_bytes = self.waiting_bytes.saturating_sub(length);
            if sent.is_ok() {
                self.times.sent = now;
                counters.sent.fetch_add(1, Relaxed);
                counters.sent_bytes.fetch_add(length as u64, Relaxed);
            } else {
                counters.unsent.fetch_add(1, Relaxed);
                self.times.snapshot_due = true;
            }
        }
    }

    /// Puts the state where operators see it.
    fn show(&mut self, now: Instant) {
        self.times.view = now;
        let recent = |seen: Instant| now.saturating_duration_since(seen) < Duration::from_secs(30);
        let conflict = self.name_conflict.as_ref().filter(|(_, seen)| recent(*seen));
        let conflict = conflict.map(|(name, _)| {
            format!("two gateways use the name `{name}`: give each its own `replicas.name`")
        });
        self.status.set(StatusView {
            name: self.config.name.as_str().into(),
            fleet: self.config.fleet.as_str().into(),
            connected: matches!(self.link, Link::Up(_)),
            name_conflict: conflict.is_some(),
            problem: self.problem.clone().or_else(|| self.denials.problem()).or(conflict),
            own_bookings: self.outbox.bookings(),
            peers: self.peers.status(now),
        });
    }

    /// Tells the others that this gateway stops, so that they need not wait for its lease.
    async fn say_bye(mut self) {
        let messages = self.outbox.batch(Vec::new());
        self.enqueue(messages);
        let bye = self.outbox.stop_message();
        self.enqueue(vec![bye]);
        self.send(Instant::now());
        if let Link::Up(connection) = self.link {
            let _ = tokio::time::timeout(BYE_TIMEOUT, connection.client.flush()).await;
        }
    }
}

/// Waits for the registry to change. Returns false, late, when it is gone.
async fn changed(changes: &mut watch::Receiver<u64>) -> bool {
    if changes.changed().await.is_ok() {
        return true;
    }
    std::future::pending().await
}
