//! A fleet of real processes on one machine: simulated engines and a gateway on free loopback ports, clients
//! that read answers to their last byte, and tables of what happened. The demo runs on it, and so do the
//! load, fault and soak tests of the repository.

#![expect(clippy::indexing_slicing, reason = "indexing a JSON value answers null")]
#![allow(clippy::disallowed_types, reason = "nothing here has a paused clock")]

pub mod client;
pub mod fleet;
pub mod load;
pub mod machine;
pub mod metrics_text;
pub mod poll;
pub mod proc;
pub mod stats;
pub mod table;
pub mod terminal;
pub mod trace;
