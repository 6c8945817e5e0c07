//! Finds the needed fields in an event's JSON without building a value tree.

use std::{collections::BTreeMap, ops::Range};

use serde_json::value::RawValue;
use smallvec::SmallVec;

use crate::{FAILED_ENDS, Seen, Usage, data_lines, is_body, is_done, object};

/// Looks at one event (with or without its `data: `), or at a whole JSON body, in one pass over its keys. The
/// text of comments and of other fields is ignored, even if it looks like JSON.
#[must_use]
pub fn look(event: &[u8]) -> Seen {
    if is_body(event) {
        return look_at_body(event, "").0;
    }
    if is_done(event) {
        return Seen { done: true, ..Seen::default() };
    }
    let (mut seen, mut first) = (Seen::default(), FirstValues::default());
    for (from, line) in data_lines(event) {
        for (key, at) in keys(line) {
            first.note(key, event, from + at, &mut seen);
        }
    }
    if first.ends {
        note_ends(object(event), &mut seen);
    }
    finish(event, seen, &first)
}

/// Looks at a whole JSON body, and returns whether it [is closed](is_closed) and has `list` at its top level,
/// the key of a list that is written without escapes.
#[must_use]
pub fn look_at_body(body: &[u8], list: &str) -> (Seen, bool) {
    let (mut seen, mut first, mut has_list) = (Seen::default(), FirstValues::default(), false);
    let mut within = Within::default();
    let end = pass(body, |name, at, depth| {
        let is_list = depth == 1 && body.get(at) == Some(&b'[');
        has_list |= is_list && body.get(name.clone()) == Some(list.as_bytes());
        let key = body.get(..name.end).and_then(Key::at_end_of);
        within.note(key, (body, at), depth, &mut seen);
        if let Some(key) = key {
            first.note(key, body, at, &mut seen);
        }
    });
    (finish(body, seen, &first), has_list && end == Some(body.trim_ascii_end().len()))
}

/// Returns whether every list and object of a text like JSON is closed, and nothing follows. Engines in
/// Python write NaN and Infinity, which JSON does not have; many clients take them.
#[must_use]
pub fn is_closed(text: &[u8]) -> bool {
    pass(text, |_, _, _| {}) == Some(text.trim_ascii_end().len())
}

/// Concludes from all values what is in an event.
fn finish(event: &[u8], mut seen: Seen, first: &FirstValues) -> Seen {
    seen.tokens = first.token_ids.unwrap_or(u32::from(seen.token));
    seen.token |= seen.tokens > 0;
    let is_object = |at: usize| event.get(at) == Some(&b'{');
    let error = first.error.and_then(|at| event.get(at));
    seen.error = (matches!(error, Some(b'{' | b'"')) || first.is_error_object) && !first.choices;
    if seen.error && first.no_choices {
        seen.error = is_error_of(object(event));
    }
    if first.usage.is_some_and(is_object) {
        let count = |at: Option<usize>| at.and_then(|at| number_at(event, at));
        seen.cached_at = first.cached.map(|at| at..at + digits(event, at)).filter(|place| !place.is_empty());
        seen.usage = Some(Usage {
            prompt_tokens: count(first.prompt).unwrap_or(0),
            completion_tokens: count(first.completion),
            cached_tokens: count(seen.cached_at.as_ref().map(|place| place.start)),
        });
    }
    seen
}

/// Returns whether a part of an event has a key that [`look`] knows.
#[must_use]
pub fn has_known_key(part: &[u8]) -> bool {
    keys(part).next().is_some()
}

/// Returns whether an event has, at any depth, a field with which engines hand over, and whose value is not
/// null.
#[must_use]
pub fn has_handoff(event: &[u8]) -> bool {
    keys(event).any(|(key, at)| matches!(key, Key::Handoff) && !is_null(event, at))
}

/// Returns the text of the key `type` at the top level of an event's data, wherever it stands. Reads no
/// further, and allocates nothing: every event of some servers is told by it.
#[must_use]
pub fn type_of(event: &[u8]) -> Option<&[u8]> {
    let object = object(event);
    let (mut open, mut at) = (0_usize, 0);
    loop {
        match *object.get(at)? {
            b'{' | b'[' => open += 1,
            b'}' | b']' => open = open.checked_sub(1).filter(|open| *open > 0)?,
            b'"' => {
                let from = at + 1;
                at = string_end(object, from)?;
                let is_type = open == 1 && object.get(from..at) == Some(b"type");
                if let Some(text) = object.get(at + 1..).filter(|_| is_type).and_then(text_behind_colon) {
                    return Some(text);
                }
            }
            _ => {}
        }
        at += 1;
    }
}

/// The text of a key, behind which `rest` begins.
fn text_behind_colon(rest: &[u8]) -> Option<&[u8]> {
    let value = rest.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start().strip_prefix(b"\"")?;
    value.get(..string_end(value, 0)?)
}

/// Positions of the values of keys whose first occurrence counts.
#[derive(Default)]
struct FirstValues {
    usage: Option<usize>,
    prompt: Option<usize>,
    completion: Option<usize>,
    cached: Option<usize>,
    error: Option<usize>,
    /// There is a finish reason, of a choice or of something else.
    ends: bool,
    token_ids: Option<u32>,
    tool_calls: bool,
    /// There are choices.
    choices: bool,
    /// There is an empty list of choices.
    no_choices: bool,
    /// `"object": "error"`, as older servers write an error.
    is_error_object: bool,
}

impl FirstValues {
    /// Notes a key whose value begins at `at`.
    fn note(&mut self, key: Key, event: &[u8], at: usize, seen: &mut Seen) {
        match key {
            // Some servers write an empty reason into every event.
            Key::FinishReason => self.ends |= is_text(event, at),
            // The first event of a chat, with a role and no content, holds no token.
            Key::Text => seen.token |= is_text(event, at),
            // A tool call's head carries a name before any argument.
            Key::ToolCalls if !self.tool_calls => {
                self.tool_calls = true;
                seen.token |= event.get(at) == Some(&b'[') && event.get(at + 1) != Some(&b']');
            }
            Key::ToolCalls => {}
            Key::TokenIds => {
                if let Some(ids) = ids_at(event, at) {
                    self.token_ids = Some(self.token_ids.unwrap_or(0) + ids);
                }
            }
            Key::Choices => {
                let list = event.get(at..).and_then(|value| value.strip_prefix(b"["));
                let is_empty = list.is_some_and(|list| list.trim_ascii_start().starts_with(b"]"));
                self.no_choices |= is_empty;
                self.choices |= list.is_some() && !is_empty;
            }
            Key::Object => {
                self.is_error_object |= event.get(at..).is_some_and(|value| value.starts_with(b"\"error\""));
            }
            Key::Error => self.error = self.error.or(Some(at)),
            Key::Usage => self.usage = self.usage.or(Some(at)),
            Key::Handoff => seen.may_have_private_fields |= !is_null(event, at),
            // Only counts after the key `usage` belong to the usage object.
            _ if self.usage.is_none() => {}
            Key::PromptTokens => self.prompt = self.prompt.or(Some(at)),
            Key::CompletionTokens => self.completion = self.completion.or(Some(at)),
            Key::CachedTokens => self.cached = self.cached.or(Some(at)),
        }
    }
}

/// A key that [`look`] knows.
#[derive(Clone, Copy)]
enum Key {
    FinishReason,
    /// Text of an answer, under any of its names.
    Text,
    ToolCalls,
    TokenIds,
    Choices,
    Object,
    Error,
    Usage,
    /// A field with which engines hand over, or with the ids of the prompt.
    Handoff,
    PromptTokens,
    CompletionTokens,
    CachedTokens,
}

impl Key {
    /// The known key at the end of `name`, the text before a closing quote. The last two letters rule out
    /// most keys of an event.
    fn at_end_of(name: &[u8]) -> Option<Self> {
        let known: &[(&[u8], Self)] = match name {
            [.., b'o', b'n'] => &[(b"finish_reason", Self::FinishReason)],
            [.., b'n', b't'] => &[(b"content", Self::Text), (b"reasoning_content", Self::Text)],
            [.., b'x', b't'] => &[(b"text", Self::Text)],
            [.., b'n', b'g'] => &[(b"reasoning", Self::Text)],
            [.., b't', b's'] => &[(b"arguments", Self::Text)],
            [.., b'l', b's'] => &[(b"tool_calls", Self::ToolCalls)],
            [.., b'd', b's'] => &[(b"token_ids", Self::TokenIds), (b"prompt_token_ids", Self::Handoff)],
            [.., b'6', b'4'] => &[(b"prompt_token_ids_b64", Self::Handoff)],
            [.., b'e', b's'] => &[(b"choices", Self::Choices)],
            [.., b'c', b't'] => &[(b"object", Self::Object)],
            [.., b'o', b'r'] => &[(b"error", Self::Error)],
            [.., b'g', b'e'] => &[(b"usage", Self::Usage)],
            [.., b'm', b's'] => &[
                (b"kv_transfer_params", Self::Handoff),
                (b"ec_transfer_params", Self::Handoff),
                (b"disaggregated_params", Self::Handoff),
            ],
            [.., b'n', b's'] => &[
                (b"prompt_tokens", Self::PromptTokens),
                (b"completion_tokens", Self::CompletionTokens),
                (b"cached_tokens", Self::CachedTokens),
            ],
            _ => return None,
        };
        // The quote before it rules out most other keys with these letters.
        let opened = |key: &[u8]| {
            let (before, end) = name.split_at_checked(name.len().checked_sub(key.len())?)?;
            before.strip_suffix(b"\"").filter(|_| end == key)
        };
        // A quoted name within a string has escaped quotes, so it is not a key.
        let is_key = |key: &[u8]| opened(key).is_some_and(|before| !before.ends_with(b"\\"));
        known.iter().find(|(key, _)| is_key(key)).map(|(_, known)| *known)
    }
}

/// The key at the top level within which a pass over an event is.
#[derive(Default)]
struct Within {
    choices: bool,
}

impl Within {
    /// Notes a key of any name, whose value begins at `at` of `text`: the finish reason of a choice.
    fn note(&mut self, key: Option<Key>, (text, at): (&[u8], usize), depth: usize, seen: &mut Seen) {
        match (depth, key) {
            (1, key) => self.choices = matches!(key, Some(Key::Choices)),
            (3, Some(Key::FinishReason)) if self.choices && is_text(text, at) => {
                seen.finish = true;
                seen.failed_end = seen.failed_end.or_else(|| failed_end_at(text, at));
            }
            _ => {}
        }
    }
}

/// Notes the finish reasons of choices. An object of an answer, such as the arguments of a tool, may have a
/// key of this name, too.
fn note_ends(json: &[u8], seen: &mut Seen) {
    let mut within = Within::default();
    pass(json, |name, at, depth| {
        within.note(json.get(..name.end).and_then(Key::at_end_of), (json, at), depth, seen);
    });
}

/// Whether the value that begins at `at` is null.
fn is_null(event: &[u8], at: usize) -> bool {
    event.get(at..).is_some_and(|value| value.starts_with(b"null"))
}

/// Whether a text that is not empty begins at `at`.
fn is_text(event: &[u8], at: usize) -> bool {
    event.get(at) == Some(&b'"') && event.get(at + 1) != Some(&b'"')
}

/// The text that begins at `at`, if it is one of those with which a server gives up.
fn failed_end_at(event: &[u8], at: usize) -> Option<&'static str> {
    let text = event.get(at + 1..)?;
    let is = |end: &&str| text.strip_prefix(end.as_bytes()).is_some_and(|rest| rest.starts_with(b"\""));
    FAILED_ENDS.into_iter().find(is)
}

/// Whether an object is an error itself, rather than something in it.
fn is_error_of(object: &[u8]) -> bool {
    let Ok(fields) = serde_json::from_slice::<BTreeMap<String, &RawValue>>(object) else { return true };
    let is = |name: &str, value: fn(&str) -> bool| fields.get(name).is_some_and(|raw| value(raw.get()));
    is("error", |error| error.starts_with(['{', '"'])) || is("object", |object| object == "\"error\"")
}

/// Every known key with the place where its value begins.
fn keys(bytes: &[u8]) -> impl Iterator<Item = (Key, usize)> {
    memchr::memchr_iter(b':', bytes).filter_map(move |colon| {
        let key = Key::at_end_of(bytes.get(..colon)?.strip_suffix(b"\"")?)?;
        Some((key, value_behind(bytes, colon)))
    })
}

/// The place of the value behind a colon.
fn value_behind(bytes: &[u8], colon: usize) -> usize {
    colon + 1 + blanks(bytes, colon + 1)
}

/// The number of blanks at `at`.
fn blanks(bytes: &[u8], at: usize) -> usize {
    let rest = bytes.get(at..).unwrap_or_default();
    rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}

/// Passes over the list or object that a text like JSON begins with, string by string, and returns where it
/// ends; `None` if it does not. `note` gets each key, where its value begins, and the number of lists and
/// objects around it.
fn pass(text: &[u8], mut note: impl FnMut(Range<usize>, usize, usize)) -> Option<usize> {
    let (mut open, mut at) = (SmallVec::<[u8; 32]>::new(), 0);
    loop {
        let byte = *text.get(at)?;
        at += 1;
        match byte {
            b'{' => open.push(b'}'),
            b'[' => open.push(b']'),
            b'}' | b']' => {
                open.pop().filter(|close| *close == byte)?;
                if open.is_empty() {
                    return Some(at);
                }
            }
            b'"' => {
                let from = at;
                let quote = string_end(text, from)?;
                at = quote + 1;
                let colon = at + blanks(text, at);
                if text.get(colon) == Some(&b':') {
                    at = value_behind(text, colon);
                    note(from..quote, at, open.len());
                }
            }
            _ => {}
        }
    }
}

/// The place of the closing quote of a string whose content begins at `from`.
fn string_end(text: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        at += memchr::memchr(b'"', text.get(at..)?)?;
        if !is_escaped(text.get(from..at)?) {
            return Some(at);
        }
        at += 1;
    }
}

/// Whether what follows in a string is escaped. Two backslashes are one that is escaped itself.
fn is_escaped(before: &[u8]) -> bool {
    before.ends_with(b"\\") && before.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
}

/// The number of ids in the array that begins at `at`, if one does.
fn ids_at(bytes: &[u8], at: usize) -> Option<u32> {
    let inner = bytes.get(at..)?.strip_prefix(b"[")?;
    let end = memchr::memchr(b']', inner).unwrap_or(inner.len());
    let list = inner.get(..end).unwrap_or_default();
    let commas = u32::try_from(memchr::memchr_iter(b',', list).count()).unwrap_or(u32::MAX);
    Some(if list.iter().all(u8::is_ascii_whitespace) { 0 } else { commas + 1 })
}

fn digits(bytes: &[u8], at: usize) -> usize {
    bytes.get(at..).unwrap_or_default().iter().take_while(|byte| byte.is_ascii_digit()).count()
}

fn number_at(bytes: &[u8], at: usize) -> Option<u32> {
    let text = bytes.get(at..at + digits(bytes, at))?;
    std::str::from_utf8(text).ok()?.parse().ok()
}
