//! Azure's LLM inference traces (2023 and 2024), CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`. The
//! multimodal one has `NumImages`, too.

use super::{TraceRequest, csv::Row, date_time};

pub(super) const COLUMNS: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];

pub(super) fn request(row: &Row<'_>) -> Result<TraceRequest, String> {
    let at = row.text("TIMESTAMP")?;
    let time = date_time::since_epoch(at);
    let problem =
        || format!("`TIMESTAMP` is \"{at}\"; expected a date and time such as 2023-11-16 18:15:46.68");
    Ok(TraceRequest {
        at: time.ok_or_else(problem)?,
        input_tokens: row.tokens("ContextTokens", 1)?,
        output_tokens: row.tokens("GeneratedTokens", 0)?,
        ..TraceRequest::default()
    })
}
