//! Fields by which vLLM uses a part of a prompt only.

use json_splice::JsonBody;

/// Returns the token ids that an engine keeps; `None` if the limit is the engine's own, which is not known.
pub(super) fn kept_ids<'a>(body: &JsonBody, ids: &'a [u32]) -> Option<&'a [u32]> {
    let Some(limit) = given(body, "truncate_prompt_tokens") else { return Some(ids) };
    let limit: usize = limit.parse().ok()?;
    match given(body, "truncation_side") {
        Some(r#""right""#) => ids.get(..limit.min(ids.len())),
        _ => ids.get(ids.len().saturating_sub(limit)..),
    }
}

fn given<'a>(body: &'a JsonBody, key: &str) -> Option<&'a str> {
    body.get(key).filter(|value| *value != "null")
}
