//! KV events: what an engine says about its cache, decoded, put in order and handed to a sink.
//!
//! Owns the wire (ZMQ, msgpack) and the rules of a broken sequence. A `Sink` takes what comes out; `feeds` has one for each
//! worker and rank, which is the index.
//! A lost or broken message costs the source's knowledge, never its truth (spec H6).

mod decode;
mod feed;
mod sequence;

pub use decode::{Batch, DecodeError, KvEvent, Stored, Tier, decode_batch};
pub use feed::{FeedConfig, FeedCounters, Sink, run};
pub use sequence::{Sequencer, Step};
