//! One chunk of a streamed chat or completion, read strictly: only what is known to be plain text counts as
//! such.

use std::{fmt, ops::Range};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::value::RawValue;

/// Why a stream is not continued; a stable label.
pub(crate) type Reason = &'static str;

/// A chunk; what stands in it is its JSON.
pub(crate) struct Chunk<'a> {
    pub(crate) id: &'a str,
    pub(crate) created: &'a str,
    pub(crate) model: &'a str,
    pub(crate) usage: Option<ChunkUsage<'a>>,
    choices: Vec<Choice<'a>>,
}

/// What a chunk adds to the answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    /// The text, as it stands between the quotes of JSON.
    pub(crate) text: Option<&'a str>,
    /// The role, with its quotes.
    pub(crate) role: Option<&'a str>,
    pub(crate) tokens: u32,
    /// Whether nothing but the text is in it.
    pub(crate) is_only_text: bool,
}

/// Counts of tokens, as JSON.
#[derive(Deserialize)]
pub(crate) struct ChunkUsage<'a> {
    #[serde(borrow)]
    pub(crate) prompt_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) completion_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) total_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(crate) prompt_tokens_details: Option<Details<'a>>,
}

#[derive(Deserialize)]
pub(crate) struct Details<'a> {
    #[serde(borrow)]
    pub(crate) cached_tokens: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow)]
    id: &'a RawValue,
    #[serde(borrow)]
    created: &'a RawValue,
    #[serde(borrow)]
    model: &'a RawValue,
    #[serde(borrow)]
    choices: Vec<Choice<'a>>,
    #[serde(borrow, default)]
    usage: Option<ChunkUsage<'a>>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    index: u32,
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    #[serde(borrow, default)]
    text: Option<&'a RawValue>,
    #[serde(borrow, default)]
    logprobs: Option<&'a RawValue>,
    #[serde(borrow, default)]
    finish_reason: Option<&'a RawValue>,
    #[serde(default)]
    token_ids: Option<Vec<u32>>,
}

/// What a chunk adds to a message.
#[derive(Default)]
struct Delta<'a> {
    content: Option<&'a RawValue>,
    role: Option<&'a RawValue>,
    /// Whether it has something else: thoughts, calls of tools, refusals, sound.
    has_other: bool,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum DeltaKey {
    Content,
    Role,
    #[serde(other)]
    Other,
}

impl<'de: 'a, 'a> Deserialize<'de> for Delta<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfObject;
        impl<'de> Visitor<'de> for OfObject {
            type Value = Delta<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut delta = Delta::default();
                while let Some((key, value)) = map.next_entry::<DeltaKey, &'de RawValue>()? {
                    match key {
                        DeltaKey::Content => delta.content = Some(value),
                        DeltaKey::Role => delta.role = Some(value),
                        DeltaKey::Other => delta.has_other |= !is_nothing(value),
                    }
                }
                Ok(delta)
            }
        }
        deserializer.deserialize_map(OfObject)
    }
}

impl<'a> Chunk<'a> {
    /// Reads the JSON of an event; `None` if it is not a chunk.
    pub(crate) fn read(json: &'a [u8]) -> Option<Self> {
        // Checked once: a parser of bytes checks the encoding of each string.
        let json = std::str::from_utf8(json).ok()?;
        let Fields { id, created, model, choices, usage } = serde_json::from_str(json).ok()?;
        Some(Self { id: id.get(), created: created.get(), model: model.get(), usage, choices })
    }

    /// Returns whether it adds anything to the answer.
    pub(crate) fn has_choices(&self) -> bool {
        !self.choices.is_empty()
    }

    /// Returns what it adds to the answer; `None` if it has no choice.
    ///
    /// # Errors
    /// It has something that is not plain text of a single choice.
    pub(crate) fn piece(&self, is_chat: bool) -> Result<Option<Piece<'a>>, Reason> {
        let choice = match &self.choices[..] {
            [] => return Ok(None),
            [choice] if choice.index == 0 => choice,
            _ => return Err("choices"),
        };
        if choice.logprobs.is_some_and(|logprobs| !is_nothing(logprobs)) {
            return Err("logprobs");
        }
        let no_delta = Delta::default();
        let Delta { content, role, has_other } = choice.delta.as_ref().unwrap_or(&no_delta);
        let role = role.filter(|role| !is_nothing(role));
        // A completion has no delta.
        let is_other = !is_chat && (role.is_some() || content.is_some_and(|content| !is_nothing(content)));
        if *has_other || is_other {
            return Err("other_content");
        }
        let text = if is_chat { *content } else { choice.text };
        let text = match text.filter(|text| text.get() != "null") {
            Some(text) => Some(between_quotes(text.get()).ok_or("other_content")?),
            None => None,
        };
        let ends = choice.finish_reason.is_some_and(|reason| !is_nothing(reason));
        // An engine sends a token without a text, too: a part of a character, for example. The first chunk of
        // a chat has a role and no token.
        let has_token = text.is_some_and(|text| !text.is_empty() || role.is_none());
        let listed = choice.token_ids.as_ref().and_then(|ids| u32::try_from(ids.len()).ok());
        Ok(Some(Piece {
            text,
            role: role.map(RawValue::get),
            tokens: listed.unwrap_or(u32::from(has_token)),
            is_only_text: role.is_none() && !ends && text.is_some(),
        }))
    }
}

impl ChunkUsage<'_> {
    /// Returns prompt and output tokens.
    pub(crate) fn counts(&self) -> Option<(u32, u32)> {
        let count = |value: Option<&RawValue>| value?.get().parse().ok();
        Some((count(self.prompt_tokens)?, count(self.completion_tokens)?))
    }
}

/// Whether a value is one of those by which engines say that something is not there.
fn is_nothing(value: &RawValue) -> bool {
    matches!(value.get(), "null" | "[]" | "\"\"")
}

fn between_quotes(json: &str) -> Option<&str> {
    json.strip_prefix('"')?.strip_suffix('"')
}

/// Returns where `part`, which was read from `bytes`, lies in it.
pub(crate) fn place_in(bytes: &[u8], part: &str) -> Option<Range<usize>> {
    let start = part.as_ptr().addr().checked_sub(bytes.as_ptr().addr())?;
    let place = start..start + part.len();
    (bytes.get(place.clone())? == part.as_bytes()).then_some(place)
}
