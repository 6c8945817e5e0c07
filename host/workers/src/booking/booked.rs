//! The named blocks booked on one rank: how many there are, a shared prefix counted once.
//!
//! Sequence hashes are chained: equal hashes at one place mean equal prompts up to there. So the blocks of all bookings are a
//! tree, kept as runs between the places where prompts part, and found by their first hash. To book, to release and to ask
//! takes as many steps as a prompt has runs, each of them a bisection, however many blocks it has.

use std::sync::Arc;

use crate::{block_map::BlockMap, id::BlockHash, prefix::Prefix};

/// The tree.
#[derive(Debug, Default)]
pub(super) struct Booked {
    /// Runs by their first hash.
    runs: BlockMap<Run>,
    /// Blocks of all runs.
    blocks: u32,
}

/// Blocks that the same bookings share.
#[derive(Clone, Debug)]
struct Run {
    /// The hashes of one of these bookings.
    hashes: Arc<[BlockHash]>,
    start: usize,
    end: usize,
    /// At least one.
    bookings: u32,
}

impl Booked {
    /// Distinct blocks booked.
    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// How many of a prompt's hashes, from the first on, are booked.
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
                // Here the prompts part, or this one ends.
                if let Some(first) = rest.hashes.get(part) {
                    self.runs.insert(*first, rest);
                }
                break;
            }
        }
        if let Some(first) = hashes.get(place) {
            let run = Run { hashes: hashes.clone(), start: place, end: hashes.len(), bookings: 1 };
            self.blocks += weight(prefix, &run);
            self.runs.insert(*first, run);
        }
    }

    /// Releases what [`Booked::add`] booked.
    pub(super) fn release(&mut self, prefix: &Prefix) {
        let hashes = prefix.hashes();
        let mut place = 0;
        while let Some(first) = hashes.get(place) {
            let Some(run) = self.runs.get_mut(first) else { return };
            place = run.end;
            run.bookings -= 1;
            if run.bookings == 0 {
                self.blocks -= weight(prefix, run);
                self.runs.remove(first);
            }
        }
    }
}

impl Run {
    /// How many of its hashes `rest` begins with.
    fn equal(&self, rest: &[BlockHash]) -> usize {
        let own = self.hashes.get(self.start..self.end).unwrap_or_default();
        let most = own.len().min(rest.len());
        let (own, rest) = (own.get(..most).unwrap_or_default(), rest.get(..most).unwrap_or_default());
        // A prompt that is there whole, or up to here, is common.
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

/// The blocks that a run of this prompt stands for.
fn weight(prefix: &Prefix, run: &Run) -> u32 {
    let blocks = |mark: usize| prefix.blocks(u32::try_from(mark).unwrap_or(u32::MAX));
    blocks(run.end) - blocks(run.start)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::hash::Salt;

    /// What blocks a multiset of prompts has, one by one.
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

    /// A prompt of a small alphabet, so that many share their beginnings.
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
        fn g_a_shared_prefix_counts_once_whatever_is_booked_and_released(
            prompts in proptest::collection::vec((proptest::collection::vec(0_u8..2, 0..12), any::<bool>()), 1..40),
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
