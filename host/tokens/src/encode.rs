//! Encodes texts, piece by piece if the pieces are known to be independent.

mod backend;
mod cache;
mod cuts;
mod frame;
mod library;
mod self_test;

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use xxhash_rust::xxh3::xxh3_128_with_seed;

pub(crate) use self::cache::PieceCache;
use self::{
    backend::Backend,
    cuts::{Cuts, MinPiece},
    frame::Frame,
    library::whole,
};
pub use self::{backend::EncoderKind, cache::CacheStats, cuts::Reuse};
use crate::{error::EncodeError, folder::Folder};

/// A piece ends at the first special token after `special` bytes, or between two words after `word` bytes.
/// Long pieces are disproportionately expensive: tokenizers take twice as long for 220 KB in one piece.
const MIN_PIECE: MinPiece = MinPiece { special: 256, word: 2048 };

/// Typical bytes of the tokens of a piece: 2 KB of text have about 500.
const TYPICAL_PIECE: usize = 2_048;

/// Encodes texts of one model.
pub(crate) struct Encoder {
    backend: Backend,
    /// Special tokens around a text; `None` if they depend on the text.
    frame: Option<Frame>,
    reuse: Option<PieceReuse>,
}

/// State for reusing the tokens of pieces.
struct PieceReuse {
    cuts: Cuts,
    pieces: PieceCache,
    /// Random, so that clients cannot construct two texts with the same key.
    seed: u64,
}

impl Encoder {
    /// Creates an encoder, and determines how its texts may be split.
    pub(crate) fn new(folder: Folder, cache_bytes: usize, use_fast: bool) -> Result<Self, EncodeError> {
        let frame = Frame::of(&folder)?;
        let cuts = Cuts::of(&folder).filter(|_| cache_bytes > 0);
        let cuts = match cuts {
            Some(cuts) => self_test::proven(&folder.tokenizer, cuts)?,
            None => None,
        };
        let seed = RandomState::new().build_hasher().finish();
        let reuse =
            cuts.map(|cuts| PieceReuse { cuts, pieces: PieceCache::new(cache_bytes, TYPICAL_PIECE), seed });
        Ok(Self { backend: Backend::new(folder, use_fast), frame, reuse })
    }

    /// Returns the tokens of a text. Ends with an error soon after `stopped` is set.
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        stopped: &AtomicBool,
    ) -> Result<Vec<u32>, EncodeError> {
        match (&self.frame, add_special_tokens) {
            (_, false) => self.plain(text, &[], &[], stopped),
            (Some(frame), true) => self.plain(text, frame.before(), frame.after(), stopped),
            (None, true) => whole(self.backend.library(), text, true),
        }
    }

    pub(crate) fn kind(&self) -> EncoderKind {
        self.backend.kind()
    }

    pub(crate) fn reuse(&self) -> Reuse {
        self.reuse.as_ref().map_or(Reuse::Off, |reuse| reuse.cuts.reuse())
    }

    pub(crate) fn cache_stats(&self) -> CacheStats {
        self.reuse.as_ref().map(|reuse| reuse.pieces.stats()).unwrap_or_default()
    }

    fn plain(
        &self,
        text: &str,
        before: &[u32],
        after: &[u32],
        stopped: &AtomicBool,
    ) -> Result<Vec<u32>, EncodeError> {
        let mut tokens = Vec::with_capacity(before.len() + text.len() / 3 + after.len());
        tokens.extend_from_slice(before);
        match &self.reuse {
            Some(reuse) => reuse.encode(&self.backend, text, &mut tokens, stopped)?,
            None => self.backend.append(text, stopped, &mut tokens)?,
        }
        tokens.extend_from_slice(after);
        Ok(tokens)
    }
}

impl PieceReuse {
    fn encode(
        &self,
        backend: &Backend,
        text: &str,
        tokens: &mut Vec<u32>,
        stopped: &AtomicBool,
    ) -> Result<(), EncodeError> {
        let pieces = self.cuts.pieces(text, MIN_PIECE);
        // Short pieces, such as the tail of a text, are not worth a cache entry.
        let key = |piece: &&str| {
            (piece.len() >= MIN_PIECE.special).then(|| xxh3_128_with_seed(piece.as_bytes(), self.seed))
        };
        let keys: Vec<Option<u128>> = pieces.iter().map(key).collect();
        let mut fresh = Vec::new();
        for ((piece, key), known) in pieces.iter().zip(&keys).zip(self.pieces.get(&keys)) {
            match known {
                Some(known) => tokens.extend_from_slice(&known),
                None if stopped.load(Relaxed) => return Err(EncodeError::Stopped),
                None => {
                    let start = tokens.len();
                    backend.append(piece, stopped, tokens)?;
                    let encoded = key.and_then(|key| Some((key, Arc::from(tokens.get(start..)?))));
                    fresh.extend(encoded);
                }
            }
        }
        self.pieces.put(fresh);
        Ok(())
    }
}
