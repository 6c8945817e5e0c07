//! The one writer: applies records in order, ends them by age, budget or their worker's leave.

use std::{
    collections::{HashMap, HashSet, VecDeque, hash_map::Entry},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvError, Sender, TryRecvError},
    },
    thread,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    IndexConfig, Name, Shared,
    shards::Change,
    source::{Evicted, Source, TierSlot},
};
use crate::{
    events::{Batch, KvEvent, Tier},
    id::{BlockHash, DpRank, WorkerId},
};

pub(super) enum Message {
    /// What an engine says of its cache.
    Events {
        candidate: Candidate,
        batch: Batch,
    },
    /// Nothing that an engine said is true any more.
    Forget(Candidate),
    /// Whether an engine's own word is there: decisions are recorded only without it.
    Live {
        candidate: Candidate,
        live: bool,
    },
    Record {
        candidate: Candidate,
        blocks: Arc<[BlockHash]>,
        at: Instant,
    },
    Remove(WorkerId),
    Expire(Instant),
    Flush(Sender<()>),
}

type Candidate = (WorkerId, DpRank);

struct Record {
    slot: u32,
    blocks: Arc<[BlockHash]>,
    at: Instant,
}

pub(super) struct Writer {
    shared: Arc<Shared>,
    ttl: Duration,
    budget: u64,
    block_size: usize,
    records: VecDeque<Record>,
    slots: HashMap<(Candidate, Tier), TierSlot>,
    /// Records alive, by slot.
    recorded: Vec<u32>,
    sources: HashMap<Candidate, Source>,
    live: HashSet<Candidate>,
    /// Runs of sources by their first blocks, the oldest first: what gives way when room is needed.
    order: VecDeque<(Candidate, u64)>,
}

/// The messages, taken in such a way that senders rarely have to wake this thread: to be woken for every decision costs
/// the decision a system call, and both threads a switch.
struct Queue<'a> {
    messages: &'a Receiver<Message>,
    /// Messages since the queue was last waited for.
    in_a_row: u32,
    /// When it was last found empty.
    emptied: Instant,
}

impl Queue<'_> {
    /// While messages come closely, the thread sleeps this long instead of waiting for the next: then all are there at once.
    const NAP: Duration = Duration::from_millis(1);

    fn next(&mut self) -> Result<Message, RecvError> {
        loop {
            match self.messages.try_recv() {
                Ok(message) => {
                    self.in_a_row = self.in_a_row.saturating_add(1);
                    return Ok(message);
                }
                Err(TryRecvError::Disconnected) => return Err(RecvError),
                Err(TryRecvError::Empty) => {}
            }
            let now = Instant::now();
            let close = self.in_a_row > 1 && now.saturating_duration_since(self.emptied) < 4 * Self::NAP;
            (self.in_a_row, self.emptied) = (0, now);
            if !close {
                let message = self.messages.recv()?;
                self.in_a_row = 1;
                return Ok(message);
            }
            thread::sleep(Self::NAP);
        }
    }
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, config: IndexConfig) -> Self {
        Self {
            shared,
            ttl: config.ttl,
            budget: config.byte_budget as u64,
            block_size: config.block_size.max(1),
            records: VecDeque::new(),
            slots: HashMap::new(),
            recorded: Vec::new(),
            sources: HashMap::new(),
            live: HashSet::new(),
            order: VecDeque::new(),
        }
    }

    /// Until every sender is gone.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        let mut queue = Queue { messages, in_a_row: 0, emptied: Instant::now() };
        while let Ok(message) = queue.next() {
            match message {
                Message::Events { candidate, batch } => {
                    self.take(candidate, &batch);
                    self.fit();
                }
                Message::Forget(candidate) => self.forget(candidate),
                Message::Live { candidate, live } => self.set_live(candidate, live),
                Message::Record { candidate, .. } if self.live.contains(&candidate) => {}
                Message::Record { candidate, blocks, at } => {
                    self.expire(at);
                    let slot = self.slot(candidate, Tier::Device).slot;
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
        let place = record.slot as usize;
        self.recorded.resize(self.recorded.len().max(place + 1), 0);
        if let Some(count) = self.recorded.get_mut(place) {
            *count += 1;
        }
        self.records.push_back(record);
        self.account(change, 1);
    }

    /// Takes a record out. With its last one a slot that has no source is free: decisions may be recorded after their worker
    /// left, and nobody takes it out again.
    fn end(&mut self, record: &Record) {
        let mut change = Change { blocks: 0, bytes: -bytes_of(record) };
        // Deepest first: at no moment does a candidate hold a block without its prefix.
        for block in record.blocks.iter().rev() {
            let one = self.shared.shards.release(*block, record.slot);
            change = Change { blocks: change.blocks + one.blocks, bytes: change.bytes + one.bytes };
        }
        self.account(change, -1);
        let Some(count) = self.recorded.get_mut(record.slot as usize) else { return };
        *count = count.saturating_sub(1);
        if *count > 0 {
            return;
        }
        let name = self.shared.names.load().slots.get(record.slot as usize).cloned().flatten();
        if let Some(name) = name {
            self.free(name.candidate, name.tier);
        }
    }

    /// Gives a slot back unless records or a source use it.
    fn free(&mut self, candidate: Candidate, tier: Tier) {
        let Entry::Occupied(occupied) = self.slots.entry((candidate, tier)) else { return };
        let slot = occupied.get().slot;
        let recorded = self.recorded.get(slot as usize).is_some_and(|count| *count > 0);
        if !recorded && !self.sources.contains_key(&candidate) {
            occupied.remove();
            self.name(slot, None);
        }
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
            let Some(record) = self.records.pop_front() else { break };
            self.end(&record);
            self.shared.counters.evicted.fetch_add(1, Ordering::Relaxed);
        }
        // A run gives way from its tail; one that others go on from waits until they are gone.
        let mut passed = 0;
        while self.shared.counters.bytes.load(Ordering::Relaxed) > self.budget && passed <= self.order.len() {
            let Some((candidate, hash)) = self.order.pop_front() else { return };
            let Some(source) = self.sources.get_mut(&candidate) else { continue };
            let (change, left) = match source.evict(&self.shared.shards, hash) {
                Evicted::Some(change) => (change, true),
                Evicted::All(change) => (change, false),
                Evicted::Not => {
                    passed += 1;
                    self.order.push_back((candidate, hash));
                    continue;
                }
            };
            passed = 0;
            if left {
                self.order.push_front((candidate, hash));
            }
            self.account(change, 0);
            self.shared.counters.evicted.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Applies what an engine says, in order.
    fn take(&mut self, candidate: Candidate, batch: &Batch) {
        let mut source = self.sources.remove(&candidate).unwrap_or_default();
        for event in &batch.events {
            // Further cache groups of hybrid models hold other layers of the same blocks.
            match event {
                KvEvent::Stored(stored) if stored.group.unwrap_or(0) == 0 => {
                    let shards = &self.shared.clone().shards;
                    let size = self.block_size;
                    let applied = source.stored(shards, stored, size, |tier| self.slot(candidate, tier));
                    self.order.extend(applied.new.into_iter().map(|hash| (candidate, hash)));
                    self.shared.counters.orphans.fetch_add(applied.orphans, Ordering::Relaxed);
                    self.account(applied.change, 0);
                }
                KvEvent::Removed { hashes, tier, group } if group.unwrap_or(0) == 0 => {
                    let change = source.removed(&self.shared.shards, hashes, *tier);
                    self.account(change, 0);
                }
                KvEvent::Cleared => {
                    let change = source.clear(&self.shared.shards);
                    self.account(change, 0);
                }
                KvEvent::Stored(_) | KvEvent::Removed { .. } | KvEvent::Unknown(_) => {}
            }
        }
        self.sources.insert(candidate, source);
        self.tidy();
    }

    /// Runs that came and went leave their place in the order behind.
    fn tidy(&mut self) {
        let known: usize = self.sources.values().map(Source::len).sum();
        if self.order.len() > 2 * known + 4_096 {
            let sources = &self.sources;
            let stays = |(candidate, hash): &(Candidate, u64)| {
                sources.get(candidate).is_some_and(|source| source.knows(*hash))
            };
            self.order.retain(stays);
        }
    }

    fn forget(&mut self, candidate: Candidate) {
        if let Some(source) = self.sources.get_mut(&candidate) {
            let change = source.clear(&self.shared.shards);
            self.account(change, 0);
        }
    }

    /// An engine's own word takes the place of guesses, and guesses take its place when it is gone.
    fn set_live(&mut self, candidate: Candidate, live: bool) {
        if !live {
            // Also the last word of a feed whose worker left: what came late goes with it.
            self.live.remove(&candidate);
            self.forget(candidate);
            self.sources.remove(&candidate);
            [Tier::Device, Tier::Host, Tier::Disk].into_iter().for_each(|tier| self.free(candidate, tier));
            self.tidy();
        } else if self.live.insert(candidate)
            && let Some(slot) = self.slots.get(&(candidate, Tier::Device)).map(|slot| slot.slot)
        {
            self.end_records_of(slot);
        }
    }

    fn end_records_of(&mut self, slot: u32) {
        let (ended, kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.records).into_iter().partition(|record| record.slot == slot);
        self.records = kept;
        ended.iter().for_each(|record| self.end(record));
    }

    fn remove(&mut self, worker: WorkerId) {
        self.live.retain(|(id, _)| *id != worker);
        let sources: Vec<_> = self.sources.keys().filter(|(id, _)| *id == worker).copied().collect();
        for candidate in sources {
            self.forget(candidate);
            self.sources.remove(&candidate);
        }
        let gone: Vec<_> = self.slots.keys().filter(|((id, _), _)| *id == worker).copied().collect();
        for key in gone {
            if let Some(slot) = self.slots.remove(&key).map(|slot| slot.slot) {
                self.end_records_of(slot);
                self.name(slot, None);
            }
        }
        self.tidy();
    }

    fn slot(&mut self, candidate: Candidate, tier: Tier) -> TierSlot {
        if let Some(slot) = self.slots.get(&(candidate, tier)) {
            return slot.clone();
        }
        let names = self.shared.names.load();
        let free = names.slots.iter().position(Option::is_none).unwrap_or(names.slots.len());
        let slot = TierSlot { slot: u32::try_from(free).unwrap_or(u32::MAX), holes: Arc::default() };
        self.slots.insert((candidate, tier), slot.clone());
        self.name(slot.slot, Some(Name { candidate, tier, holes: slot.holes.clone() }));
        slot
    }

    fn name(&self, slot: u32, name: Option<Name>) {
        let mut names = self.shared.names.load().as_ref().clone();
        names.set(slot, name);
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
