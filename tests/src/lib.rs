//! Test harness: an in-process gateway on real sockets, simulated engines behind it, and a client that reads
//! events.

pub mod client;
pub mod cluster;
pub mod collector;
pub mod envoy;
pub mod etcd;
pub mod fountain;
pub mod http2;
pub mod log;
pub mod nats;
pub mod network;
pub mod own_process;
pub mod paths;
pub mod picker;
pub mod raw;
pub mod raw_engine;
pub mod tls;
pub mod tls_proxy;

pub use client::{Client, Reply, Stream};
pub use cluster::{TestCluster, TestClusterBuilder, client_keys};
pub use collector::{Behaviour, Collector, ReceivedSpan};
pub use paths::{CHAT, COMPLETIONS, MESSAGES, RESPONSES};
pub use raw_engine::{Act, RawEngine, RawRequest};
