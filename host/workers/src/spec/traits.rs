//! The part of a description that decisions use: everything but names, addresses and keys.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::WorkerSpec;

impl WorkerSpec {
    /// Returns whether the two descriptions are equal for every decision. Facts and rules that depend on the
    /// description are then the same for both workers.
    #[must_use]
    pub(crate) fn has_traits_of(&self, other: &Self) -> bool {
        self.traits() == other.traits()
    }

    /// Returns a hash that equal traits have in common.
    pub(crate) fn traits_hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.traits().hash(&mut hasher);
        hasher.finish()
    }

    fn traits(&self) -> impl PartialEq + Hash + '_ {
        // A preferred domain is read of the worker of the other leg, and not of candidates.
        let required = self.kv_transfer.as_ref().filter(|rule| rule.weight.is_none());
        (
            (self.engine, self.transport, &self.kv_compatibility, required.map(|rule| &rule.domain)),
            (&self.labels, &self.taints, &self.topology, &self.loras),
            (self.local_prefill, self.max_concurrency),
        )
    }
}
