//! Packs the words of a decision for the ring: a run of equal words becomes one word and its length. In a
//! large fleet most workers have the same value in many columns (nothing cached, the same rank, the same
//! cost).
//!
//! Packed words are items, each with a head: the number of words, shifted left by one, plus 1 for a run. A
//! run has one word after its head, other items have all of theirs.

use crate::encoding::{WordReader, count};

/// Runs are found in steps of this many words, which the compiler compares at once.
const CHUNK: usize = 16;

/// Replaces `out` by the packed `words`.
pub(super) fn pack(words: &[u32], out: &mut Vec<u32>) {
    out.clear();
    let (chunks, _) = words.as_chunks::<CHUNK>();
    let mut chunks = (0..).step_by(CHUNK).zip(chunks).peekable();
    // Index of the first word that is not in `out` yet.
    let mut rest = 0;
    while let Some((begin, chunk)) = chunks.next() {
        let Some(value) = repeated(chunk) else { continue };
        let mut length = CHUNK;
        while chunks.next_if(|(_, next)| repeated(next) == Some(value)).is_some() {
            length += CHUNK;
        }
        write_words(words.get(rest..begin).unwrap_or_default(), out);
        out.extend([count(length) << 1 | 1, value]);
        rest = begin + length;
    }
    write_words(words.get(rest..).unwrap_or_default(), out);
}

/// Appends the words that were packed.
pub(super) fn unpack(packed: &[u32], out: &mut Vec<u32>) {
    let mut packed = WordReader(packed);
    while let Some(head) = packed.word() {
        let length = (head >> 1) as usize;
        if head & 1 == 1 {
            out.extend(packed.word().into_iter().flat_map(|value| std::iter::repeat_n(value, length)));
        } else {
            out.extend_from_slice(packed.words(length).unwrap_or_default());
        }
    }
}

/// Returns the word that fills the chunk.
fn repeated(chunk: &[u32; CHUNK]) -> Option<u32> {
    let [first, .., last] = *chunk;
    let same = first == last && chunk.iter().fold(0, |other, word| other | (word ^ first)) == 0;
    same.then_some(first)
}

fn write_words(words: &[u32], out: &mut Vec<u32>) {
    if !words.is_empty() {
        out.push(count(words.len()) << 1);
        out.extend_from_slice(words);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packed(words: &[u32]) -> Vec<u32> {
        let mut out = vec![7];
        pack(words, &mut out);
        out
    }

    #[test]
    fn a_run_takes_two_words_and_other_words_one_more_than_they_are() {
        assert!(packed(&[]).is_empty());
        assert_eq!(packed(&[5; 4_096]), [4_096 << 1 | 1, 5]);
        assert_eq!(packed(&[5, 6]), [2 << 1, 5, 6]);
        let words: Vec<u32> = std::iter::repeat_n(0, 40).chain([1, 2]).chain([3; 33]).collect();
        // Runs begin and end at multiples of 16.
        let expected = [32 << 1 | 1, 0, 16 << 1];
        assert_eq!(packed(&words)[..3], expected);
        assert_eq!(packed(&words).len(), 3 + 16 + 2 + 1 + 11);
    }

    proptest! {
        #[test]
        fn unpacking_returns_the_words(runs in proptest::collection::vec((0_u32..3, 0_usize..70), 0..40)) {
            let words: Vec<u32> =
                runs.iter().flat_map(|(value, length)| std::iter::repeat_n(*value, *length)).collect();
            let packed = packed(&words);
            prop_assert!(packed.len() <= words.len() + 1 + words.len() / CHUNK);
            let mut out = Vec::new();
            unpack(&packed, &mut out);
            prop_assert_eq!(out, words);
        }
    }
}
