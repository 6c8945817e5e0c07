//! Computes the hashes of a token prompt part by part, where those of some parts are known.

use super::Prefix;
use crate::{
    hash::{Chain, LocalHasher, Salt},
    id::BlockHash,
};

/// Builds the prefix of a token prompt.
#[derive(Debug)]
pub struct PrefixBuilder {
    local: LocalHasher,
    block_size: usize,
    chain: Chain,
    /// Tokens after the last full block.
    open: Vec<u32>,
    hashes: Vec<BlockHash>,
    of_adapter: bool,
}

impl PrefixBuilder {
    /// Begins the prefix of a prompt of `tokens` tokens.
    #[must_use]
    pub fn new(tokens: usize, block_size: usize, salt: &Salt<'_>) -> Self {
        let block_size = block_size.max(1);
        Self {
            local: LocalHasher::new(salt.seed(), block_size),
            block_size,
            chain: Chain::default(),
            open: Vec::with_capacity(block_size.min(tokens)),
            hashes: Vec::with_capacity(tokens / block_size),
            of_adapter: salt.has_adapter(),
        }
    }

    /// Returns what the hashes depend on beside the tokens: a number for the salt, and the size of a block.
    #[must_use]
    pub fn depends_on(&self) -> (u64, usize) {
        (self.local.seed(), self.block_size)
    }

    /// Appends tokens. Returns the hashes of the blocks that end within them.
    pub fn push(&mut self, tokens: &[u32]) -> &[BlockHash] {
        let known = self.hashes.len();
        let mut bytes = Vec::new();
        let missing = (self.block_size - self.open.len()).min(tokens.len());
        let (head, rest) = if self.open.is_empty() { (&[][..], tokens) } else { tokens.split_at(missing) };
        self.open.extend_from_slice(head);
        if self.open.len() == self.block_size {
            self.hashes.push(self.chain.next(self.local.tokens(&self.open, &mut bytes)));
            self.open.clear();
        }
        let blocks = rest.chunks_exact(self.block_size);
        self.open.extend_from_slice(blocks.remainder());
        for block in blocks {
            self.hashes.push(self.chain.next(self.local.tokens(block, &mut bytes)));
        }
        self.hashes.get(known..).unwrap_or_default()
    }

    /// Appends tokens for which [`PrefixBuilder::push`] returned these hashes before, after the same tokens.
    pub fn push_known(&mut self, tokens: &[u32], hashes: &[BlockHash]) {
        let count = self.open.len() + tokens.len();
        if count / self.block_size != hashes.len() {
            self.push(tokens);
            return;
        }
        let Some(last) = hashes.last() else {
            self.open.extend_from_slice(tokens);
            return;
        };
        self.chain = Chain::behind(*last);
        self.hashes.extend_from_slice(hashes);
        self.open.clear();
        let open = tokens.len().saturating_sub(count % self.block_size);
        self.open.extend_from_slice(tokens.get(open..).unwrap_or_default());
    }

    /// Returns the prefix. Tokens after the last full block have no hash.
    #[must_use]
    pub fn finish(self) -> Prefix {
        Prefix { of_adapter: self.of_adapter, ..self.hashes.into() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn h1_parts_have_the_hashes_of_the_whole(
            tokens in proptest::collection::vec(any::<u32>(), 0..300),
            cuts in proptest::collection::vec(0_usize..300, 0..6),
            known in proptest::collection::vec(any::<bool>(), 7),
            block_size in prop_oneof![Just(1_usize), Just(4), Just(16), Just(70)],
        ) {
            let salt = Salt { lora: Some("adapter"), cache: None };
            let mut ends: Vec<usize> = cuts.into_iter().map(|cut| cut.min(tokens.len())).collect();
            ends.push(tokens.len());
            ends.sort_unstable();
            let mut start = 0;
            let parts: Vec<&[u32]> =
                ends.into_iter().map(|end| &tokens[std::mem::replace(&mut start, end)..end]).collect();
            let mut first = PrefixBuilder::new(tokens.len(), block_size, &salt);
            let hashes: Vec<Vec<BlockHash>> = parts.iter().map(|part| first.push(part).to_vec()).collect();
            let mut second = PrefixBuilder::new(tokens.len(), block_size, &salt);
            for ((part, hashes), known) in parts.iter().zip(&hashes).zip(known) {
                if known {
                    second.push_known(part, hashes);
                } else {
                    prop_assert_eq!(second.push(part), &hashes[..]);
                }
            }
            let whole = Prefix::of_tokens(&tokens, block_size, &salt, &[]);
            // H1.1, H1.2
            prop_assert_eq!(first.finish(), whole.clone());
            prop_assert_eq!(second.finish(), whole);
        }
    }
}
