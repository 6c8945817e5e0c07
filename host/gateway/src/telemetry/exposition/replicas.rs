//! Metrics of the exchange with other gateways.

use std::fmt;

use super::families::Families;

/// Counters of the exchange. All are 0 if there is no exchange.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReplicaFigures {
    pub(crate) connected: bool,
    pub(crate) name_conflict: bool,
    /// Largest difference between the clock here and that of another gateway.
    pub(crate) clock_difference_ms: u64,
    /// Number of slots that share the state of their policies.
    pub(crate) state_slots: usize,
    pub(crate) peers: u64,
    pub(crate) bookings: u64,
    pub(crate) unknown_worker: u64,
    /// Numbers of sent and received messages.
    pub(crate) messages: [u64; 2],
    /// Numbers of sent and received bytes.
    pub(crate) bytes: [u64; 2],
    pub(crate) snapshots: u64,
    pub(crate) lost: u64,
    pub(crate) refused: u64,
    pub(crate) over_limit: u64,
    pub(crate) unsent: u64,
    pub(crate) journal_full: u64,
    pub(crate) sessions_full: u64,
    pub(crate) expired: u64,
    pub(crate) disconnects: u64,
    pub(crate) state_shared: bool,
    /// Numbers of sent and received changes of state.
    pub(crate) state_changes: [u64; 2],
    pub(crate) state_refused: u64,
    pub(crate) state_unsent: u64,
}

/// Writes the metrics.
pub(super) fn encode(out: &mut Families<'_>, figures: &ReplicaFigures) -> fmt::Result {
    let help = "1 if the gateway is connected to NATS, else 0";
    out.gauge("pointsman_replicas_connected", help, u64::from(figures.connected))?;
    let help = "1 if two gateways use one name, this one's or that of another, else 0";
    out.gauge("pointsman_replicas_name_conflict", help, u64::from(figures.name_conflict))?;
    let help = "Largest difference between the clock here and that of another gateway in seconds";
    let difference = figures.clock_difference_ms as f64 / 1_000.0;
    out.gauge("pointsman_replicas_clock_difference_seconds", help, difference)?;
    let help = "Number of other gateways whose load counts here";
    out.gauge("pointsman_replicas_peers", help, figures.peers)?;
    let help = "Number of requests that other gateways have booked";
    out.gauge("pointsman_replicas_remote_bookings", help, figures.bookings)?;
    let help = "Number of these on workers that this gateway does not have";
    out.gauge("pointsman_replicas_unknown_worker_bookings", help, figures.unknown_worker)?;
    let both = |[sent, received]: [u64; 2]| {
        [("sent", sent), ("received", received)]
            .map(|(direction, count)| (vec![("direction", direction.to_owned())], count))
    };
    let help = "Number of messages between gateways by direction: sent or received";
    out.counters("pointsman_replicas_messages", help, both(figures.messages))?;
    let help = "Size of messages between gateways in bytes by direction: sent or received";
    out.counters("pointsman_replicas_bytes", help, both(figures.bytes))?;
    let help = "Number of snapshots of all own bookings that were sent";
    out.counter("pointsman_replicas_snapshots", help, figures.snapshots)?;
    let help = "Number of messages of other gateways that never arrived; a snapshot repairs them";
    out.counter("pointsman_replicas_lost_messages", help, figures.lost)?;
    let dropped = [
        ("refused", figures.refused),
        ("over_limit", figures.over_limit),
        ("unsent", figures.unsent),
        ("journal_full", figures.journal_full),
        ("sessions_full", figures.sessions_full),
    ];
    let dropped = dropped.map(|(reason, count)| (vec![("reason", reason.to_owned())], count));
    let help = "Number of messages (refused, unsent), bookings (over_limit, journal_full) and bindings of sessions (sessions_full) that were dropped, by reason";
    out.counters("pointsman_replicas_dropped", help, dropped)?;
    let help = "Number of times that another gateway was forgotten because it was silent";
    out.counter("pointsman_replicas_expired", help, figures.expired)?;
    let help = "Number of times that NATS could not be reached, or the connection was lost";
    out.counter("pointsman_replicas_disconnects", help, figures.disconnects)?;
    let help = "1 if the shared state of policies and that of the fleet are kept equal, else 0";
    out.gauge("pointsman_replicas_state_shared", help, u64::from(figures.state_shared))?;
    let help = "Number of slots that share the state of their policies with the fleet";
    out.gauge("pointsman_replicas_state_slots", help, figures.state_slots as u64)?;
    let help = "Number of changes of shared state by direction: sent or received, own ones, too";
    out.counters("pointsman_replicas_state_changes", help, both(figures.state_changes))?;
    let dropped = [("refused", figures.state_refused), ("unsent", figures.state_unsent)];
    let dropped = dropped.map(|(reason, count)| (vec![("reason", reason.to_owned())], count));
    let help = "Number of changes of shared state that are not used (refused) or that NATS did not confirm and that are sent again (unsent), by reason";
    out.counters("pointsman_replicas_state_problems", help, dropped)
}
