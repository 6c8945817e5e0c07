//! BurstGPT, CSV: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`; a newer release has
//! a session id after the timestamp.

use std::time::Duration;

use super::{MAX_S, TraceRequest, number, tokens};

pub(super) fn line(text: &str) -> Result<Option<TraceRequest>, String> {
    if text.starts_with("Timestamp") {
        return Ok(None);
    }
    let fields: Vec<&str> = text.split(',').collect();
    // Files with a session id have seven fields.
    let shift = usize::from(fields.len() >= 7);
    let field = |place: usize| fields.get(place).copied();
    let at = field(0).unwrap_or_default().trim();
    let seconds = at.parse().ok().filter(|seconds| (0.0..=MAX_S).contains(seconds));
    let seconds =
        seconds.ok_or_else(|| format!("`Timestamp` is \"{at}\"; expected seconds from 0 to {MAX_S}"))?;
    let at = Duration::from_secs_f64(seconds);
    let session = field(1).filter(|_| shift == 1).map(str::trim).filter(|text| !text.is_empty());
    let input_tokens = tokens("Request tokens", number("Request tokens", field(2 + shift))?, 1)?;
    let output = tokens("Response tokens", number("Response tokens", field(3 + shift))?, 0)?;
    Ok(Some(TraceRequest {
        at,
        input_tokens,
        // A failed request has no answer; it counts as one token.
        output_tokens: output.max(1),
        session: session.map(str::to_owned),
        model: field(1 + shift).map(|model| model.trim().to_owned()),
        ..TraceRequest::default()
    }))
}
