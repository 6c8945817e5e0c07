//! Whether predictions of cached tokens hold, by model: a warning when they stop, word when they hold again.
//!
//! Exact predictions that differ mean that gateway and engine do not hash the same tokens or blocks: another tokenizer or chat
//! template, another block size.

use std::collections::HashMap;

use parking_lot::Mutex;
use pointsman_workers::ModelName;

/// Predictions that are looked at together.
const WINDOW: u32 = 100;
/// Of these, so many may differ. They hold again when no more than half as many do.
const TOLERATED: u32 = 10;

/// The last predictions of each model.
#[derive(Debug, Default)]
pub struct PredictionChecks(Mutex<HashMap<ModelName, Window>>);

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    /// One bit a prediction, the newest lowest: whether it differed.
    differed: u128,
    seen: u32,
    warned: bool,
}

/// A change worth saying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// So many of the last hundred differ.
    Broke(u32),
    /// They hold again.
    Recovered,
}

impl PredictionChecks {
    /// Takes whether one exact prediction differed from what the engine reported.
    pub fn take(&self, model: &ModelName, differed: bool) -> Option<Turn> {
        let mut windows = self.0.lock();
        match windows.get_mut(model) {
            Some(window) => window.take(differed),
            None => windows.entry(model.clone()).or_default().take(differed),
        }
    }
}

impl Window {
    fn take(&mut self, differed: bool) -> Option<Turn> {
        self.differed = ((self.differed << 1) | u128::from(differed)) & ((1 << WINDOW) - 1);
        self.seen = (self.seen + 1).min(WINDOW);
        let count = self.differed.count_ones();
        if self.seen < WINDOW {
            return None;
        }
        match self.warned {
            false if count > TOLERATED => {
                self.warned = true;
                Some(Turn::Broke(count))
            }
            true if count <= TOLERATED / 2 => {
                self.warned = false;
                Some(Turn::Recovered)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h5_a_model_is_warned_of_once_until_its_predictions_hold_again() {
        let (mismatches, model, other) =
            (PredictionChecks::default(), ModelName::new("m"), ModelName::new("n"));
        let turns = |model: &ModelName, differed: bool, count: u32| -> Vec<Turn> {
            (0..count).filter_map(|_| mismatches.take(model, differed)).collect()
        };
        assert_eq!(turns(&model, true, 99), [], "too few to judge");
        assert_eq!(turns(&other, false, 500), []);
        assert_eq!(turns(&model, true, 1), [Turn::Broke(100)]);
        assert_eq!(turns(&model, true, 300), []);
        assert_eq!(turns(&model, false, 94), []);
        assert_eq!(turns(&model, false, 1), [Turn::Recovered]);
        assert_eq!(turns(&model, true, 5), [], "the old ones leave");
        assert_eq!(turns(&model, true, 6), [Turn::Broke(11)]);
        assert_eq!(turns(&other, true, 10), []);
        assert_eq!(turns(&other, true, 1), [Turn::Broke(11)]);
    }
}
