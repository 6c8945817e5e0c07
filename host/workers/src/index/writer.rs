//! The one writer: applies records in order, ends them by age, budget or their worker's leave.

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
    Candidate, IndexConfig, Shared,
    bytes::{difference, heap},
    order::Order,
    queue::{Message, Queue},
    runs::Turn,
    seats::Seats,
    shards::{Change, Table},
    source::Source,
};
use crate::{
    events::{Batch, KvEvent, Tier},
    id::{BlockHash, WorkerId},
};

struct Record {
    slot: u32,
    blocks: Arc<[BlockHash]>,
    at: Instant,
}

impl Record {
    /// Bytes beside its place. Its hashes may be shared with bookings; they are counted here all the same.
    fn bytes(&self) -> usize {
        heap(2 * size_of::<usize>() + size_of_val::<[BlockHash]>(&self.blocks))
    }
}

pub(super) struct Writer {
    shared: Arc<Shared>,
    table: Table,
    ttl: Duration,
    budget: u64,
    block_size: usize,
    records: VecDeque<Record>,
    seats: Seats,
    /// What of engines' blocks gives way when room is needed.
    order: Order,
    /// Runs that sources have.
    runs: usize,
    /// Bytes of `records` and `order` that are counted.
    lines: usize,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, config: IndexConfig) -> Self {
        Self {
            table: Table::new(shared.shards.clone()),
            seats: Seats::new(shared.clone()),
            shared,
            ttl: config.ttl,
            budget: config.byte_budget as u64,
            block_size: config.block_size.max(1),
            records: VecDeque::new(),
            order: Order::default(),
            runs: 0,
            lines: 0,
        }
    }

    /// Until every sender is gone.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        let mut queue = Queue::new(messages);
        while let Ok(message) = queue.next() {
            match message {
                Message::Events { candidate, batch } => {
                    self.take(candidate, &batch);
                    self.fit();
                }
                Message::Forget(candidate) => self.forget(candidate),
                Message::Live { candidate, live } => self.set_live(candidate, live),
                Message::Record { candidate, blocks, at } => {
                    self.expire(at);
                    self.record(candidate, blocks, at);
                    self.fit();
                }
                Message::Remove(worker) => self.remove(worker),
                Message::Expire(now) => self.expire(now),
                Message::Flush(done) => drop(done.send(())),
            }
        }
    }

    /// Takes a decision for a record, unless the engine's own word is there.
    fn record(&mut self, candidate: Candidate, blocks: Arc<[BlockHash]>, at: Instant) {
        if self.seats.get(candidate).is_some_and(|seat| seat.live) {
            return;
        }
        let Some(slot) = self.seats.slot(candidate, Tier::Device).map(|slot| slot.slot) else { return };
        let record = Record { slot, blocks, at };
        let mut change = Change { blocks: 0, bytes: difference(record.bytes(), 0) };
        self.table.touch(record.blocks.iter());
        record.blocks.iter().for_each(|block| change += self.table.add(*block, slot));
        self.seats.count(slot, 1);
        if self.records.len() == self.records.capacity() {
            self.records.reserve_exact(16.max(self.records.len() / 4));
        }
        self.records.push_back(record);
        self.account(change, 1);
    }

    /// Takes a record out.
    fn end(&mut self, record: &Record) {
        let mut change = Change { blocks: 0, bytes: difference(0, record.bytes()) };
        self.table.touch(record.blocks.iter());
        // Deepest first: at no moment does a candidate hold a block without its prefix.
        record.blocks.iter().rev().for_each(|block| change += self.table.release(*block, record.slot));
        if self.records.capacity() > 64 && self.records.len() * 2 < self.records.capacity()
            || self.records.is_empty()
        {
            self.records.shrink_to(self.records.len() + self.records.len() / 4);
        }
        self.account(change, -1);
        self.seats.count(record.slot, -1);
    }

    fn expire(&mut self, now: Instant) {
        while self.records.front().is_some_and(|record| now.saturating_duration_since(record.at) >= self.ttl)
        {
            if let Some(record) = self.records.pop_front() {
                self.end(&record);
                self.shared.counters.expired.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn is_full(&self) -> bool {
        self.shared.counters.bytes.load(Ordering::Relaxed) > self.budget
    }

    fn fit(&mut self) {
        while self.is_full() {
            let Some(record) = self.records.pop_front() else { break };
            self.end(&record);
            self.shared.counters.evicted.fetch_add(1, Ordering::Relaxed);
        }
        while self.is_full() {
            let Some((candidate, run)) = self.order.pop() else { break };
            let Some(mut source) = self.seats.get_mut(candidate).and_then(|seat| seat.source.take()) else {
                continue;
            };
            match source.turn(run) {
                Turn::Pass => {}
                Turn::Later => self.order.put_last((candidate, run)),
                Turn::Now(tail) => {
                    let runs = source.len();
                    let change = source.evict(&mut self.table, tail);
                    if source.waits(run) {
                        self.order.put_first((candidate, run));
                    }
                    self.shared.counters.evicted.fetch_add(1, Ordering::Relaxed);
                    self.settle(candidate, &mut source, runs, change);
                }
            }
            self.seats.seat(candidate).source = Some(source);
        }
    }

    /// Applies what an engine says, in order.
    fn take(&mut self, candidate: Candidate, batch: &Batch) {
        let mut source = self.seats.seat(candidate).source.take().unwrap_or_default();
        for event in &batch.events {
            let runs = source.len();
            // Further cache groups of hybrid models hold other layers of the same blocks.
            let change = match event {
                KvEvent::Stored(stored) if stored.group.unwrap_or(0) == 0 => {
                    let (seats, size) = (&mut self.seats, self.block_size);
                    let slot = |tier| seats.slot(candidate, tier);
                    let applied = source.stored(&mut self.table, stored, size, slot);
                    self.shared.counters.orphans.fetch_add(applied.orphans, Ordering::Relaxed);
                    applied.change
                }
                KvEvent::Removed { hashes, tier, group } if group.unwrap_or(0) == 0 => {
                    source.removed(&mut self.table, hashes, *tier)
                }
                KvEvent::Cleared => source.clear(&mut self.table),
                KvEvent::Stored(_) | KvEvent::Removed { .. } | KvEvent::Unknown(_) => continue,
            };
            self.settle(candidate, &mut source, runs, change);
        }
        self.seats.seat(candidate).source = Some(source);
        self.tidy();
    }

    /// Takes in what a change of a source, which had `before` runs, means for the order and the counters.
    fn settle(&mut self, candidate: Candidate, source: &mut Source, before: usize, change: Change) {
        self.order.take(candidate, source.ripe());
        self.runs = self.runs + source.len() - before;
        self.account(change, 0);
    }

    fn tidy(&mut self) {
        let seats = &self.seats;
        self.order.tidy(self.runs, |(candidate, run)| {
            seats
                .get(*candidate)
                .and_then(|seat| seat.source.as_ref())
                .is_some_and(|source| source.waits(*run))
        });
        self.account(Change::default(), 0);
    }

    fn forget(&mut self, candidate: Candidate) {
        let Some(seat) = self.seats.get_mut(candidate) else { return };
        let Some(mut source) = seat.source.take() else { return };
        let runs = source.len();
        let change = source.clear(&mut self.table);
        self.settle(candidate, &mut source, runs, change);
        self.seats.seat(candidate).source = Some(source);
        self.tidy();
    }

    /// An engine's own word takes the place of guesses, and guesses take its place when it is gone.
    fn set_live(&mut self, candidate: Candidate, live: bool) {
        if live {
            self.seats.seat(candidate).live = true;
            self.end_records_of(candidate);
        } else {
            // Also the last word of a feed whose worker left: what came late goes with it.
            self.leave(candidate);
            self.seats.free(candidate);
        }
    }

    /// An engine's own word is there no more, nor is what it said.
    fn leave(&mut self, candidate: Candidate) {
        self.forget(candidate);
        if let Some(seat) = self.seats.get_mut(candidate) {
            (seat.live, seat.source) = (false, None);
        }
    }

    fn end_records_of(&mut self, candidate: Candidate) {
        let slot = self.seats.get(candidate).and_then(|seat| seat.slots.first().cloned().flatten());
        let Some(slot) = slot.map(|slot| slot.slot).filter(|slot| self.seats.records(*slot) > 0) else {
            return;
        };
        let (ended, kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.records).into_iter().partition(|record| record.slot == slot);
        self.records = kept;
        ended.iter().for_each(|record| self.end(record));
    }

    fn remove(&mut self, worker: WorkerId) {
        for candidate in self.seats.of(worker) {
            self.leave(candidate);
            self.end_records_of(candidate);
            self.seats.free(candidate);
        }
    }

    fn account(&mut self, change: Change, records: i64) {
        let lines = self.order.bytes() + heap(self.records.capacity() * size_of::<Record>());
        let bytes = change.bytes + difference(lines, self.lines);
        self.lines = lines;
        let counters = &self.shared.counters;
        // Nobody else writes them.
        let add = |counter: &AtomicU64, by: i64| {
            counter.store(counter.load(Ordering::Relaxed).saturating_add_signed(by), Ordering::Relaxed);
        };
        add(&counters.blocks, change.blocks);
        add(&counters.bytes, bytes);
        add(&counters.records, records);
    }
}
