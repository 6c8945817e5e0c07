//! Self-tests at load: the pieces of a text, encoded separately, must have the same tokens as the text, and
//! the fast encoder the same as Hugging Face's library.

use super::{
    cuts::{Cuts, MinPiece},
    library::encode_text,
};
use crate::error::EncodeError;

/// Number of random texts.
const TEXTS: usize = 64;
/// Number of random texts for the fast encoder, of about 1 KB each.
const FAST_TEXTS: usize = 48;
/// Blocks of Unicode from which texts for the fast encoder take characters: first and last one.
const BLOCKS: [(u32, u32); 24] = [
    (0x00, 0x1f),
    (0x20, 0x7f),
    (0x80, 0xff),
    (0x100, 0x24f),
    (0x2b0, 0x36f),
    (0x370, 0x52f),
    (0x530, 0x6ff),
    (0x900, 0xdff),
    (0xe00, 0x10ff),
    (0x1100, 0x13ff),
    (0x1c80, 0x1fff),
    (0x2000, 0x20ff),
    (0x2100, 0x2bff),
    (0x3000, 0x33ff),
    (0x4e00, 0x9fff),
    (0xa720, 0xabff),
    (0xac00, 0xd7a3),
    (0xe000, 0xe00f),
    (0xf900, 0xffff),
    (0x1_0000, 0x1_05ff),
    (0x1_d400, 0x1_d7ff),
    (0x1_e900, 0x1_f0ff),
    (0x1_f1e6, 0x1_faff),
    (0x2_0000, 0x10_ffff),
];

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

/// Returns a text for which `encode` has other tokens than the library; `None` if it passes the test.
pub(crate) fn difference(
    library: &tokenizers::Tokenizer,
    special: &[&str],
    encode: impl Fn(&str) -> Option<Vec<u32>>,
) -> Result<Option<String>, EncodeError> {
    let mut random = Random(0xfa57);
    let atoms = ATOMS.concat();
    let fixed = ["", " ", "\n", "\u{0}", "a", &atoms].map(str::to_owned);
    let size = library.get_vocab_size(true);
    let varied = (0..FAST_TEXTS).map(|_| varied(&mut random, library, size, special));
    for text in fixed.into_iter().chain(varied) {
        if encode(&text).as_ref() != Some(&encode_text(library, &text, false)?) {
            return Ok(Some(text));
        }
    }
    Ok(None)
}

/// Returns a text of parts of all kinds: words, characters of all blocks, added tokens, tokens of the
/// vocabulary, digits and letters without spaces, and long runs of one character.
fn varied(random: &mut Random, library: &tokenizers::Tokenizer, size: usize, special: &[&str]) -> String {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for _ in 0..64 {
        match random.below(12) {
            0 if !special.is_empty() => text.extend(special.get(random.below(special.len())).copied()),
            1 | 2 => {
                let block = BLOCKS.get(random.below(BLOCKS.len())).copied().unwrap_or_default();
                let span = usize::try_from(block.1 - block.0).unwrap_or_default() + 1;
                let next =
                    |_| char::from_u32(block.0 + u32::try_from(random.below(span)).unwrap_or_default());
                text.extend((0..4).filter_map(next));
            }
            3..=6 => {
                let id = u32::try_from(random.below(size)).unwrap_or_default();
                text.extend(library.id_to_token(id).and_then(|token| byte_bpe::text_of(&token)));
            }
            7 => {
                let letters = 4 + random.below(40);
                text.extend(
                    (0..letters)
                        .filter_map(|_| LETTERS.get(random.below(LETTERS.len())).copied().map(char::from)),
                );
            }
            8 => {
                let run = [" ", "\n", "\t", "a", "=", "7", "é", "中", "\r\n"];
                let long = [2, 3, 9, 33, 130];
                let times = long.get(random.below(long.len())).copied().unwrap_or_default();
                text.push_str(&run.get(random.below(run.len())).copied().unwrap_or_default().repeat(times));
            }
            _ => text.extend(ATOMS.get(random.below(ATOMS.len())).copied()),
        }
    }
    text
}

fn holds(inner: &tokenizers::Tokenizer, cuts: &Cuts) -> Result<bool, EncodeError> {
    let everywhere = MinPiece { special: 1, word: 1 };
    let mut random = Random(0x5eed);
    for _ in 0..TEXTS {
        let text = text(&mut random, cuts.contents());
        let mut pieces = Vec::new();
        for piece in cuts.pieces(&text, everywhere) {
            pieces.extend(encode_text(inner, piece, false)?);
        }
        if pieces != encode_text(inner, &text, false)? {
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
