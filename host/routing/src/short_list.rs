//! The short list of a slot with `max_rows`: the candidates that its policies see of a large fleet.
//!
//! Up to half of the list are the candidates that hold the longest parts of the prompt, a quarter those with
//! the least load, and the rest a uniform sample of the others. The decision's seed orders equal candidates:
//! the same seed gives the same list, and an idle fleet is not always entered from its beginning.

use std::collections::BinaryHeap;

use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::inputs::Inputs;

/// Smallest `max_rows`.
pub const MIN_ROWS: u32 = 8;

/// Mixed into the decision's seed, so that the sample is independent of the picks.
const SAMPLE: u64 = 0x726f_7773_2d73_6565;

/// Rows that are compared with the worst one of the best at once.
const CHUNK: usize = 64;
/// The key of a row that is left out.
const NO_KEY: u32 = u32::MAX;

/// Reusable buffers.
#[derive(Default)]
pub(crate) struct ShortList {
    /// Sort keys by position in the eligible rows, least first.
    keys: Vec<u32>,
    best: BinaryHeap<(u64, u32)>,
    rows: Vec<u32>,
}

impl ShortList {
    /// Shortens `rows`, which rise, to `most`. `inputs` has load and cached blocks of all of them.
    pub(crate) fn shorten(&mut self, rows: &mut Vec<u32>, most: u32, inputs: &Inputs, seed: u64) {
        let most = most.max(MIN_ROWS) as usize;
        if rows.len() <= most {
            return;
        }
        self.rows.clear();
        inputs.write_cached(rows, &mut self.keys);
        self.keys.iter_mut().for_each(|key| *key = NO_KEY - *key);
        self.take_best(rows, most / 2, seed);
        inputs.write_load(rows, &mut self.keys);
        self.take_best(rows, most / 4, seed);
        self.sample(rows, most, seed);
        self.rows.sort_unstable();
        std::mem::swap(rows, &mut self.rows);
    }

    /// Adds the `most` rows with the least keys that are not in the list yet.
    fn take_best(&mut self, rows: &[u32], most: usize, seed: u64) {
        self.rows.sort_unstable();
        self.best.clear();
        for (keys, rows) in self.keys.chunks(CHUNK).zip(rows.chunks(CHUNK)) {
            let least = keys.iter().copied().fold(NO_KEY, u32::min);
            // Most rows end here, when the list is full of better ones.
            let worst = self.best.peek().filter(|_| self.best.len() >= most).map(|(worst, _)| *worst);
            if least == NO_KEY || worst.is_some_and(|worst| u64::from(least) > worst >> 32) {
                continue;
            }
            for (key, row) in keys.iter().zip(rows).filter(|(key, _)| **key != NO_KEY) {
                let worst = self.best.peek().filter(|_| self.best.len() >= most).map(|(worst, _)| *worst);
                if worst.is_some_and(|worst| u64::from(*key) > worst >> 32) {
                    continue;
                }
                let key = u64::from(*key) << 32 | order(*row, seed);
                if worst.is_some_and(|worst| key >= worst) || self.rows.binary_search(row).is_ok() {
                    continue;
                }
                if self.best.len() >= most {
                    self.best.pop();
                }
                self.best.push((key, *row));
            }
        }
        self.rows.extend(self.best.drain().map(|(_, row)| row));
    }

    /// Adds rows at random until there are `most`.
    fn sample(&mut self, rows: &[u32], most: usize, seed: u64) {
        self.rows.sort_unstable();
        let mut random = SmallRng::seed_from_u64(seed ^ SAMPLE);
        // Hits of rows that are in the list already are rare in a large fleet, and bounded in a small one.
        for _ in 0..most * 4 {
            if self.rows.len() >= most {
                return;
            }
            self.insert(rows.get(random.random_range(0..rows.len())).copied());
        }
        let start = random.random_range(0..rows.len());
        let (before, after) = rows.split_at_checked(start).unwrap_or((rows, &[]));
        for row in after.iter().chain(before) {
            if self.rows.len() >= most {
                return;
            }
            self.insert(Some(*row));
        }
    }

    fn insert(&mut self, row: Option<u32>) {
        if let Some(row) = row
            && let Err(at) = self.rows.binary_search(&row)
        {
            self.rows.insert(at, row);
        }
    }
}

/// The order of a row among equal ones: 32 bits that depend on the seed.
fn order(row: u32, seed: u64) -> u64 {
    let mixed =
        (seed ^ u64::from(row).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_an_idle_fleet_is_listed_equally_often() {
        let (mut list, inputs, mut counts) = (ShortList::default(), Inputs::default(), vec![0_u32; 1_000]);
        for seed in 0..2_000 {
            let mut rows: Vec<u32> = (0..1_000).collect();
            list.shorten(&mut rows, 64, &inputs, seed);
            assert!(rows.len() == 64 && rows.is_sorted_by(|a, b| a < b));
            rows.iter().for_each(|row| counts[*row as usize] += 1);
        }
        // 128 expected, a standard deviation of 11.
        assert!(counts.iter().all(|count| (70..190).contains(count)), "{counts:?}");
    }

    #[test]
    fn a_fleet_of_about_the_list_is_listed_whole() {
        let (mut list, inputs) = (ShortList::default(), Inputs::default());
        for (count, most, expected) in [(64, 64, 64), (65, 64, 64), (9, 8, 8), (20, 3, 8), (0, 8, 0)] {
            let mut rows: Vec<u32> = (0..count).collect();
            list.shorten(&mut rows, most, &inputs, 5);
            assert_eq!(rows.len(), expected, "{count} rows, {most} wanted");
        }
    }
}
