//! Engines over real sockets, one file per concern, with a raw HTTP client.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::too_many_lines,
    clippy::unwrap_used,
    reason = "helpers of tests are tests: clippy.toml exempts only the marked functions"
)]

mod bootstrap;
mod client;
mod engine;
mod faults;
mod nixl;
mod process;
