//! Numbers and switches of a request, as clients write them and engines take them: pydantic, which reads
//! requests for vLLM and SGLang, takes `"16"` for 16 and `"true"` for true.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, Unexpected, Visitor},
};

/// A whole number from 0 on. Some languages write each number as `5.0` or `5e0`. One beyond the largest
/// counts as the largest: clients write such a limit to have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WholeNumber(pub(crate) u32);

impl<'de> Deserialize<'de> for WholeNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WholeNumberVisitor)
    }
}

/// Some servers take -1 for no limit.
const NEGATIVE: &str =
    "the number is negative; give a whole number from 0 on, or leave the field out for no limit";

struct WholeNumberVisitor;

impl Visitor<'_> for WholeNumberVisitor {
    type Value = WholeNumber;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number from 0 on")
    }

    fn visit_u64<E>(self, number: u64) -> Result<WholeNumber, E> {
        Ok(WholeNumber(u32::try_from(number).unwrap_or(u32::MAX)))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<WholeNumber, E> {
        u64::try_from(number).map_or_else(|_| Err(E::custom(NEGATIVE)), |number| self.visit_u64(number))
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
    fn visit_f64<E: Error>(self, number: f64) -> Result<WholeNumber, E> {
        if number < 0.0 {
            return Err(E::custom(NEGATIVE));
        }
        if number.fract() != 0.0 {
            return Err(E::invalid_value(Unexpected::Float(number), &self));
        }
        Ok(WholeNumber(number as u32))
    }

    fn visit_bool<E>(self, number: bool) -> Result<WholeNumber, E> {
        Ok(WholeNumber(number.into()))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<WholeNumber, E> {
        let number = text.trim();
        let is_written_out = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        match number.parse() {
            Ok(number) if is_written_out => self.visit_f64(number),
            _ => Err(E::invalid_value(Unexpected::Str(text), &self)),
        }
    }
}

/// A switch: true or false.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flag(pub(crate) bool);

impl<'de> Deserialize<'de> for Flag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FlagVisitor)
    }
}

struct FlagVisitor;

impl Visitor<'_> for FlagVisitor {
    type Value = Flag;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("true or false")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Flag, E> {
        Ok(Flag(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Flag, E> {
        match value {
            0 => Ok(Flag(false)),
            1 => Ok(Flag(true)),
            _ => Err(E::invalid_value(Unexpected::Unsigned(value), &self)),
        }
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Flag, E> {
        match value {
            0.0 => Ok(Flag(false)),
            1.0 => Ok(Flag(true)),
            _ => Err(E::invalid_value(Unexpected::Float(value), &self)),
        }
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Flag, E> {
        match text.to_ascii_lowercase().as_str() {
            "true" | "t" | "yes" | "y" | "on" | "1" => Ok(Flag(true)),
            "false" | "f" | "no" | "n" | "off" | "0" => Ok(Flag(false)),
            _ => Err(E::invalid_value(Unexpected::Str(text), &self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lax_is_read_in_every_form() {
        let read = |json: &str| serde_json::from_str::<WholeNumber>(json).ok().map(|number| number.0);
        for (json, number) in [("0", 0), ("5", 5), ("5.0", 5), ("-0.0", 0), ("1e2", 100), ("0.5e1", 5)] {
            assert_eq!(read(json), Some(number), "{json}");
        }
        for most in ["4294967295", "4294967296", "99999999999", "18446744073709551616", "1e30"] {
            assert_eq!(read(most), Some(u32::MAX), "{most}");
        }
        for (json, number) in [("\"5\"", 5), ("\" 5 \"", 5), ("\"5.0\"", 5), ("true", 1), ("false", 0)] {
            assert_eq!(read(json), Some(number), "{json}");
        }
        for negative in ["-1", "-1.0"] {
            let error = serde_json::from_str::<WholeNumber>(negative).expect_err(negative).to_string();
            assert!(error.contains("negative; give a whole number from 0 on, or leave"), "{error}");
        }
        let texts = ["\"\"", "\".\"", "\"-5\"", "\"1e2\"", "\"inf\"", "\"NaN\"", "\"1.5\"", "\"five\""];
        for other in ["-1", "-1.0", "1.5", "1e999", "[]"].iter().chain(&texts) {
            assert_eq!(read(other), None, "{other}");
        }
    }

    #[test]
    fn a_switch_is_read_in_every_form() {
        let read = |json: &str| serde_json::from_str::<Flag>(json).ok().map(|flag| flag.0);
        for (on, off) in
            [("true", "false"), ("1", "0"), ("1.0", "0.0"), ("\"True\"", "\"no\""), ("\"1\"", "\"off\"")]
        {
            assert_eq!((read(on), read(off)), (Some(true), Some(false)), "{on} {off}");
        }
        for other in ["2", "-1", "\"\"", "\"maybe\"", "[]", "{}"] {
            assert_eq!(read(other), None, "{other}");
        }
    }
}
