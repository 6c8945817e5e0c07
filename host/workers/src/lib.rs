//! Workers: their description, health and load, and the feeds of their KV events.
//!
//! Contains no HTTP server and no Wasm. `routing` reads its snapshots; `gateway` feeds it.

mod activity;
mod average;
mod booking;
mod breaker;
mod columns;
pub mod events;
mod facts;
mod feeds;
mod hash;
mod id;
mod in_flight;
mod invariant;
mod log_limit;
mod os_errors;
mod per_leg;
mod pool;
pub mod probe;
mod registry;
mod resolver;
mod spec;
mod sync;
mod tls;
mod unix_time;
mod worker;

pub use activity::{Stuck, StuckBy};
pub use booking::{
    Booking, BookingHandle, BookingRequest, Estimate, HeldTokens, Journal, JournalEntry, LoadValues,
    RankLoad, RemoteBooking, RemoteFigures, WorkerKey,
};
pub use breaker::{AfterPause, Breaker, BreakerRules, FailureRate};
pub use columns::{EngineLoad, RankView};
pub use facts::{Contradiction, EngineFacts, FactName};
pub use feeds::{FeedStatus, Feeds};
pub use hash::name_hash;
pub use id::{BlockHash, DpRank, Engine, Leg, ModelName, Role, UnknownName, WorkerId};
pub use in_flight::InFlight;
pub use invariant::Invariant;
pub use log_limit::LogLimit;
pub use os_errors::is_local_shortage;
pub use per_leg::PerLeg;
pub use pool::{CandidateIds, Pool};
pub use registry::{Activation, ActivationState, NameConflict, Registry, Snapshot};
pub use resolver::{Peer, Resolver};
pub use spec::{Bootstrap, KvTransport, SpecError, TransferRule, WorkerSpec, url_without_secrets};
pub use tls::{EngineTls, TlsClient, is_tls_alert, server_name, tls_problem};
pub use unix_time::{unix_ms, unix_time, unix_us};
pub use worker::{
    Candidate, Doubt, Drainer, Health, Ineligible, MoveCounts, OpenHandoff, Pause, Refusal, Reservation,
    StreamMove, Worker,
};
