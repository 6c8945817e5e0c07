//! Blocks with a hash that are booked on one rank, here and by other gateways.
//!
//! Each side has a tree of its own, so that wrong hashes of another gateway end with its bookings. A block of
//! both trees counts once: `both` follows each change. Chained hashes make that cheap, since the blocks of a
//! prompt that a tree has are always the first ones.

use prefix_index::Prefix;

use super::booked::{Booked, weight_between};
use crate::id::BlockHash;

#[derive(Debug, Default)]
pub(super) struct RankBlocks {
    own: Booked,
    remote: Booked,
    /// Number of blocks that are in both trees.
    both: u32,
}

impl RankBlocks {
    /// Returns the number of distinct blocks that are booked here.
    pub(super) fn own(&self) -> u32 {
        self.own.blocks()
    }

    /// Returns the number of distinct blocks that only other gateways book.
    pub(super) fn only_remote(&self) -> u32 {
        self.remote.blocks().saturating_sub(self.both)
    }

    /// Returns how many of a prompt's hashes are booked, counted from the first one.
    pub(super) fn shared(&self, hashes: &[BlockHash]) -> usize {
        self.own.shared(hashes).max(self.remote.shared(hashes))
    }

    /// Returns the number of bookings whose prompts begin with the hashes up to `last`.
    pub(super) fn bookings(&self, hashes: &[BlockHash], last: usize) -> u32 {
        self.own.bookings(hashes, last).saturating_add(self.remote.bookings(hashes, last))
    }

    pub(super) fn add_own(&mut self, prefix: &Prefix) {
        let new = add(&mut self.own, &self.remote, prefix);
        self.both = self.both.saturating_add(new);
    }

    pub(super) fn release_own(&mut self, prefix: &Prefix) {
        let gone = release(&mut self.own, &self.remote, prefix);
        self.both = if self.own.is_empty() { 0 } else { self.both.saturating_sub(gone) };
    }

    pub(super) fn add_remote(&mut self, prefix: &Prefix) {
        let new = add(&mut self.remote, &self.own, prefix);
        self.both = self.both.saturating_add(new);
    }

    pub(super) fn release_remote(&mut self, prefix: &Prefix) {
        let gone = release(&mut self.remote, &self.own, prefix);
        self.both = self.both.saturating_sub(gone);
    }

    /// Forgets all blocks of other gateways, with those that wrong hashes left behind. Returns the first
    /// blocks of their prompts, one of each bucket.
    pub(super) fn forget_remote(&mut self) -> impl Iterator<Item = BlockHash> + use<> {
        self.both = 0;
        std::mem::take(&mut self.remote).into_buckets()
    }

    /// Returns whether a prompt is booked whose first block is of the bucket of `first`.
    pub(super) fn books_like(&self, first: BlockHash) -> bool {
        self.own.books_like(first) || self.remote.books_like(first)
    }
}

/// Adds a prompt to one tree. Returns how many of the blocks that are new in it the other tree has.
fn add(tree: &mut Booked, other: &Booked, prefix: &Prefix) -> u32 {
    if other.is_empty() {
        tree.add(prefix);
        return 0;
    }
    let before = tree.shared(prefix.hashes());
    tree.add(prefix);
    weight_between(prefix, before, other.shared(prefix.hashes()))
}

/// Releases a prompt from one tree. Returns how many of the blocks that left it the other tree has.
fn release(tree: &mut Booked, other: &Booked, prefix: &Prefix) -> u32 {
    tree.release(prefix);
    if other.is_empty() {
        return 0;
    }
    weight_between(prefix, tree.shared(prefix.hashes()), other.shared(prefix.hashes()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use prefix_index::Salt;

    /// Counts every block of each side's prompts.
    #[derive(Default)]
    struct Naive([HashMap<BlockHash, (u32, u32)>; 2]);

    impl Naive {
        fn add(&mut self, remote: bool, prefix: &Prefix) {
            for (block, weight) in prefix.weighed() {
                self.0[usize::from(remote)].entry(block).or_insert((0, weight)).0 += 1;
            }
        }

        fn release(&mut self, remote: bool, prefix: &Prefix) {
            let side = &mut self.0[usize::from(remote)];
            for (block, _) in prefix.weighed() {
                side.get_mut(&block).unwrap().0 -= 1;
            }
            side.retain(|_, (count, _)| *count > 0);
        }

        fn own(&self) -> u32 {
            self.0[0].values().map(|(_, weight)| weight).sum()
        }

        fn only_remote(&self) -> u32 {
            let only = self.0[1].iter().filter(|(block, _)| !self.0[0].contains_key(block));
            only.map(|(_, (_, weight))| weight).sum()
        }

        fn bookings(&self, hash: BlockHash) -> u32 {
            self.0.iter().filter_map(|side| side.get(&hash)).map(|(count, _)| count).sum()
        }

        fn shared(&self, prefix: &Prefix) -> usize {
            let booked = |block: &&BlockHash| self.0.iter().any(|side| side.contains_key(block));
            prefix.hashes().iter().take_while(booked).count()
        }
    }

    fn prompt((letters, sparse): &(Vec<u8>, bool)) -> Prefix {
        if *sparse {
            let bytes: Vec<u8> = letters.iter().flat_map(|letter| [*letter; 64]).collect();
            Prefix::of_bytes(&bytes, 4, &Salt::default())
        } else {
            let tokens: Vec<u32> = letters.iter().flat_map(|letter| [u32::from(*letter); 4]).collect();
            Prefix::of_tokens(&tokens, 4, &Salt::default(), &[])
        }
    }

    fn change(blocks: &mut RankBlocks, remote: bool, add: bool, prefix: &Prefix) {
        match (remote, add) {
            (false, true) => blocks.add_own(prefix),
            (false, false) => blocks.release_own(prefix),
            (true, true) => blocks.add_remote(prefix),
            (true, false) => blocks.release_remote(prefix),
        }
    }

    proptest! {
        #[test]
        fn q1_a_block_that_several_gateways_book_counts_once_in_any_order(
            prompts in proptest::collection::vec(
                (proptest::collection::vec(0_u8..2, 0..12), any::<bool>()),
                1..40,
            ),
            order in proptest::collection::vec(
                (any::<bool>(), any::<bool>(), any::<prop::sample::Index>()),
                1..160,
            ),
        ) {
            let prompts: Vec<Prefix> = prompts.iter().map(prompt).collect();
            let (mut blocks, mut naive) = (RankBlocks::default(), Naive::default());
            let mut held = [Vec::new(), Vec::new()];
            for (remote, add, which) in order {
                let side = &mut held[usize::from(remote)];
                let add = add || side.is_empty();
                let one = if add {
                    which.get(&prompts).clone()
                } else {
                    side.swap_remove(which.index(side.len()))
                };
                change(&mut blocks, remote, add, &one);
                if add {
                    naive.add(remote, &one);
                    held[usize::from(remote)].push(one);
                } else {
                    naive.release(remote, &one);
                }
                prop_assert_eq!(blocks.own(), naive.own());
                // Q1.7
                prop_assert_eq!(blocks.only_remote(), naive.only_remote());
                let asked = which.get(&prompts);
                prop_assert_eq!(blocks.shared(asked.hashes()), naive.shared(asked));
                for (last, hash) in asked.hashes().iter().enumerate() {
                    prop_assert_eq!(blocks.bookings(asked.hashes(), last), naive.bookings(*hash));
                }
            }
        }

        #[test]
        fn q4_wrong_hashes_of_others_change_no_own_count_and_end_with_their_bookings(
            own in proptest::collection::vec(proptest::collection::vec(0_u64..6, 0..8), 1..10),
            wrong in proptest::collection::vec(proptest::collection::vec(0_u64..6, 0..8), 1..20),
        ) {
            // The hashes of this gateway are chained, those of the other gateway are any.
            let prefix = |hashes: &Vec<u64>| {
                Prefix::from(hashes.iter().map(|hash| BlockHash(*hash)).collect::<Vec<_>>())
            };
            let chained = |letters: &Vec<u64>| {
                let chain = letters.iter().scan(0, |chain, letter| {
                    *chain = *chain * 7 + letter + 1;
                    Some(*chain)
                });
                prefix(&chain.collect())
            };
            let own: Vec<Prefix> = own.iter().map(chained).collect();
            let wrong: Vec<Prefix> = wrong.iter().map(prefix).collect();
            let (mut blocks, mut naive) = (RankBlocks::default(), Naive::default());
            for (place, wrong) in wrong.iter().enumerate() {
                blocks.add_remote(wrong);
                if let Some(own) = own.get(place) {
                    blocks.add_own(own);
                    naive.add(false, own);
                }
                prop_assert_eq!(blocks.own(), naive.own());
            }
            wrong.iter().for_each(|wrong| blocks.release_remote(wrong));
            drop(blocks.forget_remote());
            // Q4.7
            prop_assert_eq!((blocks.own(), blocks.only_remote()), (naive.own(), 0));
            own.iter().take(wrong.len()).for_each(|own| blocks.release_own(own));
            prop_assert!(blocks.own.is_empty() && blocks.both == 0);
        }
    }
}
