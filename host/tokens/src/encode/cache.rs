//! Cache of the tokens of pieces, bounded in bytes.
//!
//! Two generations approximate "least recently used". A hit moves the entry to the young generation. When the
//! young generation reaches half the budget, the old one is dropped and the young one becomes old.

use std::{collections::HashMap, mem, sync::Arc};

use parking_lot::Mutex;

/// Bytes of an entry beside its tokens: key, pointer, reference counts and the map's spare capacity.
const OVERHEAD: usize = 96;

/// Counters of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Number of cached pieces.
    pub pieces: usize,
    /// Bytes of the cached pieces, including overhead.
    pub bytes: usize,
    /// Number of pieces found since load.
    pub hits: u64,
    /// Number of pieces not found since load.
    pub misses: u64,
}

/// The cache. Its lock is held for map operations only, never while a text is encoded or a generation is
/// freed.
#[derive(Debug)]
pub(crate) struct PieceCache {
    budget: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    young: Generation,
    old: Generation,
    hits: u64,
    misses: u64,
}

#[derive(Debug, Default)]
struct Generation {
    entries: HashMap<u128, Arc<[u32]>>,
    bytes: usize,
}

impl PieceCache {
    pub(crate) fn new(budget: usize) -> Self {
        Self { budget, state: Mutex::default() }
    }

    /// Returns the tokens of each key. `None` keys are skipped and not counted.
    pub(crate) fn get(&self, keys: &[Option<u128>]) -> Vec<Option<Arc<[u32]>>> {
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        let found = keys.iter().map(|key| state.get((*key)?, self.budget, &mut dropped)).collect();
        drop(state);
        found
    }

    /// Inserts tokens by key.
    pub(crate) fn put(&self, entries: Vec<(u128, Arc<[u32]>)>) {
        if entries.is_empty() {
            return;
        }
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        for (key, tokens) in entries {
            state.insert(key, tokens, self.budget, &mut dropped);
        }
        drop(state);
    }

    pub(crate) fn stats(&self) -> CacheStats {
        let state = self.state.lock();
        CacheStats {
            pieces: state.young.entries.len() + state.old.entries.len(),
            bytes: state.young.bytes + state.old.bytes,
            hits: state.hits,
            misses: state.misses,
        }
    }
}

impl State {
    fn get(&mut self, key: u128, budget: usize, dropped: &mut Vec<Generation>) -> Option<Arc<[u32]>> {
        let known = self.young.entries.get(&key).cloned();
        let found = known.or_else(|| {
            let tokens = self.old.remove(key)?;
            self.insert(key, Arc::clone(&tokens), budget, dropped);
            Some(tokens)
        });
        match found {
            Some(_) => self.hits += 1,
            None => self.misses += 1,
        }
        found
    }

    /// Inserts an entry. Moves a dropped generation to `dropped`, so that the caller frees it after
    /// unlocking.
    fn insert(&mut self, key: u128, tokens: Arc<[u32]>, budget: usize, dropped: &mut Vec<Generation>) {
        let cost = cost(&tokens);
        if cost > budget / 2 {
            return;
        }
        if self.young.bytes + cost > budget / 2 {
            let young = mem::take(&mut self.young);
            dropped.push(mem::replace(&mut self.old, young));
        }
        // Two threads may have encoded the same piece.
        self.old.remove(key);
        if self.young.entries.insert(key, tokens).is_none() {
            self.young.bytes += cost;
        }
    }
}

impl Generation {
    fn remove(&mut self, key: u128) -> Option<Arc<[u32]>> {
        let tokens = self.entries.remove(&key)?;
        self.bytes = self.bytes.saturating_sub(cost(&tokens));
        Some(tokens)
    }
}

fn cost(tokens: &[u32]) -> usize {
    mem::size_of_val(tokens) + OVERHEAD
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tokens(count: usize) -> Arc<[u32]> {
        (0..count).map(|token| u32::try_from(token).unwrap()).collect()
    }

    #[test]
    fn used_entries_stay_and_others_are_evicted() {
        let pieces = PieceCache::new(20 * (OVERHEAD + 4));
        for key in 0..100 {
            pieces.put(vec![(key, tokens(1))]);
            assert!(pieces.get(&[Some(0)])[0].is_some(), "key 0 was evicted at {key}");
        }
        assert!(pieces.get(&[Some(50)])[0].is_none());
        assert!(pieces.get(&[Some(99)])[0].is_some());
        let stats = pieces.stats();
        assert_eq!((stats.hits, stats.misses), (101, 1));
        assert_eq!(pieces.get(&[None]), [None]);
        assert_eq!(pieces.stats(), stats);
    }

    #[test]
    fn an_entry_over_half_the_budget_is_not_cached() {
        let pieces = PieceCache::new(1000);
        pieces.put(vec![(1, tokens(1000))]);
        assert_eq!(pieces.stats().pieces, 0);
    }

    proptest! {
        #[test]
        fn the_budget_holds_and_the_byte_count_is_exact(
            steps in proptest::collection::vec((0_u128..40, 0_usize..60, any::<bool>()), 0..300),
            budget in 0_usize..6000,
        ) {
            let pieces = PieceCache::new(budget);
            for (key, count, put) in steps {
                if put {
                    pieces.put(vec![(key, tokens(usize::try_from(key).unwrap() + count % 2))]);
                } else {
                    pieces.get(&[Some(key)]);
                }
                let state = pieces.state.lock();
                for generation in [&state.young, &state.old] {
                    let real: usize = generation.entries.values().map(|tokens| cost(tokens)).sum();
                    prop_assert!(real.abs_diff(generation.bytes) <= 4 * 40, "{real} {}", generation.bytes);
                    prop_assert!(generation.bytes <= budget / 2);
                }
            }
        }
    }
}
