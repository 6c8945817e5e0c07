//! Fields by which vLLM uses a part of a prompt only, or does not use its cached beginning.

use json_splice::JsonBody;

use crate::openai::endpoint::Endpoint;

/// Returns the token ids that an engine keeps; `None` if the limit is the engine's own, which is not known.
pub(super) fn kept_ids<'a>(body: &JsonBody, ids: &'a [u32]) -> Option<&'a [u32]> {
    let Some(limit) = given(body, "truncate_prompt_tokens") else { return Some(ids) };
    let limit: usize = limit.parse().ok()?;
    match given(body, "truncation_side") {
        Some(r#""right""#) => ids.get(..limit.min(ids.len())),
        _ => ids.get(ids.len().saturating_sub(limit)..),
    }
}

/// Returns whether the answer has logprobs of the prompt's tokens: an engine computes them with the whole
/// prompt.
pub(super) fn needs_prompt_logprobs(endpoint: Endpoint, body: &JsonBody) -> bool {
    if given(body, "prompt_logprobs").is_some() {
        return true;
    }
    // Chats have `top_logprobs` in all cases, 0 unless it is given.
    let echoes = given(body, "echo").is_some_and(|echo| echo != "false");
    echoes && (given(body, "logprobs").is_some() || endpoint == Endpoint::ChatCompletions)
}

fn given<'a>(body: &'a JsonBody, key: &str) -> Option<&'a str> {
    body.get(key).filter(|value| *value != "null")
}
