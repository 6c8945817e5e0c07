//! A lookup: how much of a prefix each candidate holds, by halving over the prefix for all of them at once.

use std::sync::{Arc, atomic::Ordering};

use super::{Matched, Shared, names::Names, shards::Shards};
use crate::id::{BlockHash, DpRank, WorkerId};

/// The answer of a lookup, and its reusable buffers.
#[derive(Debug, Default)]
pub struct Overlaps {
    /// Who the slots stood for.
    names: Arc<Names>,
    /// How many blocks each slot holds; those of lower tiers beyond the tier above.
    depths: Vec<u32>,
    /// Slots that hold the first block.
    group: Vec<u32>,
    /// Where each slot is in the group; true only if the slot is there.
    places: Vec<u32>,
    work: Vec<Task>,
    /// The depth at which most candidates ended, and how many: they often share a system prompt and no more.
    usual: (usize, usize),
}

/// Candidates `group[start..end]` hold block `low`, and none of them holds block `high`.
#[derive(Clone, Copy, Debug)]
struct Task {
    low: usize,
    high: usize,
    start: usize,
    end: usize,
}

impl Task {
    /// The block to ask for next.
    fn middle(&self, blocks: usize, usual: usize) -> usize {
        // A prompt that is cached whole, or up to its last block, is common: look there first.
        if self.low == 0 && self.high == blocks {
            return blocks - 1;
        }
        // Then whether the last lookup's usual depth is this one's: the block before it is held, the one behind is not.
        let between = |place: &usize| self.low < *place && *place < self.high;
        let guess = if self.low + 1 == usual { usual } else { usual.saturating_sub(1) };
        Some(guess).filter(between).unwrap_or(self.low.midpoint(self.high))
    }
}

impl Overlaps {
    /// What a candidate holds.
    #[must_use]
    pub fn get(&self, worker: WorkerId, rank: DpRank) -> Matched {
        let candidates = &self.names.candidates;
        let place = candidates.binary_search_by_key(&(worker, rank), |(candidate, _)| *candidate);
        let Some((_, slots)) = place.ok().and_then(|place| candidates.get(place)) else {
            return Matched::default();
        };
        let [device, host, disk] = slots.map(|slot| slot.map_or(0, |slot| self.depth(slot)));
        Matched { device, host, disk }
    }

    pub(super) fn find(&mut self, shared: &Shared, blocks: &[BlockHash]) {
        let before = shared.names.load().version();
        self.look(shared, blocks);
        let names = shared.names.load();
        if names.version() == before {
            return;
        }
        // Whose slot it was for a part of the time only is nobody's.
        for slot in names.given_after(before) {
            if let Some(depth) = self.depths.get_mut(slot) {
                *depth = 0;
            }
        }
        self.names = names.clone();
    }

    fn look(&mut self, shared: &Shared, blocks: &[BlockHash]) {
        self.depths.clear();
        self.group.clear();
        let Some(first) = blocks.first() else { return };
        let shards = &shared.shards;
        shards.holders(*first, |slot| self.group.push(slot));
        // After the first block's holders: whoever holds it has a name by now.
        let names = shared.names.load();
        if !Arc::ptr_eq(&names, &self.names) {
            self.names = names.clone();
        }
        if self.group.is_empty() && self.names.lower.is_empty() {
            return;
        }
        self.depths.resize(self.names.slots, 0);
        self.places.resize(self.names.slots, 0);
        self.halve(shards, blocks);
        self.mind_holes(shards, blocks);
        self.go_lower(shards, blocks);
    }

    fn halve(&mut self, shards: &Shards, blocks: &[BlockHash]) {
        for (place, slot) in (0..).zip(&self.group) {
            if let Some(at) = self.places.get_mut(*slot as usize) {
                *at = place;
            }
        }
        self.work.clear();
        let usual = std::mem::take(&mut self.usual).0;
        if !self.group.is_empty() {
            self.work.push(Task { low: 0, high: blocks.len(), start: 0, end: self.group.len() });
        }
        while let Some(task) = self.work.pop() {
            if task.high - task.low <= 1 {
                self.settle(task);
                continue;
            }
            let middle = task.middle(blocks.len(), usual);
            let Some(block) = blocks.get(middle) else { continue };
            let split = self.partition(shards, *block, task.start, task.end);
            if split < task.end {
                self.work.push(Task { high: middle, start: split, ..task });
            }
            if split > task.start {
                self.work.push(Task { low: middle, end: split, ..task });
            }
        }
    }

    /// Moves the holders of a block to the front of `group[start..end]`; answers where the others begin. Takes as long as
    /// the block has holders: deep blocks have few, however many hold the first.
    fn partition(&mut self, shards: &Shards, block: BlockHash, start: usize, end: usize) -> usize {
        let mut split = start;
        let (group, places) = (&mut self.group, &mut self.places);
        shards.holders(block, |slot| {
            let Some(at) = places.get(slot as usize).map(|at| *at as usize) else { return };
            if at < split || at >= end || group.get(at) != Some(&slot) {
                return;
            }
            group.swap(at, split);
            for place in [at, split] {
                if let Some(of) = group.get(place).and_then(|slot| places.get_mut(*slot as usize)) {
                    *of = u32::try_from(place).unwrap_or(u32::MAX);
                }
            }
            split += 1;
        });
        split
    }

    /// Slots of the task hold exactly `low + 1` blocks.
    fn settle(&mut self, task: Task) {
        let slots = task.end - task.start;
        if slots > self.usual.1 {
            self.usual = (task.low + 1, slots);
        }
        let depth = u32::try_from(task.low + 1).unwrap_or(u32::MAX);
        for slot in self.group.get(task.start..task.end).unwrap_or_default() {
            if let Some(of) = self.depths.get_mut(*slot as usize) {
                *of = depth;
            }
        }
    }

    /// A slot with holes is walked from the root.
    fn mind_holes(&mut self, shards: &Shards, blocks: &[BlockHash]) {
        for slot in &self.group {
            if self.names.count_of_holes(*slot).is_some_and(|holes| holes.load(Ordering::Acquire) > 0)
                && let Some(depth) = self.depths.get_mut(*slot as usize)
            {
                *depth = run(shards, blocks, 0, *slot).min(*depth);
            }
        }
    }

    /// Lower tiers go on where the tier above ended.
    fn go_lower(&mut self, shards: &Shards, blocks: &[BlockHash]) {
        for (_, [device, host, disk]) in &self.names.lower {
            let mut from = device.map_or(0, |slot| self.depth(slot));
            for slot in [host, disk].into_iter().flatten() {
                let more = run(shards, blocks, from, *slot);
                from += more;
                if let Some(depth) = self.depths.get_mut(*slot as usize) {
                    *depth = more;
                }
            }
        }
    }

    fn depth(&self, slot: u32) -> u32 {
        self.depths.get(slot as usize).copied().unwrap_or(0)
    }
}

/// How many blocks from `from` on a slot holds without a gap.
fn run(shards: &Shards, blocks: &[BlockHash], from: u32, slot: u32) -> u32 {
    let rest = blocks.get(from as usize..).unwrap_or_default();
    let held = rest.iter().take_while(|block| shards.holds(**block, slot)).count();
    u32::try_from(held).unwrap_or(u32::MAX)
}
