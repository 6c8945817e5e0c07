//! The endpoint picker that Envoy asks over `ext_proc`, by the endpoint picker protocol 1.0 of the Gateway
//! API Inference Extension.
//!
//! Envoy opens one gRPC stream for each request. The picker answers with the address of an engine, and sees
//! the answer of the engine pass:
//!
//! ```text
//! Envoy                        conversation                       Picker, Exchange
//!   |-- request headers ------------>|-- begin, admit ------------------->|
//!   |-- request body (chunks) ------>|-- receive ------------------------>|
//!   |                                |-- pick (whole body) -------------->|
//!   |<-- header: the endpoint -------|<-- endpoint, headers, body --------|
//!   |<-- body (chunks) --------------|                                    |
//!   |-- answer headers ------------->|-- answered ----------------------->|
//!   |-- answer body (chunks) ------->|-- answer_bytes, ended ------------>|
//! ```
//!
//! `message` and `metadata` read and write the messages, `message_bytes` bounds their memory, `conversation`
//! is the state machine of one stream, `service` runs it, `silent` counts those without a request, `health`
//! answers health checks. Nothing here knows how an endpoint is chosen.

mod conversation;
mod health;
mod message;
mod message_bytes;
mod metadata;
mod picker;
mod service;
mod silent;
#[cfg(test)]
mod tests;

pub use health::{Health, health_service};
pub use message::Head;
pub use message_bytes::{Counted, MessageBytes};
pub use picker::{AnswerHead, Exchange, Pick, Picker, Refusal, RequestHead};
pub use service::{EXT_PROC_SERVICE, MAX_OVERHEAD, ext_proc_service};
