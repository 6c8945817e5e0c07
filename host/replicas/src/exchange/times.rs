//! When the exchange did what it does from time to time.

use std::time::Duration;

use tokio::time::Instant;

use super::BACKOFF;

/// When what was done last.
pub(super) struct Times {
    pub(super) sent: Instant,
    pub(super) snapshot: Instant,
    pub(super) view: Instant,
    pub(super) connected: Instant,
    pub(super) backoff: Duration,
    /// Whether a snapshot has to be sent soon.
    pub(super) snapshot_due: bool,
    /// Whether the next snapshot has the bindings of sessions, too: another gateway asked, or the connection
    /// is new.
    pub(super) sessions_due: bool,
}

impl Times {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            sent: now,
            snapshot: now,
            view: now,
            connected: now,
            backoff: BACKOFF.0,
            snapshot_due: false,
            sessions_due: true,
        }
    }
}
