//! Hashes the tokens of events before the writer gets them, on the thread that brings them. The writer
//! then only chains the hashes.

use std::sync::atomic::{AtomicBool, Ordering};

use super::engine_cache::seed_of;
use crate::{
    events::{Batch, ExtraKey, GroupKind, KvEvent, LocalHashes, Stored},
    hash::{Salt, local_hashes},
};

/// Adds the local hashes of all events whose blocks consist of whole ones of the index, and drops their
/// tokens.
///
/// The writer needs the tokens when the event does not contain the seed of the hashes. An engine names the
/// salt of a prompt with the first block only. It also needs them for blocks of other sizes. Once such an
/// event was seen, `keeps_tokens` is set and tokens are kept. Events of one source come in order, so it is
/// set in time.
pub(super) fn add(batch: &mut Batch, block_size: usize, keeps_tokens: &AtomicBool) {
    for event in &mut batch.events {
        let KvEvent::Stored(stored) = event else { continue };
        if stored.locals.is_some() || stored.token_ids.is_empty() {
            continue;
        }
        let needs_tokens = needs_tokens(stored);
        if !needs_tokens || !has_tokens_of_all_blocks(stored) {
            stored.lacks_tokens = needs_tokens;
            (stored.token_ids, stored.extra_keys) = (Vec::new(), Vec::new());
            continue;
        }
        let seed = seed_of(stored);
        let plain = is_plain(stored, block_size);
        if !plain || seed != Salt::default().seed() {
            keeps_tokens.store(true, Ordering::Relaxed);
        }
        if !plain {
            continue;
        }
        let size = stored.block_size as usize;
        let blocks = stored.hashes.len().min(stored.token_ids.len() / size);
        let tokens = stored.token_ids.get(..blocks * size).unwrap_or_default();
        stored.locals =
            Some(LocalHashes { seed, size: block_size, hashes: local_hashes(tokens, block_size, seed) });
        if !keeps_tokens.load(Ordering::Relaxed) {
            (stored.token_ids, stored.extra_keys) = (Vec::new(), Vec::new());
        }
    }
}

/// Returns whether the event may be of the group that the index follows.
fn needs_tokens(stored: &Stored) -> bool {
    match stored.kind {
        Some(kind) => kind == GroupKind::Full,
        None => stored.group.unwrap_or(0) == 0,
    }
}

/// Returns whether it is known which tokens each block has. vLLM names no hash of a block that it skips, but
/// sends its tokens all the same.
fn has_tokens_of_all_blocks(stored: &Stored) -> bool {
    stored.token_ids.len() == stored.hashes.len() * stored.block_size as usize
}

/// Returns whether the event's blocks consist of whole ones of the index, without objects.
fn is_plain(stored: &Stored, block_size: usize) -> bool {
    let objects = || stored.extra_keys.iter().flatten().any(|key| matches!(key, ExtraKey::Object { .. }));
    let size = stored.block_size as usize;
    size > 0 && size.is_multiple_of(block_size) && !objects()
}
