//! Load that other gateways book on one rank. It counts beside the load that is booked here, and never in it.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use super::view::in_blocks;

/// Load of all other gateways on one rank.
#[derive(Debug, Default)]
pub(crate) struct RemoteLoad {
    pub(crate) requests: AtomicU32,
    prefill_tokens: AtomicU32,
    unnamed_millis: AtomicI64,
    /// Number of distinct blocks with a hash that are not booked here.
    named: AtomicU32,
}

impl RemoteLoad {
    pub(crate) fn requests(&self) -> u32 {
        self.requests.load(Ordering::Relaxed)
    }

    pub(crate) fn prefill_tokens(&self) -> u32 {
        self.prefill_tokens.load(Ordering::Relaxed)
    }

    /// Returns the number of distinct blocks with a hash that only other gateways book.
    pub(crate) fn named(&self) -> u32 {
        self.named.load(Ordering::Relaxed)
    }

    pub(crate) fn blocks(&self) -> u32 {
        let unnamed = in_blocks(self.unnamed_millis.load(Ordering::Relaxed));
        self.named().saturating_add(unnamed)
    }

    /// Sets the number of distinct blocks with a hash that only other gateways book.
    pub(crate) fn set_named(&self, blocks: u32) {
        self.named.store(blocks, Ordering::Relaxed);
    }

    /// Adds to the prompt tokens and the thousandths of blocks.
    pub(crate) fn add(&self, prefill_tokens: u32, unnamed_millis: i64) {
        self.prefill_tokens.fetch_add(prefill_tokens, Ordering::Relaxed);
        self.unnamed_millis.fetch_add(unnamed_millis, Ordering::Relaxed);
    }
}
