//! The OpenAI-compatible API: request bodies, routing hints, event streams, errors. Knows no state and does
//! no I/O.

pub(crate) mod body_bytes;
pub(crate) mod canary;
pub(crate) mod chunk;
pub(crate) mod client_key;
pub(crate) mod continuation;
pub(crate) mod endpoint;
pub(crate) mod error;
mod error_body;
pub(crate) mod form;
pub(crate) mod generate;
pub(crate) mod hide;
pub(crate) mod hints;
pub(crate) mod lax;
pub(crate) mod limits;
pub(crate) mod media_ids;
pub(crate) mod messages;
pub(crate) mod rate_limit;
pub(crate) mod request;
pub(crate) mod request_error;
pub(crate) mod request_id;
pub(crate) mod reserved;
pub(crate) mod responses;
pub(crate) mod results;
pub(crate) mod sampling;
pub(crate) mod seen;
pub(crate) mod sequence;
pub(crate) mod short_text;
pub(crate) mod stream_headers;
pub(crate) mod token_ids;
pub(crate) mod trace_context;
pub(crate) mod transcript;

pub(crate) use ::sse;
