//! Failed accepts: why, and at most one log line per second.

use std::io;

use tokio::time::{Duration, Instant};

/// Shortest time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Failed accepts of one listener.
#[derive(Debug, Default)]
pub(super) struct AcceptErrors {
    logged: Option<Instant>,
    suppressed: u64,
}

impl AcceptErrors {
    /// Logs a failed accept, unless another one was logged a moment ago.
    pub(super) fn note(&mut self, error: &io::Error) {
        let Some(suppressed) = self.line_is_due() else { return };
        if is_descriptor_limit(error) {
            tracing::error!(%error, suppressed, "accept failed: raise the file descriptor limit (ulimit -n)");
        } else {
            tracing::warn!(%error, suppressed, "accept failed");
        }
    }

    /// Returns the number of failures without a line since the last one, when a line may be written.
    fn line_is_due(&mut self) -> Option<u64> {
        if self.logged.is_some_and(|logged| logged.elapsed() < LOG_INTERVAL) {
            self.suppressed += 1;
            return None;
        }
        self.logged = Some(Instant::now());
        Some(std::mem::take(&mut self.suppressed))
    }
}

fn is_descriptor_limit(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_line_a_second_counts_what_it_left_out() {
        let mut errors = AcceptErrors::default();
        assert_eq!((0..50).map(|_| errors.line_is_due()).filter(Option::is_some).count(), 1);
        tokio::time::advance(LOG_INTERVAL).await;
        assert_eq!((errors.line_is_due(), errors.line_is_due()), (Some(49), None));
        tokio::time::advance(LOG_INTERVAL).await;
        assert_eq!(errors.line_is_due(), Some(1));
    }

    #[test]
    fn an_exhausted_descriptor_table_is_recognised() {
        let error = io::Error::from_raw_os_error;
        assert!(is_descriptor_limit(&error(libc::EMFILE)) && is_descriptor_limit(&error(libc::ENFILE)));
        assert!(!is_descriptor_limit(&error(libc::ECONNABORTED)));
    }
}
