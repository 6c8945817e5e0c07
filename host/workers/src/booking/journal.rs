//! Queue of changed bookings for other gateways.
//!
//! A booking is in the queue at most once. Its entry has the newest values, so a change of a booking that is
//! queued already costs two stores. Neither a change nor a full queue waits or allocates. A change wakes the
//! reader if it waits, so at most once for each of its batches.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering},
    mpsc::{Receiver, SyncSender, sync_channel},
};

use prefix_index::Prefix;
use tokio::sync::Notify;

use crate::{
    id::{DpRank, WorkerId},
    spec::WorkerSpec,
};

/// Names of a worker that gateways have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerKey {
    /// Id in the gateway that books.
    pub id: WorkerId,
    /// Hash of the base URL.
    pub url: u64,
}

/// The load of a booking that changes while the request runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadValues {
    /// Prompt tokens whose prefill has not completed.
    pub prefill_tokens: u32,
    /// Thousandths of blocks without a hash.
    pub unnamed_millis: i64,
}

/// Sends bookings that changed to the exchange with other gateways.
#[derive(Debug)]
pub struct Journal {
    queue: SyncSender<Arc<JournalEntry>>,
    next_id: AtomicU64,
    lost: AtomicU64,
    changed: Notify,
}

/// One booking as other gateways have to know it.
#[derive(Debug)]
pub struct JournalEntry {
    id: u64,
    worker: WorkerKey,
    rank: DpRank,
    prefix: Prefix,
    shares_blocks: bool,
    prefill_tokens: AtomicU32,
    unnamed_millis: AtomicI64,
    ended: AtomicBool,
    queued: AtomicBool,
}

/// The journal of one rank's bookings.
#[derive(Debug)]
pub(crate) struct RankJournal {
    pub(crate) journal: Arc<Journal>,
    pub(crate) worker: WorkerKey,
    pub(crate) rank: DpRank,
}

impl WorkerKey {
    /// Returns the names of a worker.
    #[must_use]
    pub fn of(spec: &WorkerSpec) -> Self {
        Self { id: spec.id, url: WorkerId::of_url(&spec.url).0 }
    }
}

impl Journal {
    /// Creates a journal, and the queue of at most `length` changed bookings.
    #[must_use]
    pub fn new(length: usize) -> (Arc<Self>, Receiver<Arc<JournalEntry>>) {
        let (queue, receiver) = sync_channel(length);
        let (next_id, lost, changed) = (AtomicU64::new(1), AtomicU64::new(0), Notify::new());
        (Arc::new(Self { queue, next_id, lost, changed }), receiver)
    }

    /// Returns the number of changes that found the queue full. The next change of the booking is queued
    /// again.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Waits for a change since the last call that returned.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    fn push(&self, entry: &Arc<JournalEntry>) {
        if entry.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.queue.try_send(entry.clone()).is_err() {
            entry.queued.store(false, Ordering::Release);
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        self.changed.notify_one();
    }
}

impl RankJournal {
    /// Begins the entry of a booking. `shares_blocks`: equal blocks of several bookings count once.
    pub(crate) fn add(&self, prefix: &Prefix, shares_blocks: bool, values: LoadValues) -> Arc<JournalEntry> {
        let entry = Arc::new(JournalEntry {
            id: self.journal.next_id.fetch_add(1, Ordering::Relaxed),
            worker: self.worker,
            rank: self.rank,
            prefix: prefix.clone(),
            shares_blocks,
            prefill_tokens: AtomicU32::new(values.prefill_tokens),
            unnamed_millis: AtomicI64::new(values.unnamed_millis),
            ended: AtomicBool::new(false),
            queued: AtomicBool::new(false),
        });
        self.journal.push(&entry);
        entry
    }

    /// Notes new values of a booking.
    pub(crate) fn update(&self, entry: &Arc<JournalEntry>, values: LoadValues) {
        entry.prefill_tokens.store(values.prefill_tokens, Ordering::Relaxed);
        entry.unnamed_millis.store(values.unnamed_millis, Ordering::Relaxed);
        self.journal.push(entry);
    }

    /// Notes the end of a booking.
    pub(crate) fn end(&self, entry: &Arc<JournalEntry>) {
        entry.ended.store(true, Ordering::Relaxed);
        self.journal.push(entry);
    }
}

impl JournalEntry {
    /// Returns the id, unique in this process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the names of the worker.
    #[must_use]
    pub fn worker(&self) -> WorkerKey {
        self.worker
    }

    /// Returns the rank of the worker.
    #[must_use]
    pub fn rank(&self) -> DpRank {
        self.rank
    }

    /// Returns the prefix of the prompt.
    #[must_use]
    pub fn prefix(&self) -> &Prefix {
        &self.prefix
    }

    /// Returns whether equal blocks of several bookings count once. Otherwise the values have all blocks.
    #[must_use]
    pub fn shares_blocks(&self) -> bool {
        self.shares_blocks
    }

    /// Allows the entry into the queue again. Call this before reading its values.
    pub fn allow_requeue(&self) {
        self.queued.swap(false, Ordering::AcqRel);
    }

    /// Returns the newest values.
    #[must_use]
    pub fn values(&self) -> LoadValues {
        LoadValues {
            prefill_tokens: self.prefill_tokens.load(Ordering::Relaxed),
            unnamed_millis: self.unnamed_millis.load(Ordering::Relaxed),
        }
    }

    /// Returns whether the booking ended.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}
