//! Limits of the content of a request. They are checked before anything is allocated for the content: the
//! scan of a body counts the values in every field ([`JsonBody::counts`]).

use json_splice::JsonBody;

use crate::{
    config::Limits, openai::endpoint::Endpoint, openai::lax::WholeNumber,
    openai::request_error::RequestError, openai::short_text::shortened,
};

/// Maximum length of the name of a model, bytes.
const MAX_MODEL_BYTES: usize = 512;
/// Maximum number of token ids that a client sends in place of a text.
pub(crate) const MAX_TOKEN_IDS: usize = 4_194_304;
/// Maximum number of values, on all levels, in a field that the gateway reads as a tree.
const MAX_TREE_VALUES: usize = 262_144;

/// Maximum number of items in a conversation.
const MAX_ITEMS: usize = 16_384;

/// Fields that a tokenizer's template reads as trees.
const TREES: [&str; 4] = ["messages", "tools", "documents", "chat_template_kwargs"];

/// Fields that are lists or objects, with the limit of their elements.
const LISTS: [(&str, usize); 10] = [
    ("stop", 128),
    ("stop_token_ids", 1_024),
    ("bad_words", 1_024),
    ("logit_bias", 4_096),
    ("messages", MAX_ITEMS),
    ("input_ids", MAX_TOKEN_IDS),
    ("tools", 1_024),
    ("functions", 1_024),
    ("documents", 1_024),
    ("chat_template_kwargs", 256),
];

/// Checks the lengths of lists and the number of values in trees. Where documents are the `prompt`, their
/// number has the limit of prompts instead ([`check_batch`]).
///
/// # Errors
/// [`RequestError`] names the field, its number of elements and the limit.
pub(crate) fn check_lists(body: &JsonBody, prompt: &str) -> Result<(), RequestError> {
    for (field, counts) in body.all_counts() {
        if let Some((_, limit)) = LISTS.iter().find(|(list, _)| *list == field)
            && (field != "documents" || field != prompt)
        {
            at_most(field, "elements", counts.items, *limit)?;
        }
        if TREES.contains(&field) {
            at_most(field, "JSON values", counts.values, MAX_TREE_VALUES)?;
        }
    }
    Ok(())
}

/// Checks the number of items of a conversation that is not called `messages`.
///
/// # Errors
/// Same as [`at_most`].
pub(crate) fn check_items(endpoint: Endpoint, field: &str, count: usize) -> Result<(), RequestError> {
    if endpoint == Endpoint::Responses { at_most(field, "elements", count, MAX_ITEMS) } else { Ok(()) }
}

/// Checks a count.
///
/// # Errors
/// [`RequestError`] names the field, the count and the limit.
pub(crate) fn at_most(field: &str, what: &str, count: usize, limit: usize) -> Result<(), RequestError> {
    if count <= limit {
        return Ok(());
    }
    Err(RequestError::new(field, &format!("{count} {what} are more than the limit of {limit}; send fewer")))
}

/// Checks the length of a text.
///
/// # Errors
/// [`RequestError`] names the field, the length and the limit.
pub(crate) fn text_within(field: &str, text: &str, limit: usize) -> Result<(), RequestError> {
    let length = text.len();
    if length <= limit {
        return Ok(());
    }
    let problem = format!("a text of {length} bytes is longer than the limit of {limit}; send a shorter one");
    Err(RequestError::new(field, &problem))
}

/// Checks a model's name: error messages and logs repeat it.
///
/// # Errors
/// Same as [`text_within`].
pub(crate) fn check_model(name: &str) -> Result<(), RequestError> {
    text_within("model", name, MAX_MODEL_BYTES)
}

/// Reads a number of choices; `None` when the body does not ask for one.
///
/// # Errors
/// [`RequestError`] names the field, its value and the limit.
pub(crate) fn choices(body: &JsonBody, field: &str, limit: u32) -> Result<Option<u32>, RequestError> {
    let Some(value) = body.get(field).filter(|value| *value != "null") else { return Ok(None) };
    match serde_json::from_str(value) {
        Ok(WholeNumber(count)) if (1..=limit).contains(&count) => Ok(Some(count)),
        _ => {
            let shown: String = shortened(value);
            let problem =
                format!("`{shown}` is not a whole number from 1 to {limit}, the limit of limits.choices");
            Err(RequestError::new(field, &problem))
        }
    }
}

/// Checks the number of prompts, and of sequences: every choice of every prompt.
///
/// # Errors
/// [`RequestError`] names the field, the count and the limit.
pub(crate) fn check_batch(
    field: &str,
    prompts: usize,
    choices: u32,
    limits: &Limits,
) -> Result<(), RequestError> {
    let (most_prompts, most_sequences) = (limits.prompts as usize, limits.sequences as usize);
    if prompts > most_prompts {
        let problem = format!(
            "{prompts} prompts are more than {most_prompts}, the limit of limits.prompts; split the batch"
        );
        return Err(RequestError::new(field, &problem));
    }
    let sequences = prompts.saturating_mul(choices as usize);
    if sequences > most_sequences {
        let problem = format!(
            "`{choices}` choices of {prompts} prompts are {sequences} sequences, more than {most_sequences}, the limit \
             of limits.sequences; ask for fewer choices or split the batch"
        );
        return Err(RequestError::new("n", &problem));
    }
    Ok(())
}
