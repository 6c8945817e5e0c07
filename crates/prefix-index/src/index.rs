//! Prefix index: which candidate has which prefix in its KV cache.
//!
//! It learns from two sources. Engines report blocks by KV events. For a candidate without events, each
//! routing decision is a *record*: the index assumes that the decision's blocks stay cached there until the
//! record's TTL ends, the byte budget evicts it (oldest first), the engine clears its cache, or the worker
//! leaves. Events report tokens, so decisions about prompts of bytes are records for every candidate.
//!
//! A block is held as long as any record contains it. All known prefixes form one tree of *segments*,
//! which say who has which of their blocks. Each engine's own block hashes are kept in *runs*, which know
//! where they lie in the tree.
//!
//! One writer thread applies all changes, so a decision only pays for sending a message. The thread that
//! brings events hashes their tokens. Lookups read without a lock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    events::Batch,
    id::{BlockHash, DpRank, WorkerId},
    prefix::Prefix,
};

mod block_positions;
mod candidates;
mod covers;
mod engine_cache;
mod eviction;
mod gates;
mod holder_rows;
mod holders;
mod inbox;
mod invariants;
mod locate;
mod lockfree_map;
mod lookup;
mod memory;
mod mixer;
mod moved_blocks;
mod provisional;
mod queue;
mod reach;
mod recorded;
mod runs;
mod segments;
mod shared;
mod token_hashes;
mod trail;
mod tree;
mod writer;

pub use holder_rows::CandidateRows;
use inbox::Inbox;
pub use invariants::Invariant;
pub use lookup::{Matched, OverlapReader, Overlaps};
pub use provisional::ProvisionalRecord;
use queue::Message;
use shared::Shared;
use writer::Writer;

/// A worker and one of its ranks.
type Candidate = (WorkerId, DpRank);

/// Messages that may wait for the writer. Further records are dropped and counted; events are handed back.
const QUEUE_LENGTH: usize = 8_192;

/// Bounds of the index.
#[derive(Clone, Copy, Debug)]
pub struct IndexConfig {
    /// Maximum memory of records, blocks and the slack of their tables, bytes.
    pub byte_budget: usize,
    /// How long the blocks of a recorded decision are assumed to stay cached.
    pub ttl: Duration,
    /// Tokens per block. Engines that send events may have other block sizes.
    pub block_size: usize,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self { byte_budget: 256 * 1024 * 1024, ttl: Duration::from_secs(120), block_size: 16 }
    }
}

/// Sizes and counts, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Distinct blocks held.
    pub blocks: u64,
    /// Records alive.
    pub records: u64,
    /// Bytes taken from the allocator.
    pub bytes: u64,
    /// Records and blocks evicted to keep the byte budget.
    pub evicted: u64,
    /// Records whose TTL ended.
    pub expired: u64,
    /// Records dropped because the writer's queue was full.
    pub dropped: u64,
    /// Blocks of events that could not be placed, because of an unknown parent or block size.
    pub orphans: u64,
    /// Pairs of candidate and tier that the index knows.
    pub holders: u64,
    /// How often each rule of [`Invariant::ALL`] was found broken: a defect of the index.
    pub broken: [u64; Invariant::ALL.len()],
}

/// The index.
#[derive(Debug)]
pub struct PrefixIndex {
    shared: Arc<Shared>,
    inbox: Inbox,
    block_size: usize,
    /// The writer may have to hash tokens itself.
    keeps_tokens: AtomicBool,
}

impl PrefixIndex {
    /// Creates an empty index and starts its writer thread, which ends when the index is dropped.
    ///
    /// # Errors
    /// The operating system cannot start a thread.
    pub fn new(config: IndexConfig) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (queue, messages) = mpsc::sync_channel(QUEUE_LENGTH);
        let writer = Writer::new(shared.clone(), config);
        std::thread::Builder::new().name("prefix-index".to_owned()).spawn(move || writer.run(&messages))?;
        Ok(Self::with_inbox(shared, Inbox::Thread(queue), config))
    }

    /// Creates an empty index without a thread: each call applies its change before it returns. For
    /// simulations, in which the time of a change has to be exact.
    #[must_use]
    pub fn synchronous(config: IndexConfig) -> Self {
        let shared = Arc::new(Shared::default());
        let writer = Writer::new(shared.clone(), config);
        Self::with_inbox(shared, Inbox::Inline(Box::new(Mutex::new(writer))), config)
    }

    fn with_inbox(shared: Arc<Shared>, inbox: Inbox, config: IndexConfig) -> Self {
        let block_size = config.block_size.max(1);
        Self { shared, inbox, block_size, keeps_tokens: AtomicBool::new(false) }
    }

    /// Finds how many blocks of the prefix each candidate holds.
    pub fn matches(&self, blocks: &[BlockHash], out: &mut Overlaps) {
        out.find(&self.shared, blocks);
    }

    /// Records a decision: assumes that the prefix is cached at a candidate from `now` on. Returns at once;
    /// the writer thread applies it.
    pub fn record(&self, worker: WorkerId, rank: DpRank, prefix: &Prefix, now: Instant) {
        if prefix.hashes().is_empty() {
            return;
        }
        let message = Message::Record { candidate: (worker, rank), prefix: prefix.clone(), at: now };
        if self.inbox.try_send(message).is_err() {
            self.shared.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records a decision like [`Self::record`]. The record is withdrawn when the result is dropped, unless
    /// it was kept.
    pub fn record_provisionally(
        self: &Arc<Self>,
        worker: WorkerId,
        rank: DpRank,
        prefix: &Prefix,
        now: Instant,
    ) -> ProvisionalRecord {
        self.record(worker, rank, prefix, now);
        ProvisionalRecord::new(self.clone(), (worker, rank), prefix.hashes().clone(), now)
    }

    /// Withdraws a record. If the writer's queue is full, the record stays until its TTL ends.
    fn withdraw(&self, candidate: Candidate, blocks: Arc<[BlockHash]>, at: Instant) {
        let _ = self.inbox.try_send(Message::Withdraw { candidate, blocks, at });
    }

    /// Applies an engine's events. Hashes their tokens in this thread.
    ///
    /// # Errors
    /// The writer's queue is full: returns the batch, to be sent again soon.
    pub fn events(&self, worker: WorkerId, rank: DpRank, mut batch: Batch) -> Result<(), Batch> {
        self.hash_tokens(&mut batch);
        let message = Message::Events { candidate: (worker, rank), batch };
        match self.inbox.try_send(message) {
            Err(Message::Events { batch, .. }) => Err(batch),
            _ => Ok(()),
        }
    }

    /// Hashes the tokens of an engine's events, as [`Self::events`] does with those that are not hashed yet.
    pub fn hash_tokens(&self, batch: &mut Batch) {
        token_hashes::add(batch, self.block_size, &self.keeps_tokens);
    }

    /// Removes the blocks that an engine's events added.
    pub fn forget(&self, worker: WorkerId, rank: DpRank) {
        self.inbox.send(Message::Forget((worker, rank)));
    }

    /// Sets whether an engine's event feed is live. While it is, only decisions about prompts of bytes are
    /// recorded, and those for adapters if its events do not name adapters.
    pub fn set_live(&self, worker: WorkerId, rank: DpRank, live: bool) {
        self.inbox.send(Message::Live { candidate: (worker, rank), live });
    }

    /// Removes a worker's records: their prompts are no longer assumed to be cached there.
    pub fn forget_records(&self, worker: WorkerId) {
        self.inbox.send(Message::ForgetRecords(worker));
    }

    /// Removes a worker's records, blocks and holders.
    pub fn remove_worker(&self, worker: WorkerId) {
        self.inbox.send(Message::Remove(worker));
    }

    /// Ends the records whose TTL is over at `now`. The writer also does this whenever it applies a record.
    pub fn expire(&self, now: Instant) {
        let _ = self.inbox.try_send(Message::Expire(now));
    }

    /// Blocks until everything sent before is applied.
    pub fn flush(&self) {
        let (done, wait) = mpsc::channel();
        self.inbox.send(Message::Flush(done));
        // Fails when there is no writer, and then nothing is left to apply.
        let _ = wait.recv();
    }

    /// Returns the current sizes and counts.
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
            holders: get(&counters.holders),
            broken: self.shared.tree.broken.counts(),
        }
    }
}

#[cfg(test)]
mod tests;
