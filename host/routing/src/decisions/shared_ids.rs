//! The ids of candidates that the decisions of a shard share: a pool's ids are kept once, as long as a
//! decision among the pool is kept.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use pointsman_workers::CandidateIds;

/// Shared lists of ids, within a bound of words.
#[derive(Debug)]
pub(super) struct SharedIds {
    /// Number of decisions that share ids, by their address. It is theirs as long as a decision holds them.
    decisions: HashMap<usize, usize>,
    words: usize,
    most_words: usize,
}

impl SharedIds {
    pub(super) fn new(most_words: usize) -> Self {
        Self { decisions: HashMap::new(), words: 0, most_words }
    }

    /// Counts one more decision that holds the ids. Returns false when they would exceed the bound.
    pub(super) fn hold(&mut self, ids: &Arc<CandidateIds>) -> bool {
        match self.decisions.entry(address(ids)) {
            Entry::Occupied(mut decisions) => *decisions.get_mut() += 1,
            Entry::Vacant(vacant) => {
                let words = self.words + words(ids);
                if words > self.most_words {
                    return false;
                }
                self.words = words;
                vacant.insert(1);
            }
        }
        true
    }

    /// Counts one decision less.
    pub(super) fn release(&mut self, ids: &Arc<CandidateIds>) {
        if let Entry::Occupied(mut decisions) = self.decisions.entry(address(ids)) {
            *decisions.get_mut() -= 1;
            if *decisions.get() == 0 {
                decisions.remove();
                self.words -= words(ids);
            }
        }
    }
}

fn address(ids: &Arc<CandidateIds>) -> usize {
    Arc::as_ptr(ids).addr()
}

fn words(ids: &CandidateIds) -> usize {
    ids.len() * CandidateIds::WIDTH
}

#[cfg(test)]
mod tests {
    use pointsman_workers::{DpRank, WorkerId};

    use super::*;

    fn ids(count: u64) -> Arc<CandidateIds> {
        Arc::new((0..count).map(|id| (WorkerId(id), DpRank(0))).collect())
    }

    #[test]
    fn ids_count_once_and_are_freed_with_their_last_decision() {
        let (mut shared, ids) = (SharedIds::new(600), [100, 99, 2].map(ids));
        assert!(shared.hold(&ids[0]) && shared.hold(&ids[0]) && shared.hold(&ids[1]));
        assert_eq!(shared.words, 597);
        assert!(!shared.hold(&ids[2]) && shared.hold(&ids[1]));
        shared.release(&ids[0]);
        assert!(!shared.hold(&ids[2]));
        shared.release(&ids[0]);
        assert!(shared.hold(&ids[2]) && shared.words == 303 && shared.decisions.len() == 2);
    }
}
