//! Whether a parent of 0 means that a block has none.
//!
//! llm-d's tools write 0 for the first block of a prompt. Old versions of llm-d-inference-sim wrote it for
//! all blocks: taken for first ones, those would be found as the beginning of prompts that they do not begin.
//! So 0 means none only for an engine that also named other parents. It is a hash if a block has it.

use super::EngineCache;
use crate::events::{KvEvent, NO_PARENT};

/// Parents that the engine named.
#[derive(Debug, Default)]
pub(super) struct Parents {
    /// An event had another parent than 0.
    are_named: bool,
    /// A block with the hash 0 was stored.
    has_zero: bool,
}

impl Parents {
    /// Returns whether this hash, which no stored block has, says that a block has no parent.
    pub(super) fn is_none(&self, parent: u64) -> bool {
        parent == NO_PARENT && self.are_named && !self.has_zero
    }
}

impl EngineCache {
    /// Learns how the engine names parents from events that are going to be applied.
    pub(in super::super) fn learn_parents(&mut self, events: &[KvEvent]) {
        for event in events {
            let KvEvent::Stored(stored) = event else { continue };
            self.parents.are_named |= stored.parent.is_some_and(|parent| parent != NO_PARENT);
            self.parents.has_zero |= stored.hashes.contains(&NO_PARENT);
        }
    }
}
