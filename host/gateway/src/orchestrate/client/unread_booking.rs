//! The booking of a stream while its client does not read.
//!
//! The HTTP server does not poll a response body for which its client has no room, so the relay cannot notice
//! that its booking expired. The wait for the client does, which has a timer already.

use std::{fmt, sync::Arc};

use pointsman_workers::BookingHandle;
use tokio::time::Instant;

use crate::state::State;

/// The booking of the leg that answers with a stream.
pub(crate) struct UnreadBooking {
    state: Arc<State>,
    booking: BookingHandle,
    /// When the stream began, or the booking last expired.
    since: Instant,
}

impl UnreadBooking {
    /// Returns the booking of a stream that begins now.
    pub(crate) fn new(state: Arc<State>, booking: BookingHandle) -> Self {
        Self { state, booking, since: Instant::now() }
    }

    /// Returns when the booking expires if the client reads nothing from `unread` on.
    pub(super) fn expires(&self, unread: Instant) -> Instant {
        self.since.max(unread) + self.state.settings.booking_ttl
    }

    /// Releases the booking, once. The request continues, and no longer counts as load. The time begins anew:
    /// if the stream is continued elsewhere, its new booking takes the place of this one and expires later.
    pub(crate) fn expire(&mut self) {
        self.since = Instant::now();
        if self.booking.is_booked() {
            // Counted first, so that the metric has it once the load is gone.
            self.state.metrics.expired_bookings.inc();
            self.booking.release();
            self.state.queue.wake();
        }
    }
}

impl fmt::Debug for UnreadBooking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnreadBooking").field("booking", &self.booking).finish_non_exhaustive()
    }
}
