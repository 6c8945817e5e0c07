//! Model of an inference engine with the HTTP interface of real engines.
//!
//! [`core`] models scheduling, caching and durations in virtual time, without I/O. [`Sim`] serves it over
//! real sockets in the vLLM, SGLang or plain OpenAI dialect. It checks both kinds of handoff strictly: if a
//! gateway drops, reuses or mixes up a handoff, the model answers as an engine would, and counts the error.
//! This crate does not depend on the gateway.

pub use config::{Dialect, Role, SimConfig};
pub use engine::{Disconnect, Handoffs, Recorded, SimState};
pub use faults::{Fault, FaultKind, FaultLeg};
pub use leg::Leg;
pub use sim::{Sim, SimHandle, StartError};

pub mod cli;
pub mod core;

mod api;
mod config;
mod dialect;
mod engine;
mod failure;
mod faults;
mod http;
mod leg;
mod request;
mod server;
mod sim;
mod wire;
