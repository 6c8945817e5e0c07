//! Changes of the prefix cache, for KV events.

use std::collections::HashMap;

use super::{BatchEngine, CacheChange, Job, Object};

/// A change of the prefix cache, for KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// A block was stored.
    Stored {
        /// Sequence hash of the block.
        hash: u64,
        /// Sequence hash of the previous block.
        parent: Option<u64>,
        /// Token ids of the block.
        tokens: Vec<u32>,
        /// Multimodal objects in the block: hash, and offset from the block's first token.
        objects: Vec<(u64, i64)>,
    },
    /// A block was evicted.
    Removed {
        /// Sequence hash of the block.
        hash: u64,
    },
}

/// Collects the changes of a cache, with the tokens of the blocks.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    /// Sequences whose blocks may change, by tag; `None` unless KV events are published.
    jobs: Option<HashMap<u64, Job>>,
    events: Vec<CacheEvent>,
}

impl EventLog {
    pub(super) fn enable(&mut self) {
        self.jobs = Some(HashMap::new());
    }

    pub(super) fn add(&mut self, tag: u64, job: &Job) {
        if let Some(jobs) = &mut self.jobs {
            jobs.insert(tag, job.clone());
        }
    }

    pub(super) fn remove(&mut self, tag: u64) {
        if let Some(jobs) = &mut self.jobs {
            jobs.remove(&tag);
        }
    }

    /// Collects the changes of an engine's cache. Must run before one of its sequences is removed.
    pub(super) fn collect(&mut self, batch: &mut BatchEngine, block_size: u32) {
        let changes = batch.take_changes();
        let Some(jobs) = &self.jobs else { return };
        let size = block_size as usize;
        self.events.extend(changes.into_iter().filter_map(|change| match change {
            CacheChange::Removed { hash } => Some(CacheEvent::Removed { hash }),
            CacheChange::Stored { hash, parent, tag, position } => {
                let job = jobs.get(&tag)?;
                let start = position as usize * size;
                let tokens = job.tokens.get(start..start + size)?.to_vec();
                let objects = Object::in_block(&job.objects, start, size).collect();
                Some(CacheEvent::Stored { hash, parent, tokens, objects })
            }
        }));
    }

    pub(super) fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }
}
