//! Blocks of one engine in *runs*: each block of a run is the parent of the next one.
//!
//! A block costs its hashes and its counts only; links between runs exist only where prompts branch. A run
//! grows and shrinks at its tail.

#![expect(clippy::indexing_slicing, reason = "tiers are 0, 1 and 2")]

mod blocks;
mod cut;
mod parts;
mod place;
mod run;

use std::ops::Range;

use super::{
    block_positions::{BlockPositions, Position},
    eviction::{Queueable, RunId},
    memory::{heap, reserve},
};
use crate::id::BlockHash;
pub(super) use cut::NewPart;
use parts::Parts;
use run::{Branch, Run};

/// Twentieths added to the counted bytes; 9 were not enough with larger tables. Fitted to
/// `cargo xtask nightly --only index-memory`, where resident
/// memory was 1.27 and 1.34 times what runs and block table had allocated. Fragmentation is the likely cause:
/// tables are rebuilt while runs move into the space that the old ones leave. That has not been shown.
const FRAGMENTATION_TWENTIETHS: usize = 15;

/// How often a block is stored, by tier.
pub(super) type Counts = [u16; 3];

/// The runs of one engine.
#[derive(Debug, Default)]
pub(super) struct Runs {
    positions: BlockPositions,
    runs: Vec<Run>,
    /// Unused indexes of `runs`.
    free: Vec<u32>,
    /// Heap bytes of the runs' blocks and branches.
    inner: usize,
    /// Number of runs created so far, wrapping. Tells the runs apart that reuse an index.
    births: u32,
    queueable: Queueable,
}

/// Blocks to be added.
#[derive(Debug)]
pub(super) struct NewBlocks {
    /// The engine's hashes.
    pub(super) engine: Vec<u64>,
    /// Our hashes, `step` for each block.
    pub(super) ours: Vec<BlockHash>,
    pub(super) step: u32,
    /// Seed of our local hashes.
    pub(super) seed: u64,
}

/// Action of the eviction queue on the run at its front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    /// Drop the entry: the run is gone, or other runs follow its tail.
    None,
    /// The run was used since it was queued: give it a second chance.
    Used,
    /// Evict this block, the run's last one.
    Tail(Position),
}

impl Runs {
    /// Returns the number of runs.
    pub(super) fn len(&self) -> usize {
        self.runs.len() - self.free.len()
    }

    /// Returns the bytes that the runs take, with an allowance for fragmentation.
    pub(super) fn bytes(&self) -> usize {
        let counted = self.inner
            + self.positions.bytes()
            + heap(self.runs.capacity() * size_of::<Run>())
            + heap(self.free.capacity() * size_of::<u32>());
        counted + counted / 20 * FRAGMENTATION_TWENTIETHS
    }

    /// Returns the runs that have to be queued since the last call.
    pub(super) fn queueable(&mut self) -> &mut Queueable {
        &mut self.queueable
    }

    /// Loads the positions of blocks into the cache, so that their cache misses overlap.
    pub(super) fn prefetch(&self, engine: &[u64]) {
        std::hint::black_box(self.positions.prefetch(engine));
    }

    /// Finds a block by the engine's hash.
    pub(super) fn find(&self, engine: u64) -> Option<Position> {
        self.positions.find(engine, |at| self.engine(at) == Some(engine))
    }

    /// Returns the engine's hash of a block.
    pub(super) fn engine(&self, at: Position) -> Option<u64> {
        self.run(at)?.blocks.hashes().get(at.at as usize).copied()
    }

    /// Returns whether a run exists and has an entry in the eviction queue.
    pub(super) fn is_queued(&self, run: RunId) -> bool {
        self.runs.get(run.number as usize).is_some_and(|found| found.born == run.born && found.queued)
    }

    /// Marks the run of a block as used.
    pub(super) fn mark_used(&mut self, at: Position) {
        if let Some(run) = self.runs.get_mut(at.run as usize) {
            run.used = true;
        }
    }

    /// Decides what the eviction queue does with a run whose turn has come.
    pub(super) fn victim(&mut self, run: RunId) -> Victim {
        if !self.is_queued(run) {
            return Victim::None;
        }
        let tail = self.tail(Position { run: run.number, at: 0 });
        let Some(run) = self.runs.get_mut(run.number as usize) else { return Victim::None };
        match tail {
            Some(_) if std::mem::take(&mut run.used) => Victim::Used,
            Some(tail) => Victim::Tail(tail),
            None => {
                run.queued = false;
                Victim::None
            }
        }
    }

    /// Returns the seed of the local hashes of a run.
    pub(super) fn seed(&self, at: Position) -> u64 {
        self.run(at).map_or(0, |run| run.seed)
    }

    /// Returns the number of our hashes of each block of a run; 0 if the blocks do not end where ours do.
    pub(super) fn step(&self, at: Position) -> usize {
        self.run(at).map_or(0, |run| run.step as usize)
    }

    pub(super) fn parent(&self, at: Position) -> Option<Position> {
        match at.at {
            0 => self.run(at)?.parent,
            index => Some(Position { at: index - 1, ..at }),
        }
    }

    pub(super) fn stored(&self, at: Position) -> Counts {
        self.run(at).map_or([0; 3], |run| run.blocks.stored(at.at as usize))
    }

    /// Sets how often a block is stored in a tier, and keeps the branch that it starts up to date.
    pub(super) fn set_stored(&mut self, at: Position, tier: usize, count: u16) {
        let before = self.stored(at)[tier];
        let block = at.at as usize;
        self.change(at.run, |run| run.blocks.set_stored(block..block + 1, tier, count));
        if (before > 0) != (count > 0) {
            self.count_branch(at, tier, count > 0);
        }
    }

    /// If a block starts a branch, counts there whether a tier stores the block.
    fn count_branch(&mut self, at: Position, tier: usize, stored: bool) {
        let parent = self.run(at).filter(|_| at.at == 0).and_then(|run| run.parent);
        let Some(branch) = parent.and_then(|parent| self.branch_mut(parent)) else { return };
        branch.stored[tier] = if stored { branch.stored[tier] + 1 } else { branch.stored[tier] - 1 };
    }

    /// Adds blocks that are new, up to the first one that is known, after their parent: to the parent's run
    /// if the parent is its tail, otherwise as a new run. They are stored once in `tier`. Returns the run,
    /// and the blocks in it.
    pub(super) fn push(
        &mut self,
        parent: Option<Position>,
        new: &mut NewBlocks,
        range: Range<usize>,
        tier: usize,
    ) -> (u32, Range<u32>) {
        let step = new.step;
        let tail =
            parent.filter(|at| self.run(*at).is_some_and(|run| run.step == step && run.ends_at(at.at)));
        let number = tail.map_or_else(|| self.start_run(parent, new.seed, step, None), |at| at.run);
        let first = self.run(Position { run: number, at: 0 }).map_or(0, |run| run.blocks.len());
        let mut stored = [0; 3];
        stored[tier] = 1;
        let (blocks, ours) = (range.len(), range.start * step as usize..range.end * step as usize);
        let whole = first == 0 && blocks == new.engine.len();
        self.change(number, |run| {
            if whole {
                new.ours.truncate(ours.len());
                run.fill(std::mem::take(&mut new.engine), std::mem::take(&mut new.ours), stored);
            } else {
                let engine = new.engine.get(range).unwrap_or_default();
                run.extend(engine, new.ours.get(ours).unwrap_or_default(), stored);
            }
        });
        self.positions.reserve(blocks);
        let count = self.insert_new(number, first);
        if count < blocks {
            self.change(number, |run| {
                if whole {
                    (new.engine, new.ours) = (run.blocks.hashes().to_vec(), run.our_hashes.clone());
                }
                run.truncate(first + count);
            });
        }
        if count > 0 {
            let at = u32::try_from(first).unwrap_or(u32::MAX);
            self.count_branch(Position { run: number, at }, tier, true);
        }
        let at = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
        (number, at(first)..at(first + count))
    }

    /// Adds blocks of a run to the table, up to the first one that is known. Returns how many were added.
    fn insert_new(&mut self, number: u32, first: usize) -> usize {
        let (runs, positions) = (&self.runs, &mut self.positions);
        let known = |at: Position, hash: u64| {
            let run = runs.get(at.run as usize);
            run.and_then(|run| run.blocks.hashes().get(at.at as usize)) == Some(&hash)
        };
        let new = |(at, hash): &(u32, u64)| {
            positions.insert_new(*hash, Position { run: number, at: *at }, |at| known(at, *hash))
        };
        let hashes = runs.get(number as usize).and_then(|run| run.blocks.hashes().get(first..));
        let blocks = hashes.unwrap_or_default().iter().copied();
        (u32::try_from(first).unwrap_or(u32::MAX)..).zip(blocks).take_while(new).count()
    }

    fn start_run(
        &mut self,
        parent: Option<Position>,
        seed: u64,
        step: u32,
        parts: Option<Box<Parts>>,
    ) -> u32 {
        self.births = self.births.wrapping_add(1);
        let new = Run { parent, seed, step, parts, born: self.births, queued: true, ..Run::default() };
        if let Some(parent) = parent {
            self.change(parent.run, |run| run.add_branch(parent.at));
        }
        let number = self.free.pop().unwrap_or_else(|| {
            reserve(&mut self.runs, 1);
            self.runs.push(Run::default());
            u32::try_from(self.runs.len() - 1).unwrap_or(u32::MAX)
        });
        self.queueable.new.push(RunId { number, born: new.born });
        self.change(number, |run| *run = new);
        number
    }

    /// Changes a run and accounts for its new size.
    fn change<T>(&mut self, number: u32, change: impl FnOnce(&mut Run) -> T) -> Option<T> {
        let run = self.runs.get_mut(number as usize)?;
        let before = run.bytes();
        let out = change(run);
        self.inner = self.inner + run.bytes() - before;
        Some(out)
    }

    /// Returns the last block of a position's run, unless other runs follow it.
    pub(super) fn tail(&self, at: Position) -> Option<Position> {
        let run = self.run(at)?;
        let last = u32::try_from(run.blocks.len().checked_sub(1)?).ok()?;
        run.branch(last).is_none().then_some(Position { at: last, ..at })
    }

    /// Returns the blocks of a run that a removal names first, `at` and those before or after it, and that
    /// are stored once in a tier.
    pub(super) fn leaving(&self, at: Position, hashes: &[u64], tier: usize) -> Range<u32> {
        let Some(run) = self.run(at) else { return at.at..at.at };
        let (before, behind) = run.blocks.hashes().split_at_checked(at.at as usize).unwrap_or_default();
        let once = run.blocks.are_once_in(tier);
        let is_once = |block: u32| once || run.blocks.stored(block as usize)[tier] == 1;
        let next = hashes.get(1..).unwrap_or_default();
        let leaves = |((block, hash), at): &((&u64, &u64), u32)| block == hash && is_once(*at);
        let count = |count: usize| u32::try_from(count).unwrap_or(0);
        match count(before.iter().rev().zip(next).zip((0..at.at).rev()).take_while(leaves).count()) {
            0 => at.at..at.at + count(behind.iter().zip(hashes).zip(at.at..).take_while(leaves).count()),
            more => at.at - more..at.at + 1,
        }
    }

    /// Notes that a tier no longer stores some blocks of a run, and removes the parts that became unneeded.
    pub(super) fn leave(&mut self, number: u32, blocks: Range<u32>, tier: usize) {
        let first = Position { run: number, at: blocks.start };
        let Some(run) = self.run(first).filter(|_| !blocks.is_empty()) else { return };
        let (start, end) = (blocks.start as usize, blocks.end as usize);
        let is_tail = end == run.blocks.len() && !run.is_followed_from(blocks.start);
        self.count_branch(first, tier, false);
        let run = self.runs.get(number as usize);
        if is_tail && run.is_some_and(|run| run.blocks.are_once_in(tier)) {
            // No counts of single blocks are needed to remove them.
            return self.cut(first, start);
        }
        self.change(number, |run| run.blocks.set_stored(start..end, tier, 0));
        self.trim(first);
    }

    /// Removes the blocks at a run's tail that are stored in no tier and have no successor. If that empties
    /// the run, continues with the run before it.
    pub(super) fn trim(&mut self, at: Position) {
        let needed = self.run(at).map_or(0, Run::needed);
        self.cut(at, needed);
    }

    /// Removes the blocks of a run after the first `needed`. If that empties the run, trims the run before
    /// it.
    fn cut(&mut self, at: Position, needed: usize) {
        let mut next = Some((at, needed));
        while let Some((at, needed)) = next.take() {
            if let Some(run) = self.runs.get_mut(at.run as usize) {
                for (place, hash) in (0..).zip(run.blocks.hashes()).skip(needed) {
                    self.positions.remove(*hash, Position { run: at.run, at: place });
                }
                run.truncate(needed);
            }
            let parent = self.shrink(at);
            next = parent.map(|parent| (parent, self.run(parent).map_or(0, Run::needed)));
        }
        if self.free.len() == self.runs.len() {
            (self.runs, self.free) = (Vec::new(), Vec::new());
        }
    }

    /// Frees the unused capacity of a run. If the run is empty, removes it and its branch, and returns its
    /// parent.
    fn shrink(&mut self, at: Position) -> Option<Position> {
        let parent = self.change(at.run, |run| {
            if run.blocks.is_empty() && run.in_use() {
                return Some(std::mem::take(run).parent);
            }
            run.shrink();
            None
        })??;
        reserve(&mut self.free, 1);
        self.free.push(at.run);
        let parent = parent?;
        self.change(parent.run, |run| run.remove_branch(parent.at));
        let exposed = self.tail(parent).filter(|tail| tail.at == parent.at).is_some();
        let run = self.runs.get_mut(parent.run as usize)?;
        if exposed && !run.queued {
            (run.queued, run.used) = (true, false);
            self.queueable.exposed.push(RunId { number: parent.run, born: run.born });
        }
        Some(parent)
    }

    fn run(&self, at: Position) -> Option<&Run> {
        self.runs.get(at.run as usize)
    }

    fn run_mut(&mut self, at: Position) -> Option<&mut Run> {
        self.runs.get_mut(at.run as usize)
    }

    /// Returns whether a block's end is not one of ours, or its start is not.
    pub(super) fn is_part(&self, at: Position) -> bool {
        self.run(at).is_some_and(|run| run.parts.is_some())
    }

    fn branch_mut(&mut self, at: Position) -> Option<&mut Branch> {
        self.runs.get_mut(at.run as usize)?.branch_mut(at.at)
    }
}
