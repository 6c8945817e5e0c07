//! Content of one engine's cache, as its KV events report it.
//!
//! The engine's own block hashes are opaque. They are kept only to find, at removal, which blocks they
//! stored. A block that is stored twice has to be removed twice. One with an unknown parent is ignored.

#![expect(clippy::indexing_slicing, reason = "tiers are 0, 1 and 2")]

use std::ops::Range;

mod chunks;
mod groups;
mod hashes;
mod parents;

use groups::Groups;
use hashes::hash_tokens;
pub(super) use hashes::seed_of;
use parents::Parents;

use super::{
    block_positions::Position,
    eviction::{Queueable, RunId},
    holders::tier_index,
    memory::difference,
    runs::{NewBlocks, NewPart, Runs, Victim},
    tree::TreeWriter,
};
use crate::{
    events::{ExtraKey, MAX_BLOCK_SIZE, Stored, Tier},
    hash::chain_in_place,
    id::BlockHash,
};

/// The blocks of one engine.
#[derive(Debug, Default)]
pub(super) struct EngineCache {
    /// Number of the engine's holder for each tier.
    holders: [Option<u32>; 3],
    runs: Runs,
    groups: Groups,
    parents: Parents,
    /// Number of the engine's blocks that one name stands for in each tier, where that is more than one.
    chunks: [usize; 3],
    /// A store with tokens had blocks that could not be placed.
    orphaned: bool,
    names_adapters: bool,
}

/// Effect of a store event.
#[derive(Debug, Default)]
pub(super) struct StoreEffect {
    /// Change of the bytes of the engine's blocks.
    pub(super) bytes: i64,
    /// Blocks that could not be placed: their parent or size is unknown.
    pub(super) orphans: u64,
}

impl EngineCache {
    /// Returns the number of runs.
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Returns whether a run has an entry in the eviction queue.
    pub(super) fn is_queued(&self, run: RunId) -> bool {
        self.runs.is_queued(run)
    }

    /// Returns the runs that have to be queued since the last call.
    pub(super) fn queueable(&mut self) -> &mut Queueable {
        self.runs.queueable()
    }

    /// Applies a store event of the followed group. `holder` assigns the holder of a tier that is used for
    /// the first time. Returns the number of blocks that cannot be placed.
    fn store(
        &mut self,
        tree: &mut TreeWriter,
        stored: Stored,
        block_size: usize,
        holder: impl FnOnce(Tier) -> Option<u32>,
    ) -> u64 {
        let tier = tier_index(stored.tier);
        let engine_size = stored.block_size as usize;
        if stored.has_tokens() && !(1..=MAX_BLOCK_SIZE as usize).contains(&engine_size) {
            return stored.hashes.len() as u64;
        }
        if self.holders[tier].is_none() {
            self.holders[tier] = holder(stored.tier);
        }
        let Some(holder) = self.holders[tier] else { return 0 };
        self.store_blocks(tree, stored, block_size, (tier, holder))
    }

    /// Stores an event's blocks in a tier. Returns the number of blocks that cannot be placed.
    fn store_blocks(
        &mut self,
        tree: &mut TreeWriter,
        mut stored: Stored,
        block_size: usize,
        to: (usize, u32),
    ) -> u64 {
        let (mut parent, seed) = match stored.parent {
            None => (None, seed_of(&stored)),
            Some(parent) => match self.runs.find(parent) {
                Some(at) => (Some(at), self.runs.seed(at)),
                None if self.parents.is_none(parent) => (None, seed_of(&stored)),
                None if stored.has_tokens() => return stored.hashes.len() as u64,
                None => (None, 0),
            },
        };
        if let Some(parent) = parent {
            self.runs.mark_used(parent);
        }
        let (all, blocks) = (stored.hashes.len(), stored.blocks());
        let (ours, step) = self.hash(&mut stored, parent, seed, block_size);
        let mut new = NewBlocks { engine: std::mem::take(&mut stored.hashes), ours, step, seed };
        let (mut orphans, mut number, mut known) = (0, 0, Vec::new());
        while let Some(hash) = new.engine.get(number).copied() {
            match self.runs.find(hash) {
                // The hash names another prefix already: it identifies the block's tokens alone, as in old
                // versions of SGLang.
                Some(at) if number < blocks && self.runs.parent(at) != parent => {
                    orphans += (all - number) as u64;
                    break;
                }
                Some(at) => {
                    self.runs.mark_used(at);
                    if !stored.reused || self.runs.stored(at)[to.0] == 0 {
                        known.push(at);
                    }
                    (parent, number) = (Some(at), number + 1);
                    continue;
                }
                // Events of offloaded blocks have no tokens. Without an earlier event that had them, our
                // hashes of the block are unknown.
                None if number >= blocks => {
                    (orphans, number) = (orphans + 1, number + 1);
                    continue;
                }
                None => self.add_known(tree, &mut known, to),
            }
            let last = if step > 0 {
                let (run, added) = self.runs.push(parent, &mut new, number..blocks, to.0);
                self.runs.cover_blocks(tree, run, added.clone(), to.1);
                number += added.len();
                added.last().map(|at| Position { run, at })
            } else {
                let at = self.push_part(&stored, (hash, number, all - number), parent, seed, block_size);
                self.add(tree, at, &[at], to);
                number += 1;
                Some(at)
            };
            if last.is_none() {
                break;
            }
            parent = last;
        }
        self.add_known(tree, &mut known, to);
        orphans
    }

    /// Counts blocks that the engine has reported before once more in a tier.
    fn add_known(&mut self, tree: &mut TreeWriter, known: &mut Vec<Position>, to: (usize, u32)) {
        let mut rest = &known[..];
        while let [first, ..] = rest {
            let count = self.add(tree, *first, rest, to);
            rest = rest.get(count..).unwrap_or_default();
        }
        known.clear();
    }

    /// Returns our hashes of an event's blocks, and how many each block has. It has 0 if it does not
    /// consist of whole ones of ours.
    fn hash(
        &self,
        stored: &mut Stored,
        parent: Option<Position>,
        seed: u64,
        block_size: usize,
    ) -> (Vec<BlockHash>, u32) {
        let mut ours = Vec::new();
        let size = stored.block_size as usize;
        if !stored.has_tokens() || !size.is_multiple_of(block_size) || self.runs.open_tokens(parent) > 0 {
            return (ours, 0);
        }
        let chain = self.runs.last_hash(parent);
        self.runs.prefetch(&stored.hashes);
        match stored.locals.take_if(|locals| locals.seed == seed && locals.size == block_size) {
            // Chains the hashes in place, so that no buffer is needed.
            Some(locals) => ours = chain_in_place(chain, locals.hashes),
            None => hash_tokens(stored, chain, seed, block_size, &mut ours),
        }
        (ours, u32::try_from(size / block_size).unwrap_or(1))
    }

    fn push_part(
        &mut self,
        stored: &Stored,
        (engine, number, more): (u64, usize, usize),
        parent: Option<Position>,
        seed: u64,
        block_size: usize,
    ) -> Position {
        let size = stored.block_size as usize;
        let tokens = stored.token_ids.get(number * size..(number + 1) * size).unwrap_or_default();
        let keys = stored.extra_keys.get(number).map_or(&[][..], Vec::as_slice);
        let objects: Vec<u64> = keys.iter().filter_map(ExtraKey::object).collect();
        let block = NewPart { engine, tokens, objects: &objects, seed, more };
        self.runs.push_part(parent, &block, block_size)
    }

    /// Counts the first of some blocks in a tier, together with those that continue its run and are also new
    /// there. Returns how many blocks that are.
    fn add(
        &mut self,
        tree: &mut TreeWriter,
        first: Position,
        blocks: &[Position],
        (tier, holder): (usize, u32),
    ) -> usize {
        let count = self.runs.stored(first)[tier];
        if count > 0 || self.runs.is_part(first) {
            self.runs.set_stored(first, tier, count.saturating_add(1));
            if count == 0 {
                self.runs.list_completed(tree, first, tier, holder);
            }
            return 1;
        }
        let mut end = first.at;
        for at in blocks {
            if *at != (Position { at: end, ..first }) || self.runs.stored(*at)[tier] > 0 {
                break;
            }
            self.runs.set_stored(*at, tier, 1);
            end += 1;
        }
        self.runs.cover_blocks(tree, first.run, first.at..end, holder);
        (end - first.at) as usize
    }

    /// Applies a removal event of the followed group. Engines free the deepest block first, but any order is
    /// correct. Forgets the whole engine if the removal leaves blocks in other runs, and the index cannot
    /// know whether its own blocks of those runs are complete.
    fn remove(&mut self, tree: &mut TreeWriter, hashes: &[u64], tier: Tier) {
        let tier = tier_index(tier);
        self.runs.prefetch(hashes);
        let mut rest = hashes;
        while !rest.is_empty() {
            let Some(count) = self.remove_some(tree, rest, tier) else {
                self.clear(tree);
                break;
            };
            rest = rest.get(count..).unwrap_or_default();
        }
    }

    /// Removes the first of some blocks from a tier, together with those that follow each other in its run.
    /// Returns the number of removed blocks; `None` if others are left, and the index cannot know whether its
    /// own blocks of those are complete.
    fn remove_some(&mut self, tree: &mut TreeWriter, hashes: &[u64], tier: usize) -> Option<usize> {
        let Some(at) = hashes.first().and_then(|hash| self.runs.find(*hash)) else { return Some(1) };
        match self.runs.stored(at)[tier] {
            0 => {}
            1 if self.runs.is_part(at) => {
                if !self.take_out_part(tree, at, tier) {
                    return None;
                }
                self.runs.trim(at);
            }
            1 => {
                let blocks = self.runs.leaving(at, hashes, tier);
                self.uncover(tree, at.run, blocks.clone(), tier);
                self.runs.leave(at.run, blocks.clone(), tier);
                return Some(blocks.len());
            }
            count => self.runs.set_stored(at, tier, count - 1),
        }
        Some(1)
    }

    /// Returns whether blocks with tokens could not be placed since the last call.
    pub(super) fn take_orphaned(&mut self) -> bool {
        std::mem::take(&mut self.orphaned)
    }

    /// Returns whether a stored block had the name of its adapter. A number names none: each engine counts
    /// its adapters itself.
    pub(super) fn names_adapters(&self) -> bool {
        self.names_adapters
    }

    /// Decides what the eviction queue does with a run whose turn has come.
    pub(super) fn victim(&mut self, run: RunId) -> Victim {
        self.runs.victim(run)
    }

    /// Forgets the last block of a run in all tiers to free memory, although the engine still has it.
    pub(super) fn evict(&mut self, tree: &mut TreeWriter, tail: Position) -> i64 {
        let before = self.bytes();
        if let Some(hash) = self.runs.engine(tail) {
            self.evict_sides(tree, hash);
        }
        for (tier, count) in self.runs.stored(tail).into_iter().enumerate() {
            if count == 0 {
                continue;
            }
            if self.runs.is_part(tail) {
                // Nothing follows the last block of a run.
                self.take_out_part(tree, tail, tier);
            } else {
                self.runs.set_stored(tail, tier, 0);
                self.uncover(tree, tail.run, tail.at..tail.at + 1, tier);
            }
        }
        self.runs.trim(tail);
        difference(self.bytes(), before)
    }

    /// Removes all blocks.
    pub(super) fn clear(&mut self, tree: &mut TreeWriter) -> i64 {
        let before = self.bytes();
        self.clear_sides(tree);
        for number in self.runs.numbers().rev() {
            for (tier, holder) in self.holders.iter().enumerate() {
                let Some(holder) = holder else { continue };
                for ours in self.runs.held(number, tier).into_iter().rev() {
                    self.runs.uncover(tree, number, ours, *holder);
                }
            }
        }
        self.runs.reset();
        difference(self.bytes(), before)
    }

    fn uncover(&mut self, tree: &mut TreeWriter, run: u32, blocks: Range<u32>, tier: usize) {
        if let Some(holder) = self.holders[tier] {
            self.runs.uncover_blocks(tree, run, blocks, holder);
        }
    }

    /// Removes from one tier a block whose end is not the end of one of our blocks. Returns false if blocks
    /// that contain it may still be listed.
    fn take_out_part(&mut self, tree: &mut TreeWriter, at: Position, tier: usize) -> bool {
        let consistent = self.holders[tier].is_none_or(|holder| self.runs.unlist(tree, at, tier, holder));
        self.runs.set_stored(at, tier, 0);
        consistent
    }
}
