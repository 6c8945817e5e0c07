//! A source of workers.

use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::fleet::Reporter;

/// A place that workers are read from.
///
/// A source reports everything it knows with each change ([`Reporter::present`]), or that it cannot know
/// anything now ([`Reporter::away`]). It never reports an empty snapshot because it could not read. When the
/// reporter asks for a recheck, it reads everything again.
pub trait Source: Send + 'static {
    /// Reads the source and reports snapshots until the future is dropped. It ends by itself only when the
    /// source cannot change any more.
    fn run(self, reporter: Reporter) -> impl Future<Output = ()> + Send;
}

/// Runs a source until `stop`.
pub fn start(source: impl Source, reporter: Reporter, tracker: &TaskTracker, stop: CancellationToken) {
    tracker.spawn(async move {
        stop.run_until_cancelled(source.run(reporter)).await;
    });
}
