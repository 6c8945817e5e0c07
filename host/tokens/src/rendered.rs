//! The text of a prompt, in which long texts of messages stay where they are.

use std::{borrow::Cow, io, ops::Range};

use minijinja::Value;

/// A long text of a message. A template that prints it as it is prints this very memory.
#[derive(Clone, Debug)]
pub(crate) struct SharedText {
    pub(crate) text: Value,
    /// Identifies the text.
    pub(crate) digest: u128,
}

/// A text in parts.
#[derive(Debug, Default)]
pub(crate) struct Rendered {
    /// The parts that are not shared, in order.
    own: String,
    parts: Vec<Part>,
    length: usize,
}

#[derive(Debug)]
enum Part {
    Own(Range<usize>),
    Shared(SharedText),
}

/// A part of a text, for reading.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TextPart<'a> {
    Own(&'a str),
    /// A text and its digest.
    Shared(&'a str, u128),
}

impl Rendered {
    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Returns the parts in their order. None is empty.
    pub(crate) fn parts(&self) -> impl Iterator<Item = TextPart<'_>> {
        self.parts.iter().map(|part| match part {
            Part::Own(range) => TextPart::Own(self.own.get(range.clone()).unwrap_or_default()),
            Part::Shared(SharedText { text, digest }) => {
                TextPart::Shared(text.as_str().unwrap_or_default(), *digest)
            }
        })
    }

    /// Returns the text from a byte on, which begins a character.
    pub(crate) fn from(&self, start: usize) -> Cow<'_, str> {
        let behind = |text: &'_ str, at: usize| start.saturating_sub(at).min(text.len());
        if let Some(last) = self.parts().last().map(TextPart::text) {
            let at = self.length - last.len();
            if start >= at {
                return Cow::Borrowed(last.get(behind(last, at)..).unwrap_or_default());
            }
        }
        let mut out = String::with_capacity(self.length.saturating_sub(start));
        let mut at = 0;
        for text in self.parts().map(TextPart::text) {
            out.push_str(text.get(behind(text, at)..).unwrap_or_default());
            at += text.len();
        }
        Cow::Owned(out)
    }
}

impl From<String> for Rendered {
    fn from(own: String) -> Self {
        let parts = if own.is_empty() { Vec::new() } else { vec![Part::Own(0..own.len())] };
        Self { length: own.len(), parts, own }
    }
}

impl<'a> TextPart<'a> {
    pub(crate) fn text(self) -> &'a str {
        match self {
            Self::Own(text) | Self::Shared(text, _) => text,
        }
    }
}

/// Receives what a template prints. A shared text is known by its place in memory, wherever the template has
/// it from: it is alive and cannot change, so that the same bytes are printed.
pub(crate) struct Printer {
    own: Vec<u8>,
    parts: Vec<Part>,
    /// Start of the part that grows.
    open: usize,
    length: usize,
    /// Shared texts by their addresses in memory.
    shared: Vec<(usize, SharedText)>,
    min_shared: usize,
}

impl Printer {
    pub(crate) fn new(shared: impl Iterator<Item = SharedText>) -> Self {
        let place = |text: &Value| text.as_str().map(|text| text.as_ptr().addr());
        let mut shared: Vec<_> = shared.filter_map(|shared| Some((place(&shared.text)?, shared))).collect();
        shared.sort_unstable_by_key(|(place, _)| *place);
        let lengths = shared.iter().filter_map(|(_, shared)| shared.text.as_str()).map(str::len);
        let min_shared = lengths.min().unwrap_or(usize::MAX);
        Self { own: Vec::with_capacity(4_096), parts: Vec::new(), open: 0, length: 0, shared, min_shared }
    }

    /// Returns the text; `None` if it is not UTF-8, which cannot be.
    pub(crate) fn finish(mut self) -> Option<Rendered> {
        self.close();
        Some(Rendered { own: String::from_utf8(self.own).ok()?, parts: self.parts, length: self.length })
    }

    fn close(&mut self) {
        if self.own.len() > self.open {
            self.parts.push(Part::Own(self.open..self.own.len()));
            self.open = self.own.len();
        }
    }

    fn shared(&self, bytes: &[u8]) -> Option<&SharedText> {
        if bytes.len() < self.min_shared {
            return None;
        }
        let place = bytes.as_ptr().addr();
        let at = self.shared.binary_search_by_key(&place, |(place, _)| *place).ok()?;
        let (_, shared) = self.shared.get(at)?;
        (shared.text.as_str()?.len() == bytes.len()).then_some(shared)
    }
}

impl io::Write for &mut Printer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.length += bytes.len();
        match self.shared(bytes).cloned() {
            Some(shared) => {
                self.close();
                self.parts.push(Part::Shared(shared));
            }
            None => self.own.extend_from_slice(bytes),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
