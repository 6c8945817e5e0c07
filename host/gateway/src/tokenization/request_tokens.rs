//! Tokens of a request, and the hashes of their blocks. The hashes of segments that occurred before are kept,
//! so that the next turn of a conversation hashes its new blocks only.

use std::sync::Arc;

use pointsman_tokens::PromptTokens;
use pointsman_workers::BlockHash;
use prefix_index::{Prefix, PrefixBuilder, Salt};
use quick_cache::{Weighter, sync::Cache};

/// Typical bytes of an entry: a segment of 400 tokens has 25 blocks.
const TYPICAL_ENTRY: usize = 320;
/// Bytes of an entry beside its hashes.
const OVERHEAD: usize = 128;

/// Tokens of a request.
#[derive(Clone, Debug)]
pub(crate) struct RequestTokens {
    tokens: PromptTokens,
    /// `None` when the tokens are an engine's.
    hashes: Option<Arc<SegmentHashes>>,
}

/// Block hashes of the segments of one tokenizer.
#[derive(Debug)]
pub(super) struct SegmentHashes {
    hashes: Cache<Key, Arc<[BlockHash]>, Bytes>,
}

/// A segment, which identifies the tokens up to its end, the seed of the hashes, and the size of a block.
type Key = (u128, u64, usize);

/// Weighs an entry by its bytes.
#[derive(Clone, Debug)]
struct Bytes;

impl Weighter<Key, Arc<[BlockHash]>> for Bytes {
    fn weight(&self, _: &Key, hashes: &Arc<[BlockHash]>) -> u64 {
        (size_of_val::<[BlockHash]>(hashes) + OVERHEAD) as u64
    }
}

impl RequestTokens {
    pub(super) fn new(tokens: PromptTokens, hashes: Option<Arc<SegmentHashes>>) -> Self {
        Self { tokens, hashes }
    }

    /// Returns the number of tokens.
    #[must_use]
    pub(crate) fn count(&self) -> usize {
        self.tokens.count()
    }

    /// Returns all tokens.
    #[must_use]
    pub(crate) fn to_vec(&self) -> Vec<u32> {
        self.tokens.to_vec()
    }

    /// Returns the hashes of the blocks. `objects` are the hashes of each block's multimodal objects.
    #[must_use]
    pub(crate) fn prefix(&self, block_size: usize, salt: &Salt<'_>, objects: &[Vec<u64>]) -> Prefix {
        if !objects.is_empty() {
            return Prefix::of_tokens(&self.tokens.to_vec(), block_size, salt, objects);
        }
        let mut builder = PrefixBuilder::new(self.count(), block_size, salt);
        let (seed, size) = builder.depends_on();
        for segment in self.tokens.segments() {
            let kept = segment.id().and_then(|id| Some(((id, seed, size), self.hashes.as_deref()?)));
            match kept.as_ref().and_then(|(key, kept)| kept.hashes.get(key)) {
                Some(hashes) => builder.push_known(segment.tokens(), &hashes),
                None => {
                    let hashes = builder.push(segment.tokens());
                    kept.iter().for_each(|(key, kept)| kept.hashes.insert(*key, hashes.into()));
                }
            }
        }
        builder.finish()
    }
}

impl SegmentHashes {
    /// Creates a cache of `budget` bytes.
    pub(super) fn new(budget: usize) -> Self {
        Self { hashes: Cache::with_weighter(budget / TYPICAL_ENTRY, budget as u64, Bytes) }
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::atomic::AtomicBool, time::UNIX_EPOCH};

    use pointsman_tokens::{ChatOptions, PromptForm, Tokenizer};

    use super::*;

    /// Returns the JSON of a conversation, and the ends of its messages.
    fn talk(turns: usize) -> (String, Vec<u32>) {
        let (mut json, mut ends) = ("[".to_owned(), Vec::new());
        for turn in 0..turns {
            let text: String = (0..70).map(|n| format!("{turn} {n} stories of trains, ")).collect();
            json.push_str(if turn > 0 { "," } else { "" });
            json.push_str(&format!(r#"{{"role":"user","content":"{text}"}}"#));
            ends.push(u32::try_from(json.len()).unwrap());
        }
        (json + "]", ends)
    }

    #[test]
    fn h1_turns_of_a_conversation_have_the_hashes_of_all_their_tokens() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tokens/fixtures/model");
        let tokenizer = Tokenizer::load(Path::new(folder)).unwrap();
        for budget in [0, 2_000, 1 << 20] {
            let hashes = Arc::new(SegmentHashes::new(budget));
            for turns in [4, 6, 8, 8, 5] {
                let (json, ends) = talk(turns);
                let key = tokenizer.prompt_key(PromptForm::Chat, &json, &ends, |_| None);
                let options = ChatOptions::new(UNIX_EPOCH);
                let tokens =
                    tokenizer.chat_until(&json, key.as_ref(), &options, &AtomicBool::new(false)).unwrap();
                assert!(tokens.segments().len() > 3);
                let tokens = RequestTokens::new(tokens, Some(hashes.clone()));
                for (cache, size) in [(None, 16), (Some("tenant"), 16), (None, 64), (None, 7)] {
                    let salt = Salt { lora: None, cache };
                    let whole = Prefix::of_tokens(&tokens.to_vec(), size, &salt, &[]);
                    // H1.1, H1.3
                    assert_eq!(tokens.prefix(size, &salt, &[]), whole);
                    let objects = [vec![7]];
                    assert_eq!(
                        tokens.prefix(size, &salt, &objects),
                        Prefix::of_tokens(&tokens.to_vec(), size, &salt, &objects)
                    );
                }
                assert!(hashes.hashes.weight() <= budget as u64);
            }
            assert_eq!(hashes.hashes.is_empty(), budget == 0);
        }
    }
}
