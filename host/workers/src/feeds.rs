//! The feeds of every worker that has one, into the index; they come and go with the registry.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    events::{Batch, FeedConfig, FeedCounters, Sink, run},
    id::{DpRank, WorkerId},
    index::PrefixIndex,
    registry::Registry,
    spec::rank_endpoint,
    worker::Worker,
};

/// How long a feed waits for the index's writer before it offers a batch again.
const BEHIND: Duration = Duration::from_millis(1);

/// What can be told of one feed.
#[derive(Clone, Debug)]
pub struct FeedStatus {
    /// Its counters.
    pub counters: Arc<FeedCounters>,
    live: Arc<AtomicBool>,
}

/// All feeds.
#[derive(Debug, Default)]
pub struct Feeds {
    running: Mutex<BTreeMap<(WorkerId, DpRank), FeedStatus>>,
}

struct IndexSink {
    index: Arc<PrefixIndex>,
    worker: WorkerId,
    rank: DpRank,
    live: Arc<AtomicBool>,
}

impl FeedStatus {
    /// Whether the engine's own word is there; without it, its cache is guessed from decisions.
    #[must_use]
    pub fn live(&self) -> bool {
        self.live.load(Ordering::Relaxed)
    }
}

impl Sink for IndexSink {
    fn apply(&self, batch: Batch) {
        let mut batch = batch;
        // Back-pressure: the feed reads no further while the writer is behind. Feeds have a thread of their own.
        while let Err(returned) = self.index.events(self.worker, self.rank, batch) {
            batch = returned;
            std::thread::sleep(BEHIND);
        }
    }

    fn forget(&self, why: &'static str) {
        tracing::info!(worker = %self.worker, rank = %self.rank, why, "the engine's KV events are forgotten");
        self.index.forget(self.worker, self.rank);
    }

    fn live(&self, live: bool) {
        if self.live.swap(live, Ordering::Relaxed) != live {
            tracing::info!(worker = %self.worker, rank = %self.rank, live, "KV events");
        }
        self.index.set_live(self.worker, self.rank, live);
    }
}

impl Feeds {
    /// Runs feeds until `stop`.
    pub async fn run(
        self: Arc<Self>,
        registry: Arc<Registry>,
        index: Arc<PrefixIndex>,
        stop: CancellationToken,
    ) {
        let tasks = TaskTracker::new();
        let mut known: Vec<(Arc<Worker>, CancellationToken)> = Vec::new();
        let mut changes = registry.subscribe();
        loop {
            let snapshot = registry.snapshot();
            known.retain(|(worker, token)| {
                let stays = snapshot.get(worker.id()).is_some_and(|present| Arc::ptr_eq(present, worker));
                if !stays {
                    token.cancel();
                    self.running.lock().retain(|(id, _), _| *id != worker.id());
                }
                stays
            });
            for worker in snapshot.workers() {
                if known.iter().any(|(other, _)| Arc::ptr_eq(other, worker)) {
                    continue;
                }
                let token = stop.child_token();
                self.start(worker, &index, &tasks, &token);
                known.push((worker.clone(), token));
            }
            drop(snapshot);
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { break },
                () = stop.cancelled() => break,
            }
        }
        tasks.close();
        tasks.wait().await;
    }

    /// The feeds that run now.
    #[must_use]
    pub fn status(&self) -> Vec<((WorkerId, DpRank), FeedStatus)> {
        self.running.lock().iter().map(|(key, status)| (*key, status.clone())).collect()
    }

    fn start(
        &self,
        worker: &Arc<Worker>,
        index: &Arc<PrefixIndex>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) {
        let spec = worker.spec();
        let Some(events) = &spec.kv_events else { return };
        for rank in 0..spec.dp_size {
            let Some(endpoint) = rank_endpoint(events, rank) else { continue };
            let mut config = FeedConfig::new(endpoint);
            config.replay = spec.kv_replay.as_ref().and_then(|replay| rank_endpoint(replay, rank));
            let status = FeedStatus { counters: config.counters.clone(), live: Arc::default() };
            let sink = IndexSink {
                index: index.clone(),
                worker: worker.id(),
                rank: DpRank(rank),
                live: status.live.clone(),
            };
            self.running.lock().insert((worker.id(), DpRank(rank)), status);
            tasks.spawn(run(config, Arc::new(sink), stop.clone()));
        }
    }
}
