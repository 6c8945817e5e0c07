//! Native selectors that need more than a cost: cursors and draws.

use std::sync::atomic::{AtomicUsize, Ordering};

use pointsman_workers::Leg;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

/// Round-robin cursors, one a leg. They live in the router, so that they survive reloads and workers coming and going.
#[derive(Debug, Default)]
pub(crate) struct Cursors {
    aggregated: AtomicUsize,
    prefill: AtomicUsize,
    decode: AtomicUsize,
}

impl Cursors {
    /// The next place among `rows`; moves the cursor.
    pub(crate) fn next(&self, leg: Leg, rows: usize) -> Option<usize> {
        self.of(leg).fetch_add(1, Ordering::Relaxed).checked_rem(rows)
    }

    /// The next place among `rows`; the cursor stays.
    pub(crate) fn peek(&self, leg: Leg, rows: usize) -> Option<usize> {
        self.of(leg).load(Ordering::Relaxed).checked_rem(rows)
    }

    fn of(&self, leg: Leg) -> &AtomicUsize {
        match leg {
            Leg::Aggregated => &self.aggregated,
            Leg::Prefill => &self.prefill,
            Leg::Decode => &self.decode,
        }
    }
}

/// A uniform place.
pub(crate) fn random(rows: usize, seed: u64) -> Option<usize> {
    (rows > 0).then(|| SmallRng::seed_from_u64(seed).random_range(0..rows))
}

/// The place with the smaller load of two different ones drawn uniformly; the first drawn wins a tie.
pub(crate) fn power_of_two(rows: &[u32], load: impl Fn(u32) -> u32, seed: u64) -> Option<usize> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let first = (!rows.is_empty()).then(|| rng.random_range(0..rows.len()))?;
    if rows.len() == 1 {
        return Some(first);
    }
    let step = rng.random_range(1..rows.len());
    let second = (first + step) % rows.len();
    let load_at = |place: usize| rows.get(place).map_or(u32::MAX, |row| load(*row));
    Some(if load_at(second) < load_at(first) { second } else { first })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f1_round_robin_visits_each_place_in_turn_per_leg() {
        let cursors = Cursors::default();
        let visits: Vec<_> = (0..5).filter_map(|_| cursors.next(Leg::Decode, 3)).collect();
        assert_eq!(visits, [0, 1, 2, 0, 1]);
        assert_eq!((cursors.peek(Leg::Decode, 3), cursors.peek(Leg::Decode, 3)), (Some(2), Some(2)));
        assert_eq!(cursors.next(Leg::Prefill, 3), Some(0));
        assert_eq!(cursors.next(Leg::Prefill, 0), None);
    }

    #[test]
    fn f1_random_is_uniform_and_follows_the_seed() {
        let mut counts = [0_u32; 4];
        (0..8_000).for_each(|seed| counts[random(4, seed).unwrap()] += 1);
        assert!(counts.iter().all(|count| (1_800..2_200).contains(count)), "{counts:?}");
        assert_eq!(random(4, 9), random(4, 9));
    }

    #[test]
    fn f1_power_of_two_never_takes_the_most_loaded_of_three() {
        let loads = [5_u32, 1, 9];
        for seed in 0..500 {
            let place = power_of_two(&[0, 1, 2], |row| loads[row as usize], seed).unwrap();
            assert_ne!(place, 2);
        }
        assert_eq!(power_of_two(&[7], |_| 0, 3), Some(0));
        assert_eq!(power_of_two(&[], |_| 0, 3), None);
    }
}
