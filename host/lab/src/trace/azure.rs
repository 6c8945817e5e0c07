//! Azure's LLM inference traces (2023 and 2024), CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`.

use std::time::Duration;

use super::{TraceRequest, number, tokens};

pub(super) fn line(text: &str) -> Result<Option<TraceRequest>, String> {
    if text.starts_with("TIMESTAMP") {
        return Ok(None);
    }
    let mut fields = text.split(',');
    let at = timestamp(fields.next().unwrap_or_default().trim())?;
    let input_tokens = tokens("ContextTokens", number("ContextTokens", fields.next())?, 1)?;
    let output = tokens("GeneratedTokens", number("GeneratedTokens", fields.next())?, 0)?;
    Ok(Some(TraceRequest { at, input_tokens, output_tokens: output.max(1), ..TraceRequest::default() }))
}

/// Reads `2023-11-16 18:15:46.6805900` as the time since the Unix epoch.
fn timestamp(text: &str) -> Result<Duration, String> {
    let error =
        || format!("`TIMESTAMP` is \"{text}\"; expected a date and time such as 2023-11-16 18:15:46.68");
    // Times with a zone (`+00:00`) are all in UTC.
    let plain = text.split('+').next().unwrap_or(text).trim_end_matches('Z').replace('T', " ");
    let time = chrono::NaiveDateTime::parse_from_str(&plain, "%Y-%m-%d %H:%M:%S%.f").map_err(|_| error())?;
    let micros = time.and_utc().timestamp_micros();
    Ok(Duration::from_micros(u64::try_from(micros).map_err(|_| error())?))
}
