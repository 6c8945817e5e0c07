//! Durations as a configuration file writes them: `20ms`, `5s`, `2m`.

use std::{fmt, time::Duration};

use humantime_serde::re::humantime::{format_duration, parse_duration};
use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

/// Returns a number of seconds.
#[must_use]
pub const fn secs(number: u64) -> Duration {
    Duration::from_secs(number)
}

/// Returns a number of milliseconds.
#[must_use]
pub const fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// Returns the text that is read as this duration.
#[must_use]
pub fn text(duration: Duration) -> String {
    format_duration(duration).to_string().replace(' ', "")
}

/// Reads a duration such as `20ms`.
///
/// # Errors
/// The value is not a string, or not a duration; the message gives the value and the expected form.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    const EXPECTED: &str = r#"expected a duration such as "20ms", "5s", "2m""#;
    let value = toml::Value::deserialize(deserializer)?;
    let duration = value.as_str().and_then(|text| parse_duration(text).ok());
    duration.ok_or_else(|| D::Error::custom(format!("`{}` is not a duration: {EXPECTED}", Shown(&value))))
}

/// Writes a duration in the form that is read.
///
/// # Errors
/// The errors of the serializer.
pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&text(*duration))
}

/// Durations of keys that may be left out.
pub mod optional {
    use super::{Deserializer, Duration, Serializer};

    /// Reads a duration such as `20ms`.
    ///
    /// # Errors
    /// Those of [`super::deserialize`].
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        super::deserialize(deserializer).map(Some)
    }

    /// Writes a duration in the form that is read.
    ///
    /// # Errors
    /// The errors of the serializer.
    pub fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        match duration {
            Some(duration) => super::serialize(duration, serializer),
            None => serializer.serialize_none(),
        }
    }
}

/// Shows a string without its quotation marks.
struct Shown<'a>(&'a toml::Value);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            toml::Value::String(text) => f.write_str(text),
            other => write!(f, "{other}"),
        }
    }
}
