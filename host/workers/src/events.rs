//! KV events: an engine's reports about its cache, decoded, ordered and handed to a [`Sink`].
//!
//! Owns the wire format (ZMQ, msgpack) and the handling of gaps. A lost or malformed message makes the sink
//! forget the source, so the sink may know too little but never something wrong (H6). The crate's `feeds`
//! connects the events of every worker and rank to the index.

mod decode;
mod feed;
mod sequence;

pub use decode::{Batch, DecodeError, ExtraKey, GroupKind, KvEvent, LocalHashes, Stored, Tier, decode_batch};
pub use feed::{FeedConfig, FeedCounters, Sink, run};
pub use sequence::{Sequencer, Step};
