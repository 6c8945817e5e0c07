//! Whether files changed, read twice so that half of a change is not taken for one.

use crate::{config::Problem, telemetry::tls_metrics::TlsMetrics};

/// Result of the last reading of files: a digest, or problems.
#[derive(Debug, Default)]
pub(super) struct Seen {
    last: Option<Result<[u8; 32], Vec<Problem>>>,
    /// The content was judged: it is in force, or was refused.
    judged: bool,
}

impl Seen {
    /// Takes note of a reading. Returns whether its content differs from the one `in_force`, is complete, and
    /// has not been judged.
    pub(super) fn is_due(&mut self, found: Result<[u8; 32], Vec<Problem>>, in_force: [u8; 32]) -> bool {
        if found == Ok(in_force) {
            *self = Self::default();
            return false;
        }
        if self.last.as_ref() != Some(&found) {
            // Files that are being written differ between two reads.
            *self = Self { last: Some(found), judged: false };
            return false;
        }
        !std::mem::replace(&mut self.judged, true)
    }
}

/// Counts and logs changed files that were put in force. `expires` is the time of their certificate.
pub(super) fn applied(label: &'static str, expires: Option<i64>, metrics: &TlsMetrics) {
    metrics.reloaded(label, "applied");
    metrics.expires(label, expires);
    tracing::info!(listener = label, expires, "certificate reloaded");
}

/// Counts and logs changed files that cannot be used.
pub(super) fn refused(label: &'static str, problems: &[Problem], metrics: &TlsMetrics) {
    metrics.reloaded(label, "refused");
    let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    let problems = problems.join("; ");
    tracing::error!(listener = label, problems, "certificate not reloaded");
}
