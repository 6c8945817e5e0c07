//! One event, as a positional array or as a map.
//!
//! Owns the engines' field order. A store with a field of an unknown form is skipped: the index then lacks
//! blocks. A removal with one, or of an unknown type, is an error: the index would keep blocks that are gone.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::{
    ExtraKey, KvEvent, NO_PARENT, Stored, Tier,
    fields::{ExtraKeys, Field, Hash, List, Token},
    group_kind::Named,
    value::{Of, Shape as _, Value},
};

/// Length in characters to which the name of an unknown event is cut.
const MAX_NAME: usize = 64;
/// Words in the name of an event that say that blocks are gone.
const REMOVING: [&str; 3] = ["Cleared", "Removed", "Evicted"];

impl<'de> Deserialize<'de> for KvEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EventVisitor)
    }
}

struct EventVisitor;

impl<'de> Visitor<'de> for EventVisitor {
    type Value = KvEvent;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a KV event, as an array or a map")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<KvEvent, A::Error> {
        let Of(tag) = seq.next_element()?.ok_or_else(|| A::Error::missing_field("type"))?;
        let tag = Tag::of(tag).ok_or_else(|| A::Error::custom("the type of an event is not text"))?;
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
        while let Some(Of(key)) = map.next_key()? {
            match Field::of(key) {
                Field::Type => tag = Tag::of(map.next_value::<Of<Value<'_>>>()?.0),
                field => map.next_value_seed(FieldSeed { fields: &mut fields, field })?,
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
    /// An unknown event whose name says that blocks are gone.
    Removing(String),
    Other(String),
}

impl Tag {
    fn of(name: Value<'_>) -> Option<Self> {
        let Value::Text(name) = name else { return None };
        Some(match name {
            "BlockStored" => Self::Stored,
            "BlockRemoved" => Self::Removed,
            "AllBlocksCleared" => Self::Cleared,
            _ => {
                let removes = REMOVING.iter().any(|word| name.contains(word));
                let name = name.chars().take(MAX_NAME).collect();
                if removes { Self::Removing(name) } else { Self::Other(name) }
            }
        })
    }

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
            Self::Cleared | Self::Removing(_) | Self::Other(_) => &[],
        }
    }
}

/// Fields of an event that were read so far.
#[derive(Default)]
struct Fields {
    hashes: Option<Vec<Hash>>,
    parent: Option<Hash>,
    tokens: Option<Vec<Token>>,
    block_size: Option<u32>,
    lora_id: Option<String>,
    medium: Option<Tier>,
    lora_name: Option<String>,
    extra_keys: Option<Vec<ExtraKeys>>,
    cache_salt: Option<String>,
    group: Option<u32>,
    kind: Option<Named>,
    window: Option<u32>,
    reused: bool,
    /// Fields that a removal does not have and that have an unknown form: the last of them.
    unreadable: Option<Field>,
    /// Whether a field that a removal has, too, has an unknown form.
    removal_unreadable: bool,
}

impl Fields {
    fn event<E: serde::de::Error>(self, tag: Tag) -> Result<KvEvent, E> {
        match tag {
            Tag::Stored => Ok(self.stored()),
            Tag::Removed => match self.hashes {
                Some(hashes) if !self.removal_unreadable => Ok(KvEvent::Removed {
                    hashes: hashes.into_iter().map(|hash| hash.0).collect(),
                    tier: self.medium.unwrap_or_default(),
                    group: self.group,
                }),
                _ => Err(E::custom("a BlockRemoved has a field of an unknown form")),
            },
            Tag::Cleared => Ok(KvEvent::Cleared),
            Tag::Removing(name) => {
                Err(E::custom(format_args!("an event of the unknown type {name} may remove blocks")))
            }
            Tag::Other(name) => Ok(KvEvent::Unknown(name)),
        }
    }

    fn stored(self) -> KvEvent {
        let (hashes, unreadable) = match (self.hashes, self.unreadable) {
            (Some(hashes), None) => (hashes, None),
            (hashes, unreadable) => (hashes.unwrap_or_default(), unreadable.or(Some(Field::Hashes))),
        };
        if let Some(field) = unreadable {
            return KvEvent::Unknown(format!("BlockStored with an unknown form of {}", field.name()));
        }
        let keys = self.extra_keys.unwrap_or_default();
        let mut extra_keys: Vec<Vec<ExtraKey>> = keys.into_iter().map(|keys| keys.0).collect();
        if let Some(salt) = self.cache_salt {
            add_salt(&mut extra_keys, salt);
        }
        let tokens = self.tokens.unwrap_or_default();
        // llm-d-inference-sim writes 0.
        let given_size = self.block_size.filter(|size| *size > 0);
        KvEvent::Stored(Stored {
            block_size: given_size.unwrap_or_else(|| tokens_per_hash(tokens.len(), hashes.len())),
            hashes: hashes.into_iter().map(|hash| hash.0).collect(),
            parent: self.parent.map(|hash| hash.0),
            token_ids: tokens.into_iter().map(|token| token.0).collect(),
            lora: self.lora_name.or(self.lora_id),
            tier: self.medium.unwrap_or_default(),
            extra_keys,
            group: self.group,
            kind: self.kind.and_then(|kind| kind.group_kind(self.window)),
            reused: self.reused,
            locals: None,
            lacks_tokens: false,
        })
    }

    /// Reads a field with one value. Returns false if it has an unknown form.
    fn read_scalar(&mut self, field: Field, value: Value<'_>) -> bool {
        match (field, value) {
            (Field::Kind, kind) => self.kind = Named::of(kind),
            (Field::Window, window) => self.window = window.number(),
            // Engines count adapters from 1.
            (_, Value::Nil) | (Field::LoraId, Value::Unsigned(0) | Value::Text("0")) => {}
            (Field::CacheSalt, Value::Text("")) => {}
            (Field::Parent, Value::Text("") | Value::Bytes([])) => self.parent = Some(Hash(NO_PARENT)),
            (Field::Parent, hash) => {
                self.parent = Option::of_scalar(hash);
                return self.parent.is_some();
            }
            (Field::BlockSize | Field::Group, number) => {
                let slot = if field == Field::Group { &mut self.group } else { &mut self.block_size };
                *slot = number.number();
                return slot.is_some();
            }
            (Field::Origin, Value::Text(origin)) => self.reused = origin == "REUSED",
            (Field::Medium, Value::Text(medium)) => self.medium = Some(Tier::of_medium(medium)),
            (Field::LoraId, id) => return put_text(id, &mut self.lora_id),
            (Field::LoraName, name) => return put_text(name, &mut self.lora_name),
            (Field::CacheSalt, salt) => return put_text(salt, &mut self.cache_salt),
            _ => return false,
        }
        true
    }
}

/// Returns the number of tokens of each block; 0 if it is not a whole one.
fn tokens_per_hash(tokens: usize, hashes: usize) -> u32 {
    let size = tokens.checked_div(hashes).filter(|size| size * hashes == tokens);
    size.and_then(|size| u32::try_from(size).ok()).unwrap_or_default()
}

/// Adds a request's cache salt, which SGLang gives apart from other keys, to those of its first block.
fn add_salt(extra_keys: &mut Vec<Vec<ExtraKey>>, salt: String) {
    if extra_keys.is_empty() {
        extra_keys.push(Vec::new());
    }
    if let Some(keys) = extra_keys.first_mut()
        && !keys.iter().any(|key| key.text() == Some(&salt))
    {
        keys.push(ExtraKey::Text(salt));
    }
}

fn put_text(value: Value<'_>, field: &mut Option<String>) -> bool {
    *field = match value {
        Value::Text(text) => Some(text.to_owned()),
        Value::Unsigned(number) => Some(number.to_string()),
        _ => None,
    };
    field.is_some()
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
        let readable = match field {
            Field::Hashes => Of::<List<_>>::deserialize(deserializer)?.0.put(&mut fields.hashes),
            Field::Tokens => Of::<List<_>>::deserialize(deserializer)?.0.put(&mut fields.tokens),
            Field::ExtraKeys => Of::<List<_>>::deserialize(deserializer)?.0.put(&mut fields.extra_keys),
            Field::Type | Field::Other => IgnoredAny::deserialize(deserializer).map(|_| true)?,
            _ => fields.read_scalar(field, Of::deserialize(deserializer)?.0),
        };
        if !readable {
            fields.unreadable = Some(field);
            fields.removal_unreadable |= matches!(field, Field::Hashes | Field::Medium | Field::Group);
        }
        Ok(())
    }
}
