//! Encoder for byte-level BPE, many times as fast as Hugging Face's library and with the same tokens.
//!
//! A text is split at added tokens, normalized, split into words by the tokenizer's patterns, and each word
//! is merged byte pair by byte pair. Words that occurred before come from a small cache. There are no
//! threads, and memory is bounded: each thread that encodes takes a [`Workspace`], and few are kept.
//!
//! [`FastEncoder::new`] refuses tokenizers with anything else in them. Whether the tokens are the same is
//! tested at load (`encode::self_test`), which also covers the Unicode tables of both.

mod definition;
mod merge;
mod split;
mod word_cache;

use std::{
    borrow::Cow,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use aho_corasick::{AhoCorasick, MatchKind};
use parking_lot::Mutex;
use tokenizers::AddedToken;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use self::{
    definition::{Definition, check_added},
    merge::{MergeBuffers, Merges},
    split::{SplitCache, Splitter},
    word_cache::{WordCache, WordKey},
};

pub(crate) use self::merge::text_of;

/// Number of workspaces that are kept while no thread encodes.
const MAX_IDLE: usize = 16;
/// Text with which tests make the encoder panic.
#[cfg(test)]
pub(crate) const PANIC: &str = "\u{10fffd}panic";
/// Number of words between two looks at the stop flag.
const STOP_INTERVAL: u32 = 1_024;

/// Encodes texts of one byte-level BPE model.
#[derive(Debug)]
pub(crate) struct FastEncoder {
    /// Added tokens that are found in the text as it is.
    not_normalized: Option<AddedTokens>,
    /// Added tokens that are found in normalized text.
    normalized: Option<AddedTokens>,
    nfc: bool,
    splits: Vec<Splitter>,
    merges: Merges,
    idle: Mutex<Vec<Workspace>>,
}

/// Why a text could not be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FastError {
    /// The caller stopped it.
    Stopped,
    /// A pattern's automaton gave up.
    Failed,
}

/// Added tokens, found as in Hugging Face's library: leftmost, then longest.
#[derive(Debug)]
struct AddedTokens {
    contents: AhoCorasick,
    ids: Vec<u32>,
}

/// Caches and buffers of one thread.
#[derive(Debug)]
struct Workspace {
    splits: Vec<SplitCache>,
    words: WordWorkspace,
}

#[derive(Debug)]
struct WordWorkspace {
    cache: WordCache,
    buffers: MergeBuffers,
    /// Words until the next look at the stop flag.
    until_stop: u32,
}

impl FastEncoder {
    /// Prepares a tokenizer: the text of its `tokenizer.json`, and all added tokens by id.
    ///
    /// # Errors
    /// What is not supported.
    pub(crate) fn new(json: &str, added: &[(u32, AddedToken)]) -> Result<Self, String> {
        check_added(added)?;
        let Definition { nfc, splits, merges } = Definition::read(json)?;
        let of = |normalized: bool| {
            let chosen = added.iter().filter(|(_, token)| token.normalized == normalized);
            let content = |content: &str| match normalized && nfc {
                true => normal(content).into_owned(),
                false => content.to_owned(),
            };
            AddedTokens::new(chosen.map(|(id, token)| (content(&token.content), *id)).unzip())
        };
        Ok(Self {
            not_normalized: of(false)?,
            normalized: of(true)?,
            nfc,
            splits,
            merges,
            idle: Mutex::default(),
        })
    }

    /// Appends the tokens of a text. Ends with an error soon after `stopped` is set.
    pub(crate) fn encode(
        &self,
        text: &str,
        stopped: &AtomicBool,
        out: &mut Vec<u32>,
    ) -> Result<(), FastError> {
        #[cfg(test)]
        assert!(!text.contains(PANIC), "as the test asks for");
        if stopped.load(Relaxed) {
            return Err(FastError::Stopped);
        }
        let kept = self.idle.lock().pop();
        let mut workspace = kept.unwrap_or_else(|| self.workspace());
        let done = at_tokens(self.not_normalized.as_ref(), text, out, &mut |text, out| {
            let text = if self.nfc { normal(text) } else { Cow::Borrowed(text) };
            at_tokens(self.normalized.as_ref(), &text, out, &mut |text, out| {
                let Workspace { splits, words } = &mut workspace;
                self.words(&self.splits, splits, text, words, stopped, out)
            })
        });
        let mut idle = self.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push(workspace);
        }
        done
    }

    fn workspace(&self) -> Workspace {
        let words = WordWorkspace {
            cache: WordCache::new(),
            buffers: MergeBuffers::default(),
            until_stop: STOP_INTERVAL,
        };
        Workspace { splits: self.splits.iter().map(Splitter::cache).collect(), words }
    }

    /// Splits a text by each rule in turn, and appends the tokens of the words.
    fn words(
        &self,
        rules: &[Splitter],
        caches: &mut [SplitCache],
        text: &str,
        words: &mut WordWorkspace,
        stopped: &AtomicBool,
        out: &mut Vec<u32>,
    ) -> Result<(), FastError> {
        let (Some((rule, rules)), Some((cache, caches))) = (rules.split_first(), caches.split_first_mut())
        else {
            return self.word(text, words, stopped, out);
        };
        let mut outcome = Ok(());
        let each = |part| {
            outcome = self.words(rules, caches, part, words, stopped, out);
            outcome.is_ok()
        };
        rule.split(text, cache, each).ok_or(FastError::Failed)?;
        outcome
    }

    fn word(
        &self,
        word: &str,
        workspace: &mut WordWorkspace,
        stopped: &AtomicBool,
        out: &mut Vec<u32>,
    ) -> Result<(), FastError> {
        workspace.until_stop -= 1;
        if workspace.until_stop == 0 {
            workspace.until_stop = STOP_INTERVAL;
            if stopped.load(Relaxed) {
                return Err(FastError::Stopped);
            }
        }
        let key = WordKey::of(word.as_bytes());
        if let Some(known) = key.as_ref().and_then(|key| workspace.cache.get(key)) {
            out.extend_from_slice(known);
            return Ok(());
        }
        let start = out.len();
        if !self.merges.append(word.as_bytes(), &mut workspace.buffers, stopped, out) {
            return Err(FastError::Stopped);
        }
        if let (Some(key), Some(tokens)) = (key, out.get(start..)) {
            workspace.cache.put(&key, tokens);
        }
        Ok(())
    }
}

impl AddedTokens {
    /// Returns `None` without tokens.
    fn new((contents, ids): (Vec<String>, Vec<u32>)) -> Result<Option<Self>, String> {
        if contents.is_empty() {
            return Ok(None);
        }
        let build = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents);
        Ok(Some(Self { contents: build.map_err(|error| format!("added tokens: {error}"))?, ids }))
    }
}

/// Appends the added tokens of a text, and calls `between` for the text between them.
fn at_tokens(
    tokens: Option<&AddedTokens>,
    text: &str,
    out: &mut Vec<u32>,
    between: &mut impl FnMut(&str, &mut Vec<u32>) -> Result<(), FastError>,
) -> Result<(), FastError> {
    let mut gap = 0;
    if let Some(tokens) = tokens {
        for found in tokens.contents.find_iter(text) {
            if found.start() > gap {
                between(text.get(gap..found.start()).ok_or(FastError::Failed)?, out)?;
            }
            out.extend(tokens.ids.get(found.pattern().as_usize()));
            gap = found.end();
        }
    }
    match text.get(gap..) {
        Some("") => Ok(()),
        Some(rest) => between(rest, out),
        None => Err(FastError::Failed),
    }
}

/// Returns a text in normalization form C, by the tables that Hugging Face's library uses.
fn normal(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.nfc().map(|(char, _)| char).collect())
}
