//! The gateway: an OpenAI-compatible daemon that runs the prefill and the decode leg of each request on
//! engines.
//!
//! A request passes the modules in this order: `http` reads it, `openai` parses it, `tokenization` measures
//! its prompt, `orchestrate` routes its legs and relays the answer, `connectors` write what an engine's
//! dialect wants, `upstream` is the HTTP client. `telemetry` writes down what happened; `admin` serves
//! operators. `state` is what they share, `tls` the certificates of listeners, `budget` a limit on something
//! that many use together, `count_by_key` what is in use by key, `hex` texts of ids, `tenant_limits` what
//! tenants may use; `openapi` describes the API; `picker` answers Envoy's questions for an endpoint;
//! `replicas` is the load of other gateways; `daemon` assembles it. No module names wasmtime.

mod admin;
mod big_numbers;
mod budget;
pub mod cli;
pub mod config;
mod connectors;
mod count_by_key;
pub mod daemon;
mod hex;
mod http;
#[cfg(any(feature = "otel", feature = "replicas"))]
mod instance_name;
mod openai;
mod openapi;
mod orchestrate;
#[cfg(feature = "ext-proc")]
mod picker;
#[cfg_attr(not(feature = "replicas"), path = "replicas/off.rs")]
mod replicas;
mod state;
mod tasks;
mod telemetry;
mod tenant_limits;
mod tls;
mod tokenization;
mod upstream;

use pointsman_cli::version;
