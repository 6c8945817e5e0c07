//! What a client got of a streamed chat or completion so far: the text, and what its events have in common.
//!
//! Streams that live pay a comparison and a copy of their text for an event, and allocate nothing for it:
//! most events of an answer differ in their text only, and are recognised by what is around it. Any other
//! event is read whole. What is not plain text of a single choice makes the transcript unusable.

use std::ops::Range;

use crate::openai::{
    chunk::{Chunk, Reason, place_in},
    sse,
};

/// Limit of the text that is kept of one stream, bytes of JSON.
const MAX_TEXT: usize = 256 * 1024;

/// The part of a stream that its client has.
#[derive(Debug)]
pub(crate) struct Transcript {
    is_chat: bool,
    /// The bytes of an event before its text and behind it, when it has one token and nothing else.
    before: Vec<u8>,
    behind: Vec<u8>,
    /// The text, as it stands between the quotes of JSON.
    text: Vec<u8>,
    tokens: u32,
    /// Whether a token came without a text.
    held_back: bool,
    names: Option<Names>,
    /// Prompt and output tokens, as an event reported them.
    usage: Option<(u32, u32)>,
    unusable: Option<Reason>,
}

/// What all events of an answer share, as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Names {
    pub(crate) id: String,
    pub(crate) created: String,
    pub(crate) model: String,
}

/// What a client got of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Delivered<'a> {
    /// The text, as it stands between the quotes of JSON.
    pub(crate) json: &'a str,
    pub(crate) tokens: u32,
    /// Whether a token came without a text: its text may not have been sent.
    pub(crate) held_back: bool,
    /// Prompt tokens, if an event reported them.
    pub(crate) prompt_tokens: Option<u32>,
    pub(crate) names: &'a Names,
}

impl Transcript {
    /// Begins the transcript of a chat, or of a completion.
    pub(crate) fn new(is_chat: bool) -> Box<Self> {
        Box::new(Self {
            is_chat,
            before: Vec::new(),
            behind: Vec::new(),
            text: Vec::new(),
            tokens: 0,
            held_back: false,
            names: None,
            usage: None,
            unusable: None,
        })
    }

    /// Notes an event that the client gets.
    pub(crate) fn note(&mut self, event: &[u8]) {
        if self.unusable.is_some() {
            return;
        }
        if let Some(text) = self.text_of_known(event) {
            self.text.extend_from_slice(text);
            self.tokens += 1;
            self.held_back |= text.is_empty();
        } else if sse::has_data(event)
            && !sse::is_done(event)
            && let Err(reason) = self.read(event)
        {
            self.give_up(reason);
        }
        if self.text.len() > MAX_TEXT {
            self.give_up("too_long");
        }
    }

    /// Returns what the client got.
    pub(crate) fn delivered(&self) -> Result<Delivered<'_>, Reason> {
        if let Some(reason) = self.unusable {
            return Err(reason);
        }
        let names = self.names.as_ref().ok_or("no_text")?;
        let json = std::str::from_utf8(&self.text).map_err(|_| "not_text")?;
        let tokens = self.usage.map_or(self.tokens, |(_, output)| output);
        let prompt_tokens = self.usage.map(|(prompt, _)| prompt);
        Ok(Delivered { json, tokens, held_back: self.held_back, prompt_tokens, names })
    }

    /// The text of an event that differs from one before in its text only.
    fn text_of_known<'a>(&self, event: &'a [u8]) -> Option<&'a [u8]> {
        if self.before.is_empty() {
            return None;
        }
        let text = event.strip_prefix(&self.before[..])?.strip_suffix(&self.behind[..])?;
        memchr::memchr2(b'"', b'\\', text).is_none().then_some(text)
    }

    fn read(&mut self, event: &[u8]) -> Result<(), Reason> {
        let chunk = Chunk::read(sse::object(event)).ok_or("not_a_chunk")?;
        self.names.get_or_insert_with(|| Names {
            id: chunk.id.to_owned(),
            created: chunk.created.to_owned(),
            model: chunk.model.to_owned(),
        });
        let usage = chunk.usage.as_ref().and_then(|usage| usage.counts());
        self.usage = usage.or(self.usage);
        let Some(piece) = chunk.piece(self.is_chat)? else { return Ok(()) };
        self.tokens += piece.tokens;
        let Some(text) = piece.text else { return Ok(()) };
        self.held_back |= text.is_empty() && piece.tokens > 0;
        self.text.extend_from_slice(text.as_bytes());
        let is_plain = piece.tokens == 1 && piece.is_only_text && usage.is_none();
        if let Some(Range { start, end }) = place_in(event, text).filter(|_| is_plain) {
            self.before = event.get(..start).unwrap_or_default().to_vec();
            self.behind = event.get(end..).unwrap_or_default().to_vec();
        }
        Ok(())
    }

    fn give_up(&mut self, reason: Reason) {
        self.unusable = Some(reason);
        (self.text, self.before, self.behind) = (Vec::new(), Vec::new(), Vec::new());
    }
}

#[cfg(test)]
mod tests;
