//! Block hashes: identifiers of prompt prefixes that every program computes alike.
//!
//! A *local* hash identifies the tokens of one full block. A *sequence* hash chains the local hashes up to a
//! block, and so identifies the block and everything before it.

use xxhash_rust::{
    const_xxh3::const_custom_default_secret,
    xxh3::{Xxh3, xxh3_64, xxh3_64_with_secret, xxh3_64_with_seed},
};

use crate::id::BlockHash;

/// Seed of every block hash.
const SEED: u64 = 1337;

/// Inputs besides the tokens that determine the KV values of a block.
#[derive(Clone, Copy, Debug, Default)]
pub struct Salt<'a> {
    /// Name of the LoRA adapter.
    pub lora: Option<&'a str>,
    /// The request's cache salt.
    pub cache: Option<&'a str>,
}

impl Salt<'_> {
    /// Returns whether it names an adapter.
    pub(crate) fn has_adapter(&self) -> bool {
        self.lora.is_some_and(|name| !name.is_empty())
    }

    /// Returns the seed of local hashes: 1337, plus `xxh3(lora, seed 0)` and `xxh3(cache salt, seed 1)` if
    /// present, wrapping. An empty string counts as absent.
    pub(crate) fn seed(&self) -> u64 {
        let given = |text: &&str| !text.is_empty();
        let lora = self.lora.filter(given).map_or(0, |lora| xxh3_64(lora.as_bytes()));
        let cache = self.cache.filter(given).map_or(0, |cache| xxh3_64_with_seed(cache.as_bytes(), 1));
        SEED.wrapping_add(lora).wrapping_add(cache)
    }
}

/// Returns the sequence hashes of the full blocks of `tokens`. A block is hashed as little-endian u32s.
#[must_use]
pub fn block_hashes(tokens: &[u32], block_size: usize, salt: &Salt<'_>) -> Vec<BlockHash> {
    multimodal_block_hashes(tokens, block_size, salt, &[])
}

/// Like [`block_hashes`], with the hashes of the multimodal objects in each block: sorted, and appended to
/// the block's bytes as little-endian u64s.
#[must_use]
pub(crate) fn multimodal_block_hashes(
    tokens: &[u32],
    block_size: usize,
    salt: &Salt<'_>,
    objects: &[Vec<u64>],
) -> Vec<BlockHash> {
    let local = LocalHasher::new(salt.seed(), block_size);
    let mut chain = Chain::default();
    let mut bytes = Vec::new();
    let mut sorted = Vec::new();
    let blocks = tokens.chunks_exact(block_size.max(1)).enumerate();
    blocks
        .map(|(place, block)| {
            let Some(objects) = objects.get(place).filter(|objects| !objects.is_empty()) else {
                return chain.next(local.tokens(block, &mut bytes));
            };
            fill(&mut bytes, block);
            sorted.clone_from(objects);
            sorted.sort_unstable();
            bytes.extend(sorted.iter().flat_map(|object| object.to_le_bytes()));
            chain.next(local.bytes(&bytes))
        })
        .collect()
}

/// Returns the sequence hashes of the pieces of a prompt whose bytes are those of `parts`. A piece reaches
/// from the end of the previous one to its own; an incomplete last piece has no hash.
#[must_use]
pub(crate) fn byte_piece_hashes<'a>(
    mut parts: impl Iterator<Item = &'a [u8]> + Clone,
    ends: impl Iterator<Item = usize>,
    salt: &Salt<'_>,
) -> Vec<BlockHash> {
    let total: usize = parts.clone().map(<[u8]>::len).sum();
    // No piece is longer than the prompt.
    let local = LocalHasher::new(salt.seed(), total / size_of::<u32>());
    let mut chain = Chain::default();
    let (mut from, mut part): (usize, &[u8]) = (0, &[]);
    ends.take_while(|end| *end <= total)
        .map_while(|end| {
            let length = end - from;
            from = end;
            while part.is_empty() {
                part = parts.next()?;
            }
            let hash = match part.split_at_checked(length) {
                Some((piece, rest)) => {
                    part = rest;
                    local.bytes(piece)
                }
                None => local.bytes_of_parts(length, &mut part, &mut parts)?,
            };
            Some(chain.next(hash))
        })
        .collect()
}

/// Appends to `out` the sequence hashes of the full blocks of `tokens`, which follow a block with the
/// sequence hash `parent`.
pub(crate) fn extend(
    parent: Option<BlockHash>,
    tokens: &[u32],
    block_size: usize,
    seed: u64,
    out: &mut Vec<BlockHash>,
) {
    out.append(&mut chain_in_place(parent, local_hashes(tokens, block_size, seed)));
}

/// Returns the local hashes of the full blocks of `tokens`.
pub(crate) fn local_hashes(tokens: &[u32], block_size: usize, seed: u64) -> Vec<u64> {
    let (local, mut bytes) = (LocalHasher::new(seed, block_size), Vec::new());
    tokens.chunks_exact(block_size.max(1)).map(|block| local.tokens(block, &mut bytes)).collect()
}

/// Turns the local hashes of blocks, which follow a block with the sequence hash `parent`, into sequence
/// hashes. Both have the same size, so the list is reused.
pub(crate) fn chain_in_place(parent: Option<BlockHash>, locals: Vec<u64>) -> Vec<BlockHash> {
    let mut chain = Chain(parent.map(|parent| parent.0));
    locals.into_iter().map(|local| chain.next(local)).collect()
}

/// Tokens of one block, and the hashes of the multimodal objects in it, sorted.
pub(crate) struct BlockContent<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) objects: &'a [u64],
}

/// Returns the sequence hash of a block that follows a block with the sequence hash `parent`.
pub(crate) fn extend_block(parent: Option<BlockHash>, block: &BlockContent<'_>, seed: u64) -> BlockHash {
    let mut bytes = Vec::new();
    fill(&mut bytes, block.tokens);
    bytes.extend(block.objects.iter().flat_map(|object| object.to_le_bytes()));
    Chain(parent.map(|parent| parent.0)).next(xxh3_64_with_seed(&bytes, seed))
}

/// Computes local hashes. Derives the secret that xxh3 uses for long inputs once, not for every block.
#[derive(Debug)]
pub(crate) struct LocalHasher {
    seed: u64,
    /// None for blocks that are too short.
    secret: Option<[u8; 192]>,
}

impl LocalHasher {
    /// Longest input in bytes for which xxh3 uses the seed itself.
    const SHORT: usize = 240;

    pub(crate) fn new(seed: u64, block_size: usize) -> Self {
        let long = block_size.saturating_mul(size_of::<u32>()) > Self::SHORT;
        Self { seed, secret: long.then(|| const_custom_default_secret(seed)) }
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the local hash of a block without objects. On little-endian machines it hashes the tokens in
    /// place.
    pub(crate) fn tokens(&self, block: &[u32], bytes: &mut Vec<u8>) -> u64 {
        if cfg!(target_endian = "little") {
            return self.bytes(bytemuck::cast_slice(block));
        }
        fill(bytes, block);
        self.bytes(bytes)
    }

    fn bytes(&self, bytes: &[u8]) -> u64 {
        match self.secret.as_ref().filter(|_| bytes.len() > Self::SHORT) {
            Some(secret) => xxh3_64_with_secret(bytes, secret),
            None => xxh3_64_with_seed(bytes, self.seed),
        }
    }

    /// Returns the local hash of a block of `length` bytes, which begins with `part` and goes on in `parts`.
    /// The rest of the last part that it needs is left in `part`.
    fn bytes_of_parts<'a>(
        &self,
        length: usize,
        part: &mut &'a [u8],
        parts: &mut impl Iterator<Item = &'a [u8]>,
    ) -> Option<u64> {
        let mut hasher = Xxh3::with_seed(self.seed);
        let mut missing = length;
        loop {
            let (piece, rest) = part.split_at(missing.min(part.len()));
            hasher.update(piece);
            missing -= piece.len();
            *part = rest;
            if missing == 0 {
                return Some(hasher.digest());
            }
            *part = parts.next()?;
        }
    }
}

/// Fills `bytes` with the tokens of a block as little-endian u32s.
fn fill(bytes: &mut Vec<u8>, block: &[u32]) {
    bytes.resize(block.len() * 4, 0);
    for (four, token) in bytes.chunks_exact_mut(4).zip(block) {
        four.copy_from_slice(&token.to_le_bytes());
    }
}

/// Chains local hashes: `s0 = local0`, `si = xxh3(LE(s[i-1]) || LE(local_i), seed 1337)`.
#[derive(Debug, Default)]
pub(crate) struct Chain(Option<u64>);

impl Chain {
    /// Continues after a block with this sequence hash.
    pub(crate) fn behind(hash: BlockHash) -> Self {
        Self(Some(hash.0))
    }

    pub(crate) fn next(&mut self, local: u64) -> BlockHash {
        let sequence = match self.0 {
            None => local,
            Some(parent) => {
                let mut pair = [0; 16];
                let (low, high) = pair.split_at_mut(8);
                low.copy_from_slice(&parent.to_le_bytes());
                high.copy_from_slice(&local.to_le_bytes());
                xxh3_64_with_seed(&pair, SEED)
            }
        };
        self.0 = Some(sequence);
        BlockHash(sequence)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn h1_hashes_equal_those_of_an_independent_implementation() {
        // Computed with Python's `xxhash` 3: xxh3_64_intdigest(struct.pack("<4I", …), seed=1337) and the
        // chain.
        let tokens: Vec<u32> = (1..=9).collect();
        let plain = block_hashes(&tokens, 4, &Salt::default());
        // H1.1, H1.6
        assert_eq!(plain, PLAIN.map(BlockHash));
        let salted = block_hashes(&tokens, 4, &Salt { lora: Some("adapter"), cache: Some("tenant-7") });
        // H1.3
        assert_eq!(salted, SALTED.map(BlockHash));
    }

    const PLAIN: [u64; 2] = [0xcb38_e4d7_fb2d_ca5c, 0x44a2_b237_9d6d_3c3d];
    const SALTED: [u64; 2] = [0x8937_aeb7_b940_9991, 0xf4d3_59dd_771f_b26f];

    #[test]
    fn h5_a_piece_of_bytes_of_any_length_has_their_hash_with_the_seed() {
        let salt = Salt { lora: Some("adapter"), cache: None };
        for length in [1, 64, 239, 240, 241, 243, 244, 512, 2_048] {
            let bytes: Vec<u8> = (0..length).map(|place| (place % 251) as u8).collect();
            let hashes = byte_piece_hashes(std::iter::once(&*bytes), [bytes.len()].into_iter(), &salt);
            assert_eq!(hashes, [BlockHash(xxh3_64_with_seed(&bytes, salt.seed()))], "{length} bytes");
        }
    }

    #[test]
    fn h1_an_empty_adapter_or_salt_counts_as_absent() {
        let tokens: Vec<u32> = (1..=8).collect();
        let empty = Salt { lora: Some(""), cache: Some("") };
        // H1.4
        assert_eq!(block_hashes(&tokens, 4, &empty), block_hashes(&tokens, 4, &Salt::default()));
    }

    #[test]
    fn h1_multimodal_objects_change_their_block_s_hash_in_any_order() {
        let tokens: Vec<u32> = (1..=8).collect();
        let of = |objects: &[Vec<u64>]| multimodal_block_hashes(&tokens, 4, &Salt::default(), objects);
        // H1.5
        assert_eq!(of(&[vec![], vec![9, 2]]), of(&[vec![], vec![2, 9]]));
        assert_eq!(of(&[vec![], vec![9]])[0], of(&[])[0]);
        assert_ne!(of(&[vec![], vec![9]])[1], of(&[])[1]);
    }

    #[test]
    fn h1_only_full_blocks_have_hashes() {
        // H1.2
        assert!(block_hashes(&[1, 2, 3], 4, &Salt::default()).is_empty());
        assert_eq!(block_hashes(&[1; 11], 4, &Salt::default()).len(), 2);
    }

    #[test]
    fn h1_blocks_of_any_length_have_the_hash_of_their_bytes_with_the_seed() {
        for tokens in 1..200_u32 {
            let block: Vec<u32> = (0..tokens).map(|token| token * 77_777).collect();
            let bytes: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
            let salt = Salt { lora: Some("adapter"), cache: None };
            let expected = BlockHash(xxh3_64_with_seed(&bytes, salt.seed()));
            // H1.1, H1.3
            assert_eq!(block_hashes(&block, tokens as usize, &salt), [expected], "{tokens} tokens");
        }
    }

    proptest! {
        #[test]
        fn h1_a_shared_prefix_shares_hashes_up_to_the_first_difference(
            tokens in proptest::collection::vec(any::<u32>(), 64),
            at in 0_usize..64,
        ) {
            let mut other = tokens.clone();
            other[at] = other[at].wrapping_add(1);
            let a = block_hashes(&tokens, 8, &Salt::default());
            let b = block_hashes(&other, 8, &Salt::default());
            let same = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
            prop_assert_eq!(same, at / 8);
            prop_assert!(a.iter().zip(&b).skip(same).all(|(a, b)| a != b));
        }
    }
}
