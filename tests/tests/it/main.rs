//! A gateway in process, simulated engines, real sockets: one file for each concern, all in one program,
//! since each program links the whole gateway (200 MB). Tests that change their process, or count what it
//! does, stand beside this directory in programs of their own.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::too_many_lines,
    clippy::unwrap_used,
    reason = "helpers of tests are tests: clippy.toml exempts only the marked functions"
)]

mod admin;
mod api_keys;
mod block_sizes;
mod busy_thresholds;
mod calibrate_log;
mod certificates;
mod client_bodies;
mod client_tokens;
mod contract;
mod decision_log;
mod decisions;
mod discovery;
mod docs_links;
mod drain;
mod endpoint_picker;
mod endpoints;
mod engine_answers;
mod engine_facts;
mod engines;
mod envoy;
mod error_statuses;
mod failures;
mod fairness;
mod fidelity;
mod first_byte;
mod handoffs;
mod http2;
mod jwt;
mod jwt_algorithms;
mod learning;
mod lengths;
mod messages;
mod metrics;
mod metrics_reference;
mod multimodal;
mod openapi;
mod orchestration;
mod packages;
mod page;
mod pins;
mod policies;
mod realtime;
mod reload;
mod replicas;
mod reserved;
mod serving;
mod slots;
mod slow_readers;
mod stuck;
mod tenants;
mod timings;
mod tls;
mod tls_engines;
mod tls_programs;
mod tls_reload;
mod trace_context;
mod traces;
mod whole_answers;
