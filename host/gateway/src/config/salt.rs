//! A salt: a number that logs must not show.

use std::fmt;

use serde::{
    Deserialize, Serialize,
    de::{Deserializer, Error, Unexpected, Visitor},
};

/// The salt of hashes that policies see. `Debug` hides it. A text is read as a number, because files and
/// environment variables have texts.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct HashSalt(u64);

impl HashSalt {
    pub(crate) const fn new(salt: u64) -> Self {
        Self(salt)
    }

    /// Returns the number, to compute a hash.
    #[must_use]
    pub fn expose(self) -> u64 {
        self.0
    }
}

impl From<u64> for HashSalt {
    fn from(salt: u64) -> Self {
        Self::new(salt)
    }
}

/// Writes the number: TOML has no form in which it is hidden, so `config show` leaves the key out.
impl Serialize for HashSalt {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl schemars::JsonSchema for HashSalt {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "HashSalt".into()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        u64::json_schema(generator)
    }
}

impl fmt::Debug for HashSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

impl<'de> Deserialize<'de> for HashSalt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Salt)
    }
}

struct Salt;

impl Visitor<'_> for Salt {
    type Value = HashSalt;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number from 0 to 18446744073709551615")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<HashSalt, E> {
        Ok(HashSalt(number))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<HashSalt, E> {
        let number =
            u64::try_from(number).map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))?;
        Ok(HashSalt(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<HashSalt, E> {
        text.parse().map(HashSalt).map_err(|_| E::invalid_value(Unexpected::Other("text"), &self))
    }
}
