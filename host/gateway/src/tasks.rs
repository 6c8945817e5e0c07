//! Work in the background that ends with the daemon.

use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Starts tasks that the end of the daemon stops and waits for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tasks {
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl Tasks {
    /// Tasks will be counted by `tracker`.
    pub(crate) fn new(tracker: &TaskTracker) -> Self {
        Self { tracker: tracker.clone(), stop: CancellationToken::new() }
    }

    /// Returns the token that is cancelled when the daemon stops.
    pub(crate) fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Runs `task` until it ends, or the daemon does.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tracker.spawn(self.stop.clone().run_until_cancelled_owned(task));
    }
}
