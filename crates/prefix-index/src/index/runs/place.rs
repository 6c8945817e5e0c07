//! Places of a run's blocks in the tree of all prefixes, and their holders there.

use std::ops::Range;

use super::{
    super::{
        block_positions::Position,
        invariants::Invariant,
        trail::Stretch,
        tree::{Spot, TreeWriter},
    },
    Runs,
};
use crate::id::BlockHash;

impl Runs {
    /// Returns the run and the index of the last of our hashes that ended up to the end of a block.
    pub(super) fn last_ended(&self, at: Option<Position>) -> Option<(u32, usize)> {
        let mut next = at;
        while let Some(at) = next {
            let run = self.run(at)?;
            let blocks = at.at as usize + 1;
            let ended = run.parts.as_ref().map_or(blocks * run.step as usize, |parts| parts.ended(blocks));
            if let Some(last) = ended.checked_sub(1) {
                return Some((at.run, last));
            }
            next = run.parent;
        }
        None
    }

    /// Returns our hash of the last of our blocks that ended up to the end of a block.
    pub(in super::super) fn last_hash(&self, at: Option<Position>) -> Option<BlockHash> {
        let (run, last) = self.last_ended(at)?;
        self.runs.get(run as usize)?.our_hashes.get(last).copied()
    }

    /// Notes that a holder has blocks of a run.
    pub(in super::super) fn cover_blocks(
        &mut self,
        tree: &mut TreeWriter,
        number: u32,
        blocks: Range<u32>,
        holder: u32,
    ) {
        let ours = self.hashes_of(tree, number, blocks);
        self.cover(tree, number, ours, holder);
    }

    /// Notes that a holder no longer has blocks of a run.
    pub(in super::super) fn uncover_blocks(
        &mut self,
        tree: &mut TreeWriter,
        number: u32,
        blocks: Range<u32>,
        holder: u32,
    ) {
        let ours = self.hashes_of(tree, number, blocks);
        self.uncover(tree, number, ours, holder);
    }

    /// Returns which of our hashes of a run stand for some of its blocks.
    fn hashes_of(&self, tree: &TreeWriter, number: u32, blocks: Range<u32>) -> Range<usize> {
        let run = self.runs.get(number as usize);
        tree.check(Invariant::RunHashes, run.is_some());
        let step = run.map_or(0, |run| run.step as usize);
        blocks.start as usize * step..blocks.end as usize * step
    }

    /// Notes that a holder has the blocks of some of our hashes of a run.
    pub(in super::super) fn cover(
        &mut self,
        tree: &mut TreeWriter,
        number: u32,
        ours: Range<usize>,
        holder: u32,
    ) {
        if ours.is_empty() {
            return;
        }
        let Ok(after) = self.spot_before(tree, number, ours.start, holder) else { return };
        let mut stretches = Vec::new();
        let is_placed = self.change(number, |run| {
            tree.check(Invariant::RunHashes, ours.end <= run.our_hashes.len());
            let hashes = run.our_hashes.get(ours.clone()).unwrap_or_default();
            tree.place(after, hashes, holder, &mut stretches);
            let is_placed = !stretches.is_empty();
            for stretch in stretches {
                run.trail.add(Stretch { from: stretch.from + ours.start, ..stretch });
                tree.cover(&stretch, holder);
            }
            is_placed
        });
        // No worker holds the blocks that were placed for these only.
        if let Some(spot) = after.filter(|_| is_placed != Some(true)) {
            tree.trim(spot.slot);
        }
    }

    /// Reverts [`Runs::cover`].
    pub(in super::super) fn uncover(
        &mut self,
        tree: &mut TreeWriter,
        number: u32,
        ours: Range<usize>,
        holder: u32,
    ) {
        self.change(number, |run| tree.uncover(&mut run.trail, &run.our_hashes, ours, holder));
    }

    /// Returns where the hash before one of a run lies; none before the first one of a prompt. Fails if it
    /// cannot have a place.
    fn spot_before(
        &mut self,
        tree: &mut TreeWriter,
        number: u32,
        at: usize,
        holder: u32,
    ) -> Result<Option<Spot>, NoPlace> {
        let before = match at.checked_sub(1) {
            Some(before) => Some((number, before)),
            None => self.last_ended(self.runs.get(number as usize).and_then(|run| run.parent)),
        };
        let Some((run, last)) = before else { return Ok(None) };
        let found = self.change(run, |run| tree.locate(&mut run.trail, &run.our_hashes, last)).flatten();
        if found.is_some() {
            return Ok(found);
        }
        // Nobody has the blocks before it: the engine stores parts of them only.
        let (hashes, mut stretches) = (self.path(run, last), Vec::new());
        let placed = tree.place(None, &hashes, holder, &mut stretches);
        let Some(last) = stretches.last() else { return Err(NoPlace) };
        if placed < hashes.len() {
            tree.trim(last.slot);
            return Err(NoPlace);
        }
        Ok(Some(Spot { slot: last.slot, at: last.at + last.count - 1 }))
    }

    /// Returns our hashes from the root to one of a run.
    fn path(&self, run: u32, last: usize) -> Vec<BlockHash> {
        let (mut parts, mut next) = (Vec::new(), Some((run, last)));
        while let Some((number, last)) = next {
            let Some(run) = self.runs.get(number as usize) else { break };
            parts.push(run.our_hashes.get(..=last).unwrap_or_default());
            next = self.last_ended(run.parent);
        }
        parts.reverse();
        parts.concat()
    }

    /// Takes all runs, to remove their blocks from the tree.
    pub(in super::super) fn numbers(&self) -> Range<u32> {
        0..u32::try_from(self.runs.len()).unwrap_or(u32::MAX)
    }

    /// Returns the ranges of our hashes of a run that a tier holds.
    pub(in super::super) fn held(&self, number: u32, tier: usize) -> Vec<Range<usize>> {
        let Some(run) = self.runs.get(number as usize) else { return Vec::new() };
        let step = run.step as usize;
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let mut add = |range: Range<usize>| match ranges.last_mut().filter(|last| last.end == range.start) {
            Some(last) => last.end = range.end,
            None => ranges.push(range),
        };
        if let Some(parts) = &run.parts {
            let listed = parts.listed().iter().enumerate().filter(|(_, tiers)| **tiers & (1 << tier) != 0);
            listed.for_each(|(at, _)| add(at..at + 1));
        } else {
            let held = |at: &usize| run.blocks.stored(*at).get(tier).is_some_and(|count| *count > 0);
            (0..run.blocks.len()).filter(held).for_each(|at| add(at * step..(at + 1) * step));
        }
        ranges
    }

    /// Forgets all runs.
    pub(in super::super) fn reset(&mut self) {
        *self = Self { births: self.births, ..Self::default() };
    }
}

/// The blocks before cannot be in the tree, because of a collision of hashes.
struct NoPlace;
