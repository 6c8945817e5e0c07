//! Bytes of a prompt, by which it is measured and hashed where its tokens are not known.
//!
//! They are slices of the request's body, in the order in which most chat templates write them: tools and
//! documents are part of the first message. Two things are not what the client sent, so that a prompt has as
//! many bytes as its length in tokens suggests: inline data counts no more than [`MEDIA_TOKENS`], and a line
//! with a new value in each request is left out.

use std::{ops::Range, sync::LazyLock};

use json_splice::JsonBody;
use memchr::{memchr2, memmem, memmem::Finder};
use xxhash_rust::xxh3::xxh3_64;

/// Maximum number of tokens that the data of an image, a sound or a file counts. Qwen3-VL makes so many of an
/// image of 1,024 by 1,024 pixels (patches of 16 pixels, merged two by two).
pub const MEDIA_TOKENS: usize = 1_024;

/// Fields that chat templates write into the first message.
pub const TEMPLATE_FIELDS: [&str; 2] = ["tools", "documents"];

/// Ends of the text before a string that is base64: keys of OpenAI's and Anthropic's APIs, and vLLM's
/// embeddings.
const DATA_KEYS: [&[u8]; 3] = [b"\"data", b"\"file_data", b"_embeds"];
/// Bytes of inline data that have to look like base64.
const SAMPLE: usize = 256;
/// Bytes of a `data:` URL within which its data begins.
const URL_HEAD: usize = 128;

/// Line that Claude Code puts before its system prompt. Its value changes in each request, and vLLM drops it.
static BILLING: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"x-anthropic-billing-header"));
/// Bytes of a prompt within which the line begins.
const BILLING_WITHIN: usize = 256;

/// Length of a digest, bytes.
const DIGEST: usize = size_of::<u64>();

/// The bytes of a prompt.
#[derive(Clone, Debug)]
pub struct PromptBytes<'a> {
    parts: Vec<Part<'a>>,
    /// Maximum number of bytes that inline data counts.
    media_bytes: usize,
}

#[derive(Clone, Copy, Debug)]
enum Part<'a> {
    Body(&'a [u8]),
    /// Stands for bytes that change the prompt, but are not as many tokens.
    Digest([u8; DIGEST]),
}

impl<'a> PromptBytes<'a> {
    /// Reads the bytes of a prompt that is not a chat: the values of `keys`, one after another.
    #[must_use]
    pub fn of_text(
        body: &'a JsonBody,
        keys: impl IntoIterator<Item = &'a str>,
        bytes_per_token: u32,
    ) -> Self {
        let mut bytes = Self::new(bytes_per_token);
        keys.into_iter().for_each(|key| bytes.push_field(body, key));
        bytes
    }

    /// Reads the bytes of a prompt that is a part of the value of `key`.
    #[must_use]
    pub fn of_part(body: &'a JsonBody, key: &str, part: Range<usize>, bytes_per_token: u32) -> Self {
        let mut bytes = Self::new(bytes_per_token);
        if let Some(value) = given(body, key).and_then(|value| value.get(..part.end)) {
            bytes.push(body, key, value.as_bytes(), part.start);
        }
        bytes
    }

    /// Reads the bytes of a chat whose messages are the values of `keys`.
    ///
    /// A chat template of the client's comes first, because everything depends on it, then the effort, which
    /// templates write into the first message. Other arguments come last: most of them decide how the answer
    /// begins (`enable_thinking`).
    #[must_use]
    pub fn of_chat(
        body: &'a JsonBody,
        keys: impl IntoIterator<Item = &'a str>,
        bytes_per_token: u32,
    ) -> Self {
        let mut bytes = Self::new(bytes_per_token);
        if let Some(template) = given(body, "chat_template") {
            bytes.push_digest(template.as_bytes());
        }
        bytes.push_effort(body);
        TEMPLATE_FIELDS.into_iter().for_each(|key| bytes.push_field(body, key));
        keys.into_iter().for_each(|key| bytes.push_messages(body, key));
        bytes.push_field(body, "chat_template_kwargs");
        bytes
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn count(&self) -> usize {
        self.parts().map(<[u8]>::len).sum()
    }

    /// Returns the bytes, in parts.
    pub fn parts(&self) -> impl Iterator<Item = &[u8]> + Clone {
        self.parts.iter().map(|part| match part {
            Part::Body(bytes) => *bytes,
            Part::Digest(digest) => digest.as_slice(),
        })
    }

    fn new(bytes_per_token: u32) -> Self {
        let media_bytes = MEDIA_TOKENS.saturating_mul(bytes_per_token.max(1) as usize);
        Self { parts: Vec::with_capacity(4), media_bytes }
    }

    /// Adds the effort of reasoning, whether it is a field or an argument of the template.
    fn push_effort(&mut self, body: &JsonBody) {
        const KEY: &str = "reasoning_effort";
        if let Some(effort) = given(body, KEY) {
            self.push_digest(effort.as_bytes());
        } else if let Some(Ok(arguments)) = body.object("chat_template_kwargs")
            && let Some(effort) = given(&arguments, KEY)
        {
            self.push_digest(effort.as_bytes());
        }
    }

    fn push_field(&mut self, body: &'a JsonBody, key: &str) {
        if let Some(value) = given(body, key) {
            self.push(body, key, value.as_bytes(), 0);
        }
    }

    /// Adds a field that may contain the system prompt.
    fn push_messages(&mut self, body: &'a JsonBody, key: &str) {
        let Some(value) = given(body, key).map(str::as_bytes) else { return };
        let mut from = 0;
        if let Some(line) = billing_line(value) {
            self.push_bytes(value.get(..line.start));
            from = line.end;
        }
        self.push(body, key, value, from);
    }

    /// Adds the value of a field from a position on. Inline data is cut short.
    fn push(&mut self, body: &JsonBody, key: &str, value: &'a [u8], from: usize) {
        let mut from = from;
        for place in body.long_strings(key) {
            let content = place.start + 1..place.end - 1;
            if content.len() <= self.media_bytes || content.start < from {
                continue;
            }
            let Some(data) = value.get(content.clone()).filter(|data| is_inline(key, value, &place, data))
            else {
                continue;
            };
            self.push_bytes(value.get(from..content.start));
            self.push_digest(data);
            self.push_bytes(data.get(..self.media_bytes - DIGEST));
            from = content.end;
        }
        self.push_bytes(value.get(from..));
    }

    fn push_bytes(&mut self, bytes: Option<&'a [u8]>) {
        self.parts.extend(bytes.map(Part::Body));
    }

    fn push_digest(&mut self, bytes: &[u8]) {
        self.parts.push(Part::Digest(xxh3_64(bytes).to_le_bytes()));
    }
}

/// Returns the value of a key; `None` if it has no content.
fn given<'a>(body: &'a JsonBody, key: &str) -> Option<&'a str> {
    body.get(key).filter(|value| !matches!(*value, "null" | "[]" | "{}"))
}

/// Returns the place of Claude Code's line in a system prompt, whether that is a text or a list of parts. The
/// line ends with its text, or before a line break.
fn billing_line(value: &[u8]) -> Option<Range<usize>> {
    let head = value.get(..BILLING_WITHIN).unwrap_or(value);
    let start = BILLING.find(head)? + 1;
    let end = start + memchr2(b'"', b'\\', value.get(start..)?)?;
    Some(start..end)
}

/// Returns whether a long string in the value of `key` is base64, and not a text.
fn is_inline(key: &str, value: &[u8], place: &Range<usize>, content: &[u8]) -> bool {
    let data = match content.strip_prefix(b"data:") {
        Some(url) => {
            let head = url.get(..URL_HEAD).unwrap_or(url);
            memmem::find(head, b"base64,").and_then(|at| url.get(at + 7..))
        }
        None => (key.ends_with("_embeds") || follows_data_key(value.get(..place.start))).then_some(content),
    };
    data.is_some_and(|data| data.iter().take(SAMPLE).all(|byte| is_base64(*byte)))
}

/// Returns whether a text ends with a key of base64, and its colon.
fn follows_data_key(before: Option<&[u8]>) -> bool {
    let key = before
        .map(<[u8]>::trim_ascii_end)
        .and_then(|before| before.strip_suffix(b":"))
        .and_then(|before| before.trim_ascii_end().strip_suffix(b"\""));
    key.is_some_and(|key| DATA_KEYS.into_iter().any(|data| key.ends_with(data)))
}

/// Returns whether a byte belongs to base64, of either alphabet, in JSON: some encoders write `/` as `\/`.
fn is_base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+/-_=\\".contains(&byte)
}

#[cfg(test)]
mod tests;
