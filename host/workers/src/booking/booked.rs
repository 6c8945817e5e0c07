//! Distinct blocks booked on one rank. A shared prefix counts once.
//!
//! Sequence hashes are chained: equal hashes at one position mean equal prompts up to it. The blocks of all
//! bookings therefore form a tree. It is kept as runs, each between two positions where prompts diverge, and
//! a run is found by its first hash. Booking, releasing and looking up cost one bisection for each run of the
//! prompt, not one step for each block.
//!
//! Hashes of other gateways may be wrong: no hashes make a count underflow.

use std::{collections::HashMap, sync::Arc};

use prefix_index::Prefix;

use crate::{columns::bucket, id::BlockHash, invariant::Invariant};

/// A hash map by block hash. Prompts determine the hashes, so they are mixed with numbers of this process.
type BlockMap<V> = HashMap<BlockHash, V, foldhash::fast::RandomState>;

/// The tree of booked blocks.
#[derive(Debug, Default)]
pub(super) struct Booked {
    /// Runs by their first hash.
    runs: BlockMap<Run>,
    /// Number of blocks of all runs.
    blocks: u32,
    /// Number of runs at the beginning of a prompt, by bucket.
    firsts: BlockMap<u32>,
}

/// Consecutive blocks that belong to the same bookings.
#[derive(Clone, Debug)]
struct Run {
    /// All hashes of one of these bookings; the run is `start..end`.
    hashes: Arc<[BlockHash]>,
    start: usize,
    end: usize,
    /// Number of bookings, at least 1.
    bookings: u32,
}

impl Booked {
    /// Returns the number of distinct blocks.
    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Returns whether nothing is booked.
    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns how many of a prompt's hashes are booked, counted from the first one.
    pub(super) fn shared(&self, hashes: &[BlockHash]) -> usize {
        let mut place = 0;
        while let Some(run) = hashes.get(place).and_then(|first| self.runs.get(first)) {
            let equal = run.equal(hashes.get(place..).unwrap_or_default());
            place += equal;
            if equal < run.end - run.start {
                break;
            }
        }
        place
    }

    /// Returns the number of bookings that begin with the hashes up to `last`, at least 1 of them.
    pub(super) fn bookings(&self, hashes: &[BlockHash], last: usize) -> u32 {
        let mut place = 0;
        while let Some(run) = hashes.get(place).and_then(|first| self.runs.get(first)) {
            let equal = run.equal(hashes.get(place..).unwrap_or_default());
            place += equal;
            if last < place {
                return run.bookings;
            }
            if equal < run.end - run.start {
                break;
            }
        }
        0
    }

    /// Returns whether a prompt is booked whose first block is of the bucket of `first`.
    pub(super) fn books_like(&self, first: BlockHash) -> bool {
        !self.firsts.is_empty() && self.firsts.contains_key(&in_bucket(first))
    }

    /// Returns the buckets of all first blocks.
    pub(super) fn into_buckets(self) -> impl Iterator<Item = BlockHash> + use<> {
        self.firsts.into_keys()
    }

    fn end_first(&mut self, first: BlockHash) {
        let bucket = in_bucket(first);
        if let Some(runs) = self.firsts.get_mut(&bucket) {
            *runs -= 1;
            if *runs == 0 {
                self.firsts.remove(&bucket);
            }
        }
        if self.runs.is_empty() {
            // Wrong hashes may have replaced a run.
            self.firsts.clear();
        }
    }

    /// Books a prompt's blocks.
    pub(super) fn add(&mut self, prefix: &Prefix) {
        let hashes = prefix.hashes();
        let mut place = 0;
        while let Some(run) = hashes.get(place).and_then(|first| self.runs.get_mut(first)) {
            let equal = run.equal(hashes.get(place..).unwrap_or_default());
            let part = run.start + equal;
            let rest = (part < run.end).then(|| Run { start: part, ..run.clone() });
            run.end = part;
            run.bookings += 1;
            place += equal;
            if let Some(rest) = rest {
                // The prompts diverge at this block, or this prompt ends.
                if let Some(first) = rest.hashes.get(part) {
                    self.runs.insert(*first, rest);
                }
                break;
            }
        }
        if let Some(first) = hashes.get(place) {
            let run = Run { hashes: hashes.clone(), start: place, end: hashes.len(), bookings: 1 };
            self.blocks = self.blocks.saturating_add(weight(prefix, &run));
            if place == 0 {
                *self.firsts.entry(in_bucket(*first)).or_default() += 1;
            }
            self.runs.insert(*first, run);
        }
    }

    /// Releases what [`Booked::add`] booked.
    pub(super) fn release(&mut self, prefix: &Prefix) {
        let hashes = prefix.hashes();
        let mut place = 0;
        while let Some(first) = hashes.get(place) {
            let Some(run) = self.runs.get_mut(first) else { return };
            // The position rises, also when wrong hashes lead to a run of another position.
            place = run.end.max(place + 1);
            Invariant::BookedPrompts.check(run.bookings > 0);
            run.bookings = run.bookings.saturating_sub(1);
            if run.bookings == 0 {
                self.blocks = self.blocks.saturating_sub(weight(prefix, run));
                let begins = run.start == 0;
                self.runs.remove(first);
                if begins {
                    self.end_first(*first);
                }
            }
        }
    }
}

impl Run {
    /// Returns how many of the run's hashes `rest` starts with.
    fn equal(&self, rest: &[BlockHash]) -> usize {
        let own = self.hashes.get(self.start..self.end).unwrap_or_default();
        let most = own.len().min(rest.len());
        let (own, rest) = (own.get(..most).unwrap_or_default(), rest.get(..most).unwrap_or_default());
        // Usually all compared hashes are equal.
        if own.last() == rest.last() {
            return most;
        }
        let (mut low, mut high) = (0, most);
        while low < high {
            let middle = low.midpoint(high);
            if own.get(middle) == rest.get(middle) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }
}

/// Returns the block that stands for its bucket.
fn in_bucket(block: BlockHash) -> BlockHash {
    BlockHash(bucket(block) as u64)
}

/// Returns the number of blocks that a run of this prompt covers.
fn weight(prefix: &Prefix, run: &Run) -> u32 {
    weight_between(prefix, run.start, run.end)
}

/// Returns the number of blocks between two positions of a prompt; 0 if the second is not after the first.
pub(super) fn weight_between(prefix: &Prefix, start: usize, end: usize) -> u32 {
    let blocks = |mark: usize| prefix.blocks(u32::try_from(mark).unwrap_or(u32::MAX));
    blocks(end).saturating_sub(blocks(start))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use prefix_index::Salt;

    /// Simple model for comparison: it counts every block of all booked prompts.
    #[derive(Default)]
    struct Naive(HashMap<BlockHash, (u32, u32)>);

    impl Naive {
        fn add(&mut self, prefix: &Prefix) {
            for (block, weight) in prefix.weighed() {
                self.0.entry(block).or_insert((0, weight)).0 += 1;
            }
        }

        fn release(&mut self, prefix: &Prefix) {
            for (block, _) in prefix.weighed() {
                self.0.get_mut(&block).unwrap().0 -= 1;
            }
            self.0.retain(|_, (count, _)| *count > 0);
        }

        fn blocks(&self) -> u32 {
            self.0.values().map(|(_, weight)| weight).sum()
        }
    }

    /// A prompt over a small alphabet, so that many prompts share a prefix.
    fn prefix((letters, sparse): &(Vec<u8>, bool)) -> Prefix {
        let tokens: Vec<u32> = letters.iter().flat_map(|letter| [u32::from(*letter); 4]).collect();
        if *sparse {
            let bytes: Vec<u8> = letters.iter().flat_map(|letter| [*letter; 64]).collect();
            Prefix::of_bytes(&bytes, 4, &Salt::default())
        } else {
            Prefix::of_tokens(&tokens, 4, &Salt::default(), &[])
        }
    }

    proptest! {
        #[test]
        fn g_a_shared_prefix_counts_once_in_any_order_of_bookings_and_releases(
            prompts in proptest::collection::vec(
                (proptest::collection::vec(0_u8..2, 0..12), any::<bool>()),
                1..40,
            ),
            order in proptest::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..120),
        ) {
            let prompts: Vec<Prefix> = prompts.iter().map(prefix).collect();
            let (mut booked, mut naive, mut held) = (Booked::default(), Naive::default(), Vec::new());
            for (add, which) in order {
                if add || held.is_empty() {
                    let prompt = which.get(&prompts).clone();
                    booked.add(&prompt);
                    naive.add(&prompt);
                    held.push(prompt);
                } else {
                    let prompt = held.swap_remove(which.index(held.len()));
                    booked.release(&prompt);
                    naive.release(&prompt);
                }
                prop_assert_eq!(booked.blocks(), naive.blocks());
                let asked = which.get(&prompts).hashes();
                let shared = asked.iter().take_while(|block| naive.0.contains_key(block)).count();
                prop_assert_eq!(booked.shared(asked), shared);
            }
            held.iter().for_each(|prompt| booked.release(prompt));
            prop_assert!(booked.blocks() == 0 && booked.runs.is_empty());
        }
    }
}
