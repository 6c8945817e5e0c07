//! Record of a decision whose worker may still refuse the prompt.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Candidate, PrefixIndex};
use crate::id::BlockHash;

/// A record that is withdrawn when this is dropped, unless it was kept. Until then it counts as any other, so
/// that requests of a burst that have a prefix in common go to one worker.
#[derive(Debug)]
#[must_use = "dropping it withdraws the record"]
pub struct ProvisionalRecord {
    index: Arc<PrefixIndex>,
    candidate: Candidate,
    blocks: Arc<[BlockHash]>,
    at: Instant,
    kept: bool,
}

impl ProvisionalRecord {
    pub(super) fn new(
        index: Arc<PrefixIndex>,
        candidate: Candidate,
        blocks: Arc<[BlockHash]>,
        at: Instant,
    ) -> Self {
        Self { index, candidate, blocks, at, kept: false }
    }

    /// Keeps the record for its TTL: the worker took the prompt.
    pub fn keep(&mut self) {
        self.kept = true;
    }

    /// Withdraws the record although it was kept: what the worker has of the prompt is of no use.
    pub fn withdraw(mut self) {
        self.kept = false;
    }
}

impl Drop for ProvisionalRecord {
    fn drop(&mut self) {
        if !self.kept && !self.blocks.is_empty() {
            self.index.withdraw(self.candidate, std::mem::take(&mut self.blocks), self.at);
        }
    }
}
