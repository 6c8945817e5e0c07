//! The prefix index (spec F5, H2, H3, H4): which candidate holds which prefix, as engines' events tell it, or, without
//! them, guessed from decisions.
//!
//! A decision is a *record*: these blocks are taken to be cached at that candidate until the record's TTL ends, the byte
//! budget needs its room (oldest first), or the worker leaves. A block is held as long as any record holds it, and a
//! record holds a whole prefix, so what a candidate holds is always closed under prefixes: lookups bisect.
//!
//! One writer thread applies records, so a decision pays for none of it; lookups read the table without a lock, but for blocks
//! that several hold.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, SyncSender, TrySendError},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use tokio::time::Instant;

use crate::{
    events::Batch,
    id::{BlockHash, DpRank, WorkerId},
};

mod bytes;
mod cells;
mod lookup;
mod names;
mod order;
mod places;
mod queue;
mod runs;
mod seats;
mod shards;
mod source;
mod writer;

pub use lookup::Overlaps;
use names::Names;
use queue::Message;
use shards::Shards;
use writer::Writer;

/// Records that wait for the writer; more are dropped and counted.
const QUEUE: usize = 8_192;

/// Bounds of the index.
#[derive(Clone, Copy, Debug)]
pub struct IndexConfig {
    /// Bytes of memory it may take, records and blocks together, with the slack of their tables.
    pub byte_budget: usize,
    /// How long a decision is taken to stay cached.
    pub ttl: Duration,
    /// Tokens in a block; those of the engines whose events are taken have to be multiples of it.
    pub block_size: usize,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self { byte_budget: 256 * 1024 * 1024, ttl: Duration::from_secs(120), block_size: 16 }
    }
}

/// Cached prefix blocks of one candidate, by tier. Approximate mode knows the device only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Matched {
    /// On the device.
    pub device: u32,
    /// In host memory, beyond the device's.
    pub host: u32,
    /// On disk, beyond the host's.
    pub disk: u32,
}

/// Sizes and counts, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Distinct blocks held.
    pub blocks: u64,
    /// Records alive.
    pub records: u64,
    /// Bytes that all of it takes from the allocator.
    pub bytes: u64,
    /// Records that gave way to the byte budget.
    pub evicted: u64,
    /// Records whose TTL ended.
    pub expired: u64,
    /// Records dropped because the writer was behind.
    pub dropped: u64,
    /// Blocks of engines' events that could not be placed.
    pub orphans: u64,
    /// Candidates and tiers that have a number in the index.
    pub slots: u64,
}

#[derive(Debug, Default)]
struct Counters {
    blocks: AtomicU64,
    records: AtomicU64,
    bytes: AtomicU64,
    evicted: AtomicU64,
    expired: AtomicU64,
    dropped: AtomicU64,
    orphans: AtomicU64,
    slots: AtomicU64,
}

type Candidate = (WorkerId, DpRank);

/// What lookups and the writer share.
#[derive(Debug, Default)]
struct Shared {
    shards: Arc<Shards>,
    names: ArcSwap<Names>,
    counters: Counters,
}

/// The index.
#[derive(Debug)]
pub struct PrefixIndex {
    shared: Arc<Shared>,
    queue: SyncSender<Message>,
}

impl PrefixIndex {
    /// An empty index with its writer thread, which ends when the index is dropped.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn new(config: IndexConfig) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (queue, messages) = mpsc::sync_channel(QUEUE);
        let writer = Writer::new(shared.clone(), config);
        std::thread::Builder::new()
            .name("pointsman-index".to_owned())
            .spawn(move || writer.run(&messages))?;
        Ok(Self { shared, queue })
    }

    /// Finds how many blocks of the prefix each candidate holds.
    pub fn matches(&self, blocks: &[BlockHash], _now: Instant, out: &mut Overlaps) {
        out.find(&self.shared, blocks);
    }

    /// Takes the blocks to be cached at a candidate from `now` on. Returns at once; the writer thread applies it.
    pub fn record(&self, worker: WorkerId, rank: DpRank, blocks: &Arc<[BlockHash]>, now: Instant) {
        if blocks.is_empty() {
            return;
        }
        let message = Message::Record { candidate: (worker, rank), blocks: blocks.clone(), at: now };
        if let Err(TrySendError::Full(_)) = self.queue.try_send(message) {
            self.shared.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes what an engine says of its cache.
    ///
    /// # Errors
    /// The writer is behind: the batch comes back, to be brought again soon.
    pub fn events(&self, worker: WorkerId, rank: DpRank, batch: Batch) -> Result<(), Batch> {
        let message = Message::Events { candidate: (worker, rank), batch };
        match self.queue.try_send(message) {
            Err(TrySendError::Full(Message::Events { batch, .. })) => Err(batch),
            _ => Ok(()),
        }
    }

    /// Forgets what an engine said.
    pub fn forget(&self, worker: WorkerId, rank: DpRank) {
        let _ = self.queue.send(Message::Forget((worker, rank)));
    }

    /// Whether an engine's own word is there: decisions are recorded only without it.
    pub fn set_live(&self, worker: WorkerId, rank: DpRank, live: bool) {
        let _ = self.queue.send(Message::Live { candidate: (worker, rank), live });
    }

    /// Forgets everything of a worker.
    pub fn remove_worker(&self, worker: WorkerId) {
        let _ = self.queue.send(Message::Remove(worker));
    }

    /// Ends the records whose TTL is over at `now`. The writer also does so by itself whenever a record comes in.
    pub fn expire(&self, now: Instant) {
        let _ = self.queue.try_send(Message::Expire(now));
    }

    /// Waits until everything sent before is applied.
    pub fn flush(&self) {
        let (done, wait) = mpsc::channel();
        if self.queue.send(Message::Flush(done)).is_ok() {
            let _ = wait.recv();
        }
    }

    /// Sizes and counts.
    #[must_use]
    pub fn stats(&self) -> IndexStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        IndexStats {
            blocks: get(&counters.blocks),
            records: get(&counters.records),
            bytes: get(&counters.bytes),
            evicted: get(&counters.evicted),
            expired: get(&counters.expired),
            dropped: get(&counters.dropped),
            orphans: get(&counters.orphans),
            slots: get(&counters.slots),
        }
    }
}

#[cfg(test)]
mod tests;
