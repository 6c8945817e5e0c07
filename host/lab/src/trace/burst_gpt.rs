//! BurstGPT, CSV: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`. The second release
//! also has `Session ID` and `Elapsed time`.

use super::{TraceRequest, csv::Row, date_time, sessions::check_id, timestamp_ms};

pub(super) const COLUMNS: [&str; 3] = ["Timestamp", "Request tokens", "Response tokens"];
/// Columns of the releases beside these.
pub(super) const OTHER_COLUMNS: [&str; 5] =
    ["Session ID", "Elapsed time", "Model", "Total tokens", "Log Type"];

/// Reads a request. A failed one has 0 response tokens.
pub(super) fn request(row: &Row<'_>) -> Result<TraceRequest, String> {
    let at = row.text("Timestamp")?;
    let session = row.get("Session ID");
    session.map_or(Ok(()), |id| check_id("Session ID", id))?;
    let seconds = at.parse().ok().and_then(|seconds: f64| timestamp_ms("Timestamp", seconds * 1e3).ok());
    let time = seconds.or_else(|| date_time::since_epoch(at));
    let example = date_time::EXAMPLE;
    let problem =
        || format!("`Timestamp` is \"{at}\"; expected seconds, or a date and time such as {example}");
    Ok(TraceRequest {
        at: time.ok_or_else(problem)?,
        input_tokens: row.tokens("Request tokens", 1)?,
        output_tokens: row.tokens("Response tokens", 0)?,
        session: session.map(str::to_owned),
        model: row.get("Model").map(str::to_owned),
        ..TraceRequest::default()
    })
}
