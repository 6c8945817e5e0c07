//! Engines that do not tokenize, by their answers to the gateway's own question.
//!
//! A failed question of a client does not say whether the engine or the question is at fault: any client can
//! send one that takes too long, or at which an engine fails.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_workers::{ModelName, WorkerId};
use tokio::time::Instant;

/// Time between two tests of an engine.
const INTERVAL: Duration = Duration::from_secs(1);
/// An engine that was not tested for so long has left, or has no requests.
const FORGET_AFTER: Duration = Duration::from_mins(10);

/// An engine, and the model or adapter that it was asked for.
type Tested = (WorkerId, ModelName);

/// The engines that are left out, and those that passed a test a moment ago.
#[derive(Debug, Default)]
pub(super) struct LeftOutEngines {
    tests: Mutex<HashMap<Tested, Test>>,
    failed: AtomicUsize,
}

/// The newest test of an engine.
#[derive(Debug)]
struct Test {
    begun: Instant,
    /// Result of the newest test that has ended.
    failed: bool,
}

impl LeftOutEngines {
    /// Returns whether any engine is left out.
    pub(super) fn has_any(&self) -> bool {
        self.failed.load(Ordering::Relaxed) > 0
    }

    /// Returns whether an engine is left out: it failed its newest test.
    pub(super) fn has(&self, engine: &Tested) -> bool {
        self.has_any() && self.tests.lock().get(engine).is_some_and(|test| test.failed)
    }

    /// Begins a test. Returns false if the last one began a moment ago.
    pub(super) fn begin_test(&self, engine: &Tested, now: Instant) -> bool {
        let mut tests = self.tests.lock();
        if let Some(test) = tests.get_mut(engine) {
            let is_due = now.saturating_duration_since(test.begun) >= INTERVAL;
            if is_due {
                test.begun = now;
            }
            return is_due;
        }
        tests.retain(|_, test| now.saturating_duration_since(test.begun) < FORGET_AFTER);
        self.failed.store(tests.values().filter(|test| test.failed).count(), Ordering::Relaxed);
        tests.insert(engine.clone(), Test { begun: now, failed: false });
        true
    }

    /// Ends a test. Logs whether the engine is left out, or is asked again.
    pub(super) fn end_test(&self, engine: &Tested, failure: Option<&str>) {
        let mut tests = self.tests.lock();
        let Some(test) = tests.get_mut(engine) else { return };
        let had_failed = std::mem::replace(&mut test.failed, failure.is_some());
        self.failed.store(tests.values().filter(|test| test.failed).count(), Ordering::Relaxed);
        drop(tests);
        let (worker, model) = engine;
        match failure {
            Some(error) if !had_failed => tracing::warn!(
                %worker,
                %model,
                error,
                "engine does not tokenize: others of its model are asked until it does"
            ),
            None if had_failed => tracing::info!(%worker, %model, "engine tokenizes again"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h7_an_engine_is_left_out_from_a_failed_test_to_the_next_good_one() {
        let (tests, begin) = (LeftOutEngines::default(), Instant::now());
        let [one, other] = [1, 2].map(|id| (WorkerId(id), ModelName::new("m")));
        assert!(tests.begin_test(&one, begin) && !tests.begin_test(&one, begin), "one test at a time");
        assert!(!tests.has(&one), "the test runs");
        tests.end_test(&one, Some("status 404"));
        // H7.14
        assert!(tests.has(&one) && !tests.has(&other) && tests.has_any());
        assert!(!tests.has(&(WorkerId(1), ModelName::new("adapter"))));
        assert!(tests.begin_test(&one, begin + INTERVAL));
        assert!(tests.has(&one), "the next test runs");
        tests.end_test(&one, None);
        assert!(!tests.has_any());
        tests.end_test(&one, Some("no answer"));
        assert!(tests.begin_test(&other, begin + INTERVAL + FORGET_AFTER));
        assert!(!tests.has_any() && tests.tests.lock().len() == 1, "the worker left");
    }
}
