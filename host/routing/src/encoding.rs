//! The encoding of recorded decisions: texts and byte strings as 32-bit words, so that one decision is one
//! list of words.
//!
//! A byte string is its length in bytes, then four bytes a word, little-endian, padded with zeros.

/// Bytes of a recorded text; longer ones are truncated.
const MAX_TEXT_BYTES: usize = 512;

/// Reads words one after another. Every method answers `None` when the words end too early.
#[derive(Debug)]
pub(crate) struct WordReader<'a>(pub(crate) &'a [u32]);

impl<'a> WordReader<'a> {
    pub(crate) fn word(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    pub(crate) fn words(&mut self, count: usize) -> Option<&'a [u32]> {
        let (words, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(words)
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        Some(String::from_utf8_lossy(&self.bytes()?).into_owned())
    }

    pub(crate) fn bytes(&mut self) -> Option<Vec<u8>> {
        let length = self.word()? as usize;
        let words = self.words(length.div_ceil(4))?;
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.truncate(length);
        Some(bytes)
    }

    /// The number of rows, and which ones when they are listed.
    pub(crate) fn rows(&mut self) -> Option<(u32, Option<&'a [u32]>)> {
        let count = self.word()?;
        let listed = if self.word()? == 1 { Some(self.words(count as usize)?) } else { None };
        Some((count, listed))
    }
}

/// Appends a text, truncated to [`MAX_TEXT_BYTES`].
pub(crate) fn write_text(text: &str, out: &mut Vec<u32>) {
    let text = text.get(..text.floor_char_boundary(MAX_TEXT_BYTES)).unwrap_or(text);
    write_bytes(text.as_bytes(), out);
}

/// Appends a byte string.
pub(crate) fn write_bytes(bytes: &[u8], out: &mut Vec<u32>) {
    out.push(count(bytes.len()));
    out.extend(bytes.chunks(4).map(|chunk| {
        let mut bytes = [0; 4];
        bytes.iter_mut().zip(chunk).for_each(|(byte, given)| *byte = *given);
        u32::from_le_bytes(bytes)
    }));
}

/// A length as one word.
pub(crate) fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
