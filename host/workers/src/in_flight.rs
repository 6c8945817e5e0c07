//! A call that waits for bytes of a worker's answer.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::worker::Worker;

/// A call to a worker, from its sending to the end of its answer. While it counts, the worker owes bytes.
#[derive(Debug)]
pub struct InFlight {
    worker: Arc<Worker>,
    /// The call counts when this is cancelled: before, the worker waits for another one.
    after: Option<CancellationToken>,
    counts: bool,
}

impl InFlight {
    /// Counts a call to `worker`, from now on or from when `after` is cancelled.
    #[must_use]
    pub fn new(worker: Arc<Worker>, after: Option<CancellationToken>) -> Self {
        let mut call = Self { worker, after, counts: false };
        call.check();
        call
    }

    /// Counts the call if the other worker has done its part.
    pub fn check(&mut self) {
        if !self.counts && self.after.as_ref().is_none_or(CancellationToken::is_cancelled) {
            self.counts = true;
            self.worker.activity().waits();
        }
    }

    /// Stops counting this answer while it is not being read. [`InFlight::check`] counts it again.
    pub fn pause(&mut self) {
        if std::mem::take(&mut self.counts) {
            self.worker.activity().waits_no_more();
        }
    }

    /// Bytes of the answer arrived.
    pub fn note_sign_of_life(&self) {
        self.worker.activity().note_sign_of_life();
    }

    /// Returns the worker.
    #[must_use]
    pub fn worker(&self) -> &Worker {
        &self.worker
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.pause();
    }
}
