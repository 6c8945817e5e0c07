//! Content of one engine's cache, as its KV events report it.
//!
//! The engine's own block hashes are opaque. They are kept only to find, at removal, which blocks they stored
//! (H2). A block that is stored twice has to be removed twice. A block with an unknown parent cannot be
//! placed and is ignored.

#![expect(clippy::indexing_slicing, reason = "tiers are 0, 1 and 2")]

use std::sync::atomic::Ordering;

use super::{
    block_positions::Position,
    eviction::{Queueable, RunId},
    holders::{GapCounter, tier_index},
    memory::difference,
    runs::{NewBlock, Runs, Victim},
    shards::{Change, TableWriter},
};
use crate::{
    events::{ExtraKey, Stored, Tier},
    facts::MAX_BLOCK_SIZE,
    hash::{BlockContent, Salt, extend, extend_block},
    id::BlockHash,
};

/// The holder of one tier, and its gap counter.
#[derive(Clone, Debug)]
pub(super) struct TierHolder {
    pub(super) holder: u32,
    pub(super) gaps: GapCounter,
}

/// The blocks of one engine.
#[derive(Debug, Default)]
pub(super) struct EngineCache {
    holders: [Option<TierHolder>; 3],
    runs: Runs,
    /// Buffer for the bytes of a block while it is hashed.
    bytes: Vec<u8>,
    /// Buffer for the positions of an event's blocks.
    positions: Vec<Position>,
}

/// Effect of a store event.
#[derive(Debug, Default)]
pub(super) struct StoreEffect {
    pub(super) change: Change,
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

    /// Applies a store event. `holder` assigns the holder of a tier that is used for the first time.
    pub(super) fn store(
        &mut self,
        table: &mut TableWriter,
        stored: &Stored,
        block_size: usize,
        holder: impl FnOnce(Tier) -> Option<TierHolder>,
    ) -> StoreEffect {
        let orphans = stored.hashes.len() as u64;
        let tier = tier_index(stored.tier);
        let engine_size = stored.block_size as usize;
        let has_tokens = !stored.token_ids.is_empty();
        if has_tokens && !(1..=MAX_BLOCK_SIZE as usize).contains(&engine_size) {
            return StoreEffect { orphans, ..StoreEffect::default() };
        }
        if self.holders[tier].is_none() {
            self.holders[tier] = holder(stored.tier);
        }
        let Some(holder) = self.holders[tier].as_ref().map(|holder| holder.holder) else {
            return StoreEffect::default();
        };
        let before = self.runs.bytes();
        let mut effect = StoreEffect { orphans: self.locate(stored, block_size), ..StoreEffect::default() };
        let positions = std::mem::take(&mut self.positions);
        table.prefetch(positions.iter().flat_map(|at| self.runs.our_hashes(*at)));
        positions.iter().for_each(|at| effect.change += self.add(table, *at, tier, holder));
        self.positions = positions;
        effect.change.bytes += difference(self.runs.bytes(), before);
        effect
    }

    /// Fills `positions` with those of an event's blocks, and creates blocks that are new. Returns the number
    /// of blocks that cannot be placed.
    fn locate(&mut self, stored: &Stored, block_size: usize) -> u64 {
        self.positions.clear();
        let has_tokens = !stored.token_ids.is_empty();
        let engine_size = stored.block_size as usize;
        let (mut parent, seed) = match stored.parent {
            None => (None, seed_of(stored)),
            Some(parent) => match self.runs.find(parent) {
                Some(at) => (Some(at), self.runs.seed(at)),
                None if has_tokens => return stored.hashes.len() as u64,
                None => (None, 0),
            },
        };
        if let Some(parent) = parent {
            self.runs.mark_used(parent);
        }
        self.runs.prefetch(&stored.hashes);
        let mut chain = self.runs.last_hash(parent);
        let mut tokens = stored.token_ids.chunks_exact(engine_size.max(1));
        let (mut orphans, mut objects) = (0, Vec::new());
        for (number, hash) in stored.hashes.iter().enumerate() {
            let at = match (self.runs.find(*hash), tokens.next()) {
                // The hash names another prefix already: it identifies the block's tokens alone, as in old
                // versions of SGLang.
                (Some(known), Some(_)) if self.runs.parent(known) != parent => {
                    return orphans + (stored.hashes.len() - number) as u64;
                }
                (Some(known), _) => {
                    self.runs.mark_used(known);
                    known
                }
                // Events of offloaded blocks have no tokens. Without an earlier event that had them, our
                // hashes of the block are unknown.
                (None, None) => {
                    orphans += 1;
                    continue;
                }
                (None, Some(tokens)) => {
                    let keys = stored.extra_keys.get(number).map_or(&[][..], Vec::as_slice);
                    let more = stored.hashes.len() - number;
                    if engine_size.is_multiple_of(block_size) && self.runs.open_tokens(parent) == 0 {
                        let step = u32::try_from(engine_size / block_size).unwrap_or(1);
                        let bytes = &mut self.bytes;
                        let add_hashes = |out: &mut Vec<BlockHash>| {
                            if keys.iter().any(|key| matches!(key, ExtraKey::Object { .. })) {
                                extend_with_objects(chain, tokens, block_size, seed, keys, out);
                            } else {
                                extend(chain, tokens, block_size, seed, bytes, out);
                            }
                        };
                        self.runs.push(parent, *hash, (seed, step, more), add_hashes)
                    } else {
                        objects.clear();
                        objects.extend(keys.iter().filter_map(ExtraKey::object));
                        let block = NewBlock { engine: *hash, tokens, objects: &objects, seed, more };
                        self.runs.push_part(parent, &block, block_size)
                    }
                }
            };
            self.positions.push(at);
            parent = Some(at);
            chain = self.runs.last_hash(parent);
        }
        orphans
    }

    /// Applies a removal event. Engines free the deepest block first, but any order is correct. Forgets
    /// everything if it leaves blocks in other runs of which it cannot be said whether ours are complete.
    pub(super) fn remove(&mut self, table: &mut TableWriter, hashes: &[u64], tier: Tier) -> Change {
        let tier = tier_index(tier);
        let (before, mut change) = (self.runs.bytes(), Change::default());
        self.runs.prefetch(hashes);
        let positions = hashes.iter().filter_map(|hash| self.runs.find(*hash));
        table.prefetch(positions.flat_map(|at| self.runs.our_hashes(at)));
        for hash in hashes {
            let Some(at) = self.runs.find(*hash) else { continue };
            match self.runs.stored(at)[tier] {
                0 => {}
                1 => {
                    let (taken, consistent) = self.take_out(table, at, tier);
                    change += taken;
                    if !consistent {
                        change.bytes += difference(self.runs.bytes(), before);
                        change += self.clear(table);
                        return change;
                    }
                    self.runs.trim(at);
                }
                count => self.runs.set_stored(at, tier, count - 1),
            }
        }
        change.bytes += difference(self.runs.bytes(), before);
        change
    }

    /// Decides what the eviction queue does with a run whose turn has come.
    pub(super) fn victim(&mut self, run: RunId) -> Victim {
        self.runs.victim(run)
    }

    /// Forgets the last block of a run in all tiers to free memory, although the engine still has it.
    pub(super) fn evict(&mut self, table: &mut TableWriter, tail: Position) -> Change {
        let (before, mut change) = (self.runs.bytes(), Change::default());
        for (tier, count) in self.runs.stored(tail).into_iter().enumerate() {
            if count > 0 {
                // Nothing follows the last block of a run.
                change += self.take_out(table, tail, tier).0;
            }
        }
        self.runs.trim(tail);
        change.bytes += difference(self.runs.bytes(), before);
        change
    }

    /// Removes all blocks.
    pub(super) fn clear(&mut self, table: &mut TableWriter) -> Change {
        let mut change = Change::default();
        // Blocks are removed in no useful order, so lookups must not bisect until all of them are gone.
        self.set_gaps(1);
        change.bytes -= difference(self.runs.bytes(), 0);
        for (listed, hash) in self.runs.drain() {
            for (holder, listed) in self.holders.iter().zip(listed) {
                if let Some(holder) = holder.as_ref().filter(|_| listed) {
                    change += table.release(hash, holder.holder);
                }
            }
        }
        self.set_gaps(0);
        change
    }

    fn set_gaps(&self, gaps: u32) {
        for count in self.holders.iter().flatten().filter_map(|holder| holder.gaps.count()) {
            count.store(gaps, Ordering::Release);
        }
    }

    fn add(&mut self, table: &mut TableWriter, at: Position, tier: usize, holder: u32) -> Change {
        let count = self.runs.stored(at)[tier];
        let parent = self.runs.parent(at);
        let first_child = count == 0 && parent.is_some_and(|parent| !self.runs.has_child(parent, tier));
        self.runs.set_stored(at, tier, count.saturating_add(1));
        let mut change = Change::default();
        if count > 0 {
            return change;
        }
        if self.runs.is_part(at) {
            change += self.runs.list_completed(table, at, tier, holder);
        }
        for hash in self.runs.our_hashes(at) {
            change += table.add(*hash, holder);
        }
        if self.runs.has_child(at, tier) {
            self.add_gaps(tier, -1);
        }
        if first_child && parent.is_some_and(|parent| self.runs.stored(parent)[tier] == 0) {
            self.add_gaps(tier, 1);
        }
        change
    }

    /// Removes a block from one tier. Returns false if blocks may still be listed of which it was a part.
    fn take_out(&mut self, table: &mut TableWriter, at: Position, tier: usize) -> (Change, bool) {
        let (mut change, mut consistent) = (Change::default(), true);
        if self.runs.has_child(at, tier) {
            // Count the gap before it exists: a lookup must not bisect across it.
            self.add_gaps(tier, 1);
        }
        if let Some(holder) = self.holders[tier].as_ref().map(|holder| holder.holder) {
            for hash in self.runs.our_hashes(at).iter().rev() {
                change += table.release(*hash, holder);
            }
            if self.runs.is_part(at) {
                let (unlisted, all) = self.runs.unlist(table, at, tier, holder);
                (change, consistent) = (change + unlisted, all);
            }
        }
        self.runs.set_stored(at, tier, 0);
        if let Some(parent) = self.runs.parent(at)
            && self.runs.stored(parent)[tier] == 0
            && !self.runs.has_child(parent, tier)
        {
            self.add_gaps(tier, -1);
        }
        (change, consistent)
    }

    fn add_gaps(&self, tier: usize, by: i32) {
        let counter = self.holders.get(tier).and_then(Option::as_ref).and_then(|holder| holder.gaps.count());
        let Some(count) = counter else { return };
        if by > 0 {
            count.fetch_add(1, Ordering::Release);
        } else {
            count.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Hashes our blocks in a block of the engine with multimodal objects. An object begins at its offset; where
/// it ends is not known, so all blocks from there on have it.
fn extend_with_objects(
    chain: Option<BlockHash>,
    tokens: &[u32],
    block_size: usize,
    seed: u64,
    keys: &[ExtraKey],
    out: &mut Vec<BlockHash>,
) {
    let (mut chain, mut objects) = (chain, Vec::new());
    for (number, tokens) in tokens.chunks_exact(block_size.max(1)).enumerate() {
        let end = i64::try_from((number + 1) * block_size).unwrap_or(i64::MAX);
        objects.clear();
        objects.extend(keys.iter().filter(|key| key.offset() < end).filter_map(ExtraKey::object));
        objects.sort_unstable();
        let hash = extend_block(chain, &BlockContent { tokens, objects: &objects }, seed);
        out.push(hash);
        chain = Some(hash);
    }
}

/// Returns the seed of a prompt's local hashes, from what the engine mixed into the hash of its first block:
/// the LoRA adapter, and any other text, which is the request's cache salt.
fn seed_of(stored: &Stored) -> u64 {
    let lora = stored.lora.as_deref();
    let keys = stored.extra_keys.first().into_iter().flatten();
    let mut others = keys.filter_map(ExtraKey::text).filter(|text| Some(*text) != lora);
    let salt = others.next().map(|first| {
        let more: Vec<&str> = others.collect();
        // Several texts are not a salt of any request: their blocks match nothing.
        if more.is_empty() { first.to_owned() } else { format!("{first}\0{}", more.join("\0")) }
    });
    Salt { lora, cache: salt.as_deref() }.seed()
}
