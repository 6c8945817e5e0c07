//! What is known of files that change: whether to use them, and what operators are told.

use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use pointsman_certificates::pem;

use crate::{config::Problem, telemetry::tls_metrics::TlsMetrics};

/// A certificate in force.
#[derive(Clone, Debug)]
pub(super) struct OwnCertificate {
    pub(super) file: PathBuf,
    /// When it expires, seconds since 1970.
    pub(super) expires: i64,
}

impl OwnCertificate {
    pub(super) fn new(file: &Path, expires: i64) -> Self {
        Self { file: file.to_owned(), expires }
    }
}

/// The files of a listener, or of those for engines.
#[derive(Debug)]
pub(super) struct WatchedFiles {
    /// Their table in the configuration.
    pub(super) path: &'static str,
    /// Their label in metrics.
    label: &'static str,
    seen: Mutex<Seen>,
}

/// The last reading, and what is in force.
#[derive(Debug, Default)]
struct Seen {
    /// A digest, or problems.
    last: Option<Result<[u8; 32], Vec<Problem>>>,
    /// The content was judged: it is in force, or was refused.
    judged: bool,
    /// Why the last content that was judged is not in force.
    refused: Option<String>,
    /// The certificate in force, if there is one.
    certificate: Option<OwnCertificate>,
    /// The expiry of this certificate was logged.
    is_expiry_logged: bool,
}

impl WatchedFiles {
    pub(super) fn new(path: &'static str, label: &'static str) -> Self {
        Self { path, label, seen: Mutex::default() }
    }

    /// Takes note of a reading. Returns whether its content differs from the one `in_force`, is complete, and
    /// has not been judged: files are read twice so that half of a change is not taken for one.
    pub(super) fn is_due(
        &self,
        found: Result<[u8; 32], Vec<Problem>>,
        in_force: [u8; 32],
        metrics: &TlsMetrics,
    ) -> bool {
        let mut seen = self.seen.lock();
        self.log_expiry(&mut seen);
        if found == Ok(in_force) {
            (seen.last, seen.judged) = (None, false);
            if seen.refused.take().is_some() {
                metrics.in_force(self.label, Some(true));
            }
            return false;
        }
        if seen.last.as_ref() != Some(&found) {
            // Files that are being written differ between two reads.
            (seen.last, seen.judged) = (Some(found), false);
            return false;
        }
        !std::mem::replace(&mut seen.judged, true)
    }

    /// Takes note of what the configuration puts in force; `None`: it has no certificate.
    pub(super) fn installed(&self, certificate: Option<OwnCertificate>, metrics: &TlsMetrics) {
        metrics.expires(self.label, certificate.as_ref().map(|certificate| certificate.expires));
        metrics.in_force(self.label, certificate.as_ref().map(|_| true));
        let mut seen = self.seen.lock();
        *seen = Seen { certificate, ..Seen::default() };
        self.log_expiry(&mut seen);
    }

    /// Counts and logs changed files that were put in force.
    pub(super) fn applied(&self, certificate: Option<OwnCertificate>, metrics: &TlsMetrics) {
        let expires = certificate.as_ref().map(|certificate| certificate.expires);
        self.installed(certificate, metrics);
        metrics.reloaded(self.label, "applied");
        tracing::info!(listener = self.label, expires, "certificate reloaded");
    }

    /// Counts and logs changed files that cannot be used.
    pub(super) fn refused(&self, problems: &[Problem], metrics: &TlsMetrics) {
        metrics.in_force(self.label, Some(false));
        metrics.reloaded(self.label, "refused");
        let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        let problems = problems.join("; ");
        tracing::error!(listener = self.label, problems, "certificate not reloaded");
        self.seen.lock().refused = Some(problems);
    }

    /// Logs once that the certificate in force has expired.
    fn log_expiry(&self, seen: &mut Seen) {
        if seen.is_expiry_logged {
            return;
        }
        if let Some(problem) = self.expiry_problem(seen) {
            seen.is_expiry_logged = true;
            tracing::error!(listener = self.label, problem, "certificate expired");
        }
    }

    fn expiry_problem(&self, seen: &Seen) -> Option<String> {
        let OwnCertificate { file, expires } = seen.certificate.as_ref()?;
        Some(format!("{}.cert_file: {}", self.path, pem::expiry_problem(file, *expires)?))
    }

    /// Returns why the files are not in force, and that the certificate in force has expired.
    pub(super) fn problems(&self) -> Vec<String> {
        let seen = self.seen.lock();
        let refused = seen.refused.as_ref().map(|why| format!("changed files are not in force: {why}"));
        refused.into_iter().chain(self.expiry_problem(&seen)).collect()
    }
}
