//! One run: a sequence of blocks, each the parent of the next, and the branches to other runs.

#![expect(clippy::indexing_slicing, reason = "indexes that a search just found")]

use super::{
    super::{
        block_positions::Position,
        memory::{heap, reserve, shrink},
        trail::Trail,
    },
    Counts,
    blocks::Blocks,
    parts::Parts,
};
use crate::id::BlockHash;

#[derive(Debug, Default)]
pub(super) struct Run {
    /// The block that precedes the first one.
    pub(super) parent: Option<Position>,
    /// Seed of our local hashes.
    pub(super) seed: u64,
    /// Number of our hashes for each block; 0 if the blocks do not end where ours do, and in an unused index.
    pub(super) step: u32,
    /// State for blocks that do not end where ours do.
    pub(super) parts: Option<Box<Parts>>,
    pub(super) born: u32,
    /// The run has an entry in the eviction queue.
    pub(super) queued: bool,
    /// An event named the run since it was queued.
    pub(super) used: bool,
    pub(super) blocks: Blocks,
    pub(super) our_hashes: Vec<BlockHash>,
    /// Positions of our hashes in the tree.
    pub(super) trail: Trail,
    /// Sorted by `at`.
    pub(super) branches: Vec<Branch>,
}

/// A block that other runs follow.
#[derive(Debug)]
pub(super) struct Branch {
    at: u32,
    /// Number of runs that follow.
    runs: u32,
    /// Number of them whose first block is stored, by tier.
    pub(super) stored: [u32; 3],
}

impl Run {
    /// Returns the bytes that the run takes on the heap.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.bytes()
            + heap(self.our_hashes.capacity() * size_of::<BlockHash>())
            + heap(self.branches.capacity() * size_of::<Branch>())
            + self.trail.bytes()
            + self.parts.as_ref().map_or(0, |parts| parts.bytes())
    }

    /// Returns whether this is a run, and not an unused index.
    pub(super) fn in_use(&self) -> bool {
        self.step > 0 || self.parts.is_some()
    }

    /// Returns the number of blocks up to the last one that is stored or that another run follows.
    pub(super) fn needed(&self) -> usize {
        let followed = self.branches.last().map_or(0, |branch| branch.at as usize + 1);
        self.blocks.last_stored().map_or(0, |last| last + 1).max(followed)
    }

    /// Removes the blocks after the first `blocks`.
    pub(super) fn truncate(&mut self, blocks: usize) {
        if blocks >= self.blocks.len() {
            return;
        }
        self.blocks.truncate(blocks);
        let hashes = match &mut self.parts {
            Some(parts) => parts.truncate(blocks),
            None => blocks * self.step as usize,
        };
        self.our_hashes.truncate(hashes);
        self.trail.truncate(hashes);
    }

    /// Appends blocks with our hashes of them.
    pub(super) fn extend(&mut self, engine: &[u64], ours: &[BlockHash], stored: Counts) {
        reserve(&mut self.our_hashes, ours.len());
        self.our_hashes.extend_from_slice(ours);
        self.blocks.extend(engine, stored);
    }

    /// Takes the first blocks with our hashes of them, without copying them.
    pub(super) fn fill(&mut self, engine: Vec<u64>, ours: Vec<BlockHash>, stored: Counts) {
        self.our_hashes = ours;
        shrink(&mut self.our_hashes);
        self.blocks.fill(engine, stored);
    }

    pub(super) fn shrink(&mut self) {
        self.blocks.shrink();
        shrink(&mut self.our_hashes);
        if let Some(parts) = &mut self.parts {
            parts.shrink();
        }
    }

    /// Returns whether other runs follow a block or one after it.
    pub(super) fn is_followed_from(&self, at: u32) -> bool {
        self.branches.last().is_some_and(|branch| branch.at >= at)
    }

    /// Returns whether a block is the last one and no run follows it.
    pub(super) fn ends_at(&self, at: u32) -> bool {
        at as usize + 1 == self.blocks.len() && self.branch(at).is_none()
    }

    pub(super) fn branch(&self, at: u32) -> Option<&Branch> {
        self.branches.get(self.find_branch(at).ok()?)
    }

    pub(super) fn branch_mut(&mut self, at: u32) -> Option<&mut Branch> {
        let found = self.find_branch(at).ok()?;
        self.branches.get_mut(found)
    }

    /// Counts a run that starts after block `at`.
    pub(super) fn add_branch(&mut self, at: u32) {
        match self.find_branch(at) {
            Ok(found) => self.branches[found].runs += 1,
            Err(free) => {
                reserve(&mut self.branches, 1);
                self.branches.insert(free, Branch { at, runs: 1, stored: [0; 3] });
            }
        }
    }

    /// Reverts [`Run::add_branch`].
    pub(super) fn remove_branch(&mut self, at: u32) {
        let Ok(found) = self.find_branch(at) else { return };
        self.branches[found].runs -= 1;
        if self.branches[found].runs == 0 {
            self.branches.remove(found);
            shrink(&mut self.branches);
        }
    }

    fn find_branch(&self, at: u32) -> Result<usize, usize> {
        self.branches.binary_search_by_key(&at, |branch| branch.at)
    }
}
