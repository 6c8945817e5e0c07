//! The OpenAI-compatible API: request bodies, routing hints, event streams, errors. Knows no state and does
//! no I/O.

pub(crate) mod error;
pub(crate) mod hints;
pub(crate) mod json;
pub(crate) mod request;
pub(crate) mod request_error;
pub(crate) mod sse;
