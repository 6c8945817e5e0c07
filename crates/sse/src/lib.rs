#![doc = include_str!("../README.md")]

use std::{ops::Range, sync::LazyLock};

use memchr::memmem::Finder;

mod look;

pub use look::{has_handoff, has_known_key, is_closed, look, look_at_body, type_of};

/// An event that never ends must not fill memory.
const MAX_EVENT: usize = 16 * 1024 * 1024;

/// May stand at the start of a stream.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Finds the end mark; made once.
static END_MARK: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("[DONE]"));

/// Largest buffer that a stream keeps for its next bytes after it was busy.
const KEPT: usize = 64 * 1024;

/// Cuts a stream into whole events.
#[derive(Debug, Default)]
pub struct Splitter {
    /// Bytes that arrived and were not passed on.
    bytes: Vec<u8>,
    /// Number of these bytes that are known to have no event boundary.
    looked: usize,
    /// Whether the start of the stream, where a byte order mark may stand, has passed.
    started: bool,
}

/// Finish reasons with which servers say that they gave a request up. TensorRT-LLM says `cancelled` and
/// `timeout`.
pub const FAILED_ENDS: [&str; 4] = ["abort", "error", "cancelled", "timeout"];

/// An event that is too large, or never ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of more than {MAX_EVENT} bytes")]
pub struct Oversized;

/// Facts about an event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// `data: [DONE]`.
    pub done: bool,
    /// Carries a token.
    pub token: bool,
    /// Output tokens in it: the length of `token_ids`, else 1 when it carries a choice with content.
    pub tokens: u32,
    /// The event has a choice with a finish reason that is neither null nor empty.
    pub finish: bool,
    /// Its finish reason if that is one of [`FAILED_ENDS`].
    pub failed_end: Option<&'static str>,
    /// Whether the event reports an error.
    pub error: bool,
    /// Token usage in the event.
    pub usage: Option<Usage>,
    /// Range of the number of `cached_tokens` in the event.
    pub cached_at: Option<Range<usize>>,
    /// Whether the event has, at any depth and not with null, a field that clients may not get: one with
    /// which engines hand over (`kv_transfer_params`, `ec_transfer_params`, `disaggregated_params`), or the
    /// ids of the prompt. Callers also set it for an answer that was not searched.
    pub may_have_private_fields: bool,
}

/// Returns whether a slice looks like an event: each line is a known field, a comment or blank, and data ends
/// as JSON (or the end mark) does. An event that its server cut short does not.
#[must_use]
pub fn is_event(bytes: &[u8]) -> bool {
    // Almost every event is one line of data.
    if bytes.starts_with(b"data:") && ends_as_json(bytes) {
        return true;
    }
    let (mut last_data, mut is_named) = (None, false);
    for line in lines(bytes) {
        let (name, value) = field(line);
        match name {
            b"data" => last_data = Some(value),
            b"event" => is_named = true,
            b"" | b" " | b"id" | b"retry" => {}
            _ => return false,
        }
    }
    // Data of a named event is not a chunk of an answer.
    is_named || last_data.is_none_or(|data| is_keep_alive(data) || ends_as_json(data))
}

/// Returns whether data is nothing, or a word with which some servers keep a connection alive.
fn is_keep_alive(data: &[u8]) -> bool {
    const WORDS: [&[u8]; 4] = [b"ping", b"keep-alive", b"keepalive", b"heartbeat"];
    data.is_empty() || WORDS.contains(&data)
}

/// Returns whether a body that begins with these bytes is a stream of events; `None` while they are too few.
#[must_use]
pub fn begins_as_stream(bytes: &[u8]) -> Option<bool> {
    const STARTS: [&[u8]; 5] = [b":", b"data:", b"event:", b"id:", b"retry:"];
    let begin = without_mark(bytes).trim_ascii_start();
    if STARTS.iter().any(|start| begin.starts_with(start)) {
        return Some(true);
    }
    let may_begin = STARTS.iter().chain([&BYTE_ORDER_MARK]).any(|start| start.starts_with(begin));
    (!may_begin).then_some(false)
}

/// Returns whether a content type names an event stream, in upper or lower case and with any parameters.
#[must_use]
pub fn is_stream(content_type: &[u8]) -> bool {
    let kind = content_type.split(|byte| *byte == b';').next().unwrap_or_default();
    kind.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
}

fn ends_as_json(data: &[u8]) -> bool {
    matches!(data.trim_ascii_end().last(), Some(b'}' | b']'))
}

/// The JSON object in an event's data.
#[must_use]
pub fn object(event: &[u8]) -> &[u8] {
    let (mut from, mut to) = (None, None);
    for (at, line) in data_lines(event) {
        from = from.or_else(|| Some(at + memchr::memchr(b'{', line)?));
        to = memchr::memrchr(b'}', line).map(|end| at + end).or(to);
    }
    from.zip(to).and_then(|(from, to)| event.get(from..=to)).unwrap_or_default()
}

/// The lines of an event, without their ends.
fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(bytes);
    std::iter::from_fn(move || {
        let bytes = rest?;
        let end = memchr::memchr2(b'\n', b'\r', bytes);
        rest = end.and_then(|end| bytes.get(end + 1..));
        bytes.get(..end.unwrap_or(bytes.len()))
    })
}

/// The lines of an event that have data, with where they begin. A JSON body is one line, whatever it has:
/// it has no fields.
fn data_lines(bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let (is_body, mut at) = (is_body(bytes), 0);
    let lines = std::iter::from_fn(move || {
        let rest = bytes.get(at..).filter(|rest| !rest.is_empty())?;
        let end = if is_body { None } else { memchr::memchr2(b'\n', b'\r', rest) };
        let line = (at, end.and_then(|end| rest.get(..end)).unwrap_or(rest));
        at += line.1.len() + 1;
        Some(line)
    });
    lines.filter(move |(_, line)| is_body || field(without_mark(line)).0 == b"data")
}

/// Whether a text is a JSON body, rather than an event.
fn is_body(bytes: &[u8]) -> bool {
    matches!(without_mark(bytes).trim_ascii_start().first(), Some(b'{' | b'['))
}

/// Returns a text without the byte order mark that some servers begin it with.
#[must_use]
pub fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)
}

/// The name and the value of a line's field; a comment has an empty name.
fn field(line: &[u8]) -> (&[u8], &[u8]) {
    match memchr::memchr(b':', line) {
        Some(colon) => {
            let value = line.get(colon + 1..).unwrap_or_default();
            (line.get(..colon).unwrap_or_default(), value.strip_prefix(b" ").unwrap_or(value))
        }
        None => (line, &[]),
    }
}

/// Returns whether one of the events has data. A keep-alive has none: a comment, an empty `data:`, or one
/// with a word such as `ping`.
#[must_use]
pub fn has_data(events: &[u8]) -> bool {
    // Almost every read begins with a line of data.
    let events = without_mark(events);
    events.starts_with(b"data: {")
        || lines(events).map(field).any(|(name, value)| name == b"data" && !is_keep_alive(value))
}

/// Returns whether an event has a `data:` that is a keep-alive, and nothing else. Many clients take its data
/// for JSON.
#[must_use]
pub fn is_empty(event: &[u8]) -> bool {
    let mut fields = lines(event).filter(|line| !line.is_empty()).map(field).peekable();
    !event.starts_with(b"data: {")
        && fields.peek().is_some()
        && fields.all(|(name, value)| name == b"data" && is_keep_alive(value))
}

/// The first event that has data.
#[must_use]
pub fn first_event(bytes: &[u8]) -> Option<&[u8]> {
    events(bytes).filter_map(|place| bytes.get(place)).find(|event| has_data(event))
}

/// The first line of data of an event.
#[must_use]
pub fn data(event: &[u8]) -> &[u8] {
    data_lines(event).next().map(|(_, line)| field(line).1).unwrap_or_default()
}

/// The name of an event, if it has one.
#[must_use]
pub fn name(event: &[u8]) -> Option<&[u8]> {
    lines(event).map(field).find(|(name, _)| *name == b"event").map(|(_, value)| value)
}

/// Returns whether an event is the end mark.
pub fn is_done(event: &[u8]) -> bool {
    // Neither almost every event nor a whole JSON body has to be split into lines.
    if event.starts_with(b"data: {") || END_MARK.find(event).is_none() {
        return false;
    }
    lines(event).map(field).any(|(name, value)| name == b"data" && value.starts_with(b"[DONE]"))
}

/// Token counts as the server reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Output tokens so far; `None`: not reported.
    pub completion_tokens: Option<u32>,
    /// Prompt tokens that were cached.
    pub cached_tokens: Option<u32>,
}

impl Splitter {
    /// Returns the buffer to which the caller appends new bytes.
    pub fn room(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Returns the number of bytes, from the first on, that are whole events.
    ///
    /// # Errors
    /// [`Oversized`].
    pub fn whole(&mut self) -> Result<usize, Oversized> {
        if !self.started {
            self.drop_byte_order_mark();
        }
        // A boundary may lie across a cut: three bytes of what was there before can belong to it.
        let end = last_boundary(&self.bytes, self.looked.saturating_sub(3)).unwrap_or(0);
        self.looked = self.bytes.len();
        if self.bytes.len() - end > MAX_EVENT { Err(Oversized) } else { Ok(end) }
    }

    /// Removes the mark from the start of the stream: many clients do not know it.
    fn drop_byte_order_mark(&mut self) {
        let length = self.bytes.len().min(BYTE_ORDER_MARK.len());
        if BYTE_ORDER_MARK.get(..length) != self.bytes.get(..length) {
            self.started = true;
        } else if length == BYTE_ORDER_MARK.len() {
            self.bytes.drain(..length);
            self.started = true;
        }
    }

    /// The first `length` bytes.
    #[must_use]
    pub fn first(&self, length: usize) -> &[u8] {
        self.bytes.get(..length).unwrap_or_default()
    }

    /// Forgets the first `length` bytes: they were passed on.
    pub fn discard(&mut self, length: usize) {
        self.bytes.drain(..length.min(self.bytes.len()));
        self.looked = self.looked.saturating_sub(length);
        if self.bytes.capacity() > KEPT {
            self.bytes.shrink_to(KEPT);
        }
    }

    /// Adds the blank line that is missing after the last event of a stream that has ended.
    pub fn end(&mut self) {
        let missing: &[u8] = match self.bytes.last() {
            Some(b'\n') => b"\n",
            Some(b'\r') => b"\r",
            _ => b"\n\n",
        };
        self.bytes.extend_from_slice(missing);
    }

    /// Bytes of an event that never ended.
    #[must_use]
    pub fn rest(&self) -> usize {
        self.bytes.len()
    }
}

/// The whole events at the beginning of a slice, without an event that has not ended.
#[must_use]
pub fn whole_events(bytes: &[u8]) -> &[u8] {
    last_boundary(bytes, 0).and_then(|end| bytes.get(..end)).unwrap_or_default()
}

/// Behind the last blank line of `bytes`, looked for from `from` on.
fn last_boundary(bytes: &[u8], from: usize) -> Option<usize> {
    let ends = memchr::memrchr2_iter(b'\n', b'\r', bytes.get(from..)?);
    ends.map(|at| from + at).find(|at| ends_event(bytes, *at)).map(|at| at + 1)
}

/// Returns whether the line end at `at` ends a blank line.
fn ends_event(bytes: &[u8], at: usize) -> bool {
    let before = bytes.get(..at).unwrap_or_default();
    let is_second_half = bytes.get(at) == Some(&b'\n') && before.ends_with(b"\r");
    let line = if is_second_half { before.get(..at - 1).unwrap_or_default() } else { before };
    matches!(line.last(), None | Some(b'\n' | b'\r'))
}

/// The places of the single events in a slice of whole ones.
pub fn events(bytes: &[u8]) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = bytes.get(at..).filter(|rest| !rest.is_empty())?;
        let end = memchr::memchr2_iter(b'\n', b'\r', rest).find_map(|at| {
            // Almost every event is one line, and the blank line behind it needs no search.
            let blank_follows = || rest.get(at..).is_some_and(|rest| rest.starts_with(b"\n\n"));
            if ends_event(rest, at) { Some(at) } else { blank_follows().then_some(at + 1) }
        });
        let length = end.map_or(rest.len(), |end| end + 1);
        // Both halves of a CRLF belong to the event.
        let halved = rest.get(length - 1) == Some(&b'\r') && rest.get(length) == Some(&b'\n');
        let length = length + usize::from(halved);
        let event = at..at + length;
        at += length;
        Some(event)
    })
}

#[cfg(test)]
mod tests;
