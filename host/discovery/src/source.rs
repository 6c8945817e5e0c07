//! A source of workers.

use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::fleet::Reporter;

/// A place that workers are read from.
///
/// A source reports everything it knows with each change ([`Reporter::present`]), or that it cannot know
/// anything now ([`Reporter::away`]). It never reports an empty snapshot because it could not read. When the
/// reporter asks for a recheck, it reads everything again.
pub trait Source: Send + 'static {
    /// Reads and reports until it is dropped. It ends only when nothing can come any more.
    fn run(self, reporter: Reporter) -> impl Future<Output = ()> + Send;
}

/// Runs a source until `stop`.
pub fn start(source: impl Source, reporter: Reporter, tracker: &TaskTracker, stop: CancellationToken) {
    tracker.spawn(async move {
        stop.run_until_cancelled(source.run(reporter)).await;
    });
}
