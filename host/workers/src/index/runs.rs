//! Blocks of one engine by the engine's hashes, in *runs*: each block is the parent of the next. What a block costs is its
//! hashes and its counts; the tree stands only where runs branch. A run grows and shrinks at its tail.

#![expect(clippy::indexing_slicing, reason = "tiers are 0, 1 and 2")]

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use crate::id::BlockHash;

/// Bytes a block is accounted with beside the table's own: its entry in the map, the map's slack, its place in the run.
pub(super) const BYTES_AN_ENTRY: i64 = 60;
/// Bytes a run is accounted with: itself, its branch on the parent, its place in the order of eviction, slack.
pub(super) const BYTES_A_RUN: i64 = 240;

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    run: u32,
    at: u32,
}

/// How often a block is stored, by tier.
pub(super) type Counts = [u16; 3];

/// The blocks.
#[derive(Debug, Default)]
pub(super) struct Runs {
    places: HashMap<u64, Place, BuildHasherDefault<Mixed>>,
    runs: Vec<Run>,
    /// Places in `runs` that are free.
    free: Vec<u32>,
}

#[derive(Debug, Default)]
struct Run {
    parent: Option<Place>,
    seed: u64,
    /// Hashes of ours for each block of the engine's.
    step: usize,
    blocks: Vec<Block>,
    ours: Vec<BlockHash>,
    /// Where other runs go on from this one, by place.
    branches: Vec<Branch>,
}

#[derive(Debug)]
struct Block {
    engine: u64,
    stored: Counts,
}

#[derive(Debug)]
struct Branch {
    at: u32,
    /// Runs that begin here.
    runs: u32,
    /// Of those, how many have their first block stored, by tier.
    stored: [u32; 3],
}

/// Engines' hashes may be plain numbers.
#[derive(Debug, Default)]
pub(super) struct Mixed(u64);

impl Hasher for Mixed {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Runs {
    /// Runs there are.
    pub(super) fn len(&self) -> usize {
        self.runs.len() - self.free.len()
    }

    /// Bytes accounted for all of it.
    pub(super) fn bytes(&self) -> i64 {
        let count = |len: usize| i64::try_from(len).unwrap_or(i64::MAX);
        count(self.places.len()) * BYTES_AN_ENTRY + count(self.len()) * BYTES_A_RUN
    }

    /// Where a block is.
    pub(super) fn find(&self, engine: u64) -> Option<Place> {
        self.places.get(&engine).copied()
    }

    /// Whether a run begins with this block.
    pub(super) fn begins(&self, engine: u64) -> bool {
        self.find(engine).is_some_and(|place| place.at == 0)
    }

    /// Our hashes of a block.
    pub(super) fn ours(&self, place: Place) -> &[BlockHash] {
        let Some(run) = self.run(place) else { return &[] };
        let from = place.at as usize * run.step;
        run.ours.get(from..from + run.step).unwrap_or_default()
    }

    /// The seed of the local hashes along a run.
    pub(super) fn seed(&self, place: Place) -> u64 {
        self.run(place).map_or(0, |run| run.seed)
    }

    pub(super) fn parent(&self, place: Place) -> Option<Place> {
        match place.at {
            0 => self.run(place)?.parent,
            at => Some(Place { at: at - 1, ..place }),
        }
    }

    pub(super) fn stored(&self, place: Place) -> Counts {
        self.block(place).map_or([0; 3], |block| block.stored)
    }

    /// Whether a child of a block is stored in a tier.
    pub(super) fn has_child(&self, place: Place, tier: usize) -> bool {
        let next = Place { at: place.at + 1, ..place };
        self.block(next).is_some_and(|block| block.stored[tier] > 0)
            || self.run(place).and_then(|run| run.branch(place.at)).is_some_and(|one| one.stored[tier] > 0)
    }

    /// Counts a block's stores in a tier; the block knows of it, and where its run branches off.
    pub(super) fn set_stored(&mut self, place: Place, tier: usize, count: u16) {
        let Some(block) =
            self.runs.get_mut(place.run as usize).and_then(|run| run.blocks.get_mut(place.at as usize))
        else {
            return;
        };
        let before = std::mem::replace(&mut block.stored[tier], count);
        if place.at > 0 || (before > 0) == (count > 0) {
            return;
        }
        let Some(parent) = self.parent(place) else { return };
        if let Some(branch) = self.branch_mut(parent) {
            branch.stored[tier] = if count > 0 { branch.stored[tier] + 1 } else { branch.stored[tier] - 1 };
        }
    }

    /// Puts a block below another: behind it where that is its run's tail, otherwise as a run of its own, for which room for
    /// `more` blocks is made. Answers where it is, and whether it begins a run. `ours` adds our hashes of it.
    pub(super) fn push(
        &mut self,
        parent: Option<Place>,
        engine: u64,
        (seed, step, more): (u64, usize, usize),
        ours: impl FnOnce(&mut Vec<BlockHash>),
    ) -> (Place, bool) {
        let tail = parent
            .filter(|place| self.run(*place).is_some_and(|run| run.step == step && run.ends_at(place.at)));
        let number = tail.map_or_else(|| self.begin(parent, seed, step, more), |place| place.run);
        let mut place = Place { run: number, at: 0 };
        if let Some(run) = self.runs.get_mut(number as usize) {
            place.at = u32::try_from(run.blocks.len()).unwrap_or(u32::MAX);
            ours(&mut run.ours);
            run.blocks.push(Block { engine, stored: [0; 3] });
        }
        self.places.insert(engine, place);
        (place, tail.is_none())
    }

    fn begin(&mut self, parent: Option<Place>, seed: u64, step: usize, more: usize) -> u32 {
        let (blocks, ours) = (Vec::with_capacity(more), Vec::with_capacity(more * step));
        let run = Run { parent, seed, step, blocks, ours, branches: Vec::new() };
        if let Some(above) = parent.and_then(|place| Some((place.at, self.runs.get_mut(place.run as usize)?)))
        {
            above.1.begin_at(above.0);
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.runs.push(Run::default());
            u32::try_from(self.runs.len() - 1).unwrap_or(u32::MAX)
        });
        if let Some(free) = self.runs.get_mut(number as usize) {
            *free = run;
        }
        number
    }

    /// The last block of the run that a block is in, unless other runs go on from it.
    pub(super) fn tail(&self, place: Place) -> Option<Place> {
        let run = self.run(place)?;
        let at = u32::try_from(run.blocks.len().checked_sub(1)?).ok()?;
        run.branch(at).is_none().then_some(Place { at, ..place })
    }

    /// Drops the blocks at the tail of a run that nobody stores and nothing goes on from, and then those of the run above
    /// if this one is gone. Answers the bytes that were accounted for them.
    pub(super) fn trim(&mut self, place: Place) -> i64 {
        let (mut bytes, mut next) = (0, Some(place));
        while let Some(place) = next.take() {
            while let Some(tail) = self.tail(place).filter(|tail| self.stored(*tail) == [0; 3]) {
                let Some(run) = self.runs.get_mut(tail.run as usize) else { break };
                run.ours.truncate(tail.at as usize * run.step);
                if let Some(block) = run.blocks.pop() {
                    self.places.remove(&block.engine);
                    bytes += BYTES_AN_ENTRY;
                }
            }
            next = self.give_back(place, &mut bytes);
        }
        if self.places.len() * 4 < self.places.capacity() && self.places.capacity() > 64 {
            self.places.shrink_to_fit();
        }
        bytes
    }

    /// Gives back the room that a shorter run leaves; all of it, and its branch on the run above, when it is empty.
    fn give_back(&mut self, place: Place, bytes: &mut i64) -> Option<Place> {
        let run = self.runs.get_mut(place.run as usize)?;
        if !run.blocks.is_empty() {
            if run.blocks.capacity() > 2 * run.blocks.len() {
                run.blocks.shrink_to_fit();
                run.ours.shrink_to_fit();
            }
            return None;
        }
        // Free already.
        if run.step == 0 {
            return None;
        }
        let parent = std::mem::take(run).parent;
        self.free.push(place.run);
        *bytes += BYTES_A_RUN;
        let parent = parent?;
        self.runs.get_mut(parent.run as usize)?.end_at(parent.at);
        Some(parent)
    }

    /// Takes all blocks out: how often each is stored, and our hashes of it.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (Counts, Vec<BlockHash>)> + use<> {
        let runs = std::mem::take(self).runs;
        runs.into_iter().flat_map(|run| {
            let blocks = run.blocks.into_iter().zip(run.ours.chunks(run.step.max(1)));
            blocks.map(|(block, ours)| (block.stored, ours.to_vec())).collect::<Vec<_>>()
        })
    }

    fn run(&self, place: Place) -> Option<&Run> {
        self.runs.get(place.run as usize)
    }

    fn block(&self, place: Place) -> Option<&Block> {
        self.run(place)?.blocks.get(place.at as usize)
    }

    fn branch_mut(&mut self, place: Place) -> Option<&mut Branch> {
        let run = self.runs.get_mut(place.run as usize)?;
        let found = run.find_branch(place.at).ok()?;
        run.branches.get_mut(found)
    }
}

impl Run {
    fn ends_at(&self, at: u32) -> bool {
        at as usize + 1 == self.blocks.len() && self.branch(at).is_none()
    }

    fn branch(&self, at: u32) -> Option<&Branch> {
        self.branches.get(self.find_branch(at).ok()?)
    }

    fn find_branch(&self, at: u32) -> Result<usize, usize> {
        self.branches.binary_search_by_key(&at, |branch| branch.at)
    }

    /// One more run begins below a block.
    fn begin_at(&mut self, at: u32) {
        match self.find_branch(at) {
            Ok(found) => self.branches[found].runs += 1,
            Err(free) => self.branches.insert(free, Branch { at, runs: 1, stored: [0; 3] }),
        }
    }

    /// One less does.
    fn end_at(&mut self, at: u32) {
        let Ok(found) = self.find_branch(at) else { return };
        self.branches[found].runs -= 1;
        if self.branches[found].runs == 0 {
            self.branches.remove(found);
        }
    }
}
