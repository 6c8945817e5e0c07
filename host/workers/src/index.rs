//! The prefix index (spec F5, H2, H3, H4): which candidate holds which prefix, as engines' events tell it, or, without
//! them, guessed from decisions.
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
        atomic::{AtomicU32, AtomicU64, Ordering},
        mpsc::{self, SyncSender, TrySendError},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use tokio::time::Instant;

use crate::{
    events::{Batch, Tier},
    id::{BlockHash, DpRank, WorkerId},
};

mod shards;
mod source;
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

/// The answer of a lookup, and its reusable buffers.
#[derive(Debug, Default)]
pub struct Overlaps {
    found: Vec<((WorkerId, DpRank), Matched)>,
    /// Slots with the depth to which each holds the prefix.
    depths: Vec<(u32, u32)>,
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
}

/// Who the slot numbers stand for.
#[derive(Clone, Debug, Default)]
struct Names {
    /// `None` once the worker left.
    slots: Vec<Option<Name>>,
    /// The slots of other tiers than the device.
    lower: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Name {
    candidate: (WorkerId, DpRank),
    tier: Tier,
    /// Blocks that lie below one which is not held; while there are any, halving finds too much.
    holes: Arc<AtomicU32>,
}

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
        let shards = &self.shared.shards;
        shards.holders(*first, |slot| out.group.push(slot));
        let names = self.shared.names.load();
        if out.group.is_empty() && names.lower.is_empty() {
            return;
        }
        out.marks.resize(out.marks.len().max(names.slots.len()), 0);
        if !out.group.is_empty() {
            out.work.push(Task { low: 0, high: blocks.len(), start: 0, end: out.group.len() });
        }
        while let Some(task) = out.work.pop() {
            if task.high - task.low <= 1 {
                out.settle(task);
                continue;
            }
            // A prompt that is cached whole, or up to its last block, is common: look there first.
            let whole = task.low == 0 && task.high == blocks.len();
            let middle = if whole { task.high - 1 } else { task.low.midpoint(task.high) };
            let Some(block) = blocks.get(middle) else { continue };
            out.mark(shards, *block);
            let split = out.partition(task.start, task.end);
            if split < task.end {
                out.work.push(Task { high: middle, start: split, ..task });
            }
            if split > task.start {
                out.work.push(Task { low: middle, end: split, ..task });
            }
        }
        out.name(&names, shards, blocks);
        if !names.lower.is_empty() {
            out.go_lower(&names, shards, blocks);
        }
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
            slots: self.shared.names.load().slots.iter().flatten().count() as u64,
        }
    }
}

impl Overlaps {
    /// What a candidate holds.
    #[must_use]
    pub fn get(&self, worker: WorkerId, rank: DpRank) -> Matched {
        let place = self.found.binary_search_by_key(&(worker, rank), |(candidate, _)| *candidate);
        place.ok().and_then(|place| self.found.get(place)).map_or(Matched::default(), |(_, matched)| *matched)
    }

    fn clear(&mut self) {
        self.found.clear();
        self.depths.clear();
        self.group.clear();
        self.work.clear();
    }

    /// Slots of the task hold exactly `low + 1` blocks.
    fn settle(&mut self, task: Task) {
        let depth = u32::try_from(task.low + 1).unwrap_or(u32::MAX);
        let slots = self.group.get(task.start..task.end).unwrap_or_default();
        self.depths.extend(slots.iter().map(|slot| (*slot, depth)));
    }

    /// What the device slots hold, by candidate. A slot with holes is walked from the root.
    fn name(&mut self, names: &Names, shards: &Shards, blocks: &[BlockHash]) {
        for (slot, depth) in &self.depths {
            let Some(name) = names.slots.get(*slot as usize).and_then(Option::as_ref) else { continue };
            if name.tier != Tier::Device {
                continue;
            }
            let holed = name.holes.load(Ordering::Acquire) > 0;
            let device = if holed { run(shards, blocks, 0, *slot).min(*depth) } else { *depth };
            self.found.push((name.candidate, Matched { device, ..Matched::default() }));
        }
        self.found.sort_unstable_by_key(|(candidate, _)| *candidate);
    }

    /// Lower tiers go on where the tier above ended.
    fn go_lower(&mut self, names: &Names, shards: &Shards, blocks: &[BlockHash]) {
        for tier in [Tier::Host, Tier::Disk] {
            for slot in &names.lower {
                let Some(name) = names.slots.get(*slot as usize).and_then(Option::as_ref) else { continue };
                if name.tier != tier {
                    continue;
                }
                let place = self.found.binary_search_by_key(&name.candidate, |(candidate, _)| *candidate);
                let matched = place.ok().and_then(|place| self.found.get(place)).map(|(_, matched)| *matched);
                let mut matched = matched.unwrap_or_default();
                let more = run(shards, blocks, matched.device + matched.host, *slot);
                if more == 0 {
                    continue;
                }
                *(if tier == Tier::Host { &mut matched.host } else { &mut matched.disk }) = more;
                match place.map(|place| self.found.get_mut(place)) {
                    Ok(found) => found.into_iter().for_each(|found| found.1 = matched),
                    Err(place) => self.found.insert(place, (name.candidate, matched)),
                }
            }
        }
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

/// How many blocks from `from` on a slot holds without a gap.
fn run(shards: &Shards, blocks: &[BlockHash], from: u32, slot: u32) -> u32 {
    let rest = blocks.get(from as usize..).unwrap_or_default();
    let held = rest.iter().take_while(|block| shards.holds(**block, slot)).count();
    u32::try_from(held).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
