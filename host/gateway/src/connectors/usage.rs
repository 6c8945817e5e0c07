//! The usage of a prefill answer. What cannot be read is left out, since decode does not need it.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::PromptUsage;

#[derive(Deserialize)]
struct Usage<'a> {
    #[serde(borrow)]
    prompt_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_read_input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_creation_input_tokens: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct Details {
    cached_tokens: Option<u32>,
    /// The name of a response's is the second.
    #[serde(alias = "cache_write_tokens")]
    created_cache_tokens: Option<u32>,
}

/// Returns the number of the prompt's tokens, and of those that were cached or written into the cache.
pub(super) fn of_prompt(usage: Option<&RawValue>) -> PromptUsage {
    let Some(usage) = read::<Usage<'_>>(usage) else { return PromptUsage::default() };
    let details = usage.prompt_tokens_details.or(usage.input_tokens_details);
    let Details { cached_tokens, created_cache_tokens } = read(details).unwrap_or_default();
    let cached_tokens = cached_tokens.or_else(|| read(usage.cache_read_input_tokens));
    let created_tokens = created_cache_tokens.or_else(|| read(usage.cache_creation_input_tokens));
    let tokens = read(usage.prompt_tokens).or_else(|| read(usage.input_tokens));
    PromptUsage { tokens: tokens.unwrap_or(0), cached_tokens, created_tokens }
}

fn read<'a, T: Deserialize<'a>>(json: Option<&'a RawValue>) -> Option<T> {
    serde_json::from_str(json?.get()).ok()
}
