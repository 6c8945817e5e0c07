//! The prefix index, approximate mode (spec F5, H3, H4): which candidate holds which prefix, guessed from decisions.
//!
//! A decision is a *record*: these blocks are taken to be cached at that candidate until the record's TTL ends, the byte
//! budget needs its room (oldest first), or the worker leaves. A block is held as long as any record holds it, and a
//! record holds a whole prefix, so what a candidate holds is always closed under prefixes: lookups bisect.
//!
//! One writer thread applies records, so a decision pays for none of it; lookups take a shard's read lock, which the
//! writer holds for one block at a time.

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

use crate::id::{BlockHash, DpRank, WorkerId};

mod shards;
mod writer;

use shards::Shards;
use writer::{Message, Writer};

/// Records that wait for the writer; more are dropped and counted.
const QUEUE: usize = 8_192;

/// Bounds of the index.
#[derive(Clone, Copy, Debug)]
pub struct IndexConfig {
    /// Bytes it may hold, records and blocks together.
    pub byte_budget: usize,
    /// How long a decision is taken to stay cached.
    pub ttl: Duration,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self { byte_budget: 256 * 1024 * 1024, ttl: Duration::from_secs(120) }
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

/// The answer of a lookup, and its reusable buffers.
#[derive(Debug, Default)]
pub struct Overlaps {
    found: Vec<((WorkerId, DpRank), u32)>,
    group: Vec<u32>,
    work: Vec<Task>,
    marks: Vec<u32>,
    stamp: u32,
}

/// Candidates `group[start..end]` hold block `low`, and none of them holds block `high`.
#[derive(Clone, Copy, Debug)]
struct Task {
    low: usize,
    high: usize,
    start: usize,
    end: usize,
}

/// Sizes and counts, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Distinct blocks held.
    pub blocks: u64,
    /// Records alive.
    pub records: u64,
    /// Bytes accounted.
    pub bytes: u64,
    /// Records that gave way to the byte budget.
    pub evicted: u64,
    /// Records whose TTL ended.
    pub expired: u64,
    /// Records dropped because the writer was behind.
    pub dropped: u64,
}

#[derive(Debug, Default)]
struct Counters {
    blocks: AtomicU64,
    records: AtomicU64,
    bytes: AtomicU64,
    evicted: AtomicU64,
    expired: AtomicU64,
    dropped: AtomicU64,
}

/// Who a slot number stands for; `None` once the worker left.
type Names = Vec<Option<(WorkerId, DpRank)>>;

/// What lookups and the writer share.
#[derive(Debug, Default)]
struct Shared {
    shards: Shards,
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

    /// Finds how many blocks of the prefix each candidate holds. Candidates that hold none are not in the answer.
    pub fn matches(&self, blocks: &[BlockHash], _now: Instant, out: &mut Overlaps) {
        out.clear();
        let Some(first) = blocks.first() else { return };
        self.shared.shards.holders(*first, |slot| out.group.push(slot));
        if out.group.is_empty() {
            return;
        }
        let names = self.shared.names.load();
        out.marks.resize(out.marks.len().max(names.len()), 0);
        out.work.push(Task { low: 0, high: blocks.len(), start: 0, end: out.group.len() });
        while let Some(task) = out.work.pop() {
            if task.high - task.low <= 1 {
                out.settle(task, &names);
                continue;
            }
            // A prompt that is cached whole, or up to its last block, is common: look there first.
            let whole = task.low == 0 && task.high == blocks.len();
            let middle = if whole { task.high - 1 } else { task.low.midpoint(task.high) };
            let Some(block) = blocks.get(middle) else { continue };
            out.mark(&self.shared.shards, *block);
            let split = out.partition(task.start, task.end);
            if split < task.end {
                out.work.push(Task { high: middle, start: split, ..task });
            }
            if split > task.start {
                out.work.push(Task { low: middle, end: split, ..task });
            }
        }
        out.found.sort_unstable_by_key(|(candidate, _)| *candidate);
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
        }
    }
}

impl Overlaps {
    /// What a candidate holds.
    #[must_use]
    pub fn get(&self, worker: WorkerId, rank: DpRank) -> Matched {
        let place = self.found.binary_search_by_key(&(worker, rank), |(candidate, _)| *candidate);
        let device = place.ok().and_then(|place| self.found.get(place)).map_or(0, |(_, depth)| *depth);
        Matched { device, host: 0, disk: 0 }
    }

    fn clear(&mut self) {
        self.found.clear();
        self.group.clear();
        self.work.clear();
    }

    /// Candidates of the task hold exactly `low + 1` blocks.
    fn settle(&mut self, task: Task, names: &Names) {
        let depth = u32::try_from(task.low + 1).unwrap_or(u32::MAX);
        let slots = self.group.get(task.start..task.end).unwrap_or_default();
        let candidates = slots.iter().filter_map(|slot| names.get(*slot as usize).copied().flatten());
        self.found.extend(candidates.map(|candidate| (candidate, depth)));
    }

    /// Marks the holders of a block with a new stamp.
    fn mark(&mut self, shards: &Shards, block: BlockHash) {
        self.stamp = self.stamp.wrapping_add(1).max(1);
        let (marks, stamp) = (&mut self.marks, self.stamp);
        shards.holders(block, |slot| {
            if let Some(mark) = marks.get_mut(slot as usize) {
                *mark = stamp;
            }
        });
    }

    /// Moves the marked candidates of `group[start..end]` to its front; answers where the others begin.
    fn partition(&mut self, start: usize, end: usize) -> usize {
        let mut split = start;
        for place in start..end {
            let slot = self.group.get(place).copied().unwrap_or(u32::MAX);
            if self.marks.get(slot as usize) == Some(&self.stamp) {
                self.group.swap(place, split);
                split += 1;
            }
        }
        split
    }
}

#[cfg(test)]
mod tests;
