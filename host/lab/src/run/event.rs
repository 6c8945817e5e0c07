//! Events of a run, ordered by time.

use bytes::Bytes;
use pointsman_sim::core::Sequence;
use prefix_index::events::Batch;
use tokio::time::Duration;

/// Something that happens at a point in time. An event names an engine by its position. If the engine may
/// have been away since, the event also names the engine's incarnation.
pub(super) enum Event {
    /// A request arrives.
    Arrival(usize),
    /// A sequence enters the queue of an engine's scheduler.
    Queued(usize, Box<Sequence>),
    /// An engine's step ends.
    StepEnd(usize, u32),
    /// The KV of a request has arrived at its decode engine, for the sequence of this tag.
    Transferred(u64),
    /// An engine's KV events reach routing.
    KvEvents(usize, u32, Box<Batch>),
    /// Load figures of all engines are read.
    Scrape,
    /// The wait of a request with this number of waits has ended.
    Retry(usize, u32),
    /// The lease of a handoff ends.
    LeaseEnd(usize, u64),
    /// An outage of an engine begins.
    Leaves(usize),
    /// An outage of an engine ends.
    Returns(usize),
    /// The health of an engine is checked.
    Check(usize),
    /// Gateways send the changes of their bookings.
    SendBookings,
    /// A gateway's message reaches the other gateways.
    BookingsArrive(usize, Bytes),
    /// Outcomes are delivered to the policies of a gateway.
    Learn(usize),
}

/// An event with its position in the order of events.
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
