//! A gateway in process, simulated engines, real sockets: one file for each concern, all in one program,
//! since each program links the whole gateway (200 MB). A test that changes its process, or reads what all
//! of it does, begins with `own_process!`. Tests that count allocations stand beside this directory: a
//! program has one allocator.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::too_many_lines,
    clippy::unwrap_used,
    reason = "helpers of tests are tests: clippy.toml exempts only the marked functions"
)]

mod activation;
mod adapters;
mod admin;
mod agent_programs;
mod answers_in_flight;
mod api_keys;
mod arrived_answers;
mod audit;
mod back_pressure;
mod block_sizes;
mod broken_handoffs;
mod busy_thresholds;
mod byte_streams;
mod cached_media;
mod cached_tokens;
mod calibrate_log;
mod certificates;
mod changed_workers;
mod client_bodies;
mod client_tokens;
mod committed_handoffs;
mod compressed_bodies;
mod connection_pools;
mod context_lengths;
mod continuation;
mod contract;
mod data_threads;
mod decision_log;
mod decisions;
mod descriptors;
mod discovery;
mod docs_form;
mod docs_links;
mod drain;
mod empty_answers;
mod endpoint_picker;
mod endpoints;
mod engine_answers;
mod engine_facts;
mod engine_figures;
mod engine_process;
mod engine_refusals;
mod engine_sessions;
mod engine_tokens;
mod engines;
mod envoy;
mod error_statuses;
mod errors_in_answers;
mod etcd;
mod failing_workers;
mod failures;
mod fairness;
mod fallback;
mod fidelity;
mod first_byte;
mod formulas;
mod generate;
mod given_up;
mod guest_log;
mod handoffs;
mod held_back_events;
mod hidden_from_clients;
mod http2;
mod jwt;
mod jwt_algorithms;
mod kv_groups;
mod large_bodies;
mod late_prefills;
mod latency_targets;
mod learning;
mod lengths;
mod limits;
mod loaded_adapters;
mod local_plans;
mod locked_servers;
mod log_lines;
mod loops;
mod messages;
mod metrics;
mod metrics_reference;
mod missing_endpoints;
mod moves;
mod multimodal;
mod networks;
mod openapi;
mod operators_figures;
mod orchestration;
mod packages;
mod page;
mod page_problems;
mod paused_engines;
mod picker_answers;
mod picker_garbage;
mod pins;
mod pipelined;
mod policies;
mod preemption;
mod prefill_answers;
mod prompt_bytes;
mod queue_room;
mod random_handoffs;
mod realtime;
mod records;
mod refusing_decode_workers;
mod refusing_workers;
mod reload;
mod replicas;
mod request_heads;
mod reserved;
mod response_holders;
mod resumed_responses;
mod reused_connections;
mod route_preview;
mod scale_from_zero;
mod secrets;
mod serving;
mod sessions;
mod shadow_answers;
mod sleeping_engines;
mod slots;
mod slow_readers;
mod source_changes;
mod stored_responses;
mod stream_ends;
mod stuck;
mod tenants;
mod timings;
mod tls;
mod tls_engines;
mod tls_programs;
mod tls_reload;
mod trace_context;
mod traces;
mod trtllm_legs;
mod unnamed_models;
mod unreadable_events;
mod unsplit_requests;
mod vllm_frontends;
mod vllm_legs;
mod whole_answers;
mod working_engines;
mod wrong_usage;
mod zombies;
