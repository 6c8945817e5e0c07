//! An engine model that speaks the real engines' HTTP.
//!
//! [`core`] decides in virtual time who runs, what is cached and how long things take; it does no I/O. [`Sim`] puts it
//! behind real sockets in the vLLM, SGLang or plain OpenAI dialect, with both handshakes checked strictly: a gateway that
//! drops, reuses or mixes up a handoff is answered as an engine would answer it, and counted. It must not know the gateway.

pub use config::{Dialect, Leg, Role, SimConfig};
pub use engine::{Disconnect, Handoffs, Recorded, SimState};
pub use faults::{Fault, FaultKind, FaultLeg};
pub use sim::{Sim, SimHandle, StartError};

pub mod core;

mod config;
mod dialect;
mod engine;
mod failure;
mod faults;
mod http;
mod server;
mod sim;
mod wire;
