//! KV events: an engine's reports about its cache, decoded and ordered.

mod decode;
mod sequence;

pub(crate) use decode::NO_PARENT;
pub use decode::{Batch, DecodeError, ExtraKey, GroupKind, KvEvent, LocalHashes, Stored, Tier, decode_batch};
pub use sequence::{Sequencer, Step};

/// Largest block of an engine that is believed, in tokens.
pub const MAX_BLOCK_SIZE: u32 = 65_536;
