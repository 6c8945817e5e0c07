//! Caches that are bounded in bytes.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use quick_cache::{Weighter, sync::Cache};

/// Bytes of an entry beside its value: key, pointer, reference counts and the map's spare capacity.
pub(crate) const OVERHEAD: usize = 96;

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

/// A value with a size.
pub(crate) trait Weigh: Clone {
    /// Returns the bytes of the value, without [`OVERHEAD`].
    fn bytes(&self) -> usize;
}

/// A cache. It prefers entries that were used more than once, so that one long prompt does not evict the
/// rest.
#[derive(Debug)]
pub(crate) struct ByteCache<V: Weigh> {
    entries: Cache<u128, V, Bytes>,
    hits: AtomicU64,
    misses: AtomicU64,
}

/// Weighs an entry by its bytes.
#[derive(Clone, Debug)]
struct Bytes;

impl<V: Weigh> Weighter<u128, V> for Bytes {
    fn weight(&self, _: &u128, value: &V) -> u64 {
        (value.bytes() + OVERHEAD) as u64
    }
}

impl Weigh for Arc<[u32]> {
    fn bytes(&self) -> usize {
        mem::size_of_val::<[u32]>(self)
    }
}

impl<V: Weigh> ByteCache<V> {
    /// Creates a cache of `budget` bytes, for entries of typically `typical` bytes.
    pub(crate) fn new(budget: usize, typical: usize) -> Self {
        Self {
            entries: Cache::with_weighter(budget / typical.max(1), budget as u64, Bytes),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    /// Returns a value, without counting.
    pub(crate) fn find(&self, key: u128) -> Option<V> {
        self.entries.get(&key)
    }

    /// Returns the value of each key. `None` keys are skipped and not counted.
    pub(crate) fn get(&self, keys: &[Option<u128>]) -> Vec<Option<V>> {
        let found: Vec<_> = keys.iter().map(|key| self.entries.get(&(*key)?)).collect();
        let (asked, hits) = (keys.iter().flatten().count(), found.iter().flatten().count());
        self.hits.fetch_add(hits as u64, Ordering::Relaxed);
        self.misses.fetch_add((asked - hits) as u64, Ordering::Relaxed);
        found
    }

    /// Inserts values by key. An entry that exceeds the budget is dropped.
    pub(crate) fn put(&self, entries: Vec<(u128, V)>) {
        for (key, value) in entries {
            self.entries.insert(key, value);
        }
    }

    pub(crate) fn stats(&self) -> CacheStats {
        CacheStats {
            pieces: self.entries.len(),
            bytes: usize::try_from(self.entries.weight()).unwrap_or(usize::MAX),
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
        }
    }
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
        let pieces = ByteCache::new(20 * (OVERHEAD + 4), 2_048);
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
    fn an_entry_over_the_budget_is_not_cached() {
        let pieces = ByteCache::new(1000, 100);
        pieces.put(vec![(1, tokens(1000))]);
        assert_eq!(pieces.stats().pieces, 0);
    }

    proptest! {
        #[test]
        fn the_budget_holds_and_the_byte_count_is_exact(
            steps in proptest::collection::vec((0_u128..40, 0_usize..60, any::<bool>()), 0..300),
            budget in 0_usize..6000,
        ) {
            let pieces = ByteCache::new(budget, 2_048);
            for (key, count, put) in steps {
                if put {
                    pieces.put(vec![(key, tokens(usize::try_from(key).unwrap() + count % 2))]);
                } else {
                    pieces.get(&[Some(key)]);
                }
                let real: u64 = pieces.entries.iter().map(|(key, tokens)| Bytes.weight(&key, &tokens)).sum();
                prop_assert_eq!(real, pieces.entries.weight());
                prop_assert!(real <= budget as u64, "{} of {}", real, budget);
            }
        }
    }
}
