//! Self-test at load: the pieces of a text, encoded separately, must have the same tokens as the text.

use super::{
    cuts::{Cuts, MinPiece},
    whole,
};
use crate::error::EncodeError;

/// Number of random texts.
const TEXTS: usize = 64;

/// Parts of random texts: inputs that word splitters treat differently.
const ATOMS: [&str; 40] = [
    "the", "Router", "HELLO", "don't", "I'll", "we'RE", "x", " a", " word", " Word", "  two", " ", "  ",
    "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n  ", "0", "7", "12345", " 3", ".", ", ", "!?", "...", "(",
    ") {", "_", "-", "//", "'s", "\"", "é", "e\u{301}", "中文", "😀", "\u{a0}",
];

/// Returns the split positions that pass the test: all, those at special tokens, or none.
pub(crate) fn proven(inner: &tokenizers::Tokenizer, mut cuts: Cuts) -> Result<Option<Cuts>, EncodeError> {
    loop {
        if holds(inner, &cuts)? {
            return Ok(Some(cuts));
        }
        tracing::info!(reuse = cuts.reuse().label(), "tokenizer self-test failed for this reuse");
        match cuts.reuse() {
            super::Reuse::Words => match cuts.without_words() {
                Some(fewer) => cuts = fewer,
                None => return Ok(None),
            },
            _ => return Ok(None),
        }
    }
}

fn holds(inner: &tokenizers::Tokenizer, cuts: &Cuts) -> Result<bool, EncodeError> {
    let everywhere = MinPiece { special: 1, word: 1 };
    let mut random = Random(0x5eed);
    for _ in 0..TEXTS {
        let text = text(&mut random, cuts.contents());
        let mut pieces = Vec::new();
        for piece in cuts.pieces(&text, everywhere) {
            pieces.extend(whole(inner, piece, false)?);
        }
        if pieces != whole(inner, &text, false)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn text(random: &mut Random, special: &[String]) -> String {
    let mut text = String::new();
    for _ in 0..48 {
        match random.below(8) {
            // Two words, so that every text can be split between words.
            0 => text.push_str("one two"),
            1 if !special.is_empty() => {
                text.extend(special.get(random.below(special.len())).map(String::as_str));
            }
            _ => text.extend(ATOMS.get(random.below(ATOMS.len())).copied()),
        }
    }
    text
}

/// SplitMix64 with a fixed seed: the texts are the same at every load.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let end = u64::try_from(end.max(1)).unwrap_or(1);
        usize::try_from((mixed ^ (mixed >> 31)) % end).unwrap_or(0)
    }
}
