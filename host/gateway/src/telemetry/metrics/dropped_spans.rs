//! Spans that are not exported.

use super::{Metrics, ReasonLabels};

/// Why spans that were recorded are not exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DropReason {
    /// The request has more spans than are kept.
    Request,
    /// Too many spans wait for the exporter.
    Queue,
    /// The exporter has ended.
    Stopped,
    /// No connection to the collector.
    Connect,
    /// The connection broke.
    Broken,
    /// The collector answered with an error status.
    Status,
    /// The collector's answer is too large.
    Answer,
    /// The collector took some spans of the export and not these.
    Rejected,
    /// The deadline of the export passed.
    Timeout,
}

impl DropReason {
    pub(crate) const ALL: [Self; 9] = [
        Self::Request,
        Self::Queue,
        Self::Stopped,
        Self::Connect,
        Self::Broken,
        Self::Status,
        Self::Answer,
        Self::Rejected,
        Self::Timeout,
    ];

    /// Stable metric label.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Queue => "queue",
            Self::Stopped => "stopped",
            Self::Connect => "connect",
            Self::Broken => "broken",
            Self::Status => "status",
            Self::Answer => "answer",
            Self::Rejected => "rejected",
            Self::Timeout => "timeout",
        }
    }
}

impl Metrics {
    /// Counts spans that were not exported.
    pub(in crate::telemetry) fn spans_dropped(&self, reason: DropReason, spans: usize) {
        let reason = reason.as_str();
        self.trace_spans_dropped.get_or_create(&ReasonLabels { reason }).inc_by(spans as u64);
    }
}
