//! JSON values as programs such as pandas write them.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, Unexpected, Visitor},
};

use super::date_time;

/// Largest whole number up to which a double is exact.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

struct WholeNumber<T>(PhantomData<T>);

impl<T: TryFrom<u64> + TryFrom<i64>> Visitor<'_> for WholeNumber<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
        T::try_from(value).map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
        T::try_from(value).map_err(|_| E::invalid_value(Unexpected::Signed(value), &self))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<T, E> {
        let is_exact = value.fract() == 0.0 && value.abs() <= MAX_EXACT;
        let number = is_exact.then_some(value as i64).and_then(|value| T::try_from(value).ok());
        number.ok_or_else(|| E::invalid_value(Unexpected::Float(value), &self))
    }
}

struct Whole<T>(T);

impl<'de, T: TryFrom<u64> + TryFrom<i64>> Deserialize<'de> for Whole<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        whole_number(deserializer).map(Self)
    }
}

/// Reads a whole number, which may be written as `12.0`.
pub(super) fn whole_number<'de, D: Deserializer<'de>, T: TryFrom<u64> + TryFrom<i64>>(
    deserializer: D,
) -> Result<T, D::Error> {
    deserializer.deserialize_any(WholeNumber(PhantomData))
}

/// Reads the same, or `null`.
pub(super) fn whole_number_or_null<'de, D: Deserializer<'de>, T: TryFrom<u64> + TryFrom<i64>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    Option::deserialize(deserializer).map(|value| value.map(|Whole(number)| number))
}

/// A point in time: a number in a unit, which may be in quotes, or a date and time.
struct Time {
    unit: &'static str,
    per_second: f64,
}

#[expect(clippy::cast_precision_loss, reason = "times stay far below 2^53")]
impl Visitor<'_> for Time {
    type Value = f64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} as a number, or a date and time such as {}", self.unit, date_time::EXAMPLE)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<f64, E> {
        Ok(value as f64)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<f64, E> {
        Ok(value as f64)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<f64, E> {
        Ok(value)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<f64, E> {
        let date = || date_time::since_epoch(text).map(|time| time.as_secs_f64() * self.per_second);
        let number = text.trim().parse().ok().or_else(date);
        number.ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

struct Milliseconds(f64);

impl<'de> Deserialize<'de> for Milliseconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Time { unit: "milliseconds", per_second: 1e3 }).map(Self)
    }
}

/// Reads a point in time in milliseconds, or `null`.
pub(super) fn milliseconds_or_null<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<f64>, D::Error> {
    Option::deserialize(deserializer).map(|value| value.map(|Milliseconds(time)| time))
}

/// Reads a point in time in seconds.
pub(super) fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    deserializer.deserialize_any(Time { unit: "seconds", per_second: 1.0 })
}

/// Reads a value that may be `null` in place of missing.
pub(super) fn or_null<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}
