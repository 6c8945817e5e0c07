//! Byte-pair merges: the tokens of one word.
//!
//! Like Hugging Face's library, it merges the pair with the lowest rank first, and among equal ones the
//! leftmost.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    hash::{BuildHasherDefault, Hasher},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use crate::Unsupported;

/// Longest word, in bytes, whose lowest pair is found by looking at all pairs: beyond, a heap is faster.
const MAX_SCANNED: usize = 96;
/// Number of merges of a long word between two looks at the stop flag.
const STOP_INTERVAL: usize = 4_096;
/// A pair that cannot be merged.
const NONE: u64 = u64::MAX;

/// Merges of one vocabulary.
#[derive(Debug)]
pub(super) struct Merges {
    /// Tokens of single bytes.
    bytes: Vec<u32>,
    /// Maps two tokens to the rank of their merge (high half) and its token.
    pairs: HashMap<u64, u64, BuildHasherDefault<PairHasher>>,
    /// Pairs of single bytes, as the first merge of every word looks them up: rank and token, or `NONE`.
    byte_pairs: Vec<u64>,
    /// Words that are tokens without any merge, if the model has that rule (`ignore_merges`).
    words: Option<HashMap<Box<[u8]>, u32>>,
}

/// Buffers for short words.
#[derive(Debug, Default)]
pub(super) struct MergeBuffers {
    tokens: Vec<u32>,
    /// For each token, the merge with the token after it.
    merges: Vec<u64>,
}

/// Hasher of pairs. The keys come from the vocabulary, so a client cannot choose them.
#[derive(Debug, Default)]
pub(super) struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, key: u64) {
        let mixed = (self.0 ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// The token of a merge: its low half.
#[expect(clippy::cast_possible_truncation, reason = "the low half")]
fn token_of(merge: u64) -> u32 {
    merge as u32
}

impl Merges {
    /// Prepares a vocabulary.
    ///
    /// # Errors
    /// [`Unsupported`] names what the vocabulary lacks.
    pub(super) fn new(
        vocab: &HashMap<String, u32>,
        merges: &[(String, String)],
        ignore_merges: bool,
    ) -> Result<Self, Unsupported> {
        let chars = byte_chars();
        let id = |token: &str| {
            let known = vocab.get(token).copied();
            known.ok_or_else(|| Unsupported(format!("`{token}` is not in the vocabulary")))
        };
        let bytes = chars
            .iter()
            .map(|char| id(char.encode_utf8(&mut [0; 4])))
            .collect::<Result<Vec<u32>, Unsupported>>()?;
        let mut pairs = HashMap::with_capacity_and_hasher(merges.len(), BuildHasherDefault::default());
        for (rank, (left, right)) in merges.iter().enumerate() {
            let rank = u32::try_from(rank).map_err(|_| Unsupported::new("too many merges"))?;
            pairs.insert(pair(id(left)?, id(right)?), pair(rank, id(&format!("{left}{right}"))?));
        }
        let merge = |left: &u32, right: &u32| pairs.get(&pair(*left, *right)).copied().unwrap_or(NONE);
        let byte_pairs =
            bytes.iter().flat_map(|left| bytes.iter().map(move |right| merge(left, right))).collect();
        let words = ignore_merges.then(|| {
            let word = |token: &String| -> Option<Box<[u8]>> { token.chars().map(byte_of).collect() };
            vocab.iter().filter_map(|(token, id)| Some((word(token)?, *id))).collect()
        });
        Ok(Self { bytes, pairs, byte_pairs, words })
    }

    /// Appends the tokens of a word. Returns false if `stopped` was set before the end.
    pub(super) fn append(
        &self,
        word: &[u8],
        buffers: &mut MergeBuffers,
        stopped: &AtomicBool,
        out: &mut Vec<u32>,
    ) -> bool {
        if let Some(token) = self.words.as_ref().and_then(|words| words.get(word)) {
            out.push(*token);
        } else if word.len() <= MAX_SCANNED {
            self.append_short(word, buffers, out);
        } else {
            return LongWord::new(self, word).merge(self, stopped, out);
        }
        true
    }

    fn merge(&self, left: u32, right: u32) -> u64 {
        self.pairs.get(&pair(left, right)).copied().unwrap_or(NONE)
    }

    fn byte_token(&self, byte: u8) -> u32 {
        self.bytes.get(usize::from(byte)).copied().unwrap_or_default()
    }

    fn byte_merge(&self, left: u8, right: u8) -> u64 {
        self.byte_pairs.get(usize::from(left) << 8 | usize::from(right)).copied().unwrap_or(NONE)
    }

    fn append_short(&self, word: &[u8], buffers: &mut MergeBuffers, out: &mut Vec<u32>) {
        let MergeBuffers { tokens, merges } = buffers;
        tokens.clear();
        merges.clear();
        tokens.extend(word.iter().map(|byte| self.byte_token(*byte)));
        merges.extend(word.windows(2).map(|bytes| match bytes {
            [left, right] => self.byte_merge(*left, *right),
            _ => NONE,
        }));
        loop {
            let lowest = merges.iter().enumerate().min_by_key(|(_, merge)| **merge);
            let Some((at, merge)) =
                lowest.map(|(at, merge)| (at, *merge)).filter(|(_, merge)| *merge != NONE)
            else {
                break;
            };
            let token = token_of(merge);
            tokens.remove(at + 1);
            merges.remove(at);
            if let Some(merged) = tokens.get_mut(at) {
                *merged = token;
            }
            let neighbour = |at: Option<usize>| at.and_then(|at| tokens.get(at)).copied();
            if let (Some(left), Some(before)) = (neighbour(at.checked_sub(1)), at.checked_sub(1)) {
                let merge = self.merge(left, token);
                merges.get_mut(before).into_iter().for_each(|known| *known = merge);
            }
            if let Some(right) = neighbour(Some(at + 1)) {
                let merge = self.merge(token, right);
                merges.get_mut(at).into_iter().for_each(|known| *known = merge);
            }
        }
        out.extend_from_slice(tokens);
    }
}

/// A token of a long word, linked to its neighbours by position.
#[derive(Clone, Copy)]
struct Node {
    token: u32,
    previous: u32,
    next: u32,
    merged_away: bool,
}

/// No neighbour.
const END: u32 = u32::MAX;

struct LongWord {
    nodes: Vec<Node>,
    /// Lowest rank first, then the leftmost position: merge and position.
    queue: BinaryHeap<Reverse<(u64, u32)>>,
}

impl LongWord {
    fn new(merges: &Merges, word: &[u8]) -> Self {
        let node = |(at, byte): (u32, &u8)| Node {
            token: merges.byte_token(*byte),
            previous: at.checked_sub(1).unwrap_or(END),
            next: at + 1,
            merged_away: false,
        };
        let mut nodes: Vec<Node> = (0..END).zip(word).map(node).collect();
        if let Some(last) = nodes.last_mut() {
            last.next = END;
        }
        let first = |(at, bytes): (u32, &[u8])| match bytes {
            [left, right] => Some(Reverse((merges.byte_merge(*left, *right), at))),
            _ => None,
        };
        let queue = (0..END).zip(word.windows(2)).filter_map(first);
        let queue: Vec<_> = queue.filter(|Reverse((merge, _))| *merge != NONE).collect();
        Self { nodes, queue: queue.into() }
    }

    fn node(&self, at: u32) -> Option<Node> {
        (at != END).then(|| self.nodes.get(at as usize).copied()).flatten()
    }

    fn merge(mut self, merges: &Merges, stopped: &AtomicBool, out: &mut Vec<u32>) -> bool {
        let mut steps = 0_usize;
        while let Some(Reverse((merge, at))) = self.queue.pop() {
            steps += 1;
            if steps.is_multiple_of(STOP_INTERVAL) && stopped.load(Relaxed) {
                return false;
            }
            let Some(left) = self.node(at).filter(|node| !node.merged_away) else { continue };
            let Some(right) = self.node(left.next) else { continue };
            // One of the two was merged with another in the meantime.
            if merges.merge(left.token, right.token) != merge {
                continue;
            }
            let token = token_of(merge);
            self.change(left.next, |node| node.merged_away = true);
            self.change(right.next, |node| node.previous = at);
            self.change(at, |node| (node.token, node.next) = (token, right.next));
            if let Some(before) = self.node(left.previous) {
                self.offer(merges.merge(before.token, token), left.previous);
            }
            if let Some(behind) = self.node(right.next) {
                self.offer(merges.merge(token, behind.token), at);
            }
        }
        out.extend(self.nodes.iter().filter(|node| !node.merged_away).map(|node| node.token));
        true
    }

    fn change(&mut self, at: u32, change: impl FnOnce(&mut Node)) {
        if let Some(node) = self.nodes.get_mut(at as usize) {
            change(node);
        }
    }

    fn offer(&mut self, merge: u64, at: u32) {
        if merge != NONE {
            self.queue.push(Reverse((merge, at)));
        }
    }
}

/// Returns the text of a token of a byte-level vocabulary; `None` if it is not whole characters.
#[must_use]
pub fn text_of(token: &str) -> Option<String> {
    String::from_utf8(token.chars().map(byte_of).collect::<Option<_>>()?).ok()
}

/// Returns the character that stands for each byte in a byte-level vocabulary: printable bytes for
/// themselves, the others for characters from U+0100 on (`bytes_to_unicode` of GPT-2).
fn byte_chars() -> Vec<char> {
    let mut others = (0x100_u32..).filter_map(char::from_u32);
    (0..=255_u8)
        .map(|byte| if is_printable(byte) { char::from(byte) } else { others.next().unwrap_or_default() })
        .collect()
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// Returns the byte that a character stands for.
fn byte_of(char: char) -> Option<u8> {
    let other = match u32::from(char) {
        code @ 0..=0xff => return u8::try_from(code).ok().filter(|byte| is_printable(*byte)),
        code => u8::try_from(code - 0x100).ok()?,
    };
    match other {
        0..=32 => Some(other),
        33..=66 => Some(other - 33 + 0x7f),
        67 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        let bytes: Vec<Option<u8>> = byte_chars().into_iter().map(byte_of).collect();
        assert_eq!(bytes, (0..=255).map(Some).collect::<Vec<_>>());
        assert_eq!(
            (byte_of('Ġ'), byte_of('Ċ'), byte_of(' '), byte_of('中')),
            (Some(b' '), Some(b'\n'), None, None)
        );
    }
}
