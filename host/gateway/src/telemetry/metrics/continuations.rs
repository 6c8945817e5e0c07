//! Counts streams that are to continue on another worker.

use prometheus_client::encoding::EncodeLabelSet;

use super::Metrics;

/// Labels of a stream that is to continue on another worker.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct ContinuationLabels {
    /// What followed.
    reason: &'static str,
    /// Why it was to continue on another worker.
    cause: &'static str,
}

impl Metrics {
    /// Counts a stream. `cause`: `failure` of its engine, `drain` of its worker, or `preempt`.
    pub(crate) fn continued(&self, reason: &'static str, cause: &'static str) {
        self.continuations.get_or_create(&ContinuationLabels { reason, cause }).inc();
    }
}
