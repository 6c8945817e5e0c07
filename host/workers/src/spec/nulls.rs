//! Values of keys that YAML and JSON write as null, and of keys that hold a secret.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, Unexpected, Visitor},
};

/// Reads a value; null stands for the default.
pub(super) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Reads a secret, or null. The message about any other value does not have the value.
pub(super) fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    deserializer.deserialize_any(SecretVisitor)
}

struct SecretVisitor;

impl SecretVisitor {
    fn refuse<E: Error>(what: &str) -> Result<Option<String>, E> {
        Err(E::invalid_type(Unexpected::Other(what), &Self))
    }
}

impl Visitor<'_> for SecretVisitor {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text in quotation marks")
    }

    fn visit_str<E>(self, value: &str) -> Result<Option<String>, E> {
        Ok(Some(value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Option<String>, E> {
        Ok(None)
    }

    fn visit_none<E>(self) -> Result<Option<String>, E> {
        Ok(None)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Option<String>, E> {
        Self::refuse("a boolean")
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Option<String>, E> {
        Self::refuse("a number")
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Option<String>, E> {
        Self::refuse("a number")
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Option<String>, E> {
        Self::refuse("a number")
    }
}
