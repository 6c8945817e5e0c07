//! Reads back what a recorder wrote.

/// Reads words one after another.
pub(super) struct Words<'a>(pub(super) &'a [u32]);

/// The text that a record's words begin with: the request's id.
pub(super) fn first_text(words: &[u32]) -> String {
    Words(words).text().unwrap_or_default()
}

impl<'a> Words<'a> {
    pub(super) fn word(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    pub(super) fn take(&mut self, count: usize) -> Option<&'a [u32]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    pub(super) fn text(&mut self) -> Option<String> {
        Some(String::from_utf8_lossy(&self.bytes()?).into_owned())
    }

    pub(super) fn bytes(&mut self) -> Option<Vec<u8>> {
        let length = self.word()? as usize;
        let mut bytes: Vec<u8> =
            self.take(length.div_ceil(4))?.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.truncate(length);
        Some(bytes)
    }

    pub(super) fn rows(&mut self) -> Option<(u32, Option<&'a [u32]>)> {
        let count = self.word()?;
        let listed = if self.word()? == 1 { Some(self.take(count as usize)?) } else { None };
        Some((count, listed))
    }
}
