//! Our hashes of the blocks of a store.

use crate::{
    events::{ExtraKey, Stored},
    hash::{BlockContent, Salt, extend, extend_block},
    id::BlockHash,
};

/// Appends our hashes of an event's blocks, which follow a block with the hash `chain`.
pub(super) fn hash_tokens(
    stored: &Stored,
    chain: Option<BlockHash>,
    seed: u64,
    block_size: usize,
    ours: &mut Vec<BlockHash>,
) {
    let mut chain = chain;
    let blocks = stored.token_ids.chunks_exact(stored.block_size.max(1) as usize);
    for (number, tokens) in blocks.enumerate().take(stored.hashes.len()) {
        let keys = stored.extra_keys.get(number).map_or(&[][..], Vec::as_slice);
        if keys.iter().any(|key| matches!(key, ExtraKey::Object { .. })) {
            extend_with_objects(chain, tokens, block_size, seed, keys, ours);
        } else {
            extend(chain, tokens, block_size, seed, ours);
        }
        chain = ours.last().copied();
    }
}

/// Hashes our blocks in a block of the engine with multimodal objects. An object begins at its offset; where
/// it ends is not known, so all blocks from there on have it.
fn extend_with_objects(
    chain: Option<BlockHash>,
    tokens: &[u32],
    block_size: usize,
    seed: u64,
    keys: &[ExtraKey],
    out: &mut Vec<BlockHash>,
) {
    let (mut chain, mut objects) = (chain, Vec::new());
    for (number, tokens) in tokens.chunks_exact(block_size.max(1)).enumerate() {
        let end = i64::try_from((number + 1) * block_size).unwrap_or(i64::MAX);
        objects.clear();
        objects.extend(keys.iter().filter(|key| key.offset() < end).filter_map(ExtraKey::object));
        objects.sort_unstable();
        let hash = extend_block(chain, &BlockContent { tokens, objects: &objects }, seed);
        out.push(hash);
        chain = Some(hash);
    }
}

/// Returns the seed of a prompt's local hashes, from what the engine mixed into the hash of its first block:
/// the LoRA adapter, and any other text, which is the request's cache salt.
pub(in super::super) fn seed_of(stored: &Stored) -> u64 {
    let lora = stored.lora.as_deref();
    let keys = stored.extra_keys.first().into_iter().flatten();
    let mut others = keys.filter_map(ExtraKey::text).filter(|text| Some(*text) != lora);
    let salt = others.next().map(|first| {
        let more: Vec<&str> = others.collect();
        // Several texts are not a salt of any request: their blocks match nothing.
        if more.is_empty() { first.to_owned() } else { format!("{first}\0{}", more.join("\0")) }
    });
    Salt { lora, cache: salt.as_deref() }.seed()
}
