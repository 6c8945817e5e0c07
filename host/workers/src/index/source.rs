//! What one engine says of its cache (spec H2): its own hashes are opaque, and remembered only to find at removal what they
//! stored. A block that is named twice counts twice; a block whose parent is not known is forgotten.

#![expect(clippy::indexing_slicing, reason = "tiers are 0, 1 and 2")]

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use super::{
    runs::{BYTES_A_RUN, BYTES_AN_ENTRY, Place, Runs},
    shards::{Change, Shards},
};
use crate::{
    events::{Stored, Tier},
    hash::{Salt, extend},
};

/// A slot of the table, and how many of its blocks lie below a block it does not hold.
#[derive(Clone, Debug)]
pub(super) struct TierSlot {
    pub(super) slot: u32,
    pub(super) holes: Arc<AtomicU32>,
}

/// One engine's cache, as its events tell it.
#[derive(Debug, Default)]
pub(super) struct Source {
    slots: [Option<TierSlot>; 3],
    runs: Runs,
    /// A block's bytes while it is hashed.
    bytes: Vec<u8>,
}

/// What came of an event.
#[derive(Debug, Default)]
pub(super) struct Applied {
    pub(super) change: Change,
    /// The first blocks of new runs, for the order of eviction.
    pub(super) new: Vec<u64>,
    /// Blocks that could not be placed: an unknown parent, or a block size that ours does not divide.
    pub(super) orphans: u64,
}

/// What came of making room.
#[derive(Debug)]
pub(super) enum Evicted {
    /// A run lost its last block, and has others.
    Some(Change),
    /// Nothing is left of the run, or nothing ever was.
    All(Change),
    /// Other runs go on from its last block.
    Not,
}

fn place(tier: Tier) -> usize {
    match tier {
        Tier::Device => 0,
        Tier::Host => 1,
        Tier::Disk => 2,
    }
}

impl Source {
    /// Runs that are known.
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether a run begins with a block of the engine's.
    pub(super) fn knows(&self, hash: u64) -> bool {
        self.runs.begins(hash)
    }

    /// Blocks came in. `slot` gives the slot of a tier that is met for the first time.
    pub(super) fn stored(
        &mut self,
        shards: &Shards,
        stored: &Stored,
        block_size: usize,
        slot: impl FnOnce(Tier) -> TierSlot,
    ) -> Applied {
        let tier = place(stored.tier);
        let mut applied = Applied::default();
        let orphans = stored.hashes.len() as u64;
        let slot = self.slots[tier].get_or_insert_with(|| slot(stored.tier)).slot;
        let engine_size = stored.block_size as usize;
        let told = !stored.token_ids.is_empty();
        if told && (engine_size == 0 || !engine_size.is_multiple_of(block_size)) {
            return Applied { orphans, ..applied };
        }
        let (mut parent, seed) = match stored.parent {
            None => (None, seed_of(stored)),
            Some(parent) => match self.runs.find(parent) {
                Some(place) => (Some(place), self.runs.seed(place)),
                None if told => return Applied { orphans, ..applied },
                None => (None, 0),
            },
        };
        let mut chain = parent.and_then(|parent| self.runs.ours(parent).last().copied());
        let mut tokens = stored.token_ids.chunks_exact(engine_size.max(1));
        for (number, hash) in stored.hashes.iter().enumerate() {
            let tokens = tokens.next();
            let at = match (self.runs.find(*hash), tokens) {
                (Some(known), _) => known,
                // Offloaded blocks come without tokens: what was never told with them cannot be placed.
                (None, None) => {
                    applied.orphans += 1;
                    continue;
                }
                (None, Some(tokens)) => {
                    let shape = (seed, engine_size / block_size, stored.hashes.len() - number);
                    let bytes = &mut self.bytes;
                    let ours = |ours: &mut _| extend(chain, tokens, block_size, seed, bytes, ours);
                    let (at, begins) = self.runs.push(parent, *hash, shape, ours);
                    applied.new.extend(begins.then_some(*hash));
                    applied.change.bytes += BYTES_AN_ENTRY + if begins { BYTES_A_RUN } else { 0 };
                    at
                }
            };
            applied.change += self.add(shards, at, tier, slot);
            parent = Some(at);
            chain = self.runs.ours(at).last().copied();
        }
        applied
    }

    /// Blocks left a tier. The deepest first is how engines free them, but any order will do.
    pub(super) fn removed(&mut self, shards: &Shards, hashes: &[u64], tier: Tier) -> Change {
        let tier = place(tier);
        let mut change = Change::default();
        for hash in hashes {
            let Some(at) = self.runs.find(*hash) else { continue };
            match self.runs.stored(at)[tier] {
                0 => {}
                1 => {
                    change += self.take_out(shards, at, tier);
                    change.bytes -= self.runs.trim(at);
                }
                count => self.runs.set_stored(at, tier, count - 1),
            }
        }
        change
    }

    /// Forgets the last block of the run that begins with `hash`, whatever the engine says of it: room is needed.
    pub(super) fn evict(&mut self, shards: &Shards, hash: u64) -> Evicted {
        let Some(first) = self.runs.find(hash) else { return Evicted::All(Change::default()) };
        let Some(tail) = self.runs.tail(first) else { return Evicted::Not };
        let mut change = Change::default();
        for (tier, count) in self.runs.stored(tail).into_iter().enumerate() {
            if count > 0 {
                change += self.take_out(shards, tail, tier);
            }
        }
        change.bytes -= self.runs.trim(tail);
        if self.runs.begins(hash) { Evicted::Some(change) } else { Evicted::All(change) }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self, shards: &Shards) -> Change {
        let mut change = Change::default();
        for slot in self.slots.iter().flatten() {
            // Nothing is found by halving from here on.
            slot.holes.store(1, Ordering::Release);
        }
        change.bytes -= self.runs.bytes();
        for (stored, ours) in self.runs.drain() {
            for (slot, count) in self.slots.iter().zip(stored) {
                let Some(slot) = slot.as_ref().filter(|_| count > 0) else { continue };
                ours.iter().for_each(|hash| change += shards.release(*hash, slot.slot));
            }
        }
        for slot in self.slots.iter().flatten() {
            slot.holes.store(0, Ordering::Release);
        }
        change
    }

    fn add(&mut self, shards: &Shards, at: Place, tier: usize, slot: u32) -> Change {
        let count = self.runs.stored(at)[tier];
        let parent = self.runs.parent(at);
        let first_child = count == 0 && parent.is_some_and(|parent| !self.runs.has_child(parent, tier));
        self.runs.set_stored(at, tier, count.saturating_add(1));
        let mut change = Change::default();
        if count > 0 {
            return change;
        }
        for ours in self.runs.ours(at) {
            change += shards.add(*ours, slot);
        }
        if self.runs.has_child(at, tier) {
            self.holes(tier, -1);
        }
        if first_child && parent.is_some_and(|parent| self.runs.stored(parent)[tier] == 0) {
            self.holes(tier, 1);
        }
        change
    }

    /// A block is stored in `tier` no more.
    fn take_out(&mut self, shards: &Shards, at: Place, tier: usize) -> Change {
        let mut change = Change::default();
        if self.runs.has_child(at, tier) {
            // Told before it is done: a lookup must not jump over the hole.
            self.holes(tier, 1);
        }
        if let Some(slot) = self.slots[tier].as_ref().map(|slot| slot.slot) {
            for ours in self.runs.ours(at).iter().rev() {
                change += shards.release(*ours, slot);
            }
        }
        self.runs.set_stored(at, tier, 0);
        if let Some(parent) = self.runs.parent(at)
            && self.runs.stored(parent)[tier] == 0
            && !self.runs.has_child(parent, tier)
        {
            self.holes(tier, -1);
        }
        change
    }

    fn holes(&self, tier: usize, by: i32) {
        if let Some(slot) = self.slots.get(tier).and_then(Option::as_ref) {
            if by > 0 {
                slot.holes.fetch_add(1, Ordering::Release);
            } else {
                slot.holes.fetch_sub(1, Ordering::Release);
            }
        }
    }
}

/// The seed of a prompt's local hashes, from what the engine mixed into its first block's hash: the adapter, and whatever
/// single other string there is, which is the request's cache salt.
fn seed_of(stored: &Stored) -> u64 {
    let lora = stored.lora.as_deref();
    let mut others = stored.extra_keys.first().into_iter().flatten().filter(|key| Some(key.as_str()) != lora);
    let salt = others.next().filter(|_| others.next().is_none()).map(String::as_str);
    Salt { lora, cache: salt }.seed()
}
