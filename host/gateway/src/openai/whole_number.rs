//! Whole numbers of a request, as clients write them.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, Visitor},
};

/// A whole number from 0 on. Engines take `5.0` and `5e0` for 5: some languages write every number so. One
/// beyond the largest counts as the largest: clients write such a limit to have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WholeNumber(pub(crate) u32);

impl<'de> Deserialize<'de> for WholeNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WholeNumberVisitor)
    }
}

struct WholeNumberVisitor;

impl Visitor<'_> for WholeNumberVisitor {
    type Value = WholeNumber;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number from 0 on")
    }

    fn visit_u64<E>(self, number: u64) -> Result<WholeNumber, E> {
        Ok(WholeNumber(u32::try_from(number).unwrap_or(u32::MAX)))
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
    fn visit_f64<E: Error>(self, number: f64) -> Result<WholeNumber, E> {
        if number < 0.0 || number.fract() != 0.0 {
            return Err(E::invalid_value(serde::de::Unexpected::Float(number), &self));
        }
        Ok(WholeNumber(number as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_number_is_read_in_every_form() {
        let read = |json: &str| serde_json::from_str::<WholeNumber>(json).ok().map(|number| number.0);
        for (json, number) in [("0", 0), ("5", 5), ("5.0", 5), ("-0.0", 0), ("1e2", 100), ("0.5e1", 5)] {
            assert_eq!(read(json), Some(number), "{json}");
        }
        for most in ["4294967295", "4294967296", "99999999999", "18446744073709551616", "1e30"] {
            assert_eq!(read(most), Some(u32::MAX), "{most}");
        }
        for other in ["-1", "-1.0", "1.5", "1e999", "\"5\"", "true", "[]"] {
            assert_eq!(read(other), None, "{other}");
        }
    }
}
