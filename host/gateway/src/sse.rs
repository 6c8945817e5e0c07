//! Server-sent events of an engine, looked at as they pass.
//!
//! [`Splitter`] cuts a byte stream at event boundaries without copying whole events; [`look`] finds in an event's JSON what
//! the legs and the account need: a token, a finish reason, usage, an error. It never builds a value tree and allocates
//! nothing: it knows the few keys it wants and how an engine writes them, and strings cannot fake them, for a quote within
//! a string is always escaped.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use memchr::memmem;

/// An event that never ends must not fill memory.
const MAX_EVENT: usize = 16 * 1024 * 1024;

/// Cuts a stream into whole events.
#[derive(Debug, Default)]
pub struct Splitter {
    carry: BytesMut,
}

/// An event larger than any engine writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of more than {MAX_EVENT} bytes")]
pub struct Oversized;

/// What an event is about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// `data: [DONE]`.
    pub done: bool,
    /// Carries a token.
    pub token: bool,
    /// Output tokens in it: the length of `token_ids`, else 1 when it carries a choice with content.
    pub tokens: u32,
    /// Has a finish reason that is not null.
    pub finish: bool,
    /// An error event.
    pub error: bool,
    /// Usage in it.
    pub usage: Option<Usage>,
    /// Where the number of `cached_tokens` lies in the event.
    pub cached_at: Option<Range<usize>>,
    /// Where a `kv_transfer_params` value that is not null lies in the event.
    pub handoff_at: Option<Range<usize>>,
}

/// Whether a slice looks like an event: it begins with a known field, a comment or a blank line, and data ends as JSON (or
/// the end mark) does. An event that an engine cut short must not reach a client.
#[must_use]
pub fn is_event(bytes: &[u8]) -> bool {
    const STARTS: [&[u8]; 6] = [b":", b"event:", b"id:", b"retry:", b"\n", b"\r"];
    if bytes.starts_with(b"data:") {
        return matches!(bytes.trim_ascii_end().last(), Some(b'}' | b']'));
    }
    STARTS.iter().any(|start| bytes.starts_with(start))
}

/// Token counts as the engine reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Output tokens so far.
    pub completion_tokens: u32,
    /// Prompt tokens that were cached.
    pub cached_tokens: Option<u32>,
}

impl Splitter {
    /// Takes a chunk; answers the whole events that are complete now, as one slice, and keeps the rest.
    ///
    /// # Errors
    /// [`Oversized`].
    pub fn push(&mut self, chunk: Bytes) -> Result<Option<Bytes>, Oversized> {
        if self.carry.is_empty() {
            let Some(end) = last_boundary(&chunk, 0) else {
                self.carry.extend_from_slice(&chunk);
                return self.check().map(|()| None);
            };
            let mut events = chunk;
            let rest = events.split_off(end);
            self.carry.extend_from_slice(&rest);
            return Ok(Some(events));
        }
        // A boundary may lie across the cut: three bytes of what was kept can belong to it.
        let from = self.carry.len().saturating_sub(3);
        self.carry.extend_from_slice(&chunk);
        match last_boundary(&self.carry, from) {
            Some(end) => Ok(Some(self.carry.split_to(end).freeze())),
            None => self.check().map(|()| None),
        }
    }

    /// Bytes of an event that never ended.
    #[must_use]
    pub fn rest(&self) -> usize {
        self.carry.len()
    }

    fn check(&self) -> Result<(), Oversized> {
        if self.carry.len() > MAX_EVENT { Err(Oversized) } else { Ok(()) }
    }
}

/// Behind the last blank line of `bytes`, looked for from `from` on.
fn last_boundary(bytes: &[u8], from: usize) -> Option<usize> {
    let tail = bytes.get(from..)?;
    let plain = memmem::rfind(tail, b"\n\n").map(|at| from + at + 2);
    let crlf = memmem::rfind(tail, b"\r\n\r\n").map(|at| from + at + 4);
    plain.max(crlf)
}

/// The places of the single events in a slice of whole ones.
pub fn events(bytes: &[u8]) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = bytes.get(at..).filter(|rest| !rest.is_empty())?;
        let plain = memmem::find(rest, b"\n\n").map(|end| end + 2);
        let crlf = memmem::find(rest, b"\r\n\r\n").map(|end| end + 4);
        let length = match (plain, crlf) {
            (Some(plain), Some(crlf)) => plain.min(crlf),
            (plain, crlf) => plain.or(crlf).unwrap_or(rest.len()),
        };
        let event = at..at + length;
        at += length;
        Some(event)
    })
}

/// Looks at one event (with or without its `data: `), or at a whole JSON body.
#[must_use]
pub fn look(event: &[u8]) -> Seen {
    let mut seen = Seen::default();
    if event.starts_with(b"data: [DONE]") || event.starts_with(b"data:[DONE]") {
        seen.done = true;
        return seen;
    }
    if let Some(at) = value_of(event, b"\"usage\":").filter(|at| event.get(*at) == Some(&b'{')) {
        look_at_usage(event, at, &mut seen);
    }
    seen.finish = values_of(event, b"\"finish_reason\":").any(|at| event.get(at) == Some(&b'"'));
    seen.token = has_token(event);
    seen.tokens = token_ids(event).unwrap_or(u32::from(seen.token));
    seen.token |= seen.tokens > 0;
    seen.error = value_of(event, b"\"error\":").is_some_and(|at| event.get(at) == Some(&b'{'))
        && value_of(event, b"\"choices\":").is_none();
    seen.handoff_at = value_of(event, b"\"kv_transfer_params\":").and_then(|at| object_at(event, at));
    seen
}

fn look_at_usage(event: &[u8], at: usize, seen: &mut Seen) {
    let usage = event.get(at..).unwrap_or_default();
    let count = |key| value_of(usage, key).and_then(|at| number_at(usage, at));
    let cached = value_of(usage, b"\"cached_tokens\":").map(|start| start..start + digits(usage, start));
    let cached = cached.filter(|place| !place.is_empty());
    seen.usage = Some(Usage {
        prompt_tokens: count(b"\"prompt_tokens\":").unwrap_or(0),
        completion_tokens: count(b"\"completion_tokens\":").unwrap_or(0),
        cached_tokens: cached.as_ref().and_then(|place| number_at(usage, place.start)),
    });
    seen.cached_at = cached.map(|place| at + place.start..at + place.end);
}

/// A delta (or completion text) that holds something; the first event of a chat, with a role and no content, does not.
fn has_token(event: &[u8]) -> bool {
    const TEXTS: [&[u8]; 5] =
        [b"\"content\":", b"\"text\":", b"\"reasoning_content\":", b"\"reasoning\":", b"\"arguments\":"];
    let filled = |at: usize| event.get(at) == Some(&b'"') && event.get(at + 1) != Some(&b'"');
    let text = TEXTS.iter().any(|key| values_of(event, key).any(filled));
    // A tool call's head carries a name before any argument.
    text || value_of(event, b"\"tool_calls\":")
        .is_some_and(|at| event.get(at) == Some(&b'[') && event.get(at + 1) != Some(&b']'))
}

/// The number of ids in all `token_ids` arrays that are not null.
fn token_ids(event: &[u8]) -> Option<u32> {
    let mut count = None;
    for at in values_of(event, b"\"token_ids\":").filter(|at| event.get(*at) == Some(&b'[')) {
        let inner = event.get(at + 1..).unwrap_or_default();
        let end = memchr::memchr(b']', inner).unwrap_or(inner.len());
        let list = inner.get(..end).unwrap_or_default();
        let commas = u32::try_from(memchr::memchr_iter(b',', list).count()).unwrap_or(u32::MAX);
        let ids = if list.iter().all(u8::is_ascii_whitespace) { 0 } else { commas + 1 };
        count = Some(count.unwrap_or(0) + ids);
    }
    count
}

/// Where the value of the first `"key":` begins.
fn value_of(bytes: &[u8], key: &[u8]) -> Option<usize> {
    values_of(bytes, key).next()
}

/// Where the values of every `"key":` begin. A key within a string would have escaped quotes, and is not found.
fn values_of<'a>(bytes: &'a [u8], key: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    memmem::find_iter(bytes, key)
        .filter(|at| at.checked_sub(1).and_then(|before| bytes.get(before)) != Some(&b'\\'))
        .map(|at| {
            let start = at + key.len();
            let gap = bytes
                .get(start..)
                .unwrap_or_default()
                .iter()
                .take_while(|byte| byte.is_ascii_whitespace())
                .count();
            start + gap
        })
}

fn digits(bytes: &[u8], at: usize) -> usize {
    bytes.get(at..).unwrap_or_default().iter().take_while(|byte| byte.is_ascii_digit()).count()
}

fn number_at(bytes: &[u8], at: usize) -> Option<u32> {
    let text = bytes.get(at..at + digits(bytes, at))?;
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// The place of the JSON object that begins at `at`, if one does.
fn object_at(bytes: &[u8], at: usize) -> Option<Range<usize>> {
    let rest = bytes.get(at..).filter(|rest| rest.first() == Some(&b'{'))?;
    let mut values = serde_json::Deserializer::from_slice(rest).into_iter::<&serde_json::value::RawValue>();
    let value = values.next()?.ok()?;
    Some(at..at + value.get().len())
}

#[cfg(test)]
mod tests;
