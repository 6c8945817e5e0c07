//! Tokens of about four bytes. They are equal on every engine, so a prefill and decode pair generates the
//! same output as one engine.

use std::sync::Arc;

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Seed of the state of an empty text.
const EMPTY: u64 = 0x9e37_79b9_7f4a_7c15;
/// Size of the vocabulary, as in an 8B model.
const VOCABULARY: u64 = 128_000;
const BYTES_PER_TOKEN: usize = 4;
/// Placeholder token of an image. Every image has the same number of placeholders.
const IMAGE_TOKEN: u32 = 127_999;
const IMAGE_TOKENS: u32 = 40;

/// Generated words. Every word is one token of [`BYTES_PER_TOKEN`] bytes, so that an output has the same
/// token ids when it is part of the next prompt.
const WORDS: [&str; 32] = [
    " arc", " bay", " cab", " dam", " elm", " fog", " gap", " hut", " ice", " jar", " key", " log", " map",
    " net", " oak", " pin", " rib", " sea", " tie", " urn", " van", " way", " yew", " zip", " bed", " cog",
    " dip", " ash", " fen", " hub", " lap", " mud",
];

/// A part of a prompt.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// Text.
    Text(&'a str),
    /// An image, by its URL.
    Image(&'a str),
}

/// A multimodal object in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// Hash of its content.
    pub hash: u64,
    /// Position of its first token.
    pub offset: u32,
    /// Number of its tokens.
    pub len: u32,
}

impl Object {
    /// Returns the objects in a block, with their offsets from its first token.
    pub(super) fn in_block(all: &[Self], start: usize, size: usize) -> impl Iterator<Item = (u64, i64)> {
        let overlaps = move |object: &&Self| {
            let (from, to) = (object.offset as usize, (object.offset + object.len) as usize);
            from < start + size && to > start
        };
        let start = i64::try_from(start).unwrap_or(i64::MAX);
        all.iter().filter(overlaps).map(move |object| (object.hash, i64::from(object.offset) - start))
    }
}

/// Token ids of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    tokens: Arc<[u32]>,
    objects: Arc<[Object]>,
    fingerprint: u64,
}

impl Prompt {
    /// Tokenizes texts, each separately: the messages of a chat, or a single text.
    pub(crate) fn of_texts<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        Self::of_pieces(texts.into_iter().map(Piece::Text))
    }

    /// Tokenizes texts, each separately, and images, which become placeholders.
    pub(crate) fn of_pieces<'a>(pieces: impl IntoIterator<Item = Piece<'a>>) -> Self {
        let (mut tokens, mut objects) = (Vec::new(), Vec::new());
        for piece in pieces {
            match piece {
                Piece::Text(text) => tokens.extend(tokenize(text)),
                Piece::Image(url) => {
                    let offset = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
                    objects.push(Object { hash: xxh3_64(url.as_bytes()), offset, len: IMAGE_TOKENS });
                    tokens.extend((0..IMAGE_TOKENS).map(|_| IMAGE_TOKEN));
                }
            }
        }
        let start = objects.iter().fold(EMPTY, |state, object| mix(state, object.hash));
        Self { fingerprint: state_after(start, &tokens), tokens: tokens.into(), objects: objects.into() }
    }

    /// Creates a prompt from token ids.
    #[must_use]
    pub fn of_tokens(tokens: Vec<u32>) -> Self {
        Self { fingerprint: state_after(EMPTY, &tokens), tokens: tokens.into(), objects: Arc::default() }
    }

    /// Returns the multimodal objects, shared.
    #[must_use]
    pub fn objects(&self) -> Arc<[Object]> {
        self.objects.clone()
    }

    /// Returns the token ids.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn isl(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    /// Returns a hash of the whole prompt, which must be equal for both legs of a handoff.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Returns the sequence hashes of the full blocks.
    #[must_use]
    pub fn chain(&self, block_size: u32) -> Vec<u64> {
        chain(&self.tokens, &self.objects, block_size)
    }

    /// Returns the sequence hashes of the full blocks of this prompt with its answer.
    #[must_use]
    pub(crate) fn chain_with_answer(&self, block_size: u32, with_answer: &[u32]) -> Vec<u64> {
        chain(with_answer, &self.objects, block_size)
    }

    /// Returns the token ids of the prompt and the first `out` tokens of output number `choice`.
    #[must_use]
    pub(crate) fn with_answer(&self, choice: u32, out: u32) -> Vec<u32> {
        let answer = self.output(choice).map(|(_, token)| token).take(out as usize);
        self.tokens.iter().copied().chain(answer).collect()
    }

    /// Returns the texts and ids of the tokens of output number `choice`. Each token depends on all tokens
    /// before it, as with a real model at temperature 0. An answer therefore continues in the same way when
    /// its beginning is the end of another prompt. Other choices differ from the first token on.
    pub fn output(&self, choice: u32) -> Output {
        let state = self.fingerprint;
        Output { state: if choice == 0 { state } else { mix(state, u64::from(choice)) } }
    }
}

/// The tokens of an output, without end.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// State after all earlier tokens.
    state: u64,
}

impl Iterator for Output {
    type Item = (&'static str, u32);

    fn next(&mut self) -> Option<Self::Item> {
        // The last step of the state is a product, so its high bits depend on the whole state.
        let draw = usize::try_from(self.state >> 59).unwrap_or(0);
        let word = WORDS.get(draw).copied().unwrap_or(" arc");
        let token = token_of(word.as_bytes());
        self.state = state_after(self.state, &[token]);
        Some((word, token))
    }
}

/// Returns the state after these tokens.
fn state_after(state: u64, tokens: &[u32]) -> u64 {
    tokens.iter().fold(state, |state, token| mix(state, u64::from(*token)))
}

fn mix(state: u64, value: u64) -> u64 {
    (state ^ value).wrapping_add(EMPTY).rotate_left(29).wrapping_mul(0xff51_afd7_ed55_8ccd)
}

fn tokenize(text: &str) -> impl Iterator<Item = u32> {
    text.as_bytes().chunks(BYTES_PER_TOKEN).map(token_of)
}

fn token_of(bytes: &[u8]) -> u32 {
    u32::try_from(xxh3_64(bytes) % VOCABULARY).unwrap_or(0)
}

fn chain(tokens: &[u32], objects: &[Object], block_size: u32) -> Vec<u64> {
    let mut parent = 0;
    let mut bytes = Vec::new();
    let size = block_size.max(1) as usize;
    let blocks = tokens.chunks_exact(size).enumerate();
    blocks
        .map(|(number, block)| {
            bytes.clear();
            block.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
            for (hash, offset) in Object::in_block(objects, number * size, size) {
                bytes.extend_from_slice(&hash.to_le_bytes());
                bytes.extend_from_slice(&offset.to_le_bytes());
            }
            parent = xxh3_64_with_seed(&bytes, parent);
            parent
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn about_four_bytes_make_a_token() {
        for (text, tokens) in [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("abcdabcd", 2)] {
            assert_eq!(Prompt::of_texts([text]).isl(), tokens, "{text}");
        }
        let twice = Prompt::of_texts(["abcdabcd"]);
        assert_eq!(twice.tokens()[0], twice.tokens()[1]);
    }

    #[test]
    fn an_answer_depends_on_the_prompt_alone_and_returns_as_the_same_tokens() {
        let prompt = Prompt::of_texts(["tell me about points"]);
        let same = Prompt::of_tokens(prompt.tokens().to_vec());
        let answer = |prompt: &Prompt, choice| {
            prompt.output(choice).take(40).map(|(word, _)| word).collect::<String>()
        };
        assert_eq!(answer(&prompt, 0), answer(&same, 0));
        assert_ne!(answer(&prompt, 0), answer(&prompt, 1));
        assert_ne!(answer(&prompt, 0), answer(&Prompt::of_texts(["tell me about point"]), 0));
        let next = Prompt::of_texts(["tell me about points", &answer(&prompt, 0), "go on"]);
        assert_eq!(next.chain(4)[..11], prompt.chain_with_answer(4, &prompt.with_answer(0, 40))[..11]);
    }

    #[test]
    fn an_answer_goes_on_in_the_same_way_behind_its_own_beginning() {
        let whole: Vec<_> = Prompt::of_texts(["tell me about points"]).output(0).take(40).collect();
        for cut in [1, 17, 39] {
            let begun: String = whole[..cut].iter().map(|(word, _)| *word).collect();
            let rest = Prompt::of_texts(["tell me about points", &begun]);
            assert_eq!(rest.output(0).take(40 - cut).collect::<Vec<_>>(), whole[cut..], "as a message");
            let text = format!("tell me about points{begun}");
            assert_eq!(Prompt::of_texts([text.as_str()]), rest, "as one text, at a boundary of tokens");
        }
        let mut words: Vec<_> = Prompt::of_texts(["x"]).output(0).take(400).map(|(word, _)| word).collect();
        words.sort_unstable();
        words.dedup();
        assert!(words.len() >= 28, "{} words", words.len());
    }

    #[test]
    fn a_chain_covers_full_blocks_and_everything_before_them() {
        let (a, b) = (Prompt::of_tokens(vec![1, 2, 3, 4, 5]), Prompt::of_tokens(vec![9, 2, 3, 4, 5]));
        assert_eq!((a.chain(2).len(), a.chain(8).len()), (2, 0));
        assert_ne!(a.chain(2)[1], b.chain(2)[1], "same block, other beginning");
    }
}
