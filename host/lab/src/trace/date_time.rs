//! Dates with times, as in CSV files and JSON lines.

use std::time::Duration;

use chrono::{DateTime, NaiveDateTime};

/// How an error shows the form.
pub(super) const EXAMPLE: &str = "2023-11-16T18:15:46.68Z";

/// Reads `2023-11-16 18:15:46.6805900` as the time since the Unix epoch. Times without a zone are in UTC.
pub(super) fn since_epoch(text: &str) -> Option<Duration> {
    let plain = text.replace('T', " ").replace('Z', "+00:00");
    let time = NaiveDateTime::parse_from_str(&plain, "%Y-%m-%d %H:%M:%S%.f")
        .map(|time| time.and_utc().timestamp_micros())
        .or_else(|_| {
            DateTime::parse_from_str(&plain, "%Y-%m-%d %H:%M:%S%.f%#z").map(|time| time.timestamp_micros())
        });
    time.ok().and_then(|micros| u64::try_from(micros).ok()).map(Duration::from_micros)
}
