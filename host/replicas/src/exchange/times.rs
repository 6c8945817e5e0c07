//! Times of the exchange's periodic tasks.

use std::time::Duration;

use tokio::time::Instant;

use super::{BACKOFF, bound::SentBindings};

/// When each periodic task ran last.
pub(super) struct Times {
    pub(super) sent: Instant,
    pub(super) snapshot: Instant,
    pub(super) view: Instant,
    pub(super) connected: Instant,
    pub(super) backoff: Duration,
    /// Whether a snapshot has to be sent soon.
    pub(super) snapshot_due: bool,
    /// Bindings that the next snapshot also has.
    pub(super) bindings_due: SentBindings,
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
            bindings_due: SentBindings::Own,
        }
    }
}
