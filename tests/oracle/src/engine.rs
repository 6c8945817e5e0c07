//! Model of one engine's prefix cache and of the events that it sends.
//!
//! Blocks are evicted as engines do it: least recently used first, and deepest first among equals. So a block
//! is never removed before the blocks that follow it. Pointsman and the oracle treat gaps differently
//! (Pointsman keeps the blocks behind a gap, the oracle drops them), and this order avoids gaps. No block is
//! stored twice while it is held, because Pointsman counts references and the oracle does not.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
};

use crate::mix::mix;

/// Adapter and cache salt of a prompt, which are mixed into its first block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tenant {
    /// LoRA adapter.
    pub lora: Option<&'static str>,
    /// Cache salt.
    pub salt: Option<&'static str>,
}

/// A change of the cache, as an event reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Consecutive blocks were stored.
    Stored {
        /// Adapter and salt of the prompt.
        tenant: Tenant,
        /// Engine hash of the preceding block.
        parent: Option<u64>,
        /// Engine hashes, each with the number that stands for the block's tokens.
        blocks: Vec<(u64, u64)>,
    },
    /// Blocks were removed, deepest first.
    Removed(Vec<u64>),
    /// All blocks were removed.
    Cleared,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    parent: Option<u64>,
    depth: u32,
    used: u64,
}

/// The cache.
#[derive(Clone, Debug, Default)]
pub struct Engine {
    capacity: usize,
    clock: u64,
    held: HashMap<u64, Held>,
    order: BTreeSet<(u64, Reverse<u32>, u64)>,
}

impl Engine {
    /// Creates an empty cache of `capacity` blocks.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Returns whether the cache is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Returns how many blocks of a prompt are cached.
    #[must_use]
    pub fn cached(&self, tenant: Tenant, ids: &[u64]) -> usize {
        chain(tenant, ids).take_while(|(hash, _)| self.held.contains_key(hash)).count()
    }

    /// Serves a prompt: evicts blocks if needed, and stores the missing ones.
    pub fn serve(&mut self, tenant: Tenant, ids: &[u64]) -> Vec<Change> {
        self.clock += 1;
        let ids = ids.get(..self.capacity).unwrap_or(ids);
        let (mut parent, mut blocks) = (None, Vec::new());
        let mut before = None;
        for (depth, (hash, id)) in (0..).zip(chain(tenant, ids)) {
            if let Some(held) = self.held.get_mut(&hash) {
                self.order.remove(&(held.used, Reverse(held.depth), hash));
                held.used = self.clock;
                parent = Some(hash);
            } else {
                blocks.push((hash, id));
                self.held.insert(hash, Held { parent: before, depth, used: self.clock });
            }
            self.order.insert((self.clock, Reverse(depth), hash));
            before = Some(hash);
        }
        let excess = self.held.len().saturating_sub(self.capacity);
        let mut changes: Vec<Change> = self.evict(excess).into_iter().collect();
        if !blocks.is_empty() {
            changes.push(Change::Stored { tenant, parent, blocks });
        }
        changes
    }

    /// Evicts the oldest blocks.
    pub fn evict(&mut self, count: usize) -> Option<Change> {
        let oldest = (0..count).map_while(|_| self.order.pop_first());
        let gone: Vec<u64> = oldest.map(|(_, _, hash)| hash).collect();
        gone.iter().for_each(|hash| {
            self.held.remove(hash);
        });
        (!gone.is_empty()).then_some(Change::Removed(gone))
    }

    /// Removes the block selected by `pick` and all blocks that follow it.
    pub fn prune(&mut self, pick: usize) -> Option<Change> {
        let mut hashes: Vec<u64> = self.held.keys().copied().collect();
        hashes.sort_unstable();
        let root = *hashes.get(pick % hashes.len().max(1))?;
        let mut gone: Vec<(u32, u64)> = hashes
            .into_iter()
            .filter(|hash| self.line(*hash).any(|above| above == root))
            .filter_map(|hash| Some((self.held.get(&hash)?.depth, hash)))
            .collect();
        gone.sort_unstable_by_key(|block| Reverse(*block));
        for (_, hash) in &gone {
            if let Some(held) = self.held.remove(hash) {
                self.order.remove(&(held.used, Reverse(held.depth), *hash));
            }
        }
        Some(Change::Removed(gone.into_iter().map(|(_, hash)| hash).collect()))
    }

    /// Removes all blocks.
    pub fn clear(&mut self) -> Change {
        self.held.clear();
        self.order.clear();
        Change::Cleared
    }

    /// Returns a block and its ancestors.
    fn line(&self, hash: u64) -> impl Iterator<Item = u64> + '_ {
        std::iter::successors(Some(hash), |hash| self.held.get(hash)?.parent)
    }
}

/// Returns the engine hashes of a prompt's blocks. They differ from ours. They are equal on every engine,
/// because the oracle keeps one engine hash per block; Pointsman keeps each engine's own.
fn chain(tenant: Tenant, ids: &[u64]) -> impl Iterator<Item = (u64, u64)> + '_ {
    let of = |word: Option<&str>, seed: u64| {
        word.unwrap_or_default().bytes().fold(seed, |hash, byte| mix(hash ^ u64::from(byte)))
    };
    let mut hash = of(tenant.lora, 0x1234) ^ of(tenant.salt, 0x5678).rotate_left(7);
    ids.iter().map(move |id| {
        hash = mix(hash ^ mix(*id));
        (hash, *id)
    })
}
