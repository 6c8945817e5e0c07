//! Native selectors that need more than a cost: round-robin cursors and random draws.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use pointsman_workers::{Leg, ModelName};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

/// Number of models with cursors of their own. Further models share one set, so that memory stays bounded.
const MAX_MODELS: usize = 1_024;

/// Round-robin cursors, one per model and leg. They belong to the router, so that they survive reloads, and
/// workers that leave and join (B2).
#[derive(Debug, Default)]
pub(crate) struct Cursors {
    /// Replaced as a whole when a model is routed for the first time; a decision reads it without a lock.
    by_model: ArcSwap<HashMap<ModelName, Arc<LegCursors>>>,
    /// Held while `by_model` is replaced.
    adding: Mutex<()>,
    shared: Arc<LegCursors>,
}

#[derive(Debug, Default)]
struct LegCursors {
    aggregated: AtomicUsize,
    prefill: AtomicUsize,
    decode: AtomicUsize,
}

impl Cursors {
    /// The next position among `rows`; moves the cursor.
    pub(crate) fn next(&self, model: &ModelName, leg: Leg, rows: usize) -> Option<usize> {
        let next = |cursors: &LegCursors| cursors.of(leg).fetch_add(1, Ordering::Relaxed);
        let position = self.by_model.load().get(model).map(|cursors| next(cursors));
        position.unwrap_or_else(|| next(&self.add(model))).checked_rem(rows)
    }

    /// The next position among `rows`; the cursor stays.
    pub(crate) fn peek(&self, model: &ModelName, leg: Leg, rows: usize) -> Option<usize> {
        let by_model = self.by_model.load();
        let shared = (by_model.len() >= MAX_MODELS).then_some(&self.shared);
        let cursors = by_model.get(model).or(shared);
        cursors.map_or(0, |cursors| cursors.of(leg).load(Ordering::Relaxed)).checked_rem(rows)
    }

    /// The cursors of a model that is routed for the first time.
    fn add(&self, model: &ModelName) -> Arc<LegCursors> {
        let _one_writer = self.adding.lock();
        let current = self.by_model.load_full();
        if let Some(cursors) = current.get(model) {
            return cursors.clone();
        }
        if current.len() >= MAX_MODELS {
            return self.shared.clone();
        }
        let mut grown = (*current).clone();
        let cursors = grown.entry(model.clone()).or_default().clone();
        self.by_model.store(Arc::new(grown));
        cursors
    }
}

impl LegCursors {
    fn of(&self, leg: Leg) -> &AtomicUsize {
        match leg {
            Leg::Aggregated => &self.aggregated,
            Leg::Prefill => &self.prefill,
            Leg::Decode => &self.decode,
        }
    }
}

/// A uniformly drawn position.
pub(crate) fn random(rows: usize, seed: u64) -> Option<usize> {
    (rows > 0).then(|| SmallRng::seed_from_u64(seed).random_range(0..rows))
}

/// Draws two different positions uniformly and returns the one with the smaller load; the first drawn wins a
/// tie.
pub(crate) fn power_of_two(rows: &[u32], load: impl Fn(u32) -> u32, seed: u64) -> Option<usize> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let first = (!rows.is_empty()).then(|| rng.random_range(0..rows.len()))?;
    if rows.len() == 1 {
        return Some(first);
    }
    let step = rng.random_range(1..rows.len());
    let second = (first + step) % rows.len();
    let load_at = |position: usize| rows.get(position).map_or(u32::MAX, |row| load(*row));
    Some(if load_at(second) < load_at(first) { second } else { first })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f1_round_robin_visits_each_position_in_turn_per_model_and_leg() {
        let (cursors, model, other) = (Cursors::default(), ModelName::new("m"), ModelName::new("n"));
        assert_eq!(cursors.peek(&model, Leg::Decode, 3), Some(0));
        let visits: Vec<_> = (0..5)
            .filter_map(|_| {
                // A second model in between takes its own turns.
                assert!(cursors.next(&other, Leg::Decode, 7).is_some());
                cursors.next(&model, Leg::Decode, 3)
            })
            .collect();
        assert_eq!(visits, [0, 1, 2, 0, 1]);
        assert_eq!(cursors.next(&other, Leg::Decode, 7), Some(5));
        let peek = || cursors.peek(&model, Leg::Decode, 3);
        assert_eq!((peek(), peek()), (Some(2), Some(2)));
        assert_eq!(cursors.next(&model, Leg::Prefill, 3), Some(0));
        assert_eq!(cursors.next(&model, Leg::Prefill, 0), None);
    }

    #[test]
    fn the_number_of_models_with_cursors_is_bounded() {
        let cursors = Cursors::default();
        for number in 0..MAX_MODELS {
            cursors.next(&ModelName::new(&format!("m{number}")), Leg::Decode, 2);
        }
        let late: Vec<_> =
            (0..4).filter_map(|_| cursors.next(&ModelName::new("late"), Leg::Decode, 4)).collect();
        assert_eq!(late, [0, 1, 2, 3], "a model beyond the bound takes turns too");
        assert_eq!(cursors.by_model.load().len(), MAX_MODELS);
    }

    #[test]
    fn f1_random_is_uniform_and_follows_the_seed() {
        let mut counts = [0_u32; 4];
        (0..8_000).for_each(|seed| counts[random(4, seed).unwrap()] += 1);
        assert!(counts.iter().all(|count| (1_800..2_200).contains(count)), "{counts:?}");
        assert_eq!(random(4, 9), random(4, 9));
    }

    /// The published rule (Mitzenmacher 2001; `power_of_two.rs` of SGLang's and vLLM's routers): each pair of
    /// different workers with equal probability, then the less loaded of the two.
    #[test]
    fn s4_power_of_two_has_the_shares_of_the_published_rule() {
        let (loads, mut counts) = ([5_u32, 1, 9], [0_u32; 3]);
        for seed in 0..30_000 {
            counts[power_of_two(&[0, 1, 2], |row| loads[row as usize], seed).unwrap()] += 1;
        }
        // S4.4: of the three pairs, two have the least loaded and one the second.
        assert!((19_700..20_300).contains(&counts[1]), "{counts:?}");
        // S4.4
        assert!((9_700..10_300).contains(&counts[0]) && counts[2] == 0, "{counts:?}");
    }

    #[test]
    fn f1_power_of_two_never_takes_the_most_loaded_of_three() {
        let loads = [5_u32, 1, 9];
        for seed in 0..500 {
            let position = power_of_two(&[0, 1, 2], |row| loads[row as usize], seed).unwrap();
            assert_ne!(position, 2);
        }
        assert_eq!(power_of_two(&[7], |_| 0, 3), Some(0));
        assert_eq!(power_of_two(&[], |_| 0, 3), None);
    }
}
