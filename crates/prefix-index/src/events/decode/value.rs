//! Any value of msgpack. Fields of known names may have another form in a newer engine, so that reading one
//! must not fail.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};

/// A value. Its text and bytes are those of the payload.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'de> {
    Nil,
    Bool(bool),
    /// An integer from 0 on.
    Unsigned(u64),
    /// A negative integer.
    Signed(i64),
    Float(f64),
    Text(&'de str),
    Bytes(&'de [u8]),
    /// A list whose first item is this number. The others are skipped.
    ListOf(u64),
    /// Anything else, skipped.
    Other,
}

/// What a value of any type is read as.
pub(super) trait Shape<'de>: Sized {
    /// Reads a value that is neither a list nor a map. Extension types are `Other`.
    fn of_scalar(value: Value<'de>) -> Self;

    /// Reads a list to its end.
    fn of_list<A: SeqAccess<'de>>(list: A) -> Result<Self, A::Error>;

    /// Reads a map to its end.
    fn of_map<A: MapAccess<'de>>(mut map: A) -> Result<Self, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Self::of_scalar(Value::Other))
    }
}

/// Reads a shape. Fails only if the payload is not msgpack.
pub(super) struct Of<T>(pub(super) T);

impl Value<'_> {
    pub(super) fn number(self) -> Option<u32> {
        match self {
            Self::Unsigned(value) => u32::try_from(value).ok(),
            _ => None,
        }
    }
}

impl<'de> Shape<'de> for Value<'de> {
    fn of_scalar(value: Self) -> Self {
        value
    }

    fn of_list<A: SeqAccess<'de>>(mut list: A) -> Result<Self, A::Error> {
        let first = list.next_element::<Of<Self>>()?;
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(match first {
            Some(Of(Value::Unsigned(first))) => Value::ListOf(first),
            _ => Value::Other,
        })
    }
}

impl<'de, T: Shape<'de>> Deserialize<'de> for Of<T> {
    #[inline]
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyVisitor(PhantomData)).map(Self)
    }
}

struct AnyVisitor<T>(PhantomData<T>);

impl<'de, T: Shape<'de>> Visitor<'de> for AnyVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    #[inline]
    fn visit_unit<E>(self) -> Result<T, E> {
        Ok(T::of_scalar(Value::Nil))
    }

    fn visit_bool<E>(self, value: bool) -> Result<T, E> {
        Ok(T::of_scalar(Value::Bool(value)))
    }

    #[inline]
    fn visit_u64<E>(self, value: u64) -> Result<T, E> {
        Ok(T::of_scalar(Value::Unsigned(value)))
    }

    #[inline]
    fn visit_i64<E>(self, value: i64) -> Result<T, E> {
        Ok(T::of_scalar(u64::try_from(value).map_or(Value::Signed(value), Value::Unsigned)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<T, E> {
        Ok(T::of_scalar(Value::Float(value)))
    }

    #[inline]
    fn visit_borrowed_str<E>(self, value: &'de str) -> Result<T, E> {
        Ok(T::of_scalar(Value::Text(value)))
    }

    fn visit_borrowed_bytes<E>(self, value: &'de [u8]) -> Result<T, E> {
        Ok(T::of_scalar(Value::Bytes(value)))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, extension: D) -> Result<T, D::Error> {
        IgnoredAny::deserialize(extension).map(|_| T::of_scalar(Value::Other))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<T, A::Error> {
        T::of_list(list)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::of_map(map)
    }
}
