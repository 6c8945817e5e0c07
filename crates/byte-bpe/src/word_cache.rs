//! Tokens of short words that occurred before. A place holds the last word with its hash, so the cache has a
//! fixed size and needs no eviction.

/// Longest word that is kept, bytes.
const MAX_WORD: usize = 24;
/// Highest number of tokens that is kept.
const MAX_TOKENS: usize = 8;
/// Number of words. 2 MiB for each thread that encodes.
const WORDS: usize = 1 << 15;

/// The cache of one thread.
#[derive(Debug)]
pub(super) struct WordCache {
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    key: [u64; MAX_WORD / 8],
    tokens: [u32; MAX_TOKENS],
    /// Length of the word in bytes; 0 for none.
    length: u8,
    count: u8,
}

/// The key of a short word.
#[derive(Clone, Copy, Debug)]
pub(super) struct WordKey {
    key: [u64; MAX_WORD / 8],
    length: u8,
    place: usize,
}

impl WordKey {
    /// Returns the key of a word; `None` if it is too long to be kept.
    pub(super) fn of(word: &[u8]) -> Option<Self> {
        let mut padded = [0_u8; MAX_WORD];
        padded.get_mut(..word.len())?.copy_from_slice(word);
        let mut key = [0; MAX_WORD / 8];
        for (part, bytes) in key.iter_mut().zip(padded.as_chunks::<8>().0) {
            *part = u64::from_le_bytes(*bytes);
        }
        let mix = |hash: u64, part: &u64| (hash ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
        let hash = key.iter().fold(word.len() as u64, mix);
        let place = usize::try_from(hash >> 20).unwrap_or_default() % WORDS;
        Some(Self { key, length: u8::try_from(word.len()).ok()?, place })
    }
}

impl WordCache {
    pub(super) fn new() -> Self {
        Self { entries: vec![Entry::default(); WORDS] }
    }

    pub(super) fn get(&self, word: &WordKey) -> Option<&[u32]> {
        let entry = self.entries.get(word.place)?;
        // Without branches: a comparison of arrays would be a call.
        let differs =
            entry.key.iter().zip(&word.key).fold(0, |differs, (left, right)| differs | (left ^ right));
        (entry.length == word.length && differs == 0)
            .then(|| entry.tokens.get(..usize::from(entry.count)))
            .flatten()
    }

    pub(super) fn put(&mut self, word: &WordKey, tokens: &[u32]) {
        let Some(entry) = self.entries.get_mut(word.place) else { return };
        let Some(kept) = entry.tokens.get_mut(..tokens.len()) else { return };
        kept.copy_from_slice(tokens);
        (entry.key, entry.length) = (word.key, word.length);
        entry.count = u8::try_from(tokens.len()).unwrap_or_default();
    }
}
