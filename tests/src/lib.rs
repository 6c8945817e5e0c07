//! The harness: a gateway in process on real sockets, simulated engines behind it, and a client that reads events.

pub mod client;
pub mod house;

pub use client::{Client, Reply, Stream};
pub use house::{House, HouseBuilder};
