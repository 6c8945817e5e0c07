//! Encodes texts, piece by piece if the pieces are known to be independent.

mod backend;
mod cuts;
mod frame;
mod library;
mod segments;
mod self_test;

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use xxhash_rust::xxh3::xxh3_128_with_seed;

use self::{
    backend::Backend,
    cuts::{Cuts, MinPiece},
    frame::Frame,
    library::encode_text,
    segments::Segments,
};
pub use self::{backend::EncoderKind, cuts::Reuse};
use crate::{
    byte_cache::{ByteCache, CacheStats},
    error::EncodeError,
    folder::Folder,
    prompt_tokens::PromptTokens,
    rendered::Rendered,
};

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
    segments: Segments,
}

/// State for reusing the tokens of pieces.
struct PieceReuse {
    cuts: Cuts,
    pieces: ByteCache<Arc<[u32]>>,
    /// Random, so that clients cannot construct two texts with the same key.
    seed: u64,
}

impl Encoder {
    /// Creates an encoder, and determines how its texts may be split. `budgets` are the bytes for pieces and
    /// for segments.
    pub(crate) fn new(folder: Folder, budgets: [usize; 2], use_fast: bool) -> Result<Self, EncodeError> {
        let [for_pieces, for_segments] = budgets;
        let frame = Frame::of(&folder)?;
        let cuts = Cuts::of(&folder).filter(|_| for_pieces > 0);
        let cuts = match cuts {
            Some(cuts) => self_test::proven(&folder.tokenizer, cuts)?,
            None => None,
        };
        let seed = RandomState::new().build_hasher().finish();
        let pieces = ByteCache::new(for_pieces, TYPICAL_PIECE);
        let segments = Segments::new(for_segments, seed);
        let reuse = cuts.map(|cuts| PieceReuse { cuts, pieces, seed });
        Ok(Self { backend: Backend::new(folder, use_fast), frame, reuse, segments })
    }

    /// Returns the tokens of a text. Ends with an error soon after `stopped` is set.
    pub(crate) fn encode(
        &self,
        text: &Rendered,
        add_special_tokens: bool,
        stopped: &AtomicBool,
    ) -> Result<PromptTokens, EncodeError> {
        let (before, after) = match (&self.frame, add_special_tokens) {
            (_, false) => (&[][..], &[][..]),
            (Some(frame), true) => (frame.before(), frame.after()),
            (None, true) => return Ok(encode_text(self.backend.library(), &text.from(0), true)?.into()),
        };
        let Some(reuse) = &self.reuse else {
            let mut tokens = Vec::with_capacity(before.len() + text.len() / 3 + after.len());
            tokens.extend_from_slice(before);
            self.backend.append(&text.from(0), stopped, &mut tokens)?;
            tokens.extend_from_slice(after);
            return Ok(tokens.into());
        };
        let marks = self.segments.marks(text, u8::from(add_special_tokens));
        let known = self.segments.known(&marks);
        let rest = text.from(known.cut);
        let mut tokens = Vec::with_capacity(before.len() + rest.len() / 3 + after.len());
        if known.is_empty() {
            tokens.extend_from_slice(before);
        }
        let mut cuts = reuse.encode(&self.backend, &rest, &mut tokens, stopped)?;
        cuts.iter_mut().for_each(|(at, _)| *at += known.cut);
        tokens.extend_from_slice(after);
        Ok(self.segments.keep(known, &marks, &cuts, reuse.cuts.reach(), &tokens))
    }

    /// Returns the tokens of a whole prompt that was kept.
    pub(crate) fn kept_tokens(&self, key: u128) -> Option<PromptTokens> {
        self.segments.kept_tokens(key)
    }

    /// Keeps the tokens of a whole prompt.
    pub(crate) fn keep_whole(&self, key: u128, tokens: &PromptTokens) {
        self.segments.keep_whole(key, tokens);
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
}

impl PieceReuse {
    /// Appends the tokens of a text. Returns the positions at which it is split, each with the number of
    /// tokens before it.
    fn encode(
        &self,
        backend: &Backend,
        text: &str,
        tokens: &mut Vec<u32>,
        stopped: &AtomicBool,
    ) -> Result<Vec<(usize, usize)>, EncodeError> {
        let pieces = self.cuts.pieces(text, MIN_PIECE);
        // Short pieces, such as the tail of a text, are not worth a cache entry.
        let key = |piece: &&str| {
            (piece.len() >= MIN_PIECE.special).then(|| xxh3_128_with_seed(piece.as_bytes(), self.seed))
        };
        let keys: Vec<Option<u128>> = pieces.iter().map(key).collect();
        let (mut fresh, mut cuts, mut end) = (Vec::new(), Vec::with_capacity(pieces.len()), 0);
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
            end += piece.len();
            cuts.push((end, tokens.len()));
        }
        self.pieces.put(fresh);
        // The last piece ends with the text, and another text may continue it.
        cuts.pop();
        Ok(cuts)
    }
}
