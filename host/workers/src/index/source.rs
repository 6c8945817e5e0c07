//! What one engine says of its cache (spec H2): its own hashes are opaque, and remembered only to find at removal what they
//! stored. A block that is named twice counts twice; a block whose parent is not known is forgotten.

#![expect(clippy::indexing_slicing, reason = "tiers are 0, 1 and 2")]

use std::sync::atomic::Ordering;

use super::{
    bytes::difference,
    names::{Holes, place},
    order::{Ripe, RunId},
    places::Place,
    runs::{Runs, Turn},
    shards::{Change, Table},
};
use crate::{
    events::{Stored, Tier},
    hash::{Salt, extend},
};

/// A slot of the table, and how many of its blocks lie below a block it does not hold.
#[derive(Clone, Debug)]
pub(super) struct TierSlot {
    pub(super) slot: u32,
    pub(super) holes: Holes,
}

/// One engine's cache, as its events tell it.
#[derive(Debug, Default)]
pub(super) struct Source {
    slots: [Option<TierSlot>; 3],
    runs: Runs,
    /// A block's bytes while it is hashed.
    bytes: Vec<u8>,
    /// Where an event's blocks are.
    at: Vec<Place>,
}

/// What came of an event.
#[derive(Debug, Default)]
pub(super) struct Applied {
    pub(super) change: Change,
    /// Blocks that could not be placed: an unknown parent, or a block size that ours does not divide.
    pub(super) orphans: u64,
}

impl Source {
    /// Runs that are known.
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether a run waits for its turn to give way.
    pub(super) fn waits(&self, run: RunId) -> bool {
        self.runs.waits(run)
    }

    /// What the order of eviction has to know since it was told the last time.
    pub(super) fn ripe(&mut self) -> &mut Ripe {
        self.runs.ripe()
    }

    /// Blocks came in. `slot` gives the slot of a tier that is met for the first time.
    pub(super) fn stored(
        &mut self,
        table: &mut Table,
        stored: &Stored,
        block_size: usize,
        slot: impl FnOnce(Tier) -> Option<TierSlot>,
    ) -> Applied {
        let orphans = stored.hashes.len() as u64;
        let tier = place(stored.tier);
        let engine_size = stored.block_size as usize;
        let told = !stored.token_ids.is_empty();
        if told && (engine_size == 0 || !engine_size.is_multiple_of(block_size)) {
            return Applied { orphans, ..Applied::default() };
        }
        if self.slots[tier].is_none() {
            self.slots[tier] = slot(stored.tier);
        }
        let Some(slot) = self.slots[tier].as_ref().map(|slot| slot.slot) else { return Applied::default() };
        let before = self.runs.bytes();
        let mut applied = Applied { orphans: self.place(stored, block_size), ..Applied::default() };
        let places = std::mem::take(&mut self.at);
        table.touch(places.iter().flat_map(|at| self.runs.ours(*at)));
        places.iter().for_each(|at| applied.change += self.add(table, *at, tier, slot));
        self.at = places;
        applied.change.bytes += difference(self.runs.bytes(), before);
        applied
    }

    /// Finds the places of an event's blocks, or makes them. Answers how many have none.
    fn place(&mut self, stored: &Stored, block_size: usize) -> u64 {
        self.at.clear();
        let told = !stored.token_ids.is_empty();
        let engine_size = stored.block_size as usize;
        let (mut parent, seed) = match stored.parent {
            None => (None, seed_of(stored)),
            Some(parent) => match self.runs.find(parent) {
                Some(place) => (Some(place), self.runs.seed(place)),
                None if told => return stored.hashes.len() as u64,
                None => (None, 0),
            },
        };
        if let Some(parent) = parent {
            self.runs.used(parent);
        }
        self.runs.touch(&stored.hashes);
        let step = u32::try_from(engine_size / block_size).unwrap_or(1);
        let mut chain = parent.and_then(|parent| self.runs.ours(parent).last().copied());
        let mut tokens = stored.token_ids.chunks_exact(engine_size.max(1));
        let mut orphans = 0;
        for (number, hash) in stored.hashes.iter().enumerate() {
            let at = match (self.runs.find(*hash), tokens.next()) {
                (Some(known), _) => {
                    self.runs.used(known);
                    known
                }
                // Offloaded blocks come without tokens: what was never told with them cannot be placed.
                (None, None) => {
                    orphans += 1;
                    continue;
                }
                (None, Some(tokens)) => {
                    let shape = (seed, step, stored.hashes.len() - number);
                    let bytes = &mut self.bytes;
                    let ours = |ours: &mut _| extend(chain, tokens, block_size, seed, bytes, ours);
                    self.runs.push(parent, *hash, shape, ours)
                }
            };
            self.at.push(at);
            parent = Some(at);
            chain = self.runs.ours(at).last().copied();
        }
        orphans
    }

    /// Blocks left a tier. The deepest first is how engines free them, but any order will do.
    pub(super) fn removed(&mut self, table: &mut Table, hashes: &[u64], tier: Tier) -> Change {
        let tier = place(tier);
        let (before, mut change) = (self.runs.bytes(), Change::default());
        self.runs.touch(hashes);
        let places = hashes.iter().filter_map(|hash| self.runs.find(*hash));
        table.touch(places.flat_map(|at| self.runs.ours(at)));
        for hash in hashes {
            let Some(at) = self.runs.find(*hash) else { continue };
            match self.runs.stored(at)[tier] {
                0 => {}
                1 => {
                    change += self.take_out(table, at, tier);
                    self.runs.trim(at);
                }
                count => self.runs.set_stored(at, tier, count - 1),
            }
        }
        change.bytes += difference(self.runs.bytes(), before);
        change
    }

    /// What is to be done with a run whose turn to give way has come.
    pub(super) fn turn(&mut self, run: RunId) -> Turn {
        self.runs.turn(run)
    }

    /// Forgets the last block of a run, whatever the engine says of it: room is needed.
    pub(super) fn evict(&mut self, table: &mut Table, tail: Place) -> Change {
        let (before, mut change) = (self.runs.bytes(), Change::default());
        for (tier, count) in self.runs.stored(tail).into_iter().enumerate() {
            if count > 0 {
                change += self.take_out(table, tail, tier);
            }
        }
        self.runs.trim(tail);
        change.bytes += difference(self.runs.bytes(), before);
        change
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self, table: &mut Table) -> Change {
        let mut change = Change::default();
        // Nothing is found by halving from here on.
        self.set_holes(1);
        change.bytes -= difference(self.runs.bytes(), 0);
        for (stored, ours) in self.runs.drain() {
            for (slot, count) in self.slots.iter().zip(stored) {
                let Some(slot) = slot.as_ref().filter(|_| count > 0) else { continue };
                ours.iter().for_each(|hash| change += table.release(*hash, slot.slot));
            }
        }
        self.set_holes(0);
        change
    }

    fn set_holes(&self, holes: u32) {
        for count in self.slots.iter().flatten().filter_map(|slot| slot.holes.count()) {
            count.store(holes, Ordering::Release);
        }
    }

    fn add(&mut self, table: &mut Table, at: Place, tier: usize, slot: u32) -> Change {
        let count = self.runs.stored(at)[tier];
        let parent = self.runs.parent(at);
        let first_child = count == 0 && parent.is_some_and(|parent| !self.runs.has_child(parent, tier));
        self.runs.set_stored(at, tier, count.saturating_add(1));
        let mut change = Change::default();
        if count > 0 {
            return change;
        }
        for ours in self.runs.ours(at) {
            change += table.add(*ours, slot);
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
    fn take_out(&mut self, table: &mut Table, at: Place, tier: usize) -> Change {
        let mut change = Change::default();
        if self.runs.has_child(at, tier) {
            // Told before it is done: a lookup must not jump over the hole.
            self.holes(tier, 1);
        }
        if let Some(slot) = self.slots[tier].as_ref().map(|slot| slot.slot) {
            for ours in self.runs.ours(at).iter().rev() {
                change += table.release(*ours, slot);
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
        let Some(count) = self.slots.get(tier).and_then(Option::as_ref).and_then(|slot| slot.holes.count())
        else {
            return;
        };
        if by > 0 {
            count.fetch_add(1, Ordering::Release);
        } else {
            count.fetch_sub(1, Ordering::Release);
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
