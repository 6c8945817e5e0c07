//! Reports the progress of a run, and stops it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Progress of all runs of a command, shared by its threads.
#[derive(Debug, Default)]
pub struct Monitor {
    requests: AtomicU64,
    stop: AtomicBool,
}

impl Monitor {
    /// Adds to the number of requests that have ended.
    pub(crate) fn add(&self, requests: u64) {
        self.requests.fetch_add(requests, Ordering::Relaxed);
    }

    /// Returns the number of requests that have ended, over all runs.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Tells the runs to stop. Runs that have not ended return [`RunError::Interrupted`](crate::RunError).
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Returns whether the runs have to stop.
    #[must_use]
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}
