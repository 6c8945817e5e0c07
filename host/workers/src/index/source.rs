//! What one engine says of its cache (spec H2): its own hashes are opaque, and remembered only to find at removal what they
//! stored. A block that is named twice counts twice; a block whose parent is not known is forgotten.

#![expect(clippy::indexing_slicing, reason = "tiers are 0, 1 and 2")]

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use super::shards::{Change, Shards};
use crate::{
    events::{Stored, Tier},
    hash::{Salt, extend},
    id::BlockHash,
};

/// Bytes an engine block is accounted with beside the table's own: its entry, its place in the order of eviction, slack.
pub(super) const BYTES_AN_ENTRY: i64 = 120;

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
    blocks: HashMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    ours: Ours,
    parent: Option<u64>,
    seed: u64,
    /// How often it is stored, by tier.
    stored: [u16; 3],
    /// Children that are stored, by tier.
    children: [u32; 3],
    /// Entries that have this one as parent.
    kin: u32,
}

/// Our sequence hashes of one engine block: one where the block sizes are equal.
#[derive(Debug)]
enum Ours {
    One(BlockHash),
    Many(Box<[BlockHash]>),
}

/// What came of an event.
#[derive(Debug, Default)]
pub(super) struct Applied {
    pub(super) change: Change,
    /// Engine blocks that are new, for the order of eviction.
    pub(super) new: Vec<u64>,
    /// Blocks that could not be placed: an unknown parent, or a block size that ours does not divide.
    pub(super) orphans: u64,
}

impl Ours {
    fn as_slice(&self) -> &[BlockHash] {
        match self {
            Self::One(hash) => std::slice::from_ref(hash),
            Self::Many(hashes) => hashes,
        }
    }
}

fn place(tier: Tier) -> usize {
    match tier {
        Tier::Device => 0,
        Tier::Host => 1,
        Tier::Disk => 2,
    }
}

impl Source {
    /// Blocks that are known.
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether a block of the engine's is known.
    pub(super) fn knows(&self, hash: u64) -> bool {
        self.blocks.contains_key(&hash)
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
        let (mut parent, mut chain, seed) = match stored.parent {
            None => (None, None, seed_of(stored)),
            Some(parent) => match self.blocks.get(&parent) {
                Some(entry) => (Some(parent), entry.ours.as_slice().last().copied(), entry.seed),
                None if told => return Applied { orphans, ..applied },
                None => (None, None, 0),
            },
        };
        let mut tokens = stored.token_ids.chunks_exact(engine_size.max(1));
        for hash in &stored.hashes {
            if !self.blocks.contains_key(hash) {
                // Offloaded blocks come without tokens: what was never told with them cannot be placed.
                let Some(tokens) = tokens.next() else {
                    applied.orphans += 1;
                    continue;
                };
                let ours = extend(chain, tokens, block_size, seed);
                let ours = match ours.as_slice() {
                    [one] => Ours::One(*one),
                    _ => Ours::Many(ours.into()),
                };
                let entry = Entry { ours, parent, seed, stored: [0; 3], children: [0; 3], kin: 0 };
                self.blocks.insert(*hash, entry);
                if let Some(parent) = parent.and_then(|parent| self.blocks.get_mut(&parent)) {
                    parent.kin += 1;
                }
                applied.new.push(*hash);
                applied.change.bytes += BYTES_AN_ENTRY;
            } else {
                tokens.next();
            }
            applied.change += self.add(shards, *hash, tier, slot);
            parent = Some(*hash);
            chain = self.blocks.get(hash).and_then(|entry| entry.ours.as_slice().last().copied());
        }
        applied
    }

    /// Blocks left a tier. The deepest first is how engines free them, but any order will do.
    pub(super) fn removed(&mut self, shards: &Shards, hashes: &[u64], tier: Tier) -> Change {
        let tier = place(tier);
        let mut change = Change::default();
        for hash in hashes {
            let Some(entry) = self.blocks.get_mut(hash).filter(|entry| entry.stored[tier] > 0) else {
                continue;
            };
            entry.stored[tier] -= 1;
            if entry.stored[tier] == 0 {
                change += self.take_out(shards, *hash, tier);
            }
        }
        change
    }

    /// Forgets a block whatever the engine says of it, unless others lie below it: room is needed.
    pub(super) fn evict(&mut self, shards: &Shards, hash: u64) -> Option<Change> {
        let entry = self.blocks.get_mut(&hash)?;
        if entry.kin > 0 {
            return None;
        }
        let stored = std::mem::take(&mut entry.stored);
        let mut change = Change::default();
        for (tier, count) in stored.into_iter().enumerate() {
            if count > 0 {
                change += self.take_out(shards, hash, tier);
            }
        }
        Some(change)
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self, shards: &Shards) -> Change {
        let mut change = Change::default();
        for slot in self.slots.iter().flatten() {
            // Nothing is found by halving from here on.
            slot.holes.store(1, Ordering::Release);
        }
        for (_, entry) in self.blocks.drain() {
            change.bytes -= BYTES_AN_ENTRY;
            for (tier, slot) in self.slots.iter().enumerate() {
                let Some(slot) = slot.as_ref().filter(|_| entry.stored[tier] > 0) else { continue };
                for hash in entry.ours.as_slice().iter().rev() {
                    change += shards.release(*hash, slot.slot);
                }
            }
        }
        for slot in self.slots.iter().flatten() {
            slot.holes.store(0, Ordering::Release);
        }
        change
    }

    fn add(&mut self, shards: &Shards, hash: u64, tier: usize, slot: u32) -> Change {
        let Some(entry) = self.blocks.get_mut(&hash) else { return Change::default() };
        entry.stored[tier] = entry.stored[tier].saturating_add(1);
        if entry.stored[tier] > 1 {
            return Change::default();
        }
        let filled = entry.children[tier] > 0;
        let mut change = Change::default();
        for ours in entry.ours.as_slice() {
            change += shards.add(*ours, slot);
        }
        let parent = entry.parent;
        if filled {
            self.holes(tier, -1);
        }
        if let Some(parent) = parent.and_then(|parent| self.blocks.get_mut(&parent)) {
            parent.children[tier] += 1;
            if parent.children[tier] == 1 && parent.stored[tier] == 0 {
                self.holes(tier, 1);
            }
        }
        change
    }

    /// A block is stored in `tier` no more.
    fn take_out(&mut self, shards: &Shards, hash: u64, tier: usize) -> Change {
        let mut change = Change::default();
        let Some(entry) = self.blocks.get(&hash) else { return change };
        let (parent, left_hole) = (entry.parent, entry.children[tier] > 0);
        if left_hole {
            // Told before it is done: a lookup must not jump over the hole.
            self.holes(tier, 1);
        }
        let slot = self.slots[tier].as_ref().map(|slot| slot.slot);
        if let (Some(slot), Some(entry)) = (slot, self.blocks.get(&hash)) {
            for ours in entry.ours.as_slice().iter().rev() {
                change += shards.release(*ours, slot);
            }
        }
        if let Some(parent) = parent.and_then(|parent| self.blocks.get_mut(&parent)) {
            parent.children[tier] -= 1;
            if parent.children[tier] == 0 && parent.stored[tier] == 0 {
                self.holes(tier, -1);
            }
        }
        self.drop_unused(hash, &mut change);
        change
    }

    /// Drops an entry that nobody stores and nobody descends from, and its parent if that is such a one now.
    fn drop_unused(&mut self, hash: u64, change: &mut Change) {
        let mut next = Some(hash);
        while let Some(hash) = next.take() {
            let unused = |entry: &Entry| entry.kin == 0 && entry.stored == [0; 3];
            if !self.blocks.get(&hash).is_some_and(unused) {
                return;
            }
            let Some(entry) = self.blocks.remove(&hash) else { return };
            change.bytes -= BYTES_AN_ENTRY;
            if let Some(parent) = entry.parent
                && let Some(kept) = self.blocks.get_mut(&parent)
            {
                kept.kin -= 1;
                next = Some(parent);
            }
        }
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
