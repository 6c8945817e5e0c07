//! Whether a worker whose facts were never read is still loading its model.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::time::{Duration, Instant};

use super::{Health, Worker};

/// How long an engine may load: the largest models take a quarter of an hour.
const MAX_LOADING: Duration = Duration::from_secs(900);

/// When a worker joined, and whether its engine lets the gateway in.
#[derive(Debug)]
pub(super) struct Loading {
    since: Instant,
    refused: AtomicBool,
    key_refused: AtomicBool,
}

impl Loading {
    pub(super) fn new() -> Self {
        let no = || AtomicBool::new(false);
        Self { since: Instant::now(), refused: no(), key_refused: no() }
    }
}

impl Worker {
    /// Returns whether the worker joined a moment ago and its facts were never read, so that its models may
    /// be unknown. One whose engine cannot be verified, refuses its key or is another one does not load.
    #[must_use]
    pub fn is_loading(&self) -> bool {
        self.health() == Health::Unknown
            && !self.is_misconfigured()
            && !self.state.loading.refused.load(Ordering::Relaxed)
            && self.state.loading.since.elapsed() < MAX_LOADING
    }

    /// Returns whether the engine never listed its models.
    #[must_use]
    pub fn models_were_never_read(&self) -> bool {
        self.model_readings() == 0
    }

    /// Returns whether the engine refuses the worker's key, or asks for one that the worker does not have.
    #[must_use]
    pub fn refuses_key(&self) -> bool {
        self.state.loading.key_refused.load(Ordering::Relaxed)
    }

    /// Notes whether the engine cannot be verified or refuses the worker's key, and whether it is the key.
    pub(crate) fn set_refused(&self, refused: bool, key_refused: bool) {
        self.state.loading.refused.store(refused, Ordering::Relaxed);
        self.state.loading.key_refused.store(key_refused, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::WorkerSpec;

    #[tokio::test(start_paused = true)]
    async fn i1_a_worker_that_is_refused_or_does_not_come_up_does_not_load() {
        let worker =
            Worker::new(WorkerSpec::parse_flag("role=decode,engine=vllm,url=http://a:1").expect("a worker"));
        assert!(worker.is_loading());
        worker.set_refused(true, false);
        // I1.6
        assert!(!worker.is_loading());
        worker.set_refused(false, false);
        tokio::time::advance(MAX_LOADING).await;
        // I1.6
        assert!(!worker.is_loading());
    }
}
