//! Azure's LLM inference traces (2023 and 2024), CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`. The
//! multimodal one has `NumImages`, too.

use std::time::Duration;

use chrono::{DateTime, NaiveDateTime};

use super::{TraceRequest, csv::Row};

pub(super) const COLUMNS: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];

pub(super) fn request(row: &Row<'_>) -> Result<TraceRequest, String> {
    Ok(TraceRequest {
        at: timestamp(row.text("TIMESTAMP")?)?,
        input_tokens: row.tokens("ContextTokens", 1)?,
        output_tokens: row.tokens("GeneratedTokens", 0)?,
        ..TraceRequest::default()
    })
}

/// Reads `2023-11-16 18:15:46.6805900` as the time since the Unix epoch. Times without a zone are in UTC.
fn timestamp(text: &str) -> Result<Duration, String> {
    let plain = text.replace('T', " ").replace('Z', "+00:00");
    let time = NaiveDateTime::parse_from_str(&plain, "%Y-%m-%d %H:%M:%S%.f")
        .map(|time| time.and_utc().timestamp_micros())
        .or_else(|_| {
            DateTime::parse_from_str(&plain, "%Y-%m-%d %H:%M:%S%.f%#z").map(|time| time.timestamp_micros())
        });
    time.ok().and_then(|micros| u64::try_from(micros).ok()).map(Duration::from_micros).ok_or_else(|| {
        format!("`TIMESTAMP` is \"{text}\"; expected a date and time such as 2023-11-16 18:15:46.68")
    })
}
