//! Runs a feed of KV events into the index for every worker and rank that has an endpoint for them. Follows
//! the registry.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use prefix_index::{
    PrefixIndex,
    events::{Batch, KvEvent},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    events::{FeedConfig, FeedCounters, Sink, run},
    id::{DpRank, WorkerId},
    log_limit::LogLimit,
    registry::{Followed, Registry},
    resolver::Resolver,
    spec::rank_endpoint,
    worker::{Health, Worker},
};

mod outage;
#[cfg(test)]
mod tests;

use outage::Outage;

/// How long a feed waits before it sends a batch again that the index's full queue refused.
const FULL_QUEUE_DELAY: Duration = Duration::from_millis(1);
/// Shortest time between two log lines of one kind about a source: an engine can cause thousands a second.
const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// The same for events that are skipped, and for a feed that cannot be read: an engine causes them all the
/// time.
const SKIPPED_LOG_INTERVAL: Duration = Duration::from_mins(10);

/// State of one feed.
#[derive(Clone, Debug)]
pub struct FeedStatus {
    /// The feed's counters.
    pub counters: Arc<FeedCounters>,
    /// Address of the engine's events.
    pub endpoint: Arc<str>,
    live: Arc<AtomicBool>,
    outage: Arc<Outage>,
}

/// All running feeds.
#[derive(Debug)]
pub struct Feeds {
    running: Mutex<BTreeMap<(WorkerId, DpRank), FeedStatus>>,
    /// The worker that an endpoint was first given for, by its key.
    owners: Mutex<HashMap<(&'static str, String), WorkerId>>,
    shared_lines: LogLimit,
}

impl Default for Feeds {
    fn default() -> Self {
        Self {
            running: Mutex::default(),
            owners: Mutex::default(),
            shared_lines: LogLimit::new(LOG_INTERVAL),
        }
    }
}

struct IndexSink {
    index: Arc<PrefixIndex>,
    /// Worker and rank of the events.
    owner: Arc<Worker>,
    worker: WorkerId,
    rank: DpRank,
    live: Arc<AtomicBool>,
    endpoint: Arc<str>,
    outage: Arc<Outage>,
    forget_lines: LogLimit,
    live_lines: LogLimit,
    skipped_lines: LogLimit,
    unreadable_lines: LogLimit,
}

impl FeedStatus {
    /// Returns whether the feed is connected, readable and caught up. Otherwise the index learns from
    /// decisions.
    #[must_use]
    pub fn live(&self) -> bool {
        self.live.load(Ordering::Relaxed)
    }

    /// Returns why the feed is not live, if it has not been for a while although its worker is healthy.
    #[must_use]
    pub fn problem(&self) -> Option<Arc<str>> {
        self.outage.reason()
    }
}

impl IndexSink {
    /// Warns if the engine is newer than this gateway: the index lacks what it skips.
    fn warn_of_skipped(&self, batch: &Batch) {
        let event = batch.events.iter().find_map(|event| match event {
            KvEvent::Unknown(name) => Some(name),
            _ => None,
        });
        if let Some(event) = event
            && let Some(suppressed) = self.skipped_lines.due()
        {
            let (worker, rank) = (self.worker, self.rank);
            tracing::warn!(%worker, %rank, event, suppressed, "kv event skipped: its type or form is unknown");
        }
    }
}

impl Sink for IndexSink {
    fn apply(&self, batch: Batch) {
        let mut batch = batch;
        // Blocks come and go while the engine works.
        if !batch.events.is_empty() {
            self.owner.note_sign_of_life();
        }
        self.warn_of_skipped(&batch);
        // Back-pressure: the feed stops reading while the queue is full. Blocking is fine, feeds have their
        // own thread.
        while let Err(returned) = self.index.events(self.worker, self.rank, batch) {
            batch = returned;
            std::thread::sleep(FULL_QUEUE_DELAY);
        }
    }

    fn forget(&self, why: &'static str) {
        if let Some(suppressed) = self.forget_lines.due() {
            tracing::info!(worker = %self.worker, rank = %self.rank, why, suppressed, "kv events forgotten");
        }
        self.index.forget(self.worker, self.rank);
    }

    fn restarted(&self) {
        self.index.forget_records(self.worker);
    }

    fn live(&self, live: bool) {
        if self.live.swap(live, Ordering::Relaxed) != live {
            if let Some(suppressed) = self.live_lines.due() {
                let (worker, rank) = (self.worker, self.rank);
                tracing::info!(%worker, %rank, live, suppressed, "kv event feed changed");
            }
            self.outage.restart();
        }
        self.index.set_live(self.worker, self.rank, live);
    }

    fn unreadable(&self, error: &str) {
        self.live(false);
        if self.outage.begin(error)
            && let Some(suppressed) = self.unreadable_lines.due()
        {
            let (worker, rank, endpoint) = (self.worker, self.rank, &self.endpoint);
            tracing::warn!(
                %worker, %rank, %endpoint, error, suppressed,
                "kv events of a worker cannot be decoded: its cache is predicted from decisions; check that its \
                 kv_events is the engine's address for them, and that the engine sends them as msgpack"
            );
        }
    }

    fn lost(&self, reason: &zmtp::Error) {
        if self.owner.health() != Health::Healthy {
            self.outage.restart();
        } else if self.outage.lasts(&reason.to_string()) {
            let (worker, rank, endpoint) = (self.worker, self.rank, &self.endpoint);
            tracing::warn!(
                %worker, %rank, %endpoint, %reason,
                "kv events of a healthy worker do not arrive: its cache is predicted from decisions; check its \
                 kv_events and the engine's --kv-events-config"
            );
        }
    }
}

impl Feeds {
    /// Runs the feeds until `stop` is cancelled.
    pub async fn run(
        self: Arc<Self>,
        registry: Arc<Registry>,
        index: Arc<PrefixIndex>,
        resolver: Resolver,
        stop: CancellationToken,
    ) {
        let tasks = TaskTracker::new();
        let mut followed = Followed::default();
        let mut changes = registry.subscribe();
        loop {
            let snapshot = registry.snapshot();
            followed.follow(
                &snapshot,
                &stop,
                has_same_feeds,
                |gone| {
                    self.running.lock().retain(|(id, _), _| *id != gone);
                    self.owners.lock().retain(|_, owner| *owner != gone);
                },
                |worker, token| self.start(worker, (&index, &resolver), &tasks, token),
            );
            drop(snapshot);
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { break },
                () = stop.cancelled() => break,
            }
        }
        tasks.close();
        tasks.wait().await;
    }

    /// Returns the running feeds.
    #[must_use]
    pub fn status(&self) -> Vec<((WorkerId, DpRank), FeedStatus)> {
        self.running.lock().iter().map(|(key, status)| (*key, status.clone())).collect()
    }

    /// Returns the state of one feed, if there is one.
    #[must_use]
    pub fn get(&self, worker: WorkerId, rank: DpRank) -> Option<FeedStatus> {
        self.running.lock().get(&(worker, rank)).cloned()
    }

    /// Returns why the KV events of a healthy worker have not arrived for a while: of its first rank without
    /// them, and the number of others.
    #[must_use]
    pub fn problem(&self, worker: WorkerId) -> Option<String> {
        let running = self.running.lock();
        let own = running.range((worker, DpRank(0))..=(worker, DpRank(u32::MAX)));
        let mut down = own.filter_map(|((_, rank), feed)| Some((rank, &feed.endpoint, feed.problem()?)));
        let (rank, endpoint, reason) = down.next()?;
        let others = match down.count() {
            0 => String::new(),
            others => format!(", and {others} more"),
        };
        Some(format!("no KV events of rank {rank} from {endpoint}: {reason}{others}"))
    }

    /// Warns if another worker has the same endpoint: the index would assume blocks at a worker that does not
    /// have them.
    fn warn_of_shared(&self, worker: WorkerId, key: &'static str, endpoint: &str) {
        let other = match self.owners.lock().entry((key, endpoint.to_owned())) {
            Entry::Vacant(free) => *free.insert(worker),
            Entry::Occupied(owner) => *owner.get(),
        };
        if other != worker
            && let Some(suppressed) = self.shared_lines.due()
        {
            tracing::warn!(
                %worker, %other, key, endpoint, suppressed,
                "two workers have one address for kv events: write it with {{host}} or give each its own"
            );
        }
    }

    fn start(
        &self,
        worker: &Arc<Worker>,
        (index, resolver): (&Arc<PrefixIndex>, &Resolver),
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) {
        let spec = worker.spec();
        let Some((events, offset)) = spec.kv_events.as_ref().zip(spec.kv_events_offset) else { return };
        for rank in 0..spec.dp_size {
            let Some(endpoint) = rank_endpoint(events, offset + rank) else { continue };
            let replay = spec.kv_replay.as_ref().and_then(|replay| rank_endpoint(replay, offset + rank));
            let keys = [("kv_events", Some(&endpoint)), ("kv_replay", replay.as_ref())];
            for (key, endpoint) in keys.into_iter().filter_map(|(key, of)| Some((key, of?))) {
                self.warn_of_shared(worker.id(), key, endpoint);
            }
            let mut config = FeedConfig::new(&*endpoint);
            config.resolver = resolver.clone();
            config.replay = replay;
            let status = FeedStatus {
                counters: config.counters.clone(),
                endpoint: endpoint.into(),
                live: Arc::default(),
                outage: Arc::default(),
            };
            let sink = IndexSink {
                index: index.clone(),
                owner: worker.clone(),
                worker: worker.id(),
                rank: DpRank(rank),
                live: status.live.clone(),
                endpoint: status.endpoint.clone(),
                outage: status.outage.clone(),
                forget_lines: LogLimit::new(LOG_INTERVAL),
                live_lines: LogLimit::new(LOG_INTERVAL),
                skipped_lines: LogLimit::new(SKIPPED_LOG_INTERVAL),
                unreadable_lines: LogLimit::new(SKIPPED_LOG_INTERVAL),
            };
            self.running.lock().insert((worker.id(), DpRank(rank)), status);
            tasks.spawn(run(config, Arc::new(sink), stop.clone()));
        }
    }
}

/// Returns whether a worker took over from another one, and has the same feeds: they go on. Only then does
/// the index keep what the engine reported.
fn has_same_feeds(before: &Worker, now: &Worker) -> bool {
    let feeds = |worker: &Worker| {
        let spec = worker.spec();
        (spec.kv_events.clone(), spec.kv_events_offset, spec.kv_replay.clone(), spec.dp_size)
    };
    now.continues(before) && feeds(now) == feeds(before)
}
