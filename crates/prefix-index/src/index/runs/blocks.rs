//! The engine's blocks of one run: their hashes, and how often each is stored.

#![expect(clippy::indexing_slicing, reason = "tiers are 0, 1 and 2")]

use std::ops::Range;

use super::{
    super::memory::{heap, reserve, shrink},
    Counts,
};

/// A block that is stored once, and on the device only. Nearly all are.
const ONCE: Counts = [1, 0, 0];

/// Consecutive blocks.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// The engine's hashes.
    hashes: Vec<u64>,
    /// How often each block is stored. Empty while that is `ONCE` for all blocks.
    counts: Vec<Counts>,
}

impl Blocks {
    pub(super) fn len(&self) -> usize {
        self.hashes.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// Returns the engine's hashes.
    pub(super) fn hashes(&self) -> &[u64] {
        &self.hashes
    }

    /// Returns how often a block is stored.
    pub(super) fn stored(&self, at: usize) -> Counts {
        let known = self.counts.get(at).copied();
        known.unwrap_or(if at < self.len() && self.counts.is_empty() { ONCE } else { [0; 3] })
    }

    /// Returns whether all blocks are stored once in a tier, and in no other one.
    pub(super) fn are_once_in(&self, tier: usize) -> bool {
        self.counts.is_empty() && ONCE[tier] == 1
    }

    /// Sets how often blocks are stored in a tier.
    pub(super) fn set_stored(&mut self, blocks: Range<usize>, tier: usize, count: u16) {
        if self.counts.is_empty() {
            if ONCE[tier] == count {
                return;
            }
            self.counts.resize(self.hashes.len(), ONCE);
        }
        self.counts.get_mut(blocks).into_iter().flatten().for_each(|stored| stored[tier] = count);
    }

    /// Makes space for more blocks.
    pub(super) fn reserve(&mut self, more: usize) {
        reserve(&mut self.hashes, more);
    }

    /// Appends blocks that are stored equally often.
    pub(super) fn extend(&mut self, hashes: &[u64], stored: Counts) {
        reserve(&mut self.hashes, hashes.len());
        self.count_new(hashes.len(), stored);
        self.hashes.extend_from_slice(hashes);
    }

    /// Takes the first blocks, without copying them.
    pub(super) fn fill(&mut self, hashes: Vec<u64>, stored: Counts) {
        self.count_new(hashes.len(), stored);
        self.hashes = hashes;
        shrink(&mut self.hashes);
    }

    fn count_new(&mut self, blocks: usize, stored: Counts) {
        if self.counts.is_empty() {
            if stored == ONCE {
                return;
            }
            self.counts.resize(self.hashes.len(), ONCE);
        }
        reserve(&mut self.counts, blocks);
        self.counts.resize(self.counts.len() + blocks, stored);
    }

    /// Removes the blocks after the first `len`.
    pub(super) fn truncate(&mut self, len: usize) {
        self.hashes.truncate(len);
        self.counts.truncate(len);
    }

    /// Returns the last block that is stored.
    pub(super) fn last_stored(&self) -> Option<usize> {
        match self.counts.len() {
            0 => self.hashes.len().checked_sub(1),
            _ => self.counts.iter().rposition(|stored| *stored != [0; 3]),
        }
    }

    pub(super) fn shrink(&mut self) {
        shrink(&mut self.hashes);
        shrink(&mut self.counts);
    }

    /// Returns the bytes that the blocks take on the heap.
    pub(super) fn bytes(&self) -> usize {
        heap(self.hashes.capacity() * size_of::<u64>()) + heap(self.counts.capacity() * size_of::<Counts>())
    }
}
