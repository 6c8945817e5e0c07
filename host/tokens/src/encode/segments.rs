//! Prompts that begin as earlier ones did: the tokens of their common beginning are found without cutting or
//! hashing it again.
//!
//! A text has *marks*: ends of its parts, about every kilobyte. The key of a mark is a digest of everything
//! before it. A known mark has a *segment*: the tokens from the cut of the known mark before it up to its own
//! cut, which is the last position at which the text is split whatever follows the mark. The text after the
//! deepest cut is encoded piece by piece.
//!
//! ```text
//! parts   |system|<user>|question     |<assistant>|answer  |<user>|...
//! marks          1                    2                    3
//! cuts          1                    2                    3
//! segments -----><-------------------><-------------------><--- rest
//! ```

use std::{mem, sync::Arc};

use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::{
    byte_cache::{ByteCache, Weigh},
    prompt_key::MIN_PROMPT_BYTES,
    prompt_tokens::{PromptTokens, TokenSegment},
    rendered::{Rendered, TextPart},
};

/// Least bytes between two marks.
const MARK_BYTES: usize = 1_024;
/// Longest part without a mark in it, bytes, of the text that messages do not share.
const OWN_BYTES: usize = 4_096;
/// Typical bytes of a segment.
const TYPICAL_SEGMENT: usize = 2_048;

/// The segments of one model.
#[derive(Debug)]
pub(crate) struct Segments {
    segments: ByteCache<Segment>,
    /// Random, so that clients cannot construct two texts with the same key.
    seed: u64,
}

#[derive(Clone, Debug)]
struct Segment {
    /// Key of the segment before it.
    parent: Option<u128>,
    tokens: Arc<[u32]>,
    /// Position in the text up to which the tokens reach.
    cut: usize,
}

/// A position in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    end: usize,
    key: u128,
}

/// The known beginning of a text.
#[derive(Debug, Default)]
pub(super) struct Known {
    segments: Vec<TokenSegment>,
    /// Position up to which the tokens are known.
    pub(super) cut: usize,
}

impl Weigh for Segment {
    fn bytes(&self) -> usize {
        self.tokens.bytes() + mem::size_of::<Self>()
    }
}

impl Segments {
    pub(super) fn new(budget: usize, seed: u64) -> Self {
        Self { segments: ByteCache::new(budget, TYPICAL_SEGMENT), seed }
    }

    /// Returns the marks of a text. `root` distinguishes texts whose tokens differ for another reason.
    pub(super) fn marks(&self, text: &Rendered, root: u8) -> Vec<Mark> {
        if text.len() < MIN_PROMPT_BYTES {
            return Vec::new();
        }
        let mut chain = Chain { key: u128::from(root), seed: self.seed, end: 0 };
        let (mut marks, mut marked): (Vec<Mark>, usize) = (Vec::new(), 0);
        for part in text.parts() {
            match part {
                TextPart::Shared(text, digest) => chain.add(text.len(), digest, 1),
                TextPart::Own(text) => {
                    for bytes in text.as_bytes().chunks(OWN_BYTES) {
                        chain.add(bytes.len(), xxh3_128_with_seed(bytes, self.seed), 0);
                        if chain.end - marked >= OWN_BYTES {
                            marks.push(chain.mark());
                            marked = chain.end;
                        }
                    }
                    continue;
                }
            }
            if chain.end - marked >= MARK_BYTES {
                marks.push(chain.mark());
                marked = chain.end;
            }
        }
        marks
    }

    /// Returns the known beginning of a text with these marks.
    pub(super) fn known(&self, marks: &[Mark]) -> Known {
        let mut known = Known::default();
        for mark in marks {
            // A mark without a cut of its own has no segment.
            let segment = self.segments.find(mark.key);
            if let Some(segment) = segment.filter(|segment| segment.parent == known.last()) {
                known.cut = segment.cut;
                known.segments.push(TokenSegment::new(Some(mark.key), segment.tokens));
            }
        }
        known
    }

    /// Keeps the tokens of a text after its known beginning, and returns all. `cuts` are the positions at
    /// which the text was split, each with the number of `tokens` before it. No cut depends on text more than
    /// `reach` bytes after it.
    pub(super) fn keep(
        &self,
        known: Known,
        marks: &[Mark],
        cuts: &[(usize, usize)],
        reach: usize,
        tokens: &[u32],
    ) -> PromptTokens {
        let (mut fresh, mut segments) = (Vec::new(), known.segments);
        let (mut from, mut next) = (0, cuts.iter().peekable());
        for mark in marks.iter().filter(|mark| mark.end > known.cut) {
            let mut last = None;
            while let Some(cut) = next.next_if(|(at, _)| at + reach <= mark.end) {
                last = Some(*cut);
            }
            let Some((cut, to)) = last else { continue };
            let tokens: Arc<[u32]> = tokens.get(from..to).unwrap_or_default().into();
            let parent = segments.last().and_then(TokenSegment::id);
            fresh.push((mark.key, Segment { parent, tokens: tokens.clone(), cut }));
            segments.push(TokenSegment::new(Some(mark.key), tokens));
            from = to;
        }
        self.segments.put(fresh);
        let rest = tokens.get(from..).unwrap_or_default();
        segments.push(TokenSegment::new(None, rest.into()));
        PromptTokens::new(segments)
    }

    /// Returns the tokens of a whole prompt that was kept.
    pub(super) fn kept_tokens(&self, key: u128) -> Option<PromptTokens> {
        let rest = self.segments.find(key)?;
        let mut segments = vec![TokenSegment::new(None, rest.tokens)];
        let mut parent = rest.parent;
        while let Some(key) = parent {
            let segment = self.segments.find(key)?;
            segments.push(TokenSegment::new(Some(key), segment.tokens));
            parent = segment.parent;
        }
        segments.reverse();
        Some(PromptTokens::new(segments))
    }

    /// Keeps the tokens of a whole prompt.
    pub(super) fn keep_whole(&self, key: u128, tokens: &PromptTokens) {
        if let Some((rest, before)) = tokens.segments().split_last() {
            let parent = before.last().and_then(TokenSegment::id);
            let rest = Segment { parent, tokens: rest.shared().clone(), cut: 0 };
            self.segments.put(vec![(key, rest)]);
        }
    }
}

impl Known {
    /// Returns whether the tokens begin with the text, and not after a known part.
    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    fn last(&self) -> Option<u128> {
        self.segments.last().and_then(TokenSegment::id)
    }
}

/// Digest of a text up to a position.
struct Chain {
    key: u128,
    seed: u64,
    end: usize,
}

impl Chain {
    fn add(&mut self, length: usize, digest: u128, kind: u8) {
        let mut bytes = [0; 41];
        let parts =
            [&self.key.to_le_bytes()[..], &digest.to_le_bytes(), &(length as u64).to_le_bytes(), &[kind]];
        for (to, from) in bytes.iter_mut().zip(parts.into_iter().flatten()) {
            *to = *from;
        }
        self.key = xxh3_128_with_seed(&bytes, self.seed);
        self.end += length;
    }

    fn mark(&self) -> Mark {
        Mark { end: self.end, key: self.key }
    }
}
