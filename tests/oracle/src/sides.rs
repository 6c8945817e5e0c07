//! Decoding and hashing by both sides, each with its own code.

use anyhow::Context as _;
use dynamo_kv_router::{
    LocalBlockHash, RouterEvent,
    protocols::{BlockHashOptions, WorkerWithDpRank, compute_block_hash_for_seq},
    zmq_wire::{ZmqEventNormalizer, decode_event_batch},
};
use prefix_index::{
    BlockHash, DpRank, Salt, WorkerId, block_hashes,
    events::{Batch, decode_batch},
};

use crate::engine::Tenant;

/// A worker's number and rank.
pub type Who = (u64, u32);

/// Returns our ids of a worker.
#[must_use]
pub fn ours(who: Who) -> (WorkerId, DpRank) {
    (WorkerId(who.0), DpRank(who.1))
}

/// Returns the oracle's ids of a worker.
#[must_use]
pub fn theirs(who: Who) -> WorkerWithDpRank {
    WorkerWithDpRank::new(who.0, who.1)
}

/// Decodes a payload with our code.
///
/// # Errors
/// The payload is malformed.
pub fn our_batch(payload: &[u8]) -> anyhow::Result<Batch> {
    Ok(decode_batch(payload)?)
}

/// Decodes a payload of one event with the oracle's code.
///
/// # Errors
/// The payload is malformed, or the oracle drops the event.
pub fn their_event(
    normalizer: &mut ZmqEventNormalizer,
    payload: &[u8],
    number: u64,
    who: Who,
) -> anyhow::Result<RouterEvent> {
    let batch = decode_event_batch(payload)?;
    let raw = batch.events.into_iter().next().context("a batch without an event")?;
    let placed = normalizer.normalize(raw, number, theirs(who)).context("the oracle drops the event")?;
    placed.into_router_event().context("the oracle makes no event of it")
}

/// Returns our hashes of a prompt's blocks.
#[must_use]
pub fn our_hashes(tenant: Tenant, tokens: &[u32], block_size: usize) -> Vec<BlockHash> {
    block_hashes(tokens, block_size, &Salt { lora: tenant.lora, cache: tenant.salt })
}

/// Returns the oracle's hashes of a prompt's blocks.
#[must_use]
pub fn their_hashes(tenant: Tenant, tokens: &[u32], block_size: u32) -> Vec<LocalBlockHash> {
    let options =
        BlockHashOptions { lora_name: tenant.lora, cache_namespace: tenant.salt, ..Default::default() };
    compute_block_hash_for_seq(tokens, block_size, options)
}
