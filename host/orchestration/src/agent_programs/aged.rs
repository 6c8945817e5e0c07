//! Values by hash with the time of their last use, bounded in number and age.

use std::collections::{BTreeSet, HashMap};

use tokio::time::{Duration, Instant};

/// Maximum number of values. Above it, the one that was used least recently is evicted.
pub(super) const MAX_VALUES: usize = 65_535;
/// Maximum number of values that one call expires, so that it never takes long.
const MAX_EXPIRED: usize = 256;

#[derive(Debug)]
pub(super) struct Aged<V> {
    values: HashMap<u64, (Instant, V)>,
    by_age: BTreeSet<(Instant, u64)>,
}

impl<V> Default for Aged<V> {
    fn default() -> Self {
        Self { values: HashMap::new(), by_age: BTreeSet::new() }
    }
}

impl<V: Default> Aged<V> {
    /// Returns a value, and when it was used last.
    pub(super) fn get(&self, key: u64) -> Option<(Instant, &V)> {
        self.values.get(&key).map(|(at, value)| (*at, value))
    }

    /// Returns a value that is used now.
    pub(super) fn touch(&mut self, key: u64, now: Instant) -> &mut V {
        if !self.values.contains_key(&key)
            && self.values.len() >= MAX_VALUES
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.values.remove(&oldest);
        }
        let (at, value) = self.values.entry(key).or_insert_with(|| (now, V::default()));
        self.by_age.remove(&(*at, key));
        self.by_age.insert((now, key));
        *at = now;
        value
    }

    pub(super) fn remove(&mut self, key: u64) {
        if let Some((at, _)) = self.values.remove(&key) {
            self.by_age.remove(&(at, key));
        }
    }

    /// Removes the oldest of the values that were not used for longer than `limit`. Returns whether these
    /// were all.
    pub(super) fn expire(&mut self, now: Instant, limit: Duration) -> bool {
        for _ in 0..MAX_EXPIRED {
            let Some((at, key)) = self.by_age.first().copied() else { return true };
            if now.saturating_duration_since(at) <= limit {
                return true;
            }
            self.remove(key);
        }
        false
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }
}
