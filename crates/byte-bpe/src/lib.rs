#![doc = include_str!("../README.md")]

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
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use self::{
    definition::Definition,
    merge::{MergeBuffers, Merges},
    split::{SplitCache, Splitter},
    word_cache::{WordCache, WordKey},
};

pub use self::merge::text_of;

/// Number of workspaces that are kept while no thread encodes.
const MAX_IDLE: usize = 16;
/// Number of words between two looks at the stop flag.
const STOP_INTERVAL: u32 = 1_024;

/// Encodes texts of one byte-level BPE model.
#[derive(Debug)]
pub struct Encoder {
    /// Added tokens that are found in the text as it is.
    not_normalized: Option<AddedTokens>,
    /// Added tokens that are found in normalized text.
    normalized: Option<AddedTokens>,
    nfc: bool,
    splits: Vec<Splitter>,
    merges: Merges,
    idle: Mutex<Vec<Workspace>>,
}

/// A token beside the vocabulary of merges, such as `<|end|>`. It is found in the text before this is split.
#[derive(Clone, Copy, Debug)]
pub struct AddedToken<'a> {
    /// Id of the token.
    pub id: u32,
    /// Text of the token.
    pub content: &'a str,
    /// Whether it is looked for in normalized text.
    pub normalized: bool,
    /// Whether it has to be a word of its own. Not supported.
    pub single_word: bool,
    /// Whether it takes the white space before it. Not supported.
    pub lstrip: bool,
    /// Whether it takes the white space after it. Not supported.
    pub rstrip: bool,
}

/// Why a text could not be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The caller stopped it.
    #[error("stopped by the caller")]
    Stopped,
    /// A pattern's automaton gave up.
    #[error("the automaton of a pattern gave up")]
    Failed,
}

/// A part of a tokenizer that the encoder does not implement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsupported(pub(crate) String);

impl Unsupported {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
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

impl Encoder {
    /// Prepares a tokenizer: the text of its `tokenizer.json`, and all added tokens by id.
    ///
    /// # Errors
    /// The first part that is not supported.
    pub fn new(json: &str, added: &[AddedToken<'_>]) -> Result<Self, Unsupported> {
        added.iter().try_for_each(AddedToken::check)?;
        let Definition { nfc, splits, merges } = Definition::read(json)?;
        let of = |normalized: bool| {
            let chosen = added.iter().filter(|token| token.normalized == normalized);
            let content = |content: &str| match normalized && nfc {
                true => normal(content).into_owned(),
                false => content.to_owned(),
            };
            AddedTokens::new(chosen.map(|token| (content(token.content), token.id)).unzip())
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

    /// Appends the tokens of a text. Ends with an error soon after `stopped` is set; some tokens may be
    /// appended by then.
    ///
    /// # Errors
    /// [`EncodeError`].
    pub fn encode(&self, text: &str, stopped: &AtomicBool, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        if stopped.load(Relaxed) {
            return Err(EncodeError::Stopped);
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
    ) -> Result<(), EncodeError> {
        let (Some((rule, rules)), Some((cache, caches))) = (rules.split_first(), caches.split_first_mut())
        else {
            return self.word(text, words, stopped, out);
        };
        let mut outcome = Ok(());
        let each = |part| {
            outcome = self.words(rules, caches, part, words, stopped, out);
            outcome.is_ok()
        };
        rule.split(text, cache, each).ok_or(EncodeError::Failed)?;
        outcome
    }

    fn word(
        &self,
        word: &str,
        workspace: &mut WordWorkspace,
        stopped: &AtomicBool,
        out: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        workspace.until_stop -= 1;
        if workspace.until_stop == 0 {
            workspace.until_stop = STOP_INTERVAL;
            if stopped.load(Relaxed) {
                return Err(EncodeError::Stopped);
            }
        }
        let key = WordKey::of(word.as_bytes());
        if let Some(known) = key.as_ref().and_then(|key| workspace.cache.get(key)) {
            out.extend_from_slice(known);
            return Ok(());
        }
        let start = out.len();
        if !self.merges.append(word.as_bytes(), &mut workspace.buffers, stopped, out) {
            return Err(EncodeError::Stopped);
        }
        if let (Some(key), Some(tokens)) = (key, out.get(start..)) {
            workspace.cache.put(&key, tokens);
        }
        Ok(())
    }
}

impl AddedToken<'_> {
    fn check(&self) -> Result<(), Unsupported> {
        if self.single_word || self.lstrip || self.rstrip {
            let what = format!("added token `{}` with single_word, lstrip or rstrip", self.content);
            return Err(Unsupported(what));
        }
        Ok(())
    }
}

impl AddedTokens {
    /// Returns `None` without tokens.
    fn new((contents, ids): (Vec<String>, Vec<u32>)) -> Result<Option<Self>, Unsupported> {
        if contents.is_empty() {
            return Ok(None);
        }
        let build = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents);
        let contents = build.map_err(|error| Unsupported::new(format!("added tokens: {error}")))?;
        Ok(Some(Self { contents, ids }))
    }
}

/// Appends the added tokens of a text, and calls `between` for the text between them.
fn at_tokens(
    tokens: Option<&AddedTokens>,
    text: &str,
    out: &mut Vec<u32>,
    between: &mut impl FnMut(&str, &mut Vec<u32>) -> Result<(), EncodeError>,
) -> Result<(), EncodeError> {
    let mut gap = 0;
    if let Some(tokens) = tokens {
        for found in tokens.contents.find_iter(text) {
            if found.start() > gap {
                between(text.get(gap..found.start()).ok_or(EncodeError::Failed)?, out)?;
            }
            out.extend(tokens.ids.get(found.pattern().as_usize()));
            gap = found.end();
        }
    }
    match text.get(gap..) {
        Some("") => Ok(()),
        Some(rest) => between(rest, out),
        None => Err(EncodeError::Failed),
    }
}

/// Returns a text in normalization form C, by the tables that Hugging Face's library uses.
fn normal(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.nfc().map(|(char, _)| char).collect())
}
