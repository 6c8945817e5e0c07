//! Prefix cache: blocks by sequence hash, with LRU eviction of unused blocks.

use std::collections::{BTreeMap, HashMap};

/// Blocks of one sequence: those with a hash (full prompt blocks) and those without (tail and output).
#[derive(Debug, Default)]
pub struct Hold {
    named: Vec<u64>,
    blank: Vec<u32>,
    cached: u32,
}

#[derive(Debug)]
struct Block {
    id: u32,
    holders: u32,
    /// Position in the eviction order while the block is unused.
    stamp: u64,
}

/// A fixed number of KV blocks that sequences with equal prefixes share.
#[derive(Debug)]
pub struct PrefixCache {
    block_size: u32,
    capacity: u32,
    named: HashMap<u64, Block>,
    /// Unused blocks, oldest first. Within a sequence, later blocks count as older.
    idle: BTreeMap<u64, u64>,
    free: Vec<u32>,
    clock: u64,
}

impl Hold {
    /// Returns the number of prompt tokens that need not be computed.
    #[must_use]
    pub fn cached(&self) -> u32 {
        self.cached
    }
}

impl PrefixCache {
    /// Creates an empty cache of `capacity` blocks of `block_size` tokens.
    #[must_use]
    pub fn new(capacity: u32, block_size: u32) -> Self {
        // Block 0 is the engines' null block, so ids start at 1.
        let free = (1..=capacity).rev().collect();
        Self { block_size, capacity, named: HashMap::new(), idle: BTreeMap::new(), free, clock: 0 }
    }

    /// Allocates `total` blocks for a sequence whose full prompt blocks are `chain`, and shares existing
    /// ones. `None` if the rest does not fit now. At most `(isl - 1) / block` blocks count as cached, because
    /// the last token is always computed.
    pub fn acquire(&mut self, chain: &[u64], isl: u32, total: u32) -> Option<Hold> {
        let present = chain.iter().filter_map(|hash| self.named.get(hash));
        let (shared, resting) = present
            .fold((0_usize, 0_usize), |(all, idle), block| (all + 1, idle + usize::from(block.holders == 0)));
        let need = (total as usize).saturating_sub(shared);
        if need > self.free.len() + self.idle.len() - resting {
            return None;
        }
        let run = chain.iter().take_while(|hash| self.named.contains_key(hash)).count();
        let credit = (isl.saturating_sub(1) / self.block_size).min(u32::try_from(run).unwrap_or(u32::MAX));
        let mut hold = Hold { cached: credit * self.block_size, ..Hold::default() };
        // Take existing blocks first, so that allocating the others cannot evict them.
        let (old, new): (Vec<u64>, Vec<u64>) = chain.iter().partition(|hash| self.named.contains_key(hash));
        for hash in &old {
            self.share(*hash);
        }
        for hash in new {
            let id = self.take()?;
            self.named.insert(hash, Block { id, holders: 1, stamp: 0 });
        }
        hold.named = chain.to_vec();
        for _ in chain.len()..total as usize {
            hold.blank.push(self.take()?);
        }
        Some(hold)
    }

    /// Releases blocks. Those with a hash stay cached until they are evicted.
    pub fn release(&mut self, hold: Hold) {
        for hash in hold.named.into_iter().rev() {
            let Some(block) = self.named.get_mut(&hash) else { continue };
            block.holders = block.holders.saturating_sub(1);
            if block.holders == 0 {
                self.clock += 1;
                block.stamp = self.clock;
                self.idle.insert(self.clock, hash);
            }
        }
        self.free.extend(hold.blank);
    }

    /// Adds the hashes of blocks that have become full. `chain` starts with the hashes known so far.
    pub fn name(&mut self, hold: &mut Hold, chain: &[u64]) {
        for hash in chain.get(hold.named.len()..).unwrap_or_default() {
            if self.named.contains_key(hash) {
                // Another sequence filled an equal block: keep that one in the cache.
                return;
            }
            if hold.blank.is_empty() {
                return;
            }
            let id = hold.blank.remove(0);
            self.named.insert(*hash, Block { id, holders: 1, stamp: 0 });
            hold.named.push(*hash);
        }
    }

    /// Moves the first `blocks` blocks of a sequence into a separate allocation.
    pub fn split(&mut self, hold: &mut Hold, blocks: u32) -> Hold {
        let named = hold.named.len().min(blocks as usize);
        let blank = hold.blank.len().min(blocks as usize - named);
        Hold {
            named: hold.named.drain(..named).collect(),
            blank: hold.blank.drain(..blank).collect(),
            cached: hold.cached,
        }
    }

    /// Returns the ids of a sequence's blocks, in order.
    #[must_use]
    pub fn ids(&self, hold: &Hold) -> Vec<u32> {
        let named = hold.named.iter().filter_map(|hash| self.named.get(hash)).map(|block| block.id);
        named.chain(hold.blank.iter().copied()).collect()
    }

    /// Returns the number of blocks in use.
    #[must_use]
    pub fn used(&self) -> u32 {
        let rest = self.free.len() + self.idle.len();
        self.capacity - u32::try_from(rest).unwrap_or(self.capacity)
    }

    fn share(&mut self, hash: u64) {
        let Some(block) = self.named.get_mut(&hash) else { return };
        if block.holders == 0 {
            self.idle.remove(&block.stamp);
        }
        block.holders += 1;
    }

    fn take(&mut self) -> Option<u32> {
        if let Some(id) = self.free.pop() {
            return Some(id);
        }
        let (_, hash) = self.idle.pop_first()?;
        self.named.remove(&hash).map(|block| block.id)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn credit_stops_before_the_last_token() {
        // (isl, full blocks cached) -> credited tokens, block 16
        let table = [(64, 4, 48), (65, 4, 64), (64, 2, 32), (16, 1, 0), (17, 1, 16), (1, 0, 0)];
        for (isl, full, want) in table {
            let mut cache = PrefixCache::new(64, 16);
            let chain: Vec<u64> = (0..full).collect();
            let total = u32::div_ceil(isl, 16);
            let first = cache.acquire(&chain, isl, total).expect("fits");
            assert_eq!(first.cached(), 0);
            cache.release(first);
            assert_eq!(cache.acquire(&chain, isl, total).expect("fits").cached(), want, "isl {isl}");
        }
    }

    #[test]
    fn the_least_recently_used_end_goes_first_and_held_blocks_stay() {
        let mut cache = PrefixCache::new(4, 16);
        let a = cache.acquire(&[1, 2], 33, 2).expect("fits");
        let b = cache.acquire(&[3, 4], 33, 2).expect("fits");
        assert!(cache.acquire(&[5], 17, 1).is_none(), "everything is held");
        cache.release(a);
        let c = cache.acquire(&[5], 17, 1).expect("evicts one");
        assert!(cache.named.contains_key(&1) && !cache.named.contains_key(&2), "the end of `a` went first");
        cache.release(b);
        cache.release(c);
        let d = cache.acquire(&[9, 10, 11], 49, 3).expect("evicts");
        assert!(cache.named.contains_key(&5) && !cache.named.contains_key(&1), "`5` was used last");
        assert_eq!(cache.used(), 3);
        cache.release(d);
        assert_eq!(cache.used(), 0);
    }

    #[test]
    fn sealed_blocks_are_found_by_the_next_turn() {
        let mut cache = PrefixCache::new(8, 16);
        let mut turn = cache.acquire(&[1], 20, 3).expect("fits");
        cache.name(&mut turn, &[1, 2, 3]);
        cache.release(turn);
        assert_eq!(cache.acquire(&[1, 2, 3, 4], 65, 5).expect("fits").cached(), 48);
    }

    proptest! {
        /// In any order of operations, no block is lost, duplicated or assigned to two hashes.
        #[test]
        fn blocks_are_conserved(steps in proptest::collection::vec((0_u64..6, 0_u32..6, 0_u32..4, any::<bool>()), 1..120)) {
            let mut cache = PrefixCache::new(12, 4);
            let mut held = Vec::new();
            for (family, full, extra, leave) in steps {
                let chain: Vec<u64> = (0..u64::from(full)).map(|i| family % 3 * 100 + i).collect();
                if let Some(hold) = cache.acquire(&chain, full * 4 + 1, full + extra) {
                    prop_assert_eq!(cache.ids(&hold).len(), (full + extra) as usize);
                    held.push(hold);
                }
                if leave && !held.is_empty() {
                    let at = (family as usize) % held.len();
                    cache.release(held.swap_remove(at));
                }
                let mut ids: Vec<u32> = cache.free.clone();
                ids.extend(cache.named.values().map(|block| block.id));
                ids.extend(held.iter().flat_map(|hold| hold.blank.iter().copied()));
                ids.sort_unstable();
                prop_assert_eq!(ids, (1..=12).collect::<Vec<_>>());
            }
            for hold in held {
                cache.release(hold);
            }
            prop_assert_eq!(cache.used(), 0);
        }
    }
}
