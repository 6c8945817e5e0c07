//! Decodes batches of KV events from msgpack, in positional or named form.
//!
//! Knows neither sockets nor sequence numbers. Newer engines add fields and events, and change the form of
//! fields: what is unknown is skipped. Only what could make the index wrong, a malformed batch or a removal
//! that cannot be read, is an error, and the caller then forgets the source.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

mod event;
mod fields;
mod group_kind;
mod value;

pub use group_kind::GroupKind;
use value::{Of, Value};

/// Largest payload in bytes. Decoded events take several times as much memory.
const MAX_PAYLOAD: usize = 16 * 1024 * 1024;
/// Maximum depth of nested arrays and maps.
const MAX_DEPTH: usize = 64;

/// Hash that some engines write for "no parent". An empty text and empty bytes are read as it.
pub(crate) const NO_PARENT: u64 = 0;

/// The events of one engine step.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Time at which the engine sent the batch, in seconds since the Unix epoch; NaN if unreadable.
    pub ts: f64,
    /// Data-parallel rank that sent the batch, if the engine names it.
    pub dp_rank: Option<u32>,
    /// The events in the order in which they happened.
    pub events: Vec<KvEvent>,
}

/// One change of an engine's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks were stored.
    Stored(Stored),
    /// Blocks were removed from one tier.
    Removed {
        /// Engine hashes of the blocks.
        hashes: Vec<u64>,
        /// Tier that they were removed from.
        tier: Tier,
        /// KV cache group, if the engine has several.
        group: Option<u32>,
    },
    /// All blocks were removed from all tiers.
    Cleared,
    /// An event to skip: of an unknown type (its name, cut to 64 characters), or a store of which a field has
    /// an unknown form.
    Unknown(String),
}

/// Stored blocks, each the parent of the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Engine hashes, one per block. Opaque.
    pub hashes: Vec<u64>,
    /// Engine hash of the block before the first one; `None` if the first one starts a prompt. What 0 means
    /// depends on the engine.
    pub parent: Option<u64>,
    /// Tokens of all blocks, concatenated. Empty if the engine omits them, as it does for offloaded blocks.
    pub token_ids: Vec<u32>,
    /// Engine's number of tokens per block, if need be that of tokens per hash; 0 if unknown.
    pub block_size: u32,
    /// Name of the LoRA adapter, or its number as text if the engine sends no name.
    pub lora: Option<String>,
    /// Tier that holds the blocks.
    pub tier: Tier,
    /// Further inputs of each block's engine hash. Empty, or one list per block.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// KV cache group, if the engine has several.
    pub group: Option<u32>,
    /// Part of a prompt that the group keeps, if the engine reports it.
    pub kind: Option<GroupKind>,
    /// Whether the event repeats blocks that a request found in the cache: no further copies of them.
    pub reused: bool,
    /// Local hashes of the index's blocks, which the index computes before its writer gets the event. Then
    /// the tokens may be gone.
    pub locals: Option<LocalHashes>,
    /// Whether the index dropped its tokens, because it is not known which of them belong to which block.
    pub lacks_tokens: bool,
}

/// Local hashes of the tokens of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalHashes {
    /// Seed of the hashes.
    pub(crate) seed: u64,
    /// Tokens per hash.
    pub(crate) size: usize,
    pub(crate) hashes: Vec<u64>,
}

/// An input of a block's engine hash beside parent and tokens.
///
/// vLLM lists the LoRA adapter's name, multimodal objects as `(identifier, offset)` (before 0.19 as
/// identifier), in the first block the cache salt, and hashes of prompt embeddings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// Text: an adapter, or a cache salt. Numbers are decimal.
    Text(String),
    /// A multimodal object, or prompt embeddings.
    Object {
        /// First 8 bytes of the identifier if that is 64 hex digits; otherwise the identifier's hash.
        hash: u64,
        /// Offset of its first token from the block's first one; negative if it began in a block before.
        offset: i64,
    },
}

impl Stored {
    /// Returns whether the event came with tokens.
    pub(crate) fn has_tokens(&self) -> bool {
        !self.token_ids.is_empty() || self.locals.is_some()
    }

    /// Returns whether the engine told the tokens of the blocks, also if the index cannot use them.
    pub(crate) fn told_tokens(&self) -> bool {
        self.has_tokens() || self.lacks_tokens
    }

    /// Returns the number of blocks with tokens.
    pub(crate) fn blocks(&self) -> usize {
        let size = (self.block_size as usize).max(1);
        let hashed = self.locals.as_ref().map(|locals| locals.hashes.len() * locals.size / size);
        hashed.unwrap_or(self.token_ids.len() / size).min(self.hashes.len())
    }
}

impl ExtraKey {
    /// Returns the hash of an object.
    #[must_use]
    pub fn object(&self) -> Option<u64> {
        match self {
            Self::Object { hash, .. } => Some(*hash),
            Self::Text(_) => None,
        }
    }

    /// Returns the text, if it is not an object.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Object { .. } => None,
        }
    }

    /// Returns where an object begins in the block; 0 for a text.
    #[must_use]
    pub fn offset(&self) -> i64 {
        match self {
            Self::Object { offset, .. } => *offset,
            Self::Text(_) => 0,
        }
    }
}

/// Memory that holds a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Accelerator memory.
    #[default]
    Device,
    /// Host memory.
    Host,
    /// Anything slower, and any unknown medium.
    Disk,
}

/// Why a payload cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The payload is not msgpack, is cut short, or does not have the shape of a batch.
    #[error("cannot decode kv event batch: {0}")]
    Malformed(#[from] rmp_serde::decode::Error),
    /// The batch is followed by other bytes.
    #[error("cannot decode kv event batch: other bytes follow it")]
    Trailing,
    /// The payload is over the size limit.
    #[error("cannot decode kv event batch: {0} bytes exceed the limit of {MAX_PAYLOAD}")]
    TooLarge(usize),
}

/// Decodes a batch: `[ts, events, dp_rank?]` or a map of these, with events as maps or as positional arrays.
///
/// # Errors
/// The payload is malformed, too large, or followed by other bytes, or has a removal that cannot be read.
pub fn decode_batch(payload: &[u8]) -> Result<Batch, DecodeError> {
    if payload.len() > MAX_PAYLOAD {
        return Err(DecodeError::TooLarge(payload.len()));
    }
    let mut rest = rmp_serde::Deserializer::from_read_ref(payload);
    rest.set_max_depth(MAX_DEPTH);
    let batch = Batch::deserialize(&mut rest)?;
    match IgnoredAny::deserialize(&mut rest) {
        Err(rmp_serde::decode::Error::InvalidMarkerRead(_)) => Ok(batch),
        _ => Err(DecodeError::Trailing),
    }
}

impl Tier {
    /// Returns the tier of an engine's medium, for example `GPU`, `CPU`, `CPU_PINNED`, `DISK` or `STORAGE`,
    /// in any case.
    fn of_medium(medium: &str) -> Self {
        let starts =
            |name: &str| medium.get(..name.len()).is_some_and(|head| head.eq_ignore_ascii_case(name));
        if medium.is_empty() || starts("gpu") || starts("device") {
            Self::Device
        } else if starts("cpu") || starts("host") {
            Self::Host
        } else {
            Self::Disk
        }
    }
}

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BatchVisitor)
    }
}

struct BatchVisitor;

impl<'de> Visitor<'de> for BatchVisitor {
    type Value = Batch;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a batch `[ts, events, dp_rank?]`, or a map with `events`")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Batch, A::Error> {
        let Of(ts) = seq.next_element()?.ok_or_else(|| A::Error::missing_field("ts"))?;
        let events = seq.next_element()?.ok_or_else(|| A::Error::missing_field("events"))?;
        let dp_rank = seq.next_element()?.and_then(|Of(rank): Of<Value<'_>>| rank.number());
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Batch { ts: seconds(ts), dp_rank, events })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Batch, A::Error> {
        let (mut ts, mut events, mut dp_rank) = (Value::Nil, None, None);
        while let Some(Of(key)) = map.next_key()? {
            match key {
                Value::Text("ts") => Of(ts) = map.next_value()?,
                Value::Text("events") => events = Some(map.next_value()?),
                Value::Text("data_parallel_rank" | "attn_dp_rank" | "dp_rank") => {
                    dp_rank = map.next_value::<Of<Value<'_>>>()?.0.number();
                }
                _ => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        let events = events.ok_or_else(|| A::Error::missing_field("events"))?;
        Ok(Batch { ts: seconds(ts), dp_rank, events })
    }
}

/// Returns a time stamp; NaN if it has an unknown form.
#[expect(clippy::cast_precision_loss, reason = "seconds since the epoch")]
fn seconds(ts: Value<'_>) -> f64 {
    match ts {
        Value::Float(ts) => ts,
        Value::Unsigned(ts) => ts as f64,
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests;
