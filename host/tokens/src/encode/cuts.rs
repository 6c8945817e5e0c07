//! Finds the positions where a text may be split so that its pieces encode independently.
//!
//! - Around a special token: tokenizers find added tokens first, and encode the text between them separately.
//! - Between two words, where a letter is followed by a space and a letter: if no entry of the vocabulary
//!   spans such a position, and neither does the split into words.
//!
//! Both are assumptions about a tokenizer, which the self-test checks for every loaded model.

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::{AddedToken, ModelWrapper, NormalizedString, Normalizer};

use crate::folder::Folder;

/// Extent to which tokens of earlier requests are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// Every text is encoded as a whole.
    Off,
    /// Texts are split at special tokens.
    SpecialTokens,
    /// Texts are split at special tokens and between words.
    Words,
}

/// Minimum length of a piece in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MinPiece {
    /// Minimum if it ends at a special token.
    pub(crate) special: usize,
    /// Minimum if it ends between words.
    pub(crate) word: usize,
}

/// The split positions of one tokenizer.
#[derive(Debug)]
pub(crate) struct Cuts {
    tokens: AhoCorasick,
    contents: Vec<String>,
    /// For each token, the sides on which the text may be split.
    sides: Vec<Sides>,
    words: bool,
}

/// Sides of a token on which the text may be split. Not a side on which the token strips white space.
#[derive(Clone, Copy, Debug)]
struct Sides {
    before: bool,
    behind: bool,
}

impl Reuse {
    /// Returns the stable label in metrics and logs.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::SpecialTokens => "special_tokens",
            Self::Words => "words",
        }
    }
}

impl Cuts {
    /// Determines the split positions of a tokenizer; `None` if there are none.
    pub(crate) fn of(folder: &Folder) -> Option<Self> {
        let mut added: Vec<(u32, AddedToken)> =
            folder.tokenizer.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        let added: Vec<AddedToken> = added.into_iter().map(|(_, token)| token).collect();
        // A `single_word` token matches depending on its neighbours, and split special tokens do not match at
        // all.
        if folder.split_special_tokens || added.iter().any(|token| token.single_word) {
            return None;
        }
        let words = words_are_apart(&folder.tokenizer, &added);
        // Normalized tokens are found later, in the text between the others.
        let not_normalized: Vec<AddedToken> = added.into_iter().filter(|token| !token.normalized).collect();
        let contents: Vec<String> = not_normalized.iter().map(|token| token.content.clone()).collect();
        let sides: Vec<Sides> = not_normalized
            .iter()
            .map(|token| Sides { before: !token.lstrip, behind: !token.rstrip })
            .collect();
        if !words && sides.is_empty() {
            return None;
        }
        let tokens = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&contents).ok()?;
        Some(Self { tokens, contents, sides, words })
    }

    pub(crate) fn reuse(&self) -> Reuse {
        if self.words { Reuse::Words } else { Reuse::SpecialTokens }
    }

    /// Removes the positions between words; `None` if no others are left.
    pub(crate) fn without_words(self) -> Option<Self> {
        (!self.sides.is_empty()).then_some(Self { words: false, ..self })
    }

    /// Returns the texts of the special tokens.
    pub(crate) fn contents(&self) -> &[String] {
        &self.contents
    }

    /// Returns the bytes after a position of a split up to which it depends on the text: a special token may
    /// begin there, or one that was found may continue, and a word may.
    pub(crate) fn reach(&self) -> usize {
        self.contents.iter().map(String::len).max().unwrap_or_default() + 2
    }

    /// Splits a text. The pieces before a position do not depend on the text after it, so an appended text
    /// keeps them.
    pub(crate) fn pieces<'a>(&self, text: &'a str, min: MinPiece) -> Vec<&'a str> {
        let mut cutter = Cutter { text, min, start: 0, pieces: Vec::new() };
        let mut gap = 0;
        for found in self.tokens.find_iter(text) {
            if self.words {
                cutter.between_words(gap..found.start());
            }
            gap = found.end();
            let sides = self.sides.get(found.pattern().as_usize()).copied();
            for (at, allowed) in [(found.start(), sides.map(|s| s.before)), (gap, sides.map(|s| s.behind))] {
                if allowed == Some(true) && at.saturating_sub(cutter.start) >= min.special {
                    cutter.cut(at);
                }
            }
        }
        if self.words {
            cutter.between_words(gap..text.len());
        }
        cutter.cut(text.len());
        cutter.pieces
    }
}

struct Cutter<'a> {
    text: &'a str,
    min: MinPiece,
    start: usize,
    pieces: Vec<&'a str>,
}

impl Cutter<'_> {
    fn cut(&mut self, at: usize) {
        if at > self.start {
            self.pieces.extend(self.text.get(self.start..at));
            self.start = at;
        }
    }

    /// Splits inside a gap between special tokens, before spaces that have a letter on both sides.
    fn between_words(&mut self, gap: Range<usize>) {
        let bytes = self.text.as_bytes();
        let letter = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_alphabetic);
        loop {
            let from = (self.start + self.min.word.max(1)).max(gap.start + 1);
            let Some(rest) = bytes.get(from..gap.end) else { return };
            let mut spaces = memchr::memchr_iter(b' ', rest).map(|space| from + space);
            let found = spaces.find(|at| letter(at - 1) && letter(at + 1) && at + 1 < gap.end);
            match found {
                Some(at) => self.cut(at),
                None => return,
            }
        }
    }
}

/// Returns whether no token contains a letter followed by a space. Then no merge does either, and words are
/// independent.
fn words_are_apart(tokenizer: &tokenizers::Tokenizer, added: &[AddedToken]) -> bool {
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { return false };
    if model.dropout.is_some_and(|dropout| dropout > 0.0)
        || model.continuing_subword_prefix.as_ref().is_some_and(|prefix| !prefix.is_empty())
        || model.end_of_word_suffix.as_ref().is_some_and(|suffix| !suffix.is_empty())
    {
        return false;
    }
    let Some((text_spaces, token_spaces)) = spaces(tokenizer) else { return false };
    let later =
        |token: &AddedToken| token.normalized && (token.rstrip || token.content.contains(&*text_spaces));
    if added.iter().any(later) {
        return false;
    }
    let spans = |token: &String| {
        let after = token.chars().skip(1);
        token
            .chars()
            .zip(after)
            .any(|(left, right)| left.is_ascii_alphabetic() && token_spaces.contains(&right))
    };
    !tokenizer.get_vocab(false).keys().any(spans)
}

/// Returns the characters that represent a space in normalized text and in tokens.
fn spaces(tokenizer: &tokenizers::Tokenizer) -> Option<(Vec<char>, Vec<char>)> {
    const SAMPLE: &str = "a b";
    let mut normalized = NormalizedString::from(SAMPLE);
    if let Some(normalizer) = tokenizer.get_normalizer() {
        normalizer.normalize(&mut normalized).ok()?;
    }
    let other = |c: &char| !c.is_ascii_alphabetic();
    let text = SAMPLE.chars().chain(normalized.get().chars()).filter(other).collect();
    let encoding = tokenizer.encode(SAMPLE, false).ok()?;
    let tokens: Vec<char> =
        encoding.get_tokens().iter().flat_map(|token| token.chars()).filter(other).collect();
    (!tokens.is_empty()).then_some((text, tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `<l>` strips white space before it, `<r>` after it.
    fn cuts(words: bool) -> Cuts {
        let contents = ["<a>", "<a>b", "<l>", "<r>"].map(str::to_owned).to_vec();
        let tokens = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&contents).unwrap();
        let sides = [(true, true), (true, true), (false, true), (true, false)];
        let sides = sides.map(|(before, behind)| Sides { before, behind }).to_vec();
        Cuts { tokens, contents, sides, words }
    }

    #[test]
    fn pieces_end_at_tokens_except_where_a_token_strips_white_space() {
        let min = MinPiece { special: 1, word: 1 };
        assert_eq!(
            cuts(false).pieces("x<a>y z<a>bb<r> q <l>r", min),
            ["x", "<a>", "y z", "<a>b", "b", "<r> q <l>", "r"]
        );
        assert_eq!(cuts(false).pieces("<a>", min), ["<a>"]);
        assert!(cuts(false).pieces("", min).is_empty());
    }

    #[test]
    fn texts_are_split_between_words_only_at_ascii_letters() {
        let min = MinPiece { special: 1, word: 1 };
        assert_eq!(
            cuts(true).pieces("ab cd  ef 1 gh\n ij é k l<r> m n<a>o", min),
            ["ab", " cd  ef 1 gh\n ij é k", " l", "<r> m", " n", "<a>", "o"]
        );
    }

    #[test]
    fn pieces_have_a_minimum_length() {
        let min = MinPiece { special: 4, word: 6 };
        assert_eq!(
            cuts(true).pieces("a b c d e f<a>g<a>hijk<a>l", min),
            ["a b c d", " e f", "<a>g", "<a>hijk", "<a>l"]
        );
    }
}
