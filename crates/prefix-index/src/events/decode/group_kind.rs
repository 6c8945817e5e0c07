//! Part of a prompt that a cache group of a hybrid model keeps, by vLLM's `kv_cache_spec_kind`.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};

/// Part of a prompt that a cache group keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// Every token: full attention and MLA.
    Full,
    /// The last tokens, this many: attention with a sliding window.
    Window(u32),
    /// One state for all tokens up to the end of a block: Mamba and other recurrent layers.
    State,
    /// Anything else. The index does not know how many blocks of it the engine needs to continue.
    Other,
}

/// A value that may have any type, because newer engines may change it.
#[derive(Clone, Copy)]
pub(super) enum Loose {
    /// The name of a kind.
    Kind(Named),
    Number(u32),
    Other,
}

/// A kind by its name alone.
#[derive(Clone, Copy)]
pub(super) enum Named {
    Full,
    Window,
    State,
    /// The engine itself does not know.
    Unknown,
    Other,
}

impl Loose {
    /// Returns the kind of a group that has this name, and a window if it has one.
    pub(super) fn group_kind(self, window: Option<Self>) -> Option<GroupKind> {
        let Self::Kind(named) = self else { return None };
        match (named, window) {
            (Named::Unknown, _) => None,
            (Named::Full, _) => Some(GroupKind::Full),
            (Named::State, _) => Some(GroupKind::State),
            (Named::Window, Some(Self::Number(tokens))) if tokens > 0 => Some(GroupKind::Window(tokens)),
            (Named::Window | Named::Other, _) => Some(GroupKind::Other),
        }
    }
}

impl Named {
    fn of(name: &str) -> Self {
        match name {
            "full_attention" | "mla_attention" | "sink_full_attention" => Self::Full,
            "sliding_window" | "sliding_window_mla" => Self::Window,
            "mamba" => Self::State,
            "unknown" => Self::Unknown,
            _ => Self::Other,
        }
    }
}

impl<'de> Deserialize<'de> for Loose {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LooseVisitor)
    }
}

struct LooseVisitor;

impl<'de> Visitor<'de> for LooseVisitor {
    type Value = Loose;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, name: &str) -> Result<Loose, E> {
        Ok(Loose::Kind(Named::of(name)))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Loose, E> {
        Ok(u32::try_from(number).map_or(Loose::Other, Loose::Number))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Loose, E> {
        Ok(Loose::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Loose, E> {
        Ok(Loose::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Loose, E> {
        Ok(Loose::Other)
    }

    fn visit_bytes<E>(self, _: &[u8]) -> Result<Loose, E> {
        Ok(Loose::Other)
    }

    fn visit_unit<E>(self) -> Result<Loose, E> {
        Ok(Loose::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Loose, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Loose::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Loose, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Loose::Other)
    }
}
