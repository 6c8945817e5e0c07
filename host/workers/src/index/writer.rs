//! The one writer: applies records in order, ends them by age, budget or their worker's leave.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, Sender},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::{IndexConfig, Shared, shards::Change};
use crate::id::{BlockHash, DpRank, WorkerId};

pub(super) enum Message {
    Record { candidate: (WorkerId, DpRank), blocks: Arc<[BlockHash]>, at: Instant },
    Remove(WorkerId),
    Expire(Instant),
    Flush(Sender<()>),
}

struct Record {
    slot: u32,
    blocks: Arc<[BlockHash]>,
    at: Instant,
}

pub(super) struct Writer {
    shared: Arc<Shared>,
    ttl: Duration,
    budget: u64,
    records: VecDeque<Record>,
    slots: HashMap<(WorkerId, DpRank), u32>,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, config: IndexConfig) -> Self {
        Self {
            shared,
            ttl: config.ttl,
            budget: config.byte_budget as u64,
            records: VecDeque::new(),
            slots: HashMap::new(),
        }
    }

    /// Until every sender is gone.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        while let Ok(message) = messages.recv() {
            match message {
                Message::Record { candidate, blocks, at } => {
                    self.expire(at);
                    let slot = self.slot(candidate);
                    self.apply(Record { slot, blocks, at });
                    self.fit();
                }
                Message::Remove(worker) => self.remove(worker),
                Message::Expire(now) => self.expire(now),
                Message::Flush(done) => drop(done.send(())),
            }
        }
    }

    fn apply(&mut self, record: Record) {
        let mut change = Change { blocks: 0, bytes: bytes_of(&record) };
        for block in record.blocks.iter() {
            let one = self.shared.shards.add(*block, record.slot);
            change = Change { blocks: change.blocks + one.blocks, bytes: change.bytes + one.bytes };
        }
        self.records.push_back(record);
        self.account(change, 1);
    }

    fn end(&mut self, record: &Record) {
        let mut change = Change { blocks: 0, bytes: -bytes_of(record) };
        // Deepest first: at no moment does a candidate hold a block without its prefix.
        for block in record.blocks.iter().rev() {
            let one = self.shared.shards.release(*block, record.slot);
            change = Change { blocks: change.blocks + one.blocks, bytes: change.bytes + one.bytes };
        }
        self.account(change, -1);
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

    fn fit(&mut self) {
        while self.shared.counters.bytes.load(Ordering::Relaxed) > self.budget {
            let Some(record) = self.records.pop_front() else { return };
            self.end(&record);
            self.shared.counters.evicted.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn remove(&mut self, worker: WorkerId) {
        let gone: Vec<_> =
            self.slots.iter().filter(|((id, _), _)| *id == worker).map(|(key, slot)| (*key, *slot)).collect();
        for (candidate, slot) in gone {
            self.slots.remove(&candidate);
            let (ended, kept): (VecDeque<_>, VecDeque<_>) =
                std::mem::take(&mut self.records).into_iter().partition(|record| record.slot == slot);
            self.records = kept;
            ended.iter().for_each(|record| self.end(record));
            self.name(slot, None);
        }
    }

    fn slot(&mut self, candidate: (WorkerId, DpRank)) -> u32 {
        if let Some(slot) = self.slots.get(&candidate) {
            return *slot;
        }
        let names = self.shared.names.load();
        let free = names.iter().position(Option::is_none).unwrap_or(names.len());
        let slot = u32::try_from(free).unwrap_or(u32::MAX);
        self.slots.insert(candidate, slot);
        self.name(slot, Some(candidate));
        slot
    }

    fn name(&self, slot: u32, candidate: Option<(WorkerId, DpRank)>) {
        let mut names = self.shared.names.load().as_ref().clone();
        let place = slot as usize;
        names.resize(names.len().max(place + 1), None);
        if let Some(name) = names.get_mut(place) {
            *name = candidate;
        }
        self.shared.names.store(Arc::new(names));
    }

    fn account(&self, change: Change, records: i64) {
        let counters = &self.shared.counters;
        let add = |counter: &AtomicU64, by: i64| {
            let _ = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
                Some(old.saturating_add_signed(by))
            });
        };
        add(&counters.blocks, change.blocks);
        add(&counters.bytes, change.bytes);
        add(&counters.records, records);
    }
}

/// A record's own bytes. Its hashes may be shared with bookings; they are counted here all the same.
fn bytes_of(record: &Record) -> i64 {
    i64::try_from(size_of::<Record>() + 16 + record.blocks.len() * 8).unwrap_or(i64::MAX)
}
