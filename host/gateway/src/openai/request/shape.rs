//! The shapes of a prompt: a text, token ids, embeddings, messages, or a list of prompts.

use std::ops::Range;

use json_splice::JsonBody;

use crate::openai::{
    endpoint::Endpoint,
    limits::{MAX_TOKEN_IDS, at_most, check_items},
    request_error::RequestError,
};

/// Returns the number of prompts under a key, and the token ids of a single prompt that is given as ids.
///
/// # Errors
/// [`RequestError`] when there are too many.
pub(super) fn prompts_of(
    endpoint: Endpoint,
    body: &JsonBody,
    key: &'static str,
    value: &str,
) -> Result<(usize, Option<Vec<u32>>), RequestError> {
    let counts = body.counts(key);
    let prompt = value.get(only_prompt(endpoint, body, key)).unwrap_or(value);
    let is_list_of_one = prompt.len() < value.len();
    // Both lists count as values, too.
    let elements = if is_list_of_one { counts.values.saturating_sub(2) } else { counts.items };
    if first_element(prompt).is_some_and(|byte| byte.is_ascii_digit()) {
        at_most(key, "token ids", elements, MAX_TOKEN_IDS)?;
    }
    check_items(endpoint, key, counts.items)?;
    let (prompts, token_ids) = shape_of(key, prompt, elements);
    // Objects are the items of one conversation, or inputs with texts and images.
    let are_inputs = key == "input" && endpoint != Endpoint::Responses && first_element(prompt) == Some(b'{');
    let prompts = if are_inputs { elements } else { prompts };
    Ok((if is_list_of_one { 1 } else { prompts }, token_ids))
}

/// Returns where the prompt is within the value of its key: within the list, if that is a list of one prompt.
pub(super) fn only_prompt(endpoint: Endpoint, body: &JsonBody, key: &str) -> Range<usize> {
    let value = body.get(key).unwrap_or_default();
    let may_be_list = endpoint.takes_batches() || endpoint == Endpoint::Embeddings;
    let list = value.strip_prefix('[').and_then(|list| list.strip_suffix(']'));
    let only = list.filter(|_| may_be_list && !key.ends_with("_embeds") && body.counts(key).items == 1);
    match only.map(|list| (list, list.trim_ascii_start())) {
        Some((list, only)) if only.starts_with(['"', '[']) => {
            let start = 1 + list.len() - only.len();
            start..start + only.trim_ascii_end().len()
        }
        _ => 0..value.len(),
    }
}

/// Returns the number of prompts, and the token ids of a single prompt that is given as ids. `elements` is
/// the length of the prompt if it is a list.
pub(super) fn shape_of(key: &str, prompt: &str, elements: usize) -> (usize, Option<Vec<u32>>) {
    if is_one_of_embeds(key, prompt) {
        return (1, None);
    }
    match first_element(prompt) {
        None => (1, None),
        Some(b']') => (1, Some(Vec::new())),
        // Each document is a prompt, whether it is a text or an object.
        Some(_) if key == "documents" => (elements, None),
        // A chat's messages, which are one prompt however many they are.
        Some(b'{') => (1, None),
        Some(b'0'..=b'9') => match serde_json::from_str(prompt) {
            Ok(ids) => (1, Some(ids)),
            Err(_) => (elements, None),
        },
        // A list of strings, or of token lists.
        Some(_) => (elements, None),
    }
}

/// Returns whether a prompt is a list of prompts, also of a single one.
pub(super) fn is_list_of_prompts(key: &str, prompt: &str) -> bool {
    let is_list = first_element(prompt).is_some_and(|byte| !byte.is_ascii_digit() && byte != b']');
    is_list && !is_one_of_embeds(key, prompt)
}

/// Returns whether a prompt is one of embeddings, which is a list of a list for each token (SGLang).
fn is_one_of_embeds(key: &str, prompt: &str) -> bool {
    let first = || prompt.strip_prefix('[').map(str::trim_ascii_start).and_then(first_element);
    key == "input_embeds" && first() != Some(b'[')
}

/// The first byte after the opening bracket of a list; `None` when the value is not a list.
fn first_element(value: &str) -> Option<u8> {
    value.strip_prefix('[')?.trim_ascii_start().bytes().next()
}
