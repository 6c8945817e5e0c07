//! Identifies prompts, and the messages within them, by one hash over the JSON that the client sent.
//!
//! A repeated prompt is found by its key, and is not parsed, rendered or cut into pieces. In the next turn
//! of a conversation the messages that occurred before are found by the hashes that the key consists of.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    ops::Range,
};

use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

/// Minimum length of a prompt that has a key, bytes: encoding shorter ones costs nothing noticeable.
pub(crate) const MIN_PROMPT_BYTES: usize = 4 * 1024;
/// Fields of a request beside its prompt that change its tokens: those that `ChatOptions` and completions
/// read.
const FIELDS: [&str; 9] = [
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "reasoning_effort",
    "tools",
    "truncate_prompt_tokens",
];

/// Form of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptForm {
    /// The `messages` of a chat.
    Chat,
    /// The `prompt` of a completion.
    Completion,
}

/// Identifies a prompt with everything that changes its tokens, and each of its messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptKey {
    /// `None` if the tokens also depend on the time.
    pub(crate) whole: Option<u128>,
    /// The messages; empty if their places are not known.
    pub(crate) items: Vec<Item>,
}

/// A message within a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    /// Range of the message's JSON in the body.
    pub(crate) place: Range<usize>,
    pub(crate) digest: u128,
}

/// Makes the keys of one model.
#[derive(Debug)]
pub(crate) struct KeyMaker {
    /// Random, so that clients cannot construct two prompts with the same key.
    seed: u64,
}

impl KeyMaker {
    pub(crate) fn new() -> Self {
        Self { seed: RandomState::new().build_hasher().finish() }
    }

    /// Returns the key of a prompt; `None` if it is too short. `item_ends` are the ends of the objects in the
    /// list that the prompt is, and `get` returns the raw JSON of a field.
    pub(crate) fn key<'a>(
        &self,
        form: PromptForm,
        prompt_json: &str,
        item_ends: &[u32],
        get: impl Fn(&str) -> Option<&'a str>,
    ) -> Option<PromptKey> {
        let beside: usize = FIELDS.into_iter().filter_map(&get).map(str::len).sum();
        if beside + prompt_json.len() < MIN_PROMPT_BYTES {
            return None;
        }
        let items = self.items(prompt_json, item_ends).unwrap_or_default();
        let mut hasher = Xxh3::with_seed(self.seed);
        let mut add = |text: Option<&str>| {
            // The length keeps fields apart.
            hasher.update(&text.map_or(u64::MAX, |text| text.len() as u64).to_le_bytes());
            hasher.update(text.unwrap_or_default().as_bytes());
        };
        add(Some(if form == PromptForm::Chat { "chat" } else { "completion" }));
        add(Some(if items.is_empty() { prompt_json } else { "" }));
        FIELDS.into_iter().for_each(|field| add(get(field)));
        // Behind the fields, which have lengths, the digests cannot be mistaken for anything else.
        items.iter().for_each(|item| hasher.update(&item.digest.to_le_bytes()));
        Some(PromptKey { whole: Some(hasher.digest128()), items })
    }

    /// Returns the objects of a list, which lie between `[`, commas and `]`; `None` if there is anything
    /// else.
    fn items(&self, json: &str, ends: &[u32]) -> Option<Vec<Item>> {
        let mut from = 0;
        let mut items = Vec::with_capacity(ends.len());
        for end in ends {
            let end = usize::try_from(*end).ok()?;
            let separator = if items.is_empty() { '[' } else { ',' };
            let text = json.get(from..end)?.strip_prefix(separator)?;
            let text = text.trim_start_matches(WHITE).strip_suffix('}').map(|inner| inner.len() + 1)?;
            let start = end.checked_sub(text)?;
            let text = json.get(start..end).filter(|text| text.starts_with('{'))?;
            items.push(Item { place: start..end, digest: xxh3_128_with_seed(text.as_bytes(), self.seed) });
            from = end + json.get(end..)?.find(|c| !WHITE.contains(&c))?;
        }
        (json.get(from..)? == "]").then_some(items)
    }
}

/// White space of JSON.
const WHITE: [char; 4] = [' ', '\n', '\t', '\r'];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h7_a_short_prompt_with_long_tools_has_a_key() {
        let tools = format!("[\"{}\"]", "t".repeat(MIN_PROMPT_BYTES));
        let key = |tools: &str| {
            KeyMaker { seed: 1 }.key(PromptForm::Chat, "[]", &[], |key| (key == "tools").then_some(tools))
        };
        assert!(key("[]").is_none());
        // H7.8
        assert!(key(&tools).is_some_and(|one| Some(one) != key(&tools.replace("tt", "ts"))));
    }

    #[test]
    fn messages_are_told_apart_and_white_space_between_them_does_not_count() {
        let keys = KeyMaker::new();
        let of = |json: &str, ends: &[u32]| {
            let items = keys.items(json, ends)?;
            Some(items.into_iter().map(|item| (json[item.place].to_owned(), item.digest)).collect::<Vec<_>>())
        };
        let dense = of(r#"[{"a":1},{"b":2}]"#, &[8, 16]).unwrap();
        assert_eq!((dense[0].0.as_str(), dense[1].0.as_str()), (r#"{"a":1}"#, r#"{"b":2}"#));
        assert_ne!(dense[0].1, dense[1].1);
        let loose = "[ {\"a\":1} ,\n {\"b\":2}\t]";
        assert_eq!(of(loose, &[9, 20]).unwrap(), dense);
        for (json, ends) in [
            (r#"[{"a":1},{"b":2}]"#, &[8][..]),
            (r#"[7,{"b":2}]"#, &[10]),
            (r#"[{"b":2},7]"#, &[8]),
            (r#"{"b":2}"#, &[7]),
            ("[]", &[9]),
            (r#"[{"a":1},{"b":2}]"#, &[16]),
        ] {
            let items = of(json, ends);
            assert!(
                items.is_none() || items.as_ref().is_some_and(|items| items.len() == 1),
                "{json} {items:?}"
            );
        }
    }
}
