//! Test harness: an in-process gateway on real sockets, simulated engines behind it, and a client that reads
//! events.

pub mod client;
pub mod cluster;

pub use client::{Client, Reply, Stream};
pub use cluster::{TestCluster, TestClusterBuilder};
