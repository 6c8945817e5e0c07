//! JSON values as programs such as pandas write them.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, Unexpected, Visitor},
};

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

/// Reads a value that may be `null` in place of missing.
pub(super) fn or_null<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}
