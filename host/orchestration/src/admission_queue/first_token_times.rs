//! How long admitted requests take until their first token: a request that has less time left cannot meet its
//! target.

use std::collections::HashMap;

use pointsman_workers::ModelName;
use tokio::time::Duration;

/// The estimate moves by one in this many parts of it for each request.
const STEP: i64 = 16;
/// Most that the first request of a model counts: it may have waited for a cold start.
const MAX_FIRST_US: i64 = 1_000_000;
/// Maximum number of models with an estimate.
const MAX_MODELS: usize = 1_024;

/// Moving median of each model, microseconds. Requests that wait elsewhere, as for a decode worker, do not
/// move it far.
#[derive(Debug, Default)]
pub(super) struct FirstTokenTimes(HashMap<ModelName, i64>);

impl FirstTokenTimes {
    /// Adds the time of one request.
    pub(super) fn note(&mut self, model: &ModelName, time: Duration) {
        let time = i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
        if let Some(median) = self.0.get_mut(model) {
            let step = *median / STEP + 1;
            *median += if time > *median { step } else { -step };
        } else if self.0.len() < MAX_MODELS {
            self.0.insert(model.clone(), time.min(MAX_FIRST_US));
        }
    }

    /// Returns the median of a model; 0 if it is not known.
    pub(super) fn median_us(&self, model: &ModelName) -> i64 {
        self.0.get(model).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f7_requests_that_wait_elsewhere_do_not_move_the_estimate_far() {
        let (mut times, model) = (FirstTokenTimes::default(), ModelName::new("m"));
        assert_eq!(times.median_us(&model), 0, "nothing is known");
        let mut note = |millis| times.note(&model, Duration::from_millis(millis));
        // One in five takes a hundred times as long, and the first one, too.
        for number in 0..500 {
            note(if number % 5 == 0 { 4_000 } else { 40 });
        }
        // F7.8
        assert!((30_000..60_000).contains(&times.median_us(&model)), "{}", times.median_us(&model));
    }
}
