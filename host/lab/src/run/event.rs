//! Events of a run, in the order of time.

use bytes::Bytes;
use pointsman_sim::core::Sequence;
use prefix_index::events::Batch;
use tokio::time::Duration;

/// Something that happens at a time. Engines are named by their position; those that may have gone away since
/// also by their incarnation.
pub(super) enum Event {
    /// A request arrives.
    Arrival(usize),
    /// A sequence enters the queue of an engine's scheduler.
    Queued(usize, Box<Sequence>),
    /// An engine's step ends.
    StepEnd(usize, u32),
    /// The KV of a request has arrived at its decode engine, for the sequence of this tag.
    Transferred(usize, u64),
    /// An engine's KV events reach routing.
    KvEvents(usize, u32, Box<Batch>),
    /// Load figures of all engines are read.
    Scrape,
    /// The wait of this number of a request is over.
    Retry(usize, u32),
    /// The lease of a handoff ends.
    LeaseEnd(usize, u64),
    /// An engine goes away.
    Leaves(usize),
    /// An engine comes back.
    Returns(usize),
    /// The health of an engine is checked.
    Check(usize),
    /// Gateways send what changed of their bookings.
    SendBookings,
    /// A message of a gateway reaches the others.
    BookingsArrive(usize, Bytes),
    /// Outcomes are delivered to the policies of a gateway.
    Learn(usize),
}

/// An event in the order of the loop.
pub(super) struct Planned {
    pub(super) at: Duration,
    pub(super) order: u64,
    pub(super) event: Event,
}

impl PartialEq for Planned {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl Eq for Planned {}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Planned {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}
