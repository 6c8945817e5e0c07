//! Who the slot numbers stand for. Lookups read it as it was published; a worker that joins costs a copy of plain memory.
//!
//! A slot may go from one candidate to another while a lookup runs. The writer publishes that before it says anything of the
//! new one, so a lookup that has read names before and after knows which slots it has to pass over.

use std::sync::{Arc, atomic::AtomicU32};

use super::Candidate;
use crate::events::Tier;

/// Slots whose counters lie together.
const CHUNK: usize = 256;

/// A candidate's slots on device, host and disk.
pub(super) type TierSlots = [Option<u32>; 3];

/// The names.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    /// The slots of each candidate, sorted by candidate.
    pub(super) candidates: Vec<(Candidate, TierSlots)>,
    /// Those that have other tiers than the device.
    pub(super) lower: Vec<(Candidate, TierSlots)>,
    /// All slots are below this.
    pub(super) slots: usize,
    /// How often it changed.
    version: u64,
    /// By slot: the version in which its candidate got it.
    since: Vec<u64>,
    /// Counters by slot. They stay when names change: a slot's next owner has the same.
    holes: Vec<Arc<[AtomicU32]>>,
}

/// How many blocks of a slot lie below one which is not held; while there are any, halving finds too much.
#[derive(Clone, Debug)]
pub(super) struct Holes {
    chunk: Arc<[AtomicU32]>,
    place: usize,
}

impl Holes {
    /// The counter.
    pub(super) fn count(&self) -> Option<&AtomicU32> {
        self.chunk.get(self.place)
    }
}

/// Where a tier is in an array of all three.
pub(super) fn place(tier: Tier) -> usize {
    match tier {
        Tier::Device => 0,
        Tier::Host => 1,
        Tier::Disk => 2,
    }
}

impl Names {
    /// Gives a candidate's tier a slot, or takes it. `slots` is how many there are from now on.
    pub(super) fn set(&mut self, candidate: Candidate, tier: Tier, slot: Option<u32>, slots: usize) {
        self.slots = slots;
        self.version += 1;
        self.since.resize(slots, 0);
        if let Some(since) = slot.and_then(|slot| self.since.get_mut(slot as usize)) {
            *since = self.version;
        }
        while self.holes.len() * CHUNK < slots {
            self.holes.push((0..CHUNK).map(|_| AtomicU32::new(0)).collect());
        }
        let found = self.candidates.binary_search_by_key(&candidate, |(one, _)| *one);
        let known = found.ok().and_then(|at| self.candidates.get(at));
        let mut all = known.map_or(TierSlots::default(), |(_, slots)| *slots);
        if let Some(of) = all.get_mut(place(tier)) {
            *of = slot;
        }
        put(&mut self.candidates, candidate, all);
        let [_, host, disk] = all;
        put(&mut self.lower, candidate, if host.or(disk).is_some() { all } else { TierSlots::default() });
    }

    /// How often it changed.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// The slots that got their candidate after that version.
    pub(super) fn given_after(&self, version: u64) -> impl Iterator<Item = usize> {
        let later = self.since.iter().enumerate().filter(move |(_, since)| **since > version);
        later.map(|(slot, _)| slot)
    }

    /// The counter of a slot.
    pub(super) fn holes(&self, slot: u32) -> Option<Holes> {
        let slot = slot as usize;
        Some(Holes { chunk: self.holes.get(slot / CHUNK)?.clone(), place: slot % CHUNK })
    }

    /// The same, where no hold on it is needed.
    pub(super) fn count_of_holes(&self, slot: u32) -> Option<&AtomicU32> {
        self.holes.get(slot as usize / CHUNK)?.get(slot as usize % CHUNK)
    }
}

/// Keeps a sorted list: a candidate without a slot is not in it.
fn put(list: &mut Vec<(Candidate, TierSlots)>, candidate: Candidate, slots: TierSlots) {
    let there = slots != TierSlots::default();
    match list.binary_search_by_key(&candidate, |(one, _)| *one) {
        Ok(at) if there => {
            if let Some(of) = list.get_mut(at) {
                of.1 = slots;
            }
        }
        Ok(at) => drop(list.remove(at)),
        Err(at) if there => list.insert(at, (candidate, slots)),
        Err(_) => {}
    }
}
