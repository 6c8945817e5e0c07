//! Tokens of whole prompts that occurred before. A repeated prompt costs one hash of the JSON that the
//! client sent: it is not parsed, rendered or cut into pieces.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
};

use xxhash_rust::xxh3::Xxh3;

use crate::encode::PieceCache;

/// Length of a prompt from which on it is kept, bytes: shorter ones are encoded in no time.
const MIN_PROMPT_BYTES: usize = 4 * 1024;
/// Typical bytes of an entry, from which the cache estimates its number of entries.
const TYPICAL_ENTRY: usize = 32 * 1024;
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

/// Identifies a prompt with everything that changes its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptKey(u128);

/// The prompts of one model.
#[derive(Debug)]
pub(crate) struct Repeats {
    prompts: PieceCache,
    /// Random, so that clients cannot construct two prompts with the same key.
    seed: u64,
}

impl Repeats {
    pub(crate) fn new(bytes: usize) -> Self {
        let seed = RandomState::new().build_hasher().finish();
        Self { prompts: PieceCache::new(bytes, TYPICAL_ENTRY), seed }
    }

    /// Returns the key of a prompt; `None` if it is too short to be kept. `get` returns the raw JSON of a
    /// field.
    pub(crate) fn key<'a>(
        &self,
        form: PromptForm,
        prompt_json: &str,
        get: impl Fn(&str) -> Option<&'a str>,
    ) -> Option<PromptKey> {
        if prompt_json.len() < MIN_PROMPT_BYTES {
            return None;
        }
        let mut hasher = Xxh3::with_seed(self.seed);
        let mut add = |text: Option<&str>| {
            // The length keeps fields apart.
            hasher.update(&text.map_or(u64::MAX, |text| text.len() as u64).to_le_bytes());
            hasher.update(text.unwrap_or_default().as_bytes());
        };
        add(Some(if form == PromptForm::Chat { "chat" } else { "completion" }));
        add(Some(prompt_json));
        FIELDS.into_iter().for_each(|field| add(get(field)));
        Some(PromptKey(hasher.digest128()))
    }

    pub(crate) fn get(&self, key: PromptKey) -> Option<Arc<[u32]>> {
        self.prompts.get(&[Some(key.0)]).pop().flatten()
    }

    pub(crate) fn put(&self, key: PromptKey, tokens: Arc<[u32]>) {
        self.prompts.put(vec![(key.0, tokens)]);
    }
}
