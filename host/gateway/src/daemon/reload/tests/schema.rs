//! Lists the keys of a type that serde deserializes, by asking its own `Deserialize` for the fields of each
//! struct.

use std::fmt;

use serde::de::{self, Deserialize, DeserializeSeed, IntoDeserializer, Visitor};

/// Names tried as keys of maps; the first that a map accepts stands for all.
const SAMPLES: [&str; 2] = ["prefill", "sample"];

/// Returns the dotted paths of all leaves of `T`: `*` stands for the keys of a map, `[]` for the elements of
/// a sequence.
pub(super) fn leaves<T: for<'de> Deserialize<'de>>() -> Vec<String> {
    let mut found = Vec::new();
    explore::<T>(&mut Vec::new(), &mut found);
    found
}

#[derive(Debug)]
enum Shape {
    Struct(&'static [&'static str]),
    Map,
    Seq,
    Leaf,
    Other(String),
}

/// Shape of the value at a path. It leaves serde as an error.
#[derive(Debug)]
struct Found(Shape);

fn explore<T: for<'de> Deserialize<'de>>(path: &mut Vec<String>, found: &mut Vec<String>) {
    match shape::<T>(path) {
        Shape::Struct(fields) => {
            for field in fields {
                path.push((*field).to_owned());
                explore::<T>(path, found);
                path.pop();
            }
        }
        Shape::Map => {
            path.push("*".to_owned());
            step_into::<T>(path, found);
            path.pop();
        }
        Shape::Seq => {
            path.push("[]".to_owned());
            step_into::<T>(path, found);
            path.pop();
        }
        Shape::Leaf => found.push(shown(path)),
        Shape::Other(error) => panic!("{}: {error}", shown(path)),
    }
}

/// Explores the values of a map or sequence; those that are leaves make the map or sequence itself the leaf.
fn step_into<T: for<'de> Deserialize<'de>>(path: &mut Vec<String>, found: &mut Vec<String>) {
    if matches!(shape::<T>(path), Shape::Leaf) {
        found.push(shown(&path[..path.len() - 1]));
    } else {
        explore::<T>(path, found);
    }
}

fn shape<T: for<'de> Deserialize<'de>>(path: &[String]) -> Shape {
    let mut last = Shape::Leaf;
    for sample in SAMPLES {
        match T::deserialize(Probe { path, sample }) {
            Ok(_) => panic!("the probe of {} reached nothing", shown(path)),
            Err(Found(Shape::Other(error))) => last = Shape::Other(error),
            Err(Found(shape)) => return shape,
        }
    }
    last
}

fn shown(path: &[String]) -> String {
    path.join(".").replace(".[]", "[]")
}

struct Probe<'a> {
    path: &'a [String],
    sample: &'static str,
}

impl<'a> Probe<'a> {
    fn next(&self) -> Option<(&'a str, Self)> {
        let (first, rest) = self.path.split_first()?;
        Some((first, Self { path: rest, sample: self.sample }))
    }

    fn leaf<T>(&self) -> Result<T, Found> {
        Err(Found(if self.path.is_empty() { Shape::Leaf } else { Shape::Other("a leaf".to_owned()) }))
    }
}

macro_rules! leaves {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Found> { self.leaf() })*
    };
}

impl<'de> de::Deserializer<'de> for Probe<'_> {
    type Error = Found;

    leaves! {
        deserialize_any deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_f32 deserialize_f64
        deserialize_char deserialize_str deserialize_string deserialize_bytes deserialize_byte_buf
        deserialize_unit deserialize_identifier deserialize_ignored_any
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Found> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Found> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Found> {
        match self.next() {
            Some((key, inner)) => visitor.visit_map(One { key: Some(key.to_owned()), inner: Some(inner) }),
            None => Err(Found(Shape::Struct(fields))),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Found> {
        match self.next() {
            Some((_, inner)) => {
                visitor.visit_map(One { key: Some(self.sample.to_owned()), inner: Some(inner) })
            }
            None => Err(Found(Shape::Map)),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Found> {
        match self.next() {
            Some((_, inner)) => visitor.visit_seq(One { key: None, inner: Some(inner) }),
            None => Err(Found(Shape::Seq)),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Found> {
        self.leaf()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, _: &'static str, _: V) -> Result<V::Value, Found> {
        self.leaf()
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, Found> {
        self.leaf()
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: usize,
        _: V,
    ) -> Result<V::Value, Found> {
        self.leaf()
    }
}

/// A map or a sequence of one element.
struct One<'a> {
    key: Option<String>,
    inner: Option<Probe<'a>>,
}

impl<'de> de::MapAccess<'de> for One<'_> {
    type Error = Found;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Found> {
        let key = self.key.take().ok_or_else(|| <Found as de::Error>::custom("no second key"))?;
        let key: de::value::StringDeserializer<Found> = key.into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Found> {
        let inner = self.inner.take().ok_or_else(|| <Found as de::Error>::custom("no second value"))?;
        seed.deserialize(inner)
    }
}

impl<'de> de::SeqAccess<'de> for One<'_> {
    type Error = Found;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Found> {
        self.inner.take().map(|inner| seed.deserialize(inner)).transpose()
    }
}

impl de::Error for Found {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self(Shape::Other(message.to_string()))
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl std::error::Error for Found {}
