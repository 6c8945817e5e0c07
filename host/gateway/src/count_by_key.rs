//! Numbers of what is in use by key, such as the open connections of an address.

use std::{collections::HashMap, hash::Hash, sync::Arc};

use parking_lot::Mutex;

/// Counts by key. A key without a count takes no memory, so what is counted bounds the table.
#[derive(Debug)]
pub(crate) struct CountByKey<K>(Mutex<HashMap<K, u32>>);

/// One that counts for a key. Dropping it ends its count.
#[derive(Debug)]
pub(crate) struct Counted<K: Copy + Eq + Hash> {
    counts: Arc<CountByKey<K>>,
    key: K,
}

impl<K> Default for CountByKey<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Copy + Eq + Hash> CountByKey<K> {
    /// Counts one for `key` until the returned value is dropped.
    pub(crate) fn enter(self: &Arc<Self>, key: K) -> Counted<K> {
        self.add(&mut self.0.lock(), key)
    }

    /// Like [`Self::enter`]; `None` when `key` has `limit` already.
    #[must_use]
    pub(crate) fn enter_below(self: &Arc<Self>, key: K, limit: usize) -> Option<Counted<K>> {
        let mut counts = self.0.lock();
        let is_below = (counts.get(&key).copied().unwrap_or(0) as usize) < limit;
        is_below.then(|| self.add(&mut counts, key))
    }

    /// Returns the count of a key.
    #[must_use]
    pub(crate) fn count(&self, key: K) -> u32 {
        self.0.lock().get(&key).copied().unwrap_or(0)
    }

    fn add(self: &Arc<Self>, counts: &mut HashMap<K, u32>, key: K) -> Counted<K> {
        *counts.entry(key).or_default() += 1;
        Counted { counts: self.clone(), key }
    }
}

impl<K: Copy + Eq + Hash> Drop for Counted<K> {
    fn drop(&mut self) {
        let mut counts = self.counts.0.lock();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_counts_up_to_its_limit_and_leaves_nothing() {
        let counts = Arc::new(CountByKey::default());
        let held: Vec<_> = (0..9).filter_map(|_| counts.enter_below('a', 3)).collect();
        let (beyond, other) = (counts.enter('a'), counts.enter_below('b', 1));
        assert_eq!((held.len(), counts.count('a'), counts.count('b'), counts.count('c')), (3, 4, 1, 0));
        assert!(counts.enter_below('b', 1).is_none() && counts.enter_below('c', 0).is_none());
        drop((held, other));
        assert_eq!(counts.count('a'), 1);
        drop(beyond);
        assert!(counts.0.lock().is_empty());
    }
}
