//! Tokens of pieces, remembered within a budget of bytes.
//!
//! Two generations stand for "least recently used": what is used moves to the young one; when the young one is half the
//! budget, the old one is forgotten and the young one becomes old.

use std::{collections::HashMap, mem, sync::Arc};

use parking_lot::Mutex;

/// Bytes of an entry beside its tokens: key, pointer, counts, and the map's spare room.
const OVERHEAD: usize = 96;

/// Figures of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Pieces held.
    pub pieces: usize,
    /// Bytes held, overhead included.
    pub bytes: usize,
    /// Pieces that were found, since load.
    pub hits: u64,
    /// Pieces that were looked for and not found, since load.
    pub misses: u64,
}

/// The cache. Its lock is held while maps are read and written, never while something is encoded or freed.
#[derive(Debug)]
pub(crate) struct Pieces {
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

impl Pieces {
    pub(crate) fn new(budget: usize) -> Self {
        Self { budget, state: Mutex::default() }
    }

    /// The tokens under each key. Places without a key stay empty and are not counted.
    pub(crate) fn get(&self, keys: &[Option<u128>]) -> Vec<Option<Arc<[u32]>>> {
        let mut forgotten = Vec::new();
        let mut state = self.state.lock();
        let found = keys.iter().map(|key| state.get((*key)?, self.budget, &mut forgotten)).collect();
        drop(state);
        found
    }

    /// Remembers tokens.
    pub(crate) fn put(&self, entries: Vec<(u128, Arc<[u32]>)>) {
        if entries.is_empty() {
            return;
        }
        let mut forgotten = Vec::new();
        let mut state = self.state.lock();
        for (key, tokens) in entries {
            state.insert(key, tokens, self.budget, &mut forgotten);
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
    fn get(&mut self, key: u128, budget: usize, forgotten: &mut Vec<Generation>) -> Option<Arc<[u32]>> {
        let known = self.young.entries.get(&key).cloned();
        let found = known.or_else(|| {
            let tokens = self.old.remove(key)?;
            self.insert(key, Arc::clone(&tokens), budget, forgotten);
            Some(tokens)
        });
        match found {
            Some(_) => self.hits += 1,
            None => self.misses += 1,
        }
        found
    }

    /// What is forgotten goes to `forgotten`, to be freed when the lock is open again.
    fn insert(&mut self, key: u128, tokens: Arc<[u32]>, budget: usize, forgotten: &mut Vec<Generation>) {
        let cost = cost(&tokens);
        if cost > budget / 2 {
            return;
        }
        if self.young.bytes + cost > budget / 2 {
            let young = mem::take(&mut self.young);
            forgotten.push(mem::replace(&mut self.old, young));
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
    fn what_is_used_stays_and_the_rest_goes() {
        let pieces = Pieces::new(20 * (OVERHEAD + 4));
        for key in 0..100 {
            pieces.put(vec![(key, tokens(1))]);
            assert!(pieces.get(&[Some(0)])[0].is_some(), "key 0 was forgotten at {key}");
        }
        assert!(pieces.get(&[Some(50)])[0].is_none());
        assert!(pieces.get(&[Some(99)])[0].is_some());
        let stats = pieces.stats();
        assert_eq!((stats.hits, stats.misses), (101, 1));
        assert_eq!(pieces.get(&[None]), [None]);
        assert_eq!(pieces.stats(), stats);
    }

    #[test]
    fn a_piece_that_is_too_big_is_not_kept() {
        let pieces = Pieces::new(1000);
        pieces.put(vec![(1, tokens(1000))]);
        assert_eq!(pieces.stats().pieces, 0);
    }

    proptest! {
        #[test]
        fn the_budget_holds_and_bytes_are_what_entries_cost(
            steps in proptest::collection::vec((0_u128..40, 0_usize..60, any::<bool>()), 0..300),
            budget in 0_usize..6000,
        ) {
            let pieces = Pieces::new(budget);
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
