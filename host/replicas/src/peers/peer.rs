//! One other gateway: the numbers of its messages, and its bookings.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use pointsman_orchestration::{BindingKey, CLOSED_FOR, SessionChange, Stamp};
use pointsman_workers::{DpRank, LoadValues, RemoteBooking, Worker, WorkerKey};
use prefix_index::Prefix;
use tokio::time::Instant;

use super::{Effect, LEASES, PeerLimits, placement::Placement};
use crate::{
    clock,
    status::{Counters, PeerStatus},
    wire::{Entry, Kind, Message},
};

const MILLIS: i64 = 1_000;
/// Maximum number of messages that one gap in the numbers counts as lost: another gateway chooses the
/// numbers.
const MAX_LOST: u64 = 1_000_000;

/// One other gateway.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) incarnation: u64,
    /// When this process was first heard, and last.
    pub(super) since: Instant,
    pub(super) heard: Instant,
    pub(super) lease: Duration,
    /// When it was asked for a snapshot.
    pub(super) asked: Option<Instant>,
    /// Whether all of its bookings are known.
    pub(super) in_sync: bool,
    /// By how much its clock is ahead; `None` if it has not told.
    pub(super) clock_ahead_ms: Option<i64>,
    /// Number that the next message should have.
    next: Option<u64>,
    /// Messages that were lost.
    lost: u64,
    block_size: u32,
    bookings: HashMap<u64, PeerBooking>,
    /// The snapshot that is being received.
    collecting: Option<Collecting>,
}

/// A snapshot that is being received.
#[derive(Debug)]
struct Collecting {
    number: u32,
    next_part: u32,
    parts: u32,
    /// Bookings in it.
    seen: HashSet<u64>,
}

/// One booking of another gateway.
#[derive(Debug)]
struct PeerBooking {
    worker: WorkerKey,
    rank: DpRank,
    /// Load in the blocks of this gateway.
    values: LoadValues,
    /// Thousandths of blocks whose hashes are not kept.
    extra_millis: i64,
    /// Blocks that count once.
    shared: Option<Prefix>,
    /// `None` if this gateway does not know the worker, or it has no such rank.
    placed: Option<RemoteBooking>,
}

/// Tables that a message changes besides its sender.
pub(super) struct Table<'a> {
    pub(super) workers: &'a Placement,
    pub(super) hashes: &'a mut usize,
    pub(super) limits: PeerLimits,
    pub(super) block_size: u32,
    pub(super) counters: &'a Counters,
    /// Id of the sender as a writer of bindings.
    pub(super) writer: u64,
    pub(super) effects: &'a mut Vec<Effect>,
}

impl Table<'_> {
    fn bind(&mut self, key: BindingKey, worker: Option<(WorkerKey, DpRank)>, ttl: Duration, at_us: u64) {
        let stamp = Stamp { at_us, writer: self.writer };
        let change = SessionChange { key, candidate: None, ttl, stamp };
        self.effects.push(Effect::Session((change, worker)));
    }
}

impl Peer {
    pub(super) fn new(incarnation: u64, now: Instant) -> Self {
        Self {
            incarnation,
            since: now,
            heard: now,
            lease: LEASES.0,
            asked: None,
            in_sync: false,
            clock_ahead_ms: None,
            next: None,
            lost: 0,
            block_size: 0,
            bookings: HashMap::new(),
            collecting: None,
        }
    }

    /// Returns whether a message with this number was received before.
    pub(super) fn is_repeated(&self, sequence: u64) -> bool {
        self.next.is_some_and(|next| sequence < next)
    }

    /// Notes the number of a message. Returns the number of messages that were lost before it.
    pub(super) fn advance(&mut self, sequence: u64) -> u64 {
        let lost = self.next.map_or(0, |next| sequence.saturating_sub(next)).min(MAX_LOST);
        self.next = Some(sequence.saturating_add(1));
        if lost > 0 {
            self.lost = self.lost.saturating_add(lost);
            self.in_sync = false;
            self.collecting = None;
        }
        lost
    }

    /// Applies a message.
    pub(super) fn apply(&mut self, message: Message, table: &mut Table<'_>) {
        self.block_size = message.block_size.max(1);
        if let Kind::Snapshot { number, part, parts } = message.kind {
            self.begin_part(number, part, parts);
        }
        for entry in message.entries {
            self.apply_entry(entry, table);
        }
        if self.collecting.as_ref().is_some_and(|snapshot| snapshot.next_part >= snapshot.parts) {
            self.end_snapshot(table);
        }
    }

    fn begin_part(&mut self, number: u32, part: u32, parts: u32) {
        if part == 0 {
            self.collecting = Some(Collecting { number, next_part: 0, parts, seen: HashSet::new() });
        }
        match &mut self.collecting {
            Some(snapshot) if snapshot.number == number && snapshot.next_part == part => {
                snapshot.next_part += 1;
            }
            // A part is missing: the bookings still count, but none of the others ends.
            snapshot => *snapshot = None,
        }
    }

    /// Ends the bookings that are not in the snapshot.
    fn end_snapshot(&mut self, table: &mut Table<'_>) {
        let Some(snapshot) = self.collecting.take() else { return };
        self.bookings.retain(|id, booking| {
            let stays = snapshot.seen.contains(id);
            if !stays {
                booking.release_hashes(table.hashes);
            }
            stays
        });
        self.in_sync = true;
        self.asked = None;
    }

    fn apply_entry(&mut self, entry: Entry, table: &mut Table<'_>) {
        match entry {
            Entry::Add { id, worker, rank, values, prefix, shares_blocks } => {
                let values = self.scaled(values, table.block_size);
                if self.bookings.get(&id).is_some_and(|old| (old.worker, old.rank) == (worker, rank)) {
                    self.update(id, values);
                } else {
                    self.end(id, table.hashes);
                    self.add(id, (worker, rank), values, prefix, shares_blocks, table);
                }
                // Only bookings that are kept: a snapshot without an end must not grow.
                if let (Some(snapshot), true) = (&mut self.collecting, self.bookings.contains_key(&id)) {
                    snapshot.seen.insert(id);
                }
            }
            Entry::Update { id, values } => {
                let values = self.scaled(values, table.block_size);
                self.update(id, values);
            }
            Entry::Free { id } => self.end(id, table.hashes),
            Entry::Bind { key, worker, rank, ttl_ms, at_us } => {
                table.bind(key, Some((worker, rank)), Duration::from_millis(ttl_ms), at_us);
            }
            Entry::Close { key, at_us } => table.bind(key, None, CLOSED_FOR, at_us),
            Entry::Clock { at_us } => self.clock_ahead_ms = Some(clock::ahead_ms(at_us)),
        }
    }

    fn add(
        &mut self,
        id: u64,
        (worker, rank): (WorkerKey, DpRank),
        values: LoadValues,
        prefix: Prefix,
        shares_blocks: bool,
        table: &mut Table<'_>,
    ) {
        if self.bookings.len() >= table.limits.bookings {
            table.counters.over_limit.fetch_add(1, Relaxed);
            return;
        }
        // Hashes of another block size mean nothing here.
        let comparable = self.block_size == table.block_size;
        let count = prefix.hashes().len();
        let is_kept = |worker: &&Arc<Worker>| comparable && count > 0 && worker.caches_prefixes();
        if let Some(known) = table.workers.find(worker).filter(is_kept) {
            let (worker, prefix) = (known.id(), prefix.clone());
            table.effects.push(Effect::Sent { worker, rank, prefix });
        }
        let keeps = shares_blocks && comparable && *table.hashes + count <= table.limits.hashes;
        let (shared, extra_millis) = match (keeps, shares_blocks) {
            (true, _) => {
                *table.hashes += count;
                (Some(prefix), 0)
            }
            (false, true) => {
                let named = self.scaled_blocks(i64::from(prefix.named_blocks()) * MILLIS, table.block_size);
                (None, named)
            }
            (false, false) => (None, 0),
        };
        let mut booking = PeerBooking { worker, rank, values, extra_millis, shared, placed: None };
        booking.place(table.workers);
        self.bookings.insert(id, booking);
    }

    fn update(&mut self, id: u64, values: LoadValues) {
        if let Some(booking) = self.bookings.get_mut(&id) {
            booking.values = values;
            let counted = booking.counted();
            if let Some(placed) = &mut booking.placed {
                placed.update(counted);
            }
        }
    }

    fn end(&mut self, id: u64, hashes: &mut usize) {
        if let Some(booking) = self.bookings.remove(&id) {
            booking.release_hashes(hashes);
        }
        if let Some(snapshot) = &mut self.collecting {
            snapshot.seen.remove(&id);
        }
    }

    /// Returns load in blocks of this gateway.
    fn scaled(&self, values: LoadValues, block_size: u32) -> LoadValues {
        let unnamed_millis = self.scaled_blocks(values.unnamed_millis, block_size);
        LoadValues { unnamed_millis, ..values }
    }

    fn scaled_blocks(&self, millis: i64, block_size: u32) -> i64 {
        if self.block_size == block_size {
            return millis;
        }
        let scaled = i128::from(millis) * i128::from(self.block_size) / i128::from(block_size.max(1));
        i64::try_from(scaled).unwrap_or(i64::MAX / 1_000_000)
    }

    /// Moves the bookings to the workers that are registered now.
    pub(super) fn place(&mut self, workers: &Placement) {
        for booking in self.bookings.values_mut() {
            let load = workers.find(booking.worker).and_then(|worker| worker.load(booking.rank));
            let stays = match (&booking.placed, load) {
                (Some(placed), Some(load)) => placed.is_on(load),
                (None, None) => true,
                _ => false,
            };
            if !stays {
                booking.place(workers);
            }
        }
    }

    /// Returns the number of block hashes of all bookings.
    pub(super) fn hashes(&self) -> usize {
        self.bookings.values().map(PeerBooking::hashes).sum()
    }

    pub(super) fn status(&self, name: Arc<str>, now: Instant, own_block_size: u32) -> PeerStatus {
        let aside = self.bookings.values().filter(|booking| booking.placed.is_none()).count();
        PeerStatus {
            name,
            started_us: self.incarnation,
            in_sync: self.in_sync,
            silent_ms: u64::try_from(now.saturating_duration_since(self.heard).as_millis())
                .unwrap_or(u64::MAX),
            lease_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX),
            bookings: self.bookings.len(),
            unknown_worker: aside,
            lost_messages: self.lost,
            clock_ahead_ms: self.clock_ahead_ms,
            block_size: self.block_size,
            same_block_size: self.block_size == own_block_size,
        }
    }
}

impl PeerBooking {
    fn place(&mut self, workers: &Placement) {
        let counted = self.counted();
        let worker = workers.find(self.worker);
        // The old booking is dropped after the new one counts.
        self.placed = worker.and_then(|worker| worker.book_remote(self.rank, self.shared.clone(), counted));
    }

    fn counted(&self) -> LoadValues {
        let unnamed_millis = self.values.unnamed_millis.saturating_add(self.extra_millis);
        LoadValues { unnamed_millis, ..self.values }
    }

    fn hashes(&self) -> usize {
        self.shared.as_ref().map_or(0, |prefix| prefix.hashes().len())
    }

    fn release_hashes(&self, hashes: &mut usize) {
        *hashes = hashes.saturating_sub(self.hashes());
    }
}
