//! From text to tokens, by pieces where pieces are known to be independent.

mod cache;
mod cuts;
mod frame;
mod self_test;

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
};

use xxhash_rust::xxh3::xxh3_128_with_seed;

pub use self::{cache::CacheStats, cuts::Reuse};
use self::{
    cache::Pieces,
    cuts::{Cuts, Least},
    frame::Frame,
};
use crate::{error::EncodeError, folder::Folder};

/// Pieces end at the first special token after `special` bytes, or between two words after `word` bytes. Long pieces cost
/// more than their share: tokenizers take twice the time for 220 KB in one piece.
const LEAST: Least = Least { special: 256, word: 2048 };

/// Encodes texts of one model.
pub(crate) struct Encoder {
    inner: tokenizers::Tokenizer,
    /// The special tokens around a text, where they do not depend on the text.
    frame: Option<Frame>,
    remembered: Option<Remembered>,
}

/// What is needed to reuse tokens.
struct Remembered {
    cuts: Cuts,
    pieces: Pieces,
    /// Drawn at load: nobody can prepare two texts with one key.
    seed: u64,
}

impl Encoder {
    /// Takes the tokenizer of a folder and finds out how its texts may be cut.
    pub(crate) fn new(folder: Folder, cache_bytes: usize) -> Result<Self, EncodeError> {
        let frame = Frame::of(&folder)?;
        let cuts = Cuts::of(&folder).filter(|_| cache_bytes > 0);
        let inner = folder.tokenizer;
        let cuts = match cuts {
            Some(cuts) => self_test::proven(&inner, cuts)?,
            None => None,
        };
        let seed = RandomState::new().build_hasher().finish();
        let remembered = cuts.map(|cuts| Remembered { cuts, pieces: Pieces::new(cache_bytes), seed });
        Ok(Self { inner, frame, remembered })
    }

    /// The tokens of a text.
    pub(crate) fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        match (&self.frame, add_special_tokens) {
            (_, false) => self.plain(text, &[], &[]),
            (Some(frame), true) => self.plain(text, frame.before(), frame.after()),
            (None, true) => whole(&self.inner, text, true),
        }
    }

    pub(crate) fn reuse(&self) -> Reuse {
        self.remembered.as_ref().map_or(Reuse::Off, |remembered| remembered.cuts.reuse())
    }

    pub(crate) fn cache_stats(&self) -> CacheStats {
        self.remembered.as_ref().map(|remembered| remembered.pieces.stats()).unwrap_or_default()
    }

    fn plain(&self, text: &str, before: &[u32], after: &[u32]) -> Result<Vec<u32>, EncodeError> {
        let mut tokens = Vec::with_capacity(before.len() + text.len() / 3 + after.len());
        tokens.extend_from_slice(before);
        match &self.remembered {
            Some(remembered) => remembered.encode(&self.inner, text, &mut tokens)?,
            None => tokens.extend(whole(&self.inner, text, false)?),
        }
        tokens.extend_from_slice(after);
        Ok(tokens)
    }
}

impl Remembered {
    fn encode(
        &self,
        inner: &tokenizers::Tokenizer,
        text: &str,
        tokens: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        let pieces = self.cuts.pieces(text, LEAST);
        // Short pieces (the tail of a text) are not worth a place.
        let key = |piece: &&str| {
            (piece.len() >= LEAST.special).then(|| xxh3_128_with_seed(piece.as_bytes(), self.seed))
        };
        let keys: Vec<Option<u128>> = pieces.iter().map(key).collect();
        let mut fresh = Vec::new();
        for ((piece, key), known) in pieces.iter().zip(&keys).zip(self.pieces.get(&keys)) {
            match known {
                Some(known) => tokens.extend_from_slice(&known),
                None => {
                    let encoded = whole(inner, piece, false)?;
                    tokens.extend_from_slice(&encoded);
                    fresh.extend(key.map(|key| (key, Arc::from(encoded))));
                }
            }
        }
        self.pieces.put(fresh);
        Ok(())
    }
}

/// The tokens of a text, encoded in one go.
fn whole(
    inner: &tokenizers::Tokenizer,
    text: &str,
    add_special_tokens: bool,
) -> Result<Vec<u32>, EncodeError> {
    let encoding = inner.encode_fast(text, add_special_tokens);
    let encoding = encoding.map_err(|error| EncodeError::Tokenizer(error.to_string()))?;
    Ok(encoding.get_ids().to_vec())
}
