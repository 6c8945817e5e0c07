//! Blocks that move to another tier within one batch: vLLM lists the device's removals before the stores of
//! offloaded blocks, which come without tokens.

use std::collections::HashMap;

use crate::events::{KvEvent, Stored};

/// Takes out the stores without tokens of blocks that are removed from another tier earlier in the batch.
/// They have to be applied first: after the removal nothing tells which tokens the blocks have.
pub(super) fn take_moved(events: &mut [KvEvent]) -> Vec<KvEvent> {
    let is_offload = |event: &KvEvent| matches!(event, KvEvent::Stored(stored) if !stored.has_tokens());
    let (mut moved, mut removed) = (Vec::new(), HashMap::new());
    if !events.iter().any(is_offload) {
        return moved;
    }
    for event in events {
        match event {
            KvEvent::Removed { hashes, tier, .. } => {
                removed.extend(hashes.iter().map(|hash| (*hash, *tier)));
            }
            KvEvent::Stored(stored) if !stored.has_tokens() => {
                let tier = stored.tier;
                let is_moved = |hash: &mut u64| removed.get(hash).is_some_and(|from| *from != tier);
                let hashes: Vec<u64> = stored.hashes.extract_if(.., is_moved).collect();
                if !hashes.is_empty() {
                    let (group, block_size) = (stored.group, stored.block_size);
                    let store = Stored { hashes, tier, group, block_size, ..Stored::default() };
                    moved.push(KvEvent::Stored(store));
                }
            }
            _ => {}
        }
    }
    moved
}
