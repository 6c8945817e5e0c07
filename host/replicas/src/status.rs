//! State of the exchange for operators: the connection, the other gateways, and counters.

use std::sync::{Arc, atomic::AtomicU64};

use arc_swap::{ArcSwap, ArcSwapOption};
use serde::Serialize;

/// Counters of the exchange. All rise only.
#[derive(Debug, Default)]
pub struct Counters {
    /// Messages that were sent.
    pub sent: AtomicU64,
    /// Bytes of the sent messages.
    pub sent_bytes: AtomicU64,
    /// Messages that were received.
    pub received: AtomicU64,
    /// Bytes of the received messages.
    pub received_bytes: AtomicU64,
    /// Snapshots that were sent.
    pub snapshots: AtomicU64,
    /// Messages that were never received, by the gaps in their numbers.
    pub lost: AtomicU64,
    /// Messages that are not used: garbage, of an old process, repeated, of too many gateways.
    pub refused: AtomicU64,
    /// Bookings of others beyond the limit of one gateway.
    pub over_limit: AtomicU64,
    /// Own messages that could not be sent.
    pub unsent: AtomicU64,
    /// Gateways that were silent for their lease.
    pub expired: AtomicU64,
    /// Times that the connection to NATS was lost, or could not be made.
    pub disconnects: AtomicU64,
    /// Changes of policies' state that were sent.
    pub state_sent: AtomicU64,
    /// Changes that the server did not confirm, and that are sent again.
    pub state_unsent: AtomicU64,
    /// Entries of the bucket that were received, own ones, too.
    pub state_received: AtomicU64,
    /// Changes that are not used: malformed, beyond the quota, or of a clock that is ahead.
    pub state_refused: AtomicU64,
}

/// Values that other parts of the gateway may read at any time.
#[derive(Debug, Default)]
pub struct Status {
    /// Counters.
    pub counters: Arc<Counters>,
    view: ArcSwap<StatusView>,
    state: ArcSwap<StateView>,
    /// What the server refused of the policies' state since it was tried last.
    state_denial: ArcSwapOption<String>,
}

/// Status of the policies' shared state, as it was a moment ago.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StateView {
    /// Whether this gateway synchronizes its state with the fleet at present.
    pub shared: bool,
    /// Why it does not, if a slot shares its state.
    pub problem: Option<String>,
}

/// The exchange as it was a moment ago.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StatusView {
    /// Name of this gateway.
    pub name: Arc<str>,
    /// Name of the fleet.
    pub fleet: Arc<str>,
    /// Whether it is connected to NATS.
    pub connected: bool,
    /// Whether two processes use one name: that of this gateway, or of another one.
    pub name_conflict: bool,
    /// Why it is not connected, which subjects or messages NATS does not take, or which name two gateways
    /// use.
    pub problem: Option<String>,
    /// Number of this gateway's bookings that the others get.
    pub own_bookings: usize,
    /// The other gateways, by name.
    pub peers: Vec<PeerStatus>,
}

/// One other gateway.
#[derive(Clone, Debug, Serialize)]
pub struct PeerStatus {
    /// Name.
    pub name: Arc<str>,
    /// When its process began, in microseconds of its clock.
    pub started_us: u64,
    /// Whether all of its bookings are known.
    pub in_sync: bool,
    /// Time since its last message in milliseconds.
    pub silent_ms: u64,
    /// Lease that it asks for, in milliseconds.
    pub lease_ms: u64,
    /// Number of bookings.
    pub bookings: usize,
    /// Number of these on workers that this gateway does not have. They are kept and count nowhere.
    pub unknown_worker: usize,
    /// Messages of it that were never received.
    pub lost_messages: u64,
    /// By how many milliseconds its clock was ahead of this one when it told it last; negative: behind.
    /// `None` if its version does not tell.
    pub clock_ahead_ms: Option<i64>,
    /// Tokens in one of its blocks.
    pub block_size: u32,
    /// Whether that is the block size here. Otherwise its blocks are only counted.
    pub same_block_size: bool,
}

impl StateView {
    pub(crate) fn not_shared(problem: &str) -> Self {
        Self { shared: false, problem: Some(problem.to_owned()) }
    }
}

impl Status {
    /// Returns the latest view.
    #[must_use]
    pub fn view(&self) -> Arc<StatusView> {
        self.view.load_full()
    }

    /// Returns how the shared state of policies is.
    #[must_use]
    pub fn state(&self) -> Arc<StateView> {
        self.state.load_full()
    }

    /// Replaces that view.
    pub(crate) fn set_state(&self, view: StateView) {
        self.state.store(Arc::new(view));
    }

    /// Records that the server refused a subject of the policies' state.
    pub(crate) fn note_state_denial(&self, denial: String) {
        self.state_denial.store(Some(Arc::new(denial)));
    }

    /// Takes what the server refused of the policies' state.
    pub(crate) fn take_state_denial(&self) -> Option<Arc<String>> {
        self.state_denial.swap(None)
    }

    /// Replaces the view.
    pub(crate) fn set(&self, view: StatusView) {
        self.view.store(Arc::new(view));
    }
}
