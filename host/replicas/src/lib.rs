//! Exchange of load, sessions and policy state between the gateways of one fleet over NATS.
//!
//! Each gateway publishes its bookings in batches of a few milliseconds, and all of them from time to time. A
//! reader counts the bookings of the others as load of its own workers. Nothing here is on the path of a
//! request: bookings arrive through a journal ([`pointsman_workers::Journal`]) that never waits, and remote
//! load goes into the same counters that policies read.
//!
//! ```text
//! Booking -> Journal -> Outbox -> NATS -> Peers -> RemoteBooking (load of a rank)
//! ```
//! [`Outbox`] and [`Peers`] are state machines without I/O; [`Exchange`] connects them to NATS. The state of
//! policies is kept in a bucket of JetStream ([`SharedStates`]).

pub use bindings::{Bindings, NamedSession};
pub use config::{Credentials, ReplicasConfig, TlsFiles};
pub use exchange::Exchange;
pub use names::{MAX_NAME, is_name};
pub use outbox::Outbox;
pub use peers::{Effect, PeerLimits, Peers, Refused};
pub use shared_states::{SharedStates, slot_name};
pub use status::{Counters, PeerStatus, StateView, Status, StatusView};
pub use wire::{Entry, Kind, Message, WireError};

mod bindings;
mod clock;
mod config;
mod exchange;
mod names;
mod outbox;
mod peers;
mod shared_states;
mod status;
mod wire;
