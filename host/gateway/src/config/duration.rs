//! Durations as the configuration file writes them.

use std::time::Duration;

use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

/// Reads a duration such as `20ms`.
///
/// # Errors
/// The value is not a string, or not a duration; the message gives the value and the expected form.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    const EXPECTED: &str = r#"expected a duration such as "20ms", "5s", "2m""#;
    let value = toml::Value::deserialize(deserializer)?;
    let duration = value.as_str().and_then(|text| humantime_serde::re::humantime::parse_duration(text).ok());
    duration.ok_or_else(|| D::Error::custom(format!("`{}` is not a duration: {EXPECTED}", Shown(&value))))
}

/// Writes a duration in the form that is read.
pub(super) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    let text = humantime_serde::re::humantime::format_duration(*duration);
    serializer.collect_str(&text.to_string().replace(' ', ""))
}

/// Shows a string without its quotation marks.
struct Shown<'a>(&'a toml::Value);

impl std::fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            toml::Value::String(text) => f.write_str(text),
            other => write!(f, "{other}"),
        }
    }
}
