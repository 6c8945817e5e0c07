//! The usage of a prefill answer.

use serde::Deserialize;
use serde_json::value::RawValue;

#[derive(Deserialize)]
struct Usage<'a> {
    #[serde(borrow)]
    prompt_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_read_input_tokens: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u32>,
}

/// Returns the number of the prompt's cached tokens; `None` also if it cannot be read, since decode does not
/// need it.
pub(super) fn cached_tokens(usage: Option<&RawValue>) -> Option<u32> {
    let usage: Usage<'_> = read(usage)?;
    let in_details = |details| read::<Details>(details)?.cached_tokens;
    in_details(usage.prompt_tokens_details)
        .or_else(|| in_details(usage.input_tokens_details))
        .or_else(|| read(usage.cache_read_input_tokens))
}

fn read<'a, T: Deserialize<'a>>(json: Option<&'a RawValue>) -> Option<T> {
    serde_json::from_str(json?.get()).ok()
}
