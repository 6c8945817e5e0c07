//! Blocks of paged KV memory: shared by hash, allocated one by one, and evicted in the order of their last
//! use.
//!
//! Follows vLLM's pool: an unused block stays cached in the free queue until it is allocated again.

use std::collections::{HashMap, VecDeque};

/// Number of a block.
pub type BlockId = u32;

/// Marks the end of the free queue's links.
const NONE: u32 = u32::MAX;

/// A change of the cache's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheChange {
    /// A full block was computed.
    Stored {
        /// Hash of the block.
        hash: u64,
        /// Hash of the block before it; `None` for the first block of a prompt.
        parent: Option<u64>,
        /// Tag of the sequence that computed it.
        tag: u64,
        /// Position of the block in that sequence.
        position: u32,
    },
    /// A block was evicted.
    Removed {
        /// Hash of the block.
        hash: u64,
    },
}

#[derive(Clone, Copy, Debug)]
struct Block {
    hash: Option<u64>,
    holders: u32,
    /// Neighbours in the free queue; valid while the block is unused.
    before: u32,
    after: u32,
}

/// A fixed number of blocks.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    by_hash: HashMap<u64, BlockId>,
    /// Ends of the free queue. The first block is allocated next.
    first: u32,
    last: u32,
    free: u32,
    changes: VecDeque<CacheChange>,
    evicted: u64,
}

impl BlockPool {
    /// Creates a pool of `capacity` blocks, all free.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        let link = |at: u32| if at < capacity { at } else { NONE };
        let blocks = (0..capacity)
            .map(|at| Block { hash: None, holders: 0, before: at.wrapping_sub(1), after: link(at + 1) })
            .collect();
        Self {
            blocks,
            by_hash: HashMap::new(),
            first: link(0),
            last: capacity.wrapping_sub(1),
            free: capacity,
            changes: VecDeque::new(),
            evicted: 0,
        }
    }

    /// Returns the number of consecutive blocks from the start of a prompt that are cached.
    pub(crate) fn cached_run(&self, hashes: impl Iterator<Item = u64>) -> usize {
        hashes.take_while(|hash| self.by_hash.contains_key(hash)).count()
    }

    /// Returns the number of blocks that can be allocated: the unused ones.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Returns the number of blocks that are held.
    #[must_use]
    pub fn used(&self) -> u32 {
        u32::try_from(self.blocks.len()).unwrap_or(u32::MAX) - self.free
    }

    /// Returns the number of cached blocks that were evicted.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns whether a block is cached and unused.
    #[must_use]
    pub fn is_idle(&self, hash: u64) -> bool {
        self.by_hash.get(&hash).and_then(|id| self.block(*id)).is_some_and(|block| block.holders == 0)
    }

    /// Holds a cached block.
    pub fn share(&mut self, hash: u64) -> Option<BlockId> {
        let id = *self.by_hash.get(&hash)?;
        if self.block(id).is_some_and(|block| block.holders == 0) {
            self.unlink(id);
        }
        self.blocks.get_mut(id as usize)?.holders += 1;
        Some(id)
    }

    /// Allocates `count` blocks and appends them to `out`; allocates none when there are fewer.
    pub fn allocate(&mut self, count: u32, out: &mut Vec<BlockId>) -> bool {
        if count > self.free {
            return false;
        }
        for _ in 0..count {
            let id = self.first;
            self.unlink(id);
            let Some(block) = self.blocks.get_mut(id as usize) else { return false };
            block.holders = 1;
            if let Some(hash) = block.hash.take() {
                self.by_hash.remove(&hash);
                self.evicted += 1;
                self.changes.push_back(CacheChange::Removed { hash });
            }
            out.push(id);
        }
        true
    }

    /// Adds a held block to the cache, unless the cache already has an equal one.
    pub fn publish(&mut self, id: BlockId, hash: u64, parent: Option<u64>, tag: u64, position: u32) {
        if self.by_hash.contains_key(&hash) {
            return;
        }
        let Some(block) = self.blocks.get_mut(id as usize) else { return };
        block.hash = Some(hash);
        self.by_hash.insert(hash, id);
        self.changes.push_back(CacheChange::Stored { hash, parent, tag, position });
    }

    /// Releases the blocks of a sequence. Its last blocks are evicted before its first ones.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for id in blocks.iter().rev() {
            let Some(block) = self.blocks.get_mut(*id as usize) else { continue };
            block.holders = block.holders.saturating_sub(1);
            if block.holders == 0 {
                self.append(*id);
            }
        }
    }

    /// Returns the changes since the last call, oldest first.
    pub fn take_changes(&mut self) -> VecDeque<CacheChange> {
        std::mem::take(&mut self.changes)
    }

    fn block(&self, id: BlockId) -> Option<Block> {
        self.blocks.get(id as usize).copied()
    }

    fn unlink(&mut self, id: BlockId) {
        let Some(Block { before, after, .. }) = self.block(id) else { return };
        match self.blocks.get_mut(before as usize) {
            Some(block) => block.after = after,
            None => self.first = after,
        }
        match self.blocks.get_mut(after as usize) {
            Some(block) => block.before = before,
            None => self.last = before,
        }
        self.free -= 1;
    }

    fn append(&mut self, id: BlockId) {
        let last = std::mem::replace(&mut self.last, id);
        if let Some(block) = self.blocks.get_mut(id as usize) {
            (block.before, block.after) = (last, NONE);
        }
        match self.blocks.get_mut(last as usize) {
            Some(block) => block.after = id,
            None => self.first = id,
        }
        self.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn publish(pool: &mut BlockPool, blocks: &[BlockId], hashes: &[u64]) {
        for (position, (id, hash)) in (0..).zip(blocks.iter().zip(hashes)) {
            pool.publish(*id, *hash, None, 0, position);
        }
    }

    #[test]
    fn the_least_recently_released_block_is_evicted_and_the_end_of_a_sequence_before_its_start() {
        let mut pool = BlockPool::new(4);
        let (mut one, mut other, mut third) = (Vec::new(), Vec::new(), Vec::new());
        assert!(pool.allocate(2, &mut one) && pool.allocate(2, &mut other));
        publish(&mut pool, &one, &[1, 2]);
        publish(&mut pool, &other, &[3, 4]);
        assert!(!pool.allocate(1, &mut third), "every block is held");
        pool.release(&one);
        pool.release(&other);
        assert_eq!((pool.cached_run([1, 2].into_iter()), pool.free(), pool.used()), (2, 4, 0));
        pool.take_changes();
        assert!(pool.allocate(1, &mut third));
        assert_eq!(pool.take_changes(), [CacheChange::Removed { hash: 2 }]);
        assert_eq!(pool.share(1), Some(one[0]));
        assert!(pool.allocate(2, &mut third));
        let removed = [CacheChange::Removed { hash: 4 }, CacheChange::Removed { hash: 3 }];
        assert_eq!(pool.take_changes(), removed, "a held block is not evicted");
        assert!(!pool.allocate(1, &mut third));
    }

    #[test]
    fn an_equal_block_is_published_once() {
        let mut pool = BlockPool::new(2);
        let mut blocks = Vec::new();
        assert!(pool.allocate(2, &mut blocks));
        publish(&mut pool, &blocks, &[7, 7]);
        let changes = pool.take_changes();
        assert_eq!(changes, [CacheChange::Stored { hash: 7, parent: None, tag: 0, position: 0 }]);
    }

    proptest! {
        #[test]
        fn no_block_is_lost_or_held_twice_without_a_hash(
            steps in proptest::collection::vec((0_u8..3, 0_u32..5, 0_u64..8), 1..200),
        ) {
            let mut pool = BlockPool::new(12);
            let mut held: Vec<Vec<BlockId>> = Vec::new();
            for (step, count, hash) in steps {
                match step {
                    0 => {
                        let mut blocks: Vec<BlockId> = pool.share(hash).into_iter().collect();
                        let fits = count <= pool.free();
                        prop_assert_eq!(pool.allocate(count, &mut blocks), fits);
                        held.push(blocks);
                    }
                    1 => if let Some(id) = held.last().and_then(|blocks| blocks.last()) {
                        pool.publish(*id, hash, None, 0, 0);
                    },
                    _ => if !held.is_empty() {
                        let blocks = held.swap_remove(count as usize % held.len());
                        pool.release(&blocks);
                    },
                }
                let mut distinct: Vec<BlockId> = held.iter().flatten().copied().collect();
                distinct.sort_unstable();
                distinct.dedup();
                prop_assert_eq!(pool.used() as usize, distinct.len());
            }
            held.iter().for_each(|blocks| pool.release(blocks));
            prop_assert_eq!(pool.free(), 12);
        }
    }
}
