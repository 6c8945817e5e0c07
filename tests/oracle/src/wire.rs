//! Encodes changes of a cache as vLLM does: msgpack, with events as maps (H6).

use serde::Serialize;

use crate::{engine::Change, mix::mix};

#[derive(Serialize)]
#[serde(tag = "type")]
enum Event<'a> {
    BlockStored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: usize,
        medium: &'a str,
        lora_name: Option<&'a str>,
        // The oracle reads the salt here, Pointsman reads it from the extra keys of the first block, as vLLM
        // sends it.
        cache_salt: Option<&'a str>,
        extra_keys: Vec<Option<Vec<&'a str>>>,
    },
    BlockRemoved {
        block_hashes: &'a [u64],
        medium: &'a str,
    },
    AllBlocksCleared {},
}

/// Returns the payload of a message: a batch of one event.
///
/// # Errors
/// The change cannot be encoded as msgpack.
pub fn encode(change: &Change, block_tokens: usize) -> anyhow::Result<Vec<u8>> {
    let event = match change {
        Change::Stored { tenant, parent, blocks } => {
            let first = parent.is_none();
            let extra = (0..blocks.len()).map(|place| {
                let salt = tenant.salt.filter(|_| first && place == 0);
                let keys: Vec<&str> = tenant.lora.into_iter().chain(salt).collect();
                (!keys.is_empty()).then_some(keys)
            });
            Event::BlockStored {
                block_hashes: blocks.iter().map(|(hash, _)| *hash).collect(),
                parent_block_hash: *parent,
                token_ids: blocks.iter().flat_map(|(_, id)| tokens(*id, block_tokens)).collect(),
                block_size: block_tokens,
                medium: "GPU",
                lora_name: tenant.lora,
                cache_salt: tenant.salt.filter(|_| first),
                extra_keys: extra.collect(),
            }
        }
        Change::Removed(hashes) => Event::BlockRemoved { block_hashes: hashes, medium: "GPU" },
        Change::Cleared => Event::AllBlocksCleared {},
    };
    Ok(rmp_serde::to_vec_named(&(0.0_f64, [event], Option::<u32>::None))?)
}

/// Returns the tokens that a block number stands for, from a vocabulary of 128 Ki.
pub fn tokens(id: u64, block_tokens: usize) -> impl Iterator<Item = u32> {
    (0..block_tokens as u64)
        .map(move |place| (mix(id.wrapping_mul(0x1_0001).wrapping_add(place)) % (1 << 17)) as u32)
}

/// Returns the tokens of a prompt.
#[must_use]
pub fn prompt(ids: &[u64], block_tokens: usize) -> Vec<u32> {
    ids.iter().flat_map(|id| tokens(*id, block_tokens)).collect()
}
