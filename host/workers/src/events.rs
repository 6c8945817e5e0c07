//! KV events: an engine's reports about its cache, received, ordered and handed to a [`Sink`].
//!
//! Owns the connections and the handling of gaps. A lost or malformed message makes the sink
//! forget the source, so the sink may know too little but never something wrong (H6). The crate's `feeds`
//! connects the events of every worker and rank to the index.

mod feed;

pub use feed::{FeedConfig, FeedCounters, Sink, run};
