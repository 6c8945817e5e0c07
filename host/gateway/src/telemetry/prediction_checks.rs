//! Checks predictions of cached tokens, by model: reports when they become wrong and when they are right
//! again.
//!
//! A wrong prediction from exact tokens means that gateway and engine do not hash the same tokens or blocks:
//! their tokenizer, chat template or block size differs.

use std::collections::HashMap;

use parking_lot::Mutex;
use pointsman_workers::ModelName;

/// Number of predictions that are judged together.
const WINDOW: u32 = 100;
/// Number of these predictions that may be wrong. The model recovers when at most half of this number is
/// wrong.
const TOLERATED: u32 = 10;

/// Maximum number of models whose predictions are kept. Workers may come and go with ever new models: when
/// there are more, all begin anew.
const MAX_MODELS: usize = 10_000;

/// Latest predictions of each model.
#[derive(Debug, Default)]
pub struct PredictionChecks(Mutex<HashMap<ModelName, Window>>);

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    /// One bit for each prediction, 1 if it was wrong. The newest prediction has the lowest bit.
    differed: u128,
    seen: u32,
    warned: bool,
}

/// A change worth a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// This number of the latest predictions is wrong.
    Broke(u32),
    /// Predictions are right again.
    Recovered,
}

impl PredictionChecks {
    /// Records whether one prediction from exact tokens differed from the engine's report.
    pub(crate) fn record_check(&self, model: &ModelName, differed: bool) -> Option<Turn> {
        let mut windows = self.0.lock();
        match windows.get_mut(model) {
            Some(window) => window.record_check(differed),
            None => {
                if windows.len() == MAX_MODELS {
                    windows.clear();
                }
                windows.entry(model.clone()).or_default().record_check(differed)
            }
        }
    }
}

impl Window {
    fn record_check(&mut self, differed: bool) -> Option<Turn> {
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

/// Logs that predictions of a model broke or recovered.
pub(super) fn log_turn(model: &ModelName, turn: Option<Turn>) {
    match turn {
        None => {}
        Some(Turn::Broke(wrong)) => tracing::warn!(
            %model,
            wrong,
            of = WINDOW,
            "cached-token predictions are wrong: check the tokenizer, chat template and block size"
        ),
        Some(Turn::Recovered) => tracing::info!(%model, "cached-token predictions are right again"),
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
            (0..count).filter_map(|_| mismatches.record_check(model, differed)).collect()
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

    #[test]
    fn m4_models_that_come_and_go_leave_a_bounded_number_of_windows() {
        let checks = PredictionChecks::default();
        for number in 0..MAX_MODELS + 5 {
            checks.record_check(&ModelName::new(&format!("m{number}")), false);
        }
        // M4.7
        assert_eq!(checks.0.lock().len(), 5);
    }
}
