//! Draws two different rows and compares them. Knows columns of numbers and no facts.

use pointsman_policy_sdk::Rng;

/// Two drawn rows, or the only row twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    /// First drawn; wins a tie.
    pub(crate) first: usize,
    /// Second drawn.
    pub(crate) second: usize,
}

impl Pair {
    /// Draws from `0..rows`. All ordered pairs of different rows are equally likely. `None`: there are no
    /// rows.
    pub(crate) fn draw(rows: usize, rng: &mut Rng) -> Option<Self> {
        match rows {
            0 => None,
            1 => Some(Self { first: 0, second: 0 }),
            _ => {
                let first = rng.below(rows);
                let other = rng.below(rows - 1);
                Some(Self { first, second: if other < first { other } else { other + 1 } })
            }
        }
    }

    /// Returns the row with fewer requests; at a tie, with fewer prefill tokens; then the first drawn.
    pub(crate) fn less_loaded(self, requests: &[u32], prefill_tokens: &[u32]) -> usize {
        let load = |row: usize| (requests.get(row), prefill_tokens.get(row));
        if load(self.second) < load(self.first) { self.second } else { self.first }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn every_ordered_pair_of_different_rows_is_as_likely() {
        let mut counts = BTreeMap::new();
        for seed in 0..12_000 {
            let Pair { first, second } = Pair::draw(4, &mut Rng::new(seed)).unwrap();
            assert_ne!(first, second);
            *counts.entry((first, second)).or_insert(0_u32) += 1;
        }
        assert_eq!(counts.len(), 12);
        assert!(counts.values().all(|count| (880..1_120).contains(count)), "{counts:?}");
    }

    #[test]
    fn two_rows_are_always_both_drawn() {
        for seed in 0..100 {
            let Pair { first, second } = Pair::draw(2, &mut Rng::new(seed)).unwrap();
            assert_eq!(first + second, 1);
        }
    }

    #[test]
    fn one_row_is_drawn_and_none_is_not() {
        assert_eq!(Pair::draw(1, &mut Rng::new(3)), Some(Pair { first: 0, second: 0 }));
        assert_eq!(Pair::draw(0, &mut Rng::new(3)), None);
    }

    #[test]
    fn the_same_seed_draws_the_same_pair() {
        for seed in 0..100 {
            assert_eq!(Pair::draw(64, &mut Rng::new(seed)), Pair::draw(64, &mut Rng::new(seed)));
        }
    }

    #[test]
    fn requests_come_before_prefill_tokens_and_the_first_keeps_a_tie() {
        let pair = Pair { first: 0, second: 1 };
        assert_eq!(pair.less_loaded(&[3, 2], &[0, 9_000]), 1);
        assert_eq!(pair.less_loaded(&[2, 3], &[9_000, 0]), 0);
        assert_eq!(pair.less_loaded(&[2, 2], &[9_000, 0]), 1);
        assert_eq!(pair.less_loaded(&[2, 2], &[7, 7]), 0);
        assert_eq!(Pair { first: 1, second: 0 }.less_loaded(&[2, 2], &[7, 7]), 1);
    }

    #[test]
    fn the_most_loaded_row_never_wins() {
        let requests = [4, 9, 2, 7];
        for seed in 0..1_000 {
            let pair = Pair::draw(4, &mut Rng::new(seed)).unwrap();
            assert_ne!(pair.less_loaded(&requests, &[0; 4]), 1);
        }
    }
}
