//! The gateway: an OpenAI-compatible daemon that runs the prefill and the decode leg of each request on real engines.
//!
//! Knows HTTP and requests; never names wasmtime. The way of a request: `server` reads it, `request` parses it,
//! `subject` measures it, `drive` routes and sends its legs as `legs` says, `relay` streams the answer,
//! `telemetry` writes it down.

mod admin;
pub mod app;
pub mod cli;
pub mod config;
pub mod connector;
pub mod detach;
mod drive;
pub mod error;
pub mod hints;
pub mod json;
pub mod legs;
pub mod limit;
pub mod parking;
mod preview;
mod relay;
pub mod request;
mod server;
pub mod sessions;
pub mod sse;
pub mod subject;
pub mod telemetry;
pub mod tokens;
pub mod upstream;
