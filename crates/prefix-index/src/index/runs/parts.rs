//! State of a run whose blocks do not end where ours do.

use super::super::memory::{heap, shrink};

/// State of a run of such blocks, besides its blocks and our hashes.
#[derive(Debug, Default)]
pub(super) struct Parts {
    /// Tokens in a block of the engine.
    pub(super) size: usize,
    /// Tokens in a block of ours.
    pub(super) ours: usize,
    /// Tokens between the start of our block in which the run starts, and the run's start.
    pub(super) before: usize,
    /// Tokens of all blocks.
    pub(super) tokens: Vec<u32>,
    /// Multimodal objects: index of the block, and hash. Sorted by block.
    pub(super) objects: Vec<(u32, u64)>,
    /// Tiers in which a block of ours is in the block table, one bit each, by block.
    pub(super) listed: Vec<u8>,
}

impl Parts {
    pub(super) fn bytes(&self) -> usize {
        heap(size_of::<Self>())
            + heap(self.tokens.capacity() * size_of::<u32>())
            + heap(self.objects.capacity() * size_of::<(u32, u64)>())
            + heap(self.listed.capacity())
    }

    pub(super) fn shrink(&mut self) {
        shrink(&mut self.tokens);
        shrink(&mut self.objects);
        shrink(&mut self.listed);
    }

    /// Keeps the parts of the first `blocks` blocks. Returns the number of our blocks that end in them.
    pub(super) fn truncate(&mut self, blocks: usize) -> usize {
        self.tokens.truncate(blocks * self.size);
        while self.objects.last().is_some_and(|(block, _)| *block as usize >= blocks) {
            self.objects.pop();
        }
        let ours = self.ended(blocks);
        self.listed.truncate(ours);
        ours
    }

    /// Returns how many of our blocks end within the first `blocks` blocks.
    pub(super) fn ended(&self, blocks: usize) -> usize {
        (self.before + blocks * self.size) / self.ours.max(1)
    }

    /// Returns the number of tokens after the last end of one of our blocks, at the end of `blocks` blocks.
    pub(super) fn open(&self, blocks: usize) -> usize {
        (self.before + blocks * self.size) % self.ours.max(1)
    }

    /// Returns our blocks that overlap a block, and may end after the run.
    pub(super) fn overlapping(&self, block: usize) -> std::ops::Range<usize> {
        let ours = self.ours.max(1);
        self.ended(block)..(self.before + (block + 1) * self.size).div_ceil(ours)
    }

    /// Returns the tiers that list our hashes, for each of them.
    pub(super) fn listed(&self) -> &[u8] {
        &self.listed
    }
}
