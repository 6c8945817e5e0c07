//! The end of the drain: requests that are still open end then with an error.

use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::Poll,
};

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

/// The end of the drain. It wakes the tasks of connections, and the requests in them look at a flag: this
/// takes no lock.
#[derive(Clone, Debug, Default)]
pub struct DrainEnd {
    passed: Arc<AtomicBool>,
    token: CancellationToken,
}

impl DrainEnd {
    /// Ends the requests that are open.
    pub(crate) fn pass(&self) {
        self.passed.store(true, Relaxed);
        self.token.cancel();
    }

    /// Returns whether it has passed.
    pub(crate) fn has_passed(&self) -> bool {
        self.passed.load(Relaxed)
    }

    /// Waits for it. Once polled, the future wakes its task, even if it is not polled again.
    pub(crate) fn passed(&self) -> WaitForCancellationFuture<'_> {
        self.token.cancelled()
    }

    /// Ready when it has passed, for a future whose task is woken by another one, such as its connection.
    pub(crate) fn seen(&self) -> impl Future<Output = ()> + use<'_> {
        poll_fn(|_| if self.has_passed() { Poll::Ready(()) } else { Poll::Pending })
    }

    /// Returns what `future` gives, unless `deadline` or the end of the drain comes first.
    pub(crate) async fn or_at<F: Future>(&self, deadline: Instant, future: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            output = future => Some(output),
            () = sleep_until(deadline) => None,
            () = self.seen() => None,
        }
    }

    /// Returns the same end with a list of waiting tasks of its own, which other threads do not lock.
    pub(crate) fn of_connection(&self) -> Self {
        Self { passed: self.passed.clone(), token: self.token.child_token() }
    }
}
