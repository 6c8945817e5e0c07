//! The index's only writer: applies decisions and events in order, and ends records by age, budget or
//! departure.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::Receiver,
    },
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Candidate, IndexConfig,
    candidates::{Candidates, HoldersOf},
    engine_cache::EngineCache,
    eviction::EvictionQueue,
    holders::RECORDED,
    memory::{difference, heap},
    moved_blocks::take_moved,
    queue::{Message, Queue},
    runs::Victim,
    shared::Shared,
    tree::TreeWriter,
};
use crate::{
    events::{Batch, KvEvent},
    id::{BlockHash, WorkerId},
    prefix::Prefix,
};

/// How much later than a record one with an earlier time may arrive: threads decide side by side.
const MAX_DISORDER: Duration = Duration::from_secs(1);

struct Record {
    /// Number of the record, counted from the start.
    number: u64,
    holder: u32,
    prefix: Prefix,
    /// Number of the blocks that earlier records of the holder covered.
    covered: usize,
    at: Instant,
}

impl Record {
    fn blocks(&self) -> &Arc<[BlockHash]> {
        self.prefix.hashes()
    }

    /// Returns the bytes that the record takes beside its queue entry. Bookings may share the hashes; they
    /// are counted here all the same.
    fn bytes(&self) -> usize {
        heap(2 * size_of::<usize>() + size_of_val::<[BlockHash]>(self.blocks()))
    }
}

pub(super) struct Writer {
    shared: Arc<Shared>,
    tree: TreeWriter,
    ttl: Duration,
    budget: u64,
    block_size: usize,
    /// Records that have not expired, oldest first.
    records: VecDeque<Record>,
    /// Number of records so far.
    recorded: u64,
    candidates: Candidates,
    eviction: EvictionQueue,
    /// Number of runs of all engine caches.
    runs: usize,
    /// Bytes of `records`, `eviction` and `tree` that the counters include.
    counted: usize,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, config: IndexConfig) -> Self {
        Self {
            tree: TreeWriter::new(shared.tree.clone()),
            candidates: Candidates::new(shared.clone()),
            shared,
            ttl: config.ttl,
            budget: config.byte_budget as u64,
            block_size: config.block_size.max(1),
            records: VecDeque::new(),
            recorded: 0,
            eviction: EvictionQueue::default(),
            runs: 0,
            counted: 0,
        }
    }

    /// Handles messages until all senders are dropped.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        let mut queue = Queue::new(messages);
        while let Ok(message) = queue.next() {
            self.handle(message);
        }
    }

    /// Handles one message.
    pub(super) fn handle(&mut self, message: Message) {
        match message {
            Message::Events { candidate, batch } => {
                self.apply(candidate, batch);
                self.enforce_budget();
            }
            Message::Forget(candidate) => self.forget(candidate),
            Message::Live { candidate, live } => self.set_live(candidate, live),
            Message::Record { candidate, prefix, at } => {
                self.expire(at);
                self.record(candidate, prefix, at);
                self.enforce_budget();
            }
            Message::Withdraw { candidate, blocks, at } => self.withdraw(candidate, &blocks, at),
            Message::ForgetRecords(worker) => {
                let candidates = self.candidates.of_worker(worker);
                candidates.into_iter().for_each(|candidate| self.end_records_of(candidate, |_| true));
            }
            Message::Remove(worker) => self.remove(worker),
            Message::Expire(now) => self.expire(now),
            Message::Flush(done) => drop(done.send(())),
        }
    }

    /// Records a decision, unless the candidate's event feed is live and reports all blocks. No event ever
    /// reports the blocks of a prompt of bytes.
    fn record(&mut self, candidate: Candidate, prefix: Prefix, at: Instant) {
        let state = self.candidates.get_mut(candidate).filter(|_| !prefix.is_sparse());
        if state.is_some_and(|state| state.is_followed(&prefix, at)) {
            return;
        }
        let Some(holder) = self.candidates.holder(candidate, RECORDED) else { return };
        self.recorded += 1;
        let covered = self.tree.record(holder, prefix.hashes(), self.recorded);
        let record = Record { number: self.recorded, holder, prefix, covered, at };
        self.candidates.count_records(holder, 1);
        if self.records.len() == self.records.capacity() {
            self.records.reserve_exact(16.max(self.records.len() / 4));
        }
        let bytes = difference(record.bytes(), 0);
        self.records.push_back(record);
        self.account(bytes, 1);
    }

    /// Ends the record of a decision whose worker did not take the prompt. What earlier records have of its
    /// blocks stays until they end.
    fn withdraw(&mut self, candidate: Candidate, blocks: &Arc<[BlockHash]>, at: Instant) {
        let Some(holder) = self.record_holder(candidate) else { return };
        let is_it = |record: &Record| {
            record.holder == holder && record.at == at && Arc::ptr_eq(record.blocks(), blocks)
        };
        let recent = self.records.iter().rev().take_while(|record| record.at + MAX_DISORDER >= at);
        let Some(later) = recent.map(is_it).position(|found| found) else { return };
        let place = self.records.len() - 1 - later;
        let Some(withdrawn) = self.records.remove(place) else { return };
        let earlier = self.records.range(..place).rev().filter(|record| record.holder == holder);
        self.tree.end_record(holder, blocks, withdrawn.number, |tree| {
            let mut covered = 0;
            for record in earlier {
                if covered >= withdrawn.covered {
                    break;
                }
                let both = record.blocks().iter().zip(blocks.iter());
                let common = both.take_while(|(one, other)| one == other).count();
                if common > covered {
                    tree.record(holder, record.blocks().get(..common).unwrap_or_default(), record.number);
                    covered = common;
                }
            }
        });
        self.left(&withdrawn);
    }

    /// Removes the blocks of a record that has left the queue.
    fn end(&mut self, record: &Record) {
        self.tree.end_record(record.holder, record.blocks(), record.number, |_| {});
        self.left(record);
    }

    /// Updates the counters after a record left the queue and the tree.
    fn left(&mut self, record: &Record) {
        let half_empty = self.records.capacity() > 64 && self.records.len() * 2 < self.records.capacity();
        if half_empty || self.records.is_empty() {
            self.records.shrink_to(self.records.len() + self.records.len() / 4);
        }
        self.account(difference(0, record.bytes()), -1);
        self.candidates.count_records(record.holder, -1);
    }

    fn expire(&mut self, now: Instant) {
        let expired = |record: &Record, ttl| now.saturating_duration_since(record.at) >= ttl;
        while self.records.front().is_some_and(|record| expired(record, self.ttl)) {
            if let Some(record) = self.records.pop_front() {
                self.end(&record);
                self.shared.counters.expired.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn is_over_budget(&self) -> bool {
        self.shared.counters.bytes.load(Ordering::Relaxed) > self.budget
    }

    /// Evicts records, oldest first, and then blocks of engine caches.
    fn enforce_budget(&mut self) {
        while self.is_over_budget() {
            let Some(record) = self.records.pop_front() else { break };
            self.end(&record);
            self.shared.counters.evicted.fetch_add(1, Ordering::Relaxed);
        }
        while self.is_over_budget() {
            let Some((candidate, run)) = self.eviction.pop() else { break };
            let Some(mut cache) = self.candidates.get_mut(candidate).and_then(|state| state.cache.take())
            else {
                continue;
            };
            match cache.victim(run) {
                Victim::None => {}
                Victim::Used => self.eviction.push_back((candidate, run)),
                Victim::Tail(tail) => {
                    let runs = cache.len();
                    let bytes = cache.evict(&mut self.tree, tail);
                    if cache.is_queued(run) {
                        self.eviction.push_front((candidate, run));
                    }
                    self.shared.counters.evicted.fetch_add(1, Ordering::Relaxed);
                    self.settle(candidate, &mut cache, runs, bytes);
                }
            }
            self.candidates.get_or_insert(candidate).cache = Some(cache);
        }
    }

    /// Applies an engine's events in order, except for blocks that move to another tier.
    fn apply(&mut self, candidate: Candidate, mut batch: Batch) {
        let moved = take_moved(&mut batch.events);
        let mut cache = self.candidates.get_or_insert(candidate).cache.take().unwrap_or_default();
        cache.learn_parents(&batch.events);
        let (recorded, named) = (cache.lacks_followed_group(), cache.names_adapters());
        let mut cleared = false;
        for event in moved.into_iter().chain(batch.events) {
            let runs = cache.len();
            let mut holders = HoldersOf { candidates: &mut self.candidates, candidate };
            let bytes = match event {
                KvEvent::Stored(stored) => {
                    let effect = cache.stored(&mut self.tree, stored, self.block_size, &mut holders);
                    self.shared.counters.orphans.fetch_add(effect.orphans, Ordering::Relaxed);
                    effect.bytes
                }
                KvEvent::Removed { hashes, tier, group } => {
                    cache.removed(&mut self.tree, &hashes, (tier, group), &mut holders)
                }
                KvEvent::Cleared => {
                    cleared = true;
                    cache.clear(&mut self.tree)
                }
                KvEvent::Unknown(_) => continue,
            };
            self.settle(candidate, &mut cache, runs, bytes);
        }
        let ends_records = recorded && !cache.lacks_followed_group();
        let ends_adapters = !named && cache.names_adapters();
        self.candidates.get_or_insert(candidate).cache = Some(cache);
        if cleared || ends_records || ends_adapters {
            self.end_records_of(candidate, |Record { prefix, .. }| {
                cleared || (ends_records && !prefix.is_sparse()) || (ends_adapters && prefix.is_of_adapter())
            });
        }
        self.compact();
    }

    /// Updates the eviction queue and the counters after a change of a cache, which had `runs_before` runs.
    /// `bytes`: how its own size changed.
    fn settle(&mut self, candidate: Candidate, cache: &mut EngineCache, runs_before: usize, bytes: i64) {
        self.eviction.enqueue(candidate, cache.queueable());
        self.runs = self.runs + cache.len() - runs_before;
        self.account(bytes, 0);
    }

    fn compact(&mut self) {
        let candidates = &self.candidates;
        self.eviction.compact(self.runs, |(candidate, run)| {
            let cache = candidates.get(*candidate).and_then(|state| state.cache.as_ref());
            cache.is_some_and(|cache| cache.is_queued(*run))
        });
        self.account(0, 0);
    }

    fn forget(&mut self, candidate: Candidate) {
        let Some(state) = self.candidates.get_mut(candidate) else { return };
        state.incomplete_until = None;
        let Some(mut cache) = state.cache.take() else { return };
        let runs = cache.len();
        let bytes = cache.clear(&mut self.tree);
        self.settle(candidate, &mut cache, runs, bytes);
        cache.forget_engine();
        cache.take_orphaned();
        self.candidates.get_or_insert(candidate).cache = Some(cache);
        self.candidates.end_gates(candidate, None);
        self.compact();
    }

    /// Switches a candidate between events and recorded decisions. Each replaces what the other had added,
    /// except for prompts of bytes, which are recorded in both cases, and of adapters, which may be.
    fn set_live(&mut self, candidate: Candidate, live: bool) {
        if live {
            self.candidates.get_or_insert(candidate).live = true;
            self.end_records_of(candidate, |Record { prefix, .. }| {
                !prefix.is_sparse() && !prefix.is_of_adapter()
            });
        } else {
            // This is also the last message of a feed whose worker left, and removes what its late events
            // added.
            self.drop_cache(candidate);
            self.candidates.release_unused(candidate);
        }
    }

    fn drop_cache(&mut self, candidate: Candidate) {
        self.forget(candidate);
        if let Some(state) = self.candidates.get_mut(candidate) {
            (state.live, state.cache) = (false, None);
        }
    }

    /// Returns the holder of a candidate's records.
    fn record_holder(&self, candidate: Candidate) -> Option<u32> {
        self.candidates.get(candidate)?.holders.get(RECORDED).copied().flatten()
    }

    /// Ends those records of a candidate for which `ends` returns true.
    fn end_records_of(&mut self, candidate: Candidate, ends: impl Fn(&Record) -> bool) {
        let Some(holder) = self.record_holder(candidate) else { return };
        if self.candidates.records(holder) == 0 {
            return;
        }
        let ends = |record: &Record| record.holder == holder && ends(record);
        let (ended, kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.records).into_iter().partition(ends);
        self.records = kept;
        ended.iter().for_each(|record| self.end(record));
    }

    fn remove(&mut self, worker: WorkerId) {
        for candidate in self.candidates.of_worker(worker) {
            self.drop_cache(candidate);
            self.end_records_of(candidate, |_| true);
            self.candidates.release_unused(candidate);
        }
    }

    /// Updates the counters after a change of the tree, of the queues, of the records by `records`, and of
    /// other parts by `bytes`.
    fn account(&mut self, bytes: i64, records: i64) {
        let queues = self.eviction.bytes() + heap(self.records.capacity() * size_of::<Record>());
        let counted = queues + self.tree.bytes();
        let bytes = bytes + difference(counted, self.counted);
        self.counted = counted;
        let counters = &self.shared.counters;
        // Only this thread writes these counters, so load and store need not be one operation.
        let add = |counter: &AtomicU64, by: i64| {
            counter.store(counter.load(Ordering::Relaxed).saturating_add_signed(by), Ordering::Relaxed);
        };
        counters.blocks.store(self.tree.blocks() as u64, Ordering::Relaxed);
        add(&counters.bytes, bytes);
        add(&counters.records, records);
    }
}
