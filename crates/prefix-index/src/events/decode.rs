//! Decodes batches of KV events from msgpack, in positional or named form.
//!
//! Owns the engines' field order. Knows neither sockets nor sequence numbers. Unknown fields and events are
//! skipped. A malformed batch is an error, and the caller then forgets the source.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

mod fields;
mod group_kind;

use fields::{ExtraKeys, Field, Hash, LoraId, Medium, Token};
pub use group_kind::GroupKind;
use group_kind::Loose;

/// Largest payload in bytes. Decoded events take several times as much memory.
const MAX_PAYLOAD: usize = 16 * 1024 * 1024;
/// Maximum depth of nested arrays and maps.
const MAX_DEPTH: usize = 64;
/// Length in characters to which the name of an unknown event is cut.
const MAX_NAME: usize = 64;

/// The events of one engine step.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Time at which the engine sent the batch, in seconds since the Unix epoch.
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
    /// An event of an unknown type, with the type's name cut to 64 characters.
    Unknown(String),
}

/// Stored blocks, each the parent of the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Engine hashes, one per block. Opaque.
    pub hashes: Vec<u64>,
    /// Engine hash of the block before the first one; `None` if the first one starts a prompt.
    pub parent: Option<u64>,
    /// Tokens of all blocks, concatenated. Empty if the engine omits them, as it does for offloaded blocks.
    pub token_ids: Vec<u32>,
    /// Engine's number of tokens per block; 0 if unknown.
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
    /// Local hashes of the index's blocks, which the index computes before its writer gets the event. Then
    /// the tokens may be gone.
    pub locals: Option<LocalHashes>,
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

/// Decodes a batch: `[ts, events, dp_rank?]`, with events as maps or as positional arrays.
///
/// # Errors
/// The payload is malformed, too large, or followed by other bytes.
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
        deserializer.deserialize_seq(BatchVisitor)
    }
}

impl<'de> Deserialize<'de> for KvEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EventVisitor)
    }
}

struct BatchVisitor;

impl<'de> Visitor<'de> for BatchVisitor {
    type Value = Batch;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a batch `[ts, events, dp_rank?]`")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Batch, A::Error> {
        let ts = seq.next_element()?.ok_or_else(|| A::Error::missing_field("ts"))?;
        let events = seq.next_element()?.ok_or_else(|| A::Error::missing_field("events"))?;
        let dp_rank = seq.next_element::<Option<u32>>()?.flatten();
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Batch { ts, dp_rank, events })
    }
}

struct EventVisitor;

impl<'de> Visitor<'de> for EventVisitor {
    type Value = KvEvent;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a KV event, as an array or a map")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<KvEvent, A::Error> {
        let tag: Tag = seq.next_element()?.ok_or_else(|| A::Error::missing_field("type"))?;
        let mut fields = Fields::default();
        for field in tag.order() {
            if seq.next_element_seed(FieldSeed { fields: &mut fields, field: *field })?.is_none() {
                break;
            }
        }
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        fields.event(tag)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<KvEvent, A::Error> {
        let mut tag = None;
        let mut fields = Fields::default();
        while let Some(key) = map.next_key()? {
            match (key, &tag) {
                (Field::Type, _) => tag = Some(map.next_value::<Tag>()?),
                // The fields of an unknown event may have any shape.
                (_, Some(Tag::Other(_))) | (Field::Other, _) => _ = map.next_value::<IgnoredAny>()?,
                (field, _) => map.next_value_seed(FieldSeed { fields: &mut fields, field })?,
            }
        }
        fields.event(tag.ok_or_else(|| A::Error::missing_field("type"))?)
    }
}

/// Type of an event.
enum Tag {
    Stored,
    Removed,
    Cleared,
    Other(String),
}

impl Tag {
    /// Returns the fields that follow the tag in the positional form.
    fn order(&self) -> &'static [Field] {
        match self {
            Self::Stored => &[
                Field::Hashes,
                Field::Parent,
                Field::Tokens,
                Field::BlockSize,
                Field::LoraId,
                Field::Medium,
                Field::LoraName,
                Field::ExtraKeys,
                Field::Group,
                Field::Kind,
                Field::Window,
            ],
            Self::Removed => &[Field::Hashes, Field::Medium, Field::Group],
            Self::Cleared | Self::Other(_) => &[],
        }
    }
}

impl<'de> Deserialize<'de> for Tag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Ok(match name.as_str() {
            "BlockStored" => Self::Stored,
            "BlockRemoved" => Self::Removed,
            "AllBlocksCleared" => Self::Cleared,
            _ => Self::Other(name.chars().take(MAX_NAME).collect()),
        })
    }
}

/// Fields of an event that were read so far.
#[derive(Default)]
struct Fields {
    hashes: Option<Vec<Hash>>,
    parent: Option<Hash>,
    tokens: Option<Vec<Token>>,
    block_size: Option<u32>,
    lora_id: Option<LoraId>,
    medium: Option<Medium>,
    lora_name: Option<String>,
    extra_keys: Option<Vec<ExtraKeys>>,
    group: Option<u32>,
    kind: Option<Loose>,
    window: Option<Loose>,
}

impl Fields {
    fn event<E: serde::de::Error>(self, tag: Tag) -> Result<KvEvent, E> {
        let tier = self.medium.map(|medium| medium.0).unwrap_or_default();
        let hashes = |hashes: Option<Vec<Hash>>| {
            let hashes = hashes.ok_or_else(|| E::missing_field("block_hashes"))?;
            Ok(hashes.into_iter().map(|hash| hash.0).collect())
        };
        Ok(match tag {
            Tag::Stored => KvEvent::Stored(Stored {
                hashes: hashes(self.hashes)?,
                parent: self.parent.map(|hash| hash.0),
                token_ids: self.tokens.unwrap_or_default().into_iter().map(|token| token.0).collect(),
                block_size: self.block_size.unwrap_or_default(),
                lora: self.lora_name.or_else(|| self.lora_id.and_then(|id| id.0)),
                tier,
                extra_keys: self.extra_keys.unwrap_or_default().into_iter().map(|keys| keys.0).collect(),
                group: self.group,
                kind: self.kind.and_then(|kind| kind.group_kind(self.window)),
                locals: None,
            }),
            Tag::Removed => KvEvent::Removed { hashes: hashes(self.hashes)?, tier, group: self.group },
            Tag::Cleared => KvEvent::Cleared,
            Tag::Other(name) => KvEvent::Unknown(name),
        })
    }
}

/// Reads the value of one field.
struct FieldSeed<'a> {
    fields: &'a mut Fields,
    field: Field,
}

impl<'de> DeserializeSeed<'de> for FieldSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let Self { fields, field } = self;
        match field {
            Field::Hashes => fields.hashes = Option::deserialize(deserializer)?,
            Field::Parent => fields.parent = Option::deserialize(deserializer)?,
            Field::Tokens => fields.tokens = Option::deserialize(deserializer)?,
            Field::BlockSize => fields.block_size = Option::deserialize(deserializer)?,
            Field::LoraId => fields.lora_id = Option::deserialize(deserializer)?,
            Field::Medium => fields.medium = Option::deserialize(deserializer)?,
            Field::LoraName => fields.lora_name = Option::deserialize(deserializer)?,
            Field::ExtraKeys => fields.extra_keys = Option::deserialize(deserializer)?,
            Field::Group => fields.group = Option::deserialize(deserializer)?,
            Field::Kind => fields.kind = Some(Loose::deserialize(deserializer)?),
            Field::Window => fields.window = Some(Loose::deserialize(deserializer)?),
            Field::Type | Field::Other => _ = IgnoredAny::deserialize(deserializer)?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
