//! Prefix of a prompt as routing sees it: a chain of hashes, each of which identifies everything up to its
//! position.
//!
//! Token prompts have a hash for every block. Prompts measured in bytes are approximate anyway and may be
//! very long, so their hashes are further apart the deeper they are. A match is exact up to 32 blocks,
//! short by at most 7 up to 256, and by at most 31 beyond. A 220 KB prompt costs 160 hashes instead of 3,400.

mod builder;

use std::{iter, sync::Arc};

pub use self::builder::PrefixBuilder;
use crate::{
    hash::{Salt, byte_piece_hashes, multimodal_block_hashes},
    id::BlockHash,
};

/// Depth in blocks up to which every block has a hash.
const EVERY: u32 = 32;
/// Depth up to which one block in eight has a hash. Beyond it, one in 32 has.
const EIGHTH: u32 = 256;

/// Hashes of a prompt's prefix. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prefix {
    hashes: Arc<[BlockHash]>,
    sparse: bool,
    of_adapter: bool,
}

impl Prefix {
    /// Computes one hash for every full block of tokens. `objects` are the hashes of each block's multimodal
    /// objects.
    #[must_use]
    pub fn of_tokens(tokens: &[u32], block_size: usize, salt: &Salt<'_>, objects: &[Vec<u64>]) -> Self {
        let prefix = Self::from(multimodal_block_hashes(tokens, block_size, salt, objects));
        Self { of_adapter: salt.has_adapter(), ..prefix }
    }

    /// Computes the hashes of a prompt given as bytes, with `block_bytes` per block.
    #[must_use]
    pub fn of_bytes(bytes: &[u8], block_bytes: usize, salt: &Salt<'_>) -> Self {
        Self::of_byte_parts(iter::once(bytes), block_bytes, salt)
    }

    /// Computes the hashes of a prompt whose bytes are those of `parts`, one after another.
    #[must_use]
    pub fn of_byte_parts<'a>(
        parts: impl Iterator<Item = &'a [u8]> + Clone,
        block_bytes: usize,
        salt: &Salt<'_>,
    ) -> Self {
        let ends = (1..).map(|mark| depth(mark) as usize * block_bytes.max(1));
        Self { hashes: byte_piece_hashes(parts, ends, salt).into(), sparse: true, of_adapter: false }
    }

    /// Returns a prefix of hashes that another program computed. `sparse`: as [`Prefix::of_bytes`] spaces
    /// them.
    #[must_use]
    pub fn of_hashes(hashes: Arc<[BlockHash]>, sparse: bool) -> Self {
        Self { hashes, sparse, of_adapter: false }
    }

    /// Returns whether these are hashes of bytes, as [`Prefix::of_bytes`] makes them: deep ones are further
    /// apart, and no engine's events report them.
    #[must_use]
    pub fn is_sparse(&self) -> bool {
        self.sparse
    }

    /// Returns whether these are hashes of tokens of a prompt for a LoRA adapter, as [`Prefix::of_tokens`]
    /// makes them. Some engines' events do not name the adapter of a block.
    #[must_use]
    pub fn is_of_adapter(&self) -> bool {
        self.of_adapter
    }

    /// Returns the hashes, each deeper than the one before.
    #[must_use]
    pub fn hashes(&self) -> &Arc<[BlockHash]> {
        &self.hashes
    }

    /// Returns the number of blocks that the first `marks` hashes cover.
    #[must_use]
    pub fn blocks(&self, marks: u32) -> u32 {
        if self.sparse { depth(marks) } else { marks }
    }

    /// Returns the number of blocks that all hashes cover.
    #[must_use]
    pub fn named_blocks(&self) -> u32 {
        self.blocks(u32::try_from(self.hashes.len()).unwrap_or(u32::MAX))
    }

    /// Returns each hash with the number of blocks between it and the one before.
    pub fn weighed(&self) -> impl Iterator<Item = (BlockHash, u32)> + '_ {
        let marks = (0_u32..).zip(self.hashes.iter());
        marks.map(|(mark, hash)| (*hash, self.blocks(mark + 1) - self.blocks(mark)))
    }
}

impl From<Vec<BlockHash>> for Prefix {
    fn from(hashes: Vec<BlockHash>) -> Self {
        Arc::<[BlockHash]>::from(hashes).into()
    }
}

impl From<Arc<[BlockHash]>> for Prefix {
    fn from(hashes: Arc<[BlockHash]>) -> Self {
        Self::of_hashes(hashes, false)
    }
}

/// Returns the depth in blocks of the `mark`-th sparse hash, counted from 1.
fn depth(mark: u32) -> u32 {
    let eighths = (EIGHTH - EVERY) / 8;
    if mark <= EVERY {
        mark
    } else if mark <= EVERY + eighths {
        EVERY + (mark - EVERY) * 8
    } else {
        EIGHTH.saturating_add((mark - EVERY - eighths).saturating_mul(32))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(bytes: &[u8]) -> Prefix {
        Prefix::of_bytes(bytes, 64, &Salt::default())
    }

    #[test]
    fn h5_the_hashes_of_a_long_prompt_are_further_apart_the_deeper_they_are() {
        let prefix = of(&vec![7; 220_000]);
        // H5.4
        assert_eq!(prefix.hashes().len(), 32 + 28 + 99);
        assert_eq!(prefix.named_blocks(), 256 + 99 * 32);
        assert_eq!(
            (prefix.blocks(0), prefix.blocks(32), prefix.blocks(33), prefix.blocks(61)),
            (0, 32, 40, 288)
        );
        let weights: u32 = prefix.weighed().map(|(_, weight)| weight).sum();
        assert_eq!(weights, prefix.named_blocks());
    }

    #[test]
    fn h5_a_token_prompt_has_a_hash_for_every_block() {
        let prefix = Prefix::of_tokens(&[1; 640], 16, &Salt::default(), &[]);
        assert_eq!((prefix.hashes().len(), prefix.named_blocks()), (40, 40));
    }

    proptest! {
        #[test]
        fn h5_a_prompt_in_parts_has_the_hashes_of_its_bytes(
            mut cuts in proptest::collection::vec(0_usize..20_000, 0..9),
            block_bytes in 1_usize..300,
        ) {
            let text: Vec<u8> = (0..20_000_u32).map(|place| (place % 251) as u8).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let parts = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]);
            let salt = Salt { lora: Some("adapter"), cache: None };
            prop_assert_eq!(
                Prefix::of_byte_parts(parts, block_bytes, &salt),
                Prefix::of_bytes(&text, block_bytes, &salt)
            );
        }

        #[test]
        fn h5_the_common_prefix_of_two_prompts_is_found_up_to_the_hash_before_it_ends(at in 0_usize..60_000) {
            let mut text: Vec<u8> = (0..60_000_u32).map(|place| (place % 251) as u8).collect();
            let whole = of(&text);
            text[at] ^= 0x80;
            let other = of(&text);
            let same = whole.hashes().iter().zip(other.hashes().iter()).take_while(|(a, b)| a == b).count();
            let (found, real) = (whole.blocks(same as u32), (at / 64) as u32);
            let slack = if real < EVERY { 0 } else if real < EIGHTH { 7 } else { 31 };
            // H5.5
            prop_assert!(found <= real && real - found <= slack, "{found} of {real}");
        }
    }
}
