//! Values inside an event that engines encode in more than one form.

use std::fmt::{self, Write as _};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, SeqAccess, Unexpected, Visitor},
};

use xxhash_rust::xxh3::xxh3_64;

use super::{ExtraKey, Tier};

/// Name of a field.
#[derive(Clone, Copy)]
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
    Group,
    Kind,
    Window,
    Other,
}

/// An engine's block hash: the bits of a signed or unsigned integer, or the last 8 bytes of a byte string,
/// big-endian.
pub(super) struct Hash(pub(super) u64);

/// Number of a LoRA adapter as text. 0 means no adapter; engines count from 1.
pub(super) struct LoraId(pub(super) Option<String>);

/// A token, or the first of a pair of neighbours: SGLang lists such pairs when it speculates with EAGLE.
pub(super) struct Token(pub(super) u32);

/// A medium, converted to a tier.
pub(super) struct Medium(pub(super) Tier);

/// Extra keys of one block; nil stands for an empty list.
pub(super) struct ExtraKeys(pub(super) Vec<ExtraKey>);

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FieldVisitor)
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(HashVisitor)
    }
}

impl<'de> Deserialize<'de> for LoraId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Text::deserialize(deserializer)?.0;
        Ok(Self((text != "0").then_some(text)))
    }
}

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TokenVisitor)
    }
}

impl<'de> Deserialize<'de> for Medium {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(Tier::of_medium(&String::deserialize(deserializer)?)))
    }
}

impl<'de> Deserialize<'de> for ExtraKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(Option::deserialize(deserializer)?.unwrap_or_default()))
    }
}

impl<'de> Deserialize<'de> for ExtraKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ExtraKeyVisitor)
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

struct ExtraKeyVisitor;

impl<'de> Visitor<'de> for ExtraKeyVisitor {
    type Value = ExtraKey;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key: text, a number, bytes or a list of these")
    }

    fn visit_str<E>(self, value: &str) -> Result<ExtraKey, E> {
        let object = digest(value).map(|hash| ExtraKey::Object { hash, offset: 0 });
        Ok(object.unwrap_or_else(|| ExtraKey::Text(value.to_owned())))
    }

    fn visit_bool<E>(self, value: bool) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Text(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Text(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Text(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Text(value.to_string()))
    }

    fn visit_unit<E>(self) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Text(String::from("null")))
    }

    /// Prompt embeddings are a digest in bytes.
    fn visit_bytes<E>(self, value: &[u8]) -> Result<ExtraKey, E> {
        Ok(ExtraKey::Object { hash: xxh3_64(value), offset: 0 })
    }

    /// A multimodal object is `[identifier, offset]`.
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<ExtraKey, A::Error> {
        let mut parts = Vec::new();
        while let Some(Text(part)) = seq.next_element()? {
            parts.push(part);
        }
        let object = match parts.as_slice() {
            [identifier, offset] => offset.parse().ok().map(|offset| (object_hash(identifier), offset)),
            _ => None,
        };
        let (hash, offset) = object.unwrap_or_else(|| (xxh3_64(parts.join("\0").as_bytes()), 0));
        Ok(ExtraKey::Object { hash, offset })
    }
}

struct FieldVisitor;

impl Visitor<'_> for FieldVisitor {
    type Value = Field;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a field")
    }

    fn visit_str<E>(self, name: &str) -> Result<Field, E> {
        Ok(match name {
            "type" => Field::Type,
            "block_hashes" => Field::Hashes,
            "parent_block_hash" => Field::Parent,
            "token_ids" => Field::Tokens,
            "block_size" => Field::BlockSize,
            "lora_id" => Field::LoraId,
            "medium" => Field::Medium,
            "lora_name" => Field::LoraName,
            "extra_keys" => Field::ExtraKeys,
            "group_idx" => Field::Group,
            "kv_cache_spec_kind" => Field::Kind,
            "kv_cache_spec_sliding_window" => Field::Window,
            _ => Field::Other,
        })
    }

    fn visit_bytes<E>(self, _: &[u8]) -> Result<Field, E> {
        Ok(Field::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Field, E> {
        Ok(Field::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Field, E> {
        Ok(Field::Other)
    }
}

struct TokenVisitor;

impl<'de> Visitor<'de> for TokenVisitor {
    type Value = Token;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token or a pair of tokens")
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Token, E> {
        let token = u32::try_from(value);
        token.map(Token).map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Token, E> {
        let token = u32::try_from(value);
        token.map(Token).map_err(|_| E::invalid_value(Unexpected::Signed(value), &self))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Token, A::Error> {
        let first = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Token(first))
    }
}

struct HashVisitor;

impl Visitor<'_> for HashVisitor {
    type Value = Hash;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a block hash: an integer or bytes")
    }

    fn visit_u64<E>(self, value: u64) -> Result<Hash, E> {
        Ok(Hash(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Hash, E> {
        Ok(Hash(value.cast_unsigned()))
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Hash, E> {
        if bytes.is_empty() {
            return Err(E::invalid_length(0, &self));
        }
        let last = bytes.iter().skip(bytes.len().saturating_sub(8));
        Ok(Hash(last.fold(0, |value, byte| (value << 8) | u64::from(*byte))))
    }
}

/// Any value as text: numbers are decimal, bytes are hex, nested lists are `(a,b)`.
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextVisitor).map(Self)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key: text, a number, bytes or a list of these")
    }

    fn visit_str<E>(self, value: &str) -> Result<String, E> {
        Ok(value.to_owned())
    }

    fn visit_bool<E>(self, value: bool) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_u64<E>(self, value: u64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_i64<E>(self, value: i64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_f64<E>(self, value: f64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_unit<E>(self) -> Result<String, E> {
        Ok(String::from("null"))
    }

    fn visit_bytes<E: serde::de::Error>(self, value: &[u8]) -> Result<String, E> {
        let mut text = String::new();
        for byte in value {
            write!(text, "{byte:02x}").map_err(E::custom)?;
        }
        Ok(text)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<String, A::Error> {
        let mut text = String::from("(");
        while let Some(Text(part)) = seq.next_element()? {
            if text.len() > 1 {
                text.push(',');
            }
            text.push_str(&part);
        }
        text.push(')');
        Ok(text)
    }
}
