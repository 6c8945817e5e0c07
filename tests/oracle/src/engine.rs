//! A model of one engine's prefix cache: what it holds, and the events it would send.
//!
//! Blocks are evicted the least recently used first and the deepest first among those, as engines free them,
//! so a block never leaves before the blocks below it. Pointsman keeps a hole (a block that is gone while
//! blocks below it stay) and the oracle cuts at it, so holes would compare what each of them guesses; they
//! are excluded by this order. Nor is a block stored twice while it is resident: Pointsman counts references,
//! the oracle does not.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
};

use crate::wire::mix;

/// Whose prompt it is: the adapter and the cache salt that are mixed into its first block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tenant {
    /// LoRA adapter.
    pub lora: Option<&'static str>,
    /// Cache salt.
    pub salt: Option<&'static str>,
}

/// One change of the cache, as an event says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A run of blocks came in.
    Stored {
        /// Whose.
        tenant: Tenant,
        /// The engine's hash of the block before the run.
        parent: Option<u64>,
        /// The engine's hashes, with the number that stands for the tokens of each.
        blocks: Vec<(u64, u64)>,
    },
    /// Blocks left, the deepest first.
    Removed(Vec<u64>),
    /// All left.
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
    /// An empty cache of `capacity` blocks.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Blocks it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// How many blocks of a prompt are there.
    #[must_use]
    pub fn cached(&self, tenant: Tenant, ids: &[u64]) -> usize {
        chain(tenant, ids).take_while(|(hash, _)| self.held.contains_key(hash)).count()
    }

    /// Serves a prompt: makes room, and takes in what is missing of it.
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

    /// Lets the oldest blocks go.
    pub fn evict(&mut self, count: usize) -> Option<Change> {
        let oldest = (0..count).map_while(|_| self.order.pop_first());
        let gone: Vec<u64> = oldest.map(|(_, _, hash)| hash).collect();
        gone.iter().for_each(|hash| {
            self.held.remove(hash);
        });
        (!gone.is_empty()).then_some(Change::Removed(gone))
    }

    /// Lets a block go with all below it; `pick` says which.
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

    /// Lets everything go.
    pub fn clear(&mut self) -> Change {
        self.held.clear();
        self.order.clear();
        Change::Cleared
    }

    /// A block and those above it.
    fn line(&self, hash: u64) -> impl Iterator<Item = u64> + '_ {
        std::iter::successors(Some(hash), |hash| self.held.get(hash)?.parent)
    }
}

/// The engine's own hashes of a prompt's blocks: of another kind than ours, and the same on every engine,
/// which the oracle needs (it keeps one engine hash for a block, Pointsman keeps each engine's own).
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
