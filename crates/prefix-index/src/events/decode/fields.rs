//! Values inside an event that engines encode in more than one form.

use std::fmt::Write as _;

use serde::de::{IgnoredAny, MapAccess, SeqAccess};

use xxhash_rust::xxh3::xxh3_64;

use super::{
    ExtraKey,
    value::{Of, Shape, Value},
};

/// Number of items for which room is made before they were read.
const MAX_RESERVED: usize = 1 << 16;

/// Name of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Type,
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    ExtraKeys,
    CacheSalt,
    Group,
    Kind,
    Window,
    Origin,
    Other,
}

/// A list of hashes, of tokens, or of the extra keys of blocks.
pub(super) enum List<T> {
    Nil,
    Items(Vec<T>),
    /// Not a list, or one with an item that cannot be read.
    Unreadable,
}

/// An engine's block hash. Opaque: the bits of a signed or unsigned integer, the last 8 bytes of a byte
/// string (big-endian), or the hash of a text.
pub(super) struct Hash(pub(super) u64);

/// A token, or the first of a pair of neighbours: SGLang lists such pairs when it speculates with EAGLE.
pub(super) struct Token(pub(super) u32);

/// Extra keys of one block; nil stands for an empty list.
pub(super) struct ExtraKeys(pub(super) Vec<ExtraKey>);

/// Any value as text: numbers are decimal, bytes are hex, nested lists are `(a,b)`, maps `{a:b}`.
pub(super) struct Text(pub(super) String);

impl Field {
    /// Fields of events, by the names that vLLM and SGLang give them.
    const NAMES: [(&'static str, Self); 14] = [
        ("type", Self::Type),
        ("block_hashes", Self::Hashes),
        ("parent_block_hash", Self::Parent),
        ("token_ids", Self::Tokens),
        ("block_size", Self::BlockSize),
        ("lora_id", Self::LoraId),
        ("medium", Self::Medium),
        ("lora_name", Self::LoraName),
        ("extra_keys", Self::ExtraKeys),
        ("cache_salt", Self::CacheSalt),
        ("group_idx", Self::Group),
        ("kv_cache_spec_kind", Self::Kind),
        ("kv_cache_spec_sliding_window", Self::Window),
        ("origin", Self::Origin),
    ];

    pub(super) fn of(key: Value<'_>) -> Self {
        let name = match key {
            Value::Text(name) => name.as_bytes(),
            Value::Bytes(name) => name,
            _ => return Self::Other,
        };
        let field = Self::NAMES.iter().find(|(known, _)| known.as_bytes() == name);
        field.map_or(Self::Other, |(_, field)| *field)
    }

    pub(super) fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, field)| *field == self).map_or("?", |(name, _)| *name)
    }
}

impl<T> List<T> {
    /// Puts the items into a field of an event. Returns false if they cannot be read.
    pub(super) fn put(self, field: &mut Option<Vec<T>>) -> bool {
        match self {
            Self::Nil => true,
            Self::Items(items) => {
                *field = Some(items);
                true
            }
            Self::Unreadable => false,
        }
    }
}

impl<'de, T> Shape<'de> for List<T>
where
    Option<T>: Shape<'de>,
{
    fn of_scalar(value: Value<'de>) -> Self {
        if matches!(value, Value::Nil) { Self::Nil } else { Self::Unreadable }
    }

    fn of_list<A: SeqAccess<'de>>(mut list: A) -> Result<Self, A::Error> {
        let mut items = Vec::with_capacity(list.size_hint().unwrap_or_default().min(MAX_RESERVED));
        while let Some(Of(item)) = list.next_element::<Of<Option<T>>>()? {
            let Some(item) = item else {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                return Ok(Self::Unreadable);
            };
            items.push(item);
        }
        Ok(Self::Items(items))
    }
}

impl<'de> Shape<'de> for Option<Hash> {
    #[inline]
    fn of_scalar(value: Value<'de>) -> Self {
        match value {
            Value::Unsigned(value) => Some(Hash(value)),
            Value::Signed(value) => Some(Hash(value.cast_unsigned())),
            Value::Text(text) if !text.is_empty() => Some(Hash(xxh3_64(text.as_bytes()))),
            Value::Bytes(bytes) if !bytes.is_empty() => {
                let last = bytes.iter().skip(bytes.len().saturating_sub(8));
                Some(Hash(last.fold(0, |value, byte| (value << 8) | u64::from(*byte))))
            }
            _ => None,
        }
    }

    fn of_list<A: SeqAccess<'de>>(list: A) -> Result<Self, A::Error> {
        Value::of_list(list).map(|_| None)
    }
}

impl<'de> Shape<'de> for Option<Token> {
    #[inline]
    fn of_scalar(value: Value<'de>) -> Self {
        match value {
            Value::Unsigned(token) | Value::ListOf(token) => u32::try_from(token).ok().map(Token),
            _ => None,
        }
    }

    fn of_list<A: SeqAccess<'de>>(list: A) -> Result<Self, A::Error> {
        Value::of_list(list).map(Self::of_scalar)
    }
}

impl<'de> Shape<'de> for Option<ExtraKeys> {
    fn of_scalar(value: Value<'de>) -> Self {
        let is_nil = matches!(value, Value::Nil);
        Some(ExtraKeys(if is_nil { Vec::new() } else { vec![ExtraKey::of_scalar(value)] }))
    }

    fn of_list<A: SeqAccess<'de>>(mut list: A) -> Result<Self, A::Error> {
        let mut keys = Vec::new();
        while let Some(Of(key)) = list.next_element()? {
            keys.push(key);
        }
        Ok(Some(ExtraKeys(keys)))
    }

    fn of_map<A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        Ok(Some(ExtraKeys(vec![ExtraKey::of_map(map)?])))
    }
}

impl<'de> Shape<'de> for ExtraKey {
    fn of_scalar(value: Value<'de>) -> Self {
        match value {
            // Prompt embeddings are a digest in bytes.
            Value::Bytes(bytes) => Self::Object { hash: xxh3_64(bytes), offset: 0 },
            Value::Text(text) => match digest(text) {
                Some(hash) => Self::Object { hash, offset: 0 },
                None => Self::Text(text.to_owned()),
            },
            other => Self::Text(Text::of_scalar(other).0),
        }
    }

    /// A multimodal object is `[identifier, offset]`. A tag may name the kind of a key (vLLM's pull request
    /// 44706).
    fn of_list<A: SeqAccess<'de>>(mut list: A) -> Result<Self, A::Error> {
        let mut parts = Vec::new();
        while let Some(Of(Text(part))) = list.next_element()? {
            parts.push(part);
        }
        let object = match parts.as_slice() {
            [tag, text] if matches!(tag.as_str(), "lora" | "cache_salt") => {
                return Ok(Self::Text(text.clone()));
            }
            [identifier, offset] => offset.parse().ok().map(|offset| (object_hash(identifier), offset)),
            [tag, identifier, offset] if tag == "mm" => {
                offset.parse().ok().map(|offset| (object_hash(identifier), offset))
            }
            _ => None,
        };
        let (hash, offset) = object.unwrap_or_else(|| (xxh3_64(parts.join("\0").as_bytes()), 0));
        Ok(Self::Object { hash, offset })
    }

    /// No engine lists maps today. As an object without a place in any prompt, it keeps the block apart.
    fn of_map<A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        Ok(Self::Object { hash: xxh3_64(Text::of_map(map)?.0.as_bytes()), offset: 0 })
    }
}

impl<'de> Shape<'de> for Text {
    fn of_scalar(value: Value<'de>) -> Self {
        Self(match value {
            Value::Nil => String::from("null"),
            Value::Bool(value) => value.to_string(),
            Value::Unsigned(value) => value.to_string(),
            Value::Signed(value) => value.to_string(),
            Value::Float(value) => value.to_string(),
            Value::Text(text) => text.to_owned(),
            Value::Bytes(bytes) => bytes.iter().fold(String::new(), |mut text, byte| {
                _ = write!(text, "{byte:02x}");
                text
            }),
            Value::ListOf(_) | Value::Other => String::from("?"),
        })
    }

    fn of_list<A: SeqAccess<'de>>(mut list: A) -> Result<Self, A::Error> {
        let mut text = String::from("(");
        while let Some(Of(Self(part))) = list.next_element()? {
            if text.len() > 1 {
                text.push(',');
            }
            text.push_str(&part);
        }
        text.push(')');
        Ok(Self(text))
    }

    fn of_map<A: MapAccess<'de>>(mut map: A) -> Result<Self, A::Error> {
        let mut text = String::from("{");
        while let Some((Of(Self(key)), Of(Self(value)))) = map.next_entry()? {
            _ = write!(text, "{key}:{value},");
        }
        text.push('}');
        Ok(Self(text))
    }
}

/// Returns the hash of a multimodal object: the first 16 of 64 hex digits, as clients compute it, or the hash
/// of another identifier, which only distinguishes objects.
fn object_hash(identifier: &str) -> u64 {
    digest(identifier).unwrap_or_else(|| xxh3_64(identifier.as_bytes()))
}

fn digest(identifier: &str) -> Option<u64> {
    let is_digest = identifier.len() == 64 && identifier.bytes().all(|byte| byte.is_ascii_hexdigit());
    u64::from_str_radix(identifier.get(..16).filter(|_| is_digest)?, 16).ok()
}
