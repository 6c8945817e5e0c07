//! Offloaded chunks of several of the engine's blocks. Events without tokens name a chunk by its last block
//! (vLLM's `OffloadingConnector` with a larger `block_size`).
//!
//! ```text
//! device     1 2 3 4 5 6 7 8      blocks of 16 tokens
//! host             4       8      chunks of 64 tokens: 4 names blocks 1 to 4
//! ```

use std::borrow::Cow;

use super::{super::holders::AssignHolders, EngineCache, tier_index};
use crate::events::{MAX_BLOCK_SIZE, Stored, Tier};

impl EngineCache {
    /// Has a store without tokens name all blocks of its chunks, and notes the size of the tier's chunks. It
    /// is not known while the index has none of the named blocks, and for blocks that are not whole ones of
    /// ours.
    pub(super) fn name_blocks_of_chunks(
        &mut self,
        stored: &mut Stored,
        block_size: usize,
        holders: &mut impl AssignHolders,
    ) {
        let size = stored.block_size as usize;
        if !(1..=MAX_BLOCK_SIZE as usize).contains(&size) || !size.is_multiple_of(block_size) {
            return;
        }
        let ours = size / block_size;
        let known = stored.hashes.iter().find_map(|hash| self.runs.find(*hash));
        let step = known.map_or(0, |at| self.runs.step(at));
        if step == 0 || !ours.is_multiple_of(step) {
            return;
        }
        holders.at_once(stored.tier, u32::try_from(ours).unwrap_or(1));
        self.chunks[tier_index(stored.tier)] = ours / step;
        if let Cow::Owned(all) = self.blocks_of_chunks(&stored.hashes, stored.tier, |_| true) {
            stored.hashes = all;
        }
    }

    /// Returns the blocks of the chunks that a removal names.
    pub(super) fn removed_blocks<'a>(&self, hashes: &'a [u64], tier: Tier) -> Cow<'a, [u64]> {
        // The blocks of a chunk that could not be placed were not counted.
        self.blocks_of_chunks(hashes, tier, |count| count > 0)
    }

    fn blocks_of_chunks<'a>(
        &self,
        hashes: &'a [u64],
        tier: Tier,
        is_meant: impl Fn(u16) -> bool,
    ) -> Cow<'a, [u64]> {
        let tier = tier_index(tier);
        let chunk = self.chunks[tier];
        if chunk < 2 {
            return Cow::Borrowed(hashes);
        }
        let mut all = Vec::with_capacity(hashes.len() * chunk.min(64));
        for hash in hashes {
            let begin = all.len();
            let last = self.runs.find(*hash).filter(|at| is_meant(self.runs.stored(*at)[tier]));
            let path = std::iter::successors(last, |at| self.runs.parent(*at)).take(chunk);
            all.extend(path.filter_map(|at| self.runs.engine(at)));
            if all.len() - begin == chunk {
                all[begin..].reverse();
            } else {
                all.truncate(begin);
                all.push(*hash);
            }
        }
        Cow::Owned(all)
    }
}
