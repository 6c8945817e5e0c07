//! Load that other gateways book on one rank. It counts beside the load that is booked here, and never in it:
//! wrong figures of another gateway end with its bookings. Blocks with a hash are in `rank_blocks`.

use std::sync::{
    Arc,
    atomic::{AtomicI64, AtomicU32, Ordering},
};

use super::{RankLoad, in_blocks, journal::LoadValues};
use crate::prefix::Prefix;

/// Load of all other gateways on one rank.
#[derive(Debug, Default)]
pub(crate) struct RemoteLoad {
    requests: AtomicU32,
    prefill_tokens: AtomicU32,
    unnamed_millis: AtomicI64,
    /// Number of distinct blocks with a hash that are not booked here.
    named: AtomicU32,
}

/// Load of other gateways on one rank, for display.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RemoteFigures {
    /// Number of requests.
    pub active_requests: u32,
    /// Prompt tokens whose prefill has not completed.
    pub active_prefill_tokens: u32,
    /// Number of blocks that are not booked here, too.
    pub decode_blocks: u32,
}

/// A booking of another gateway. Dropping it releases its load.
#[derive(Debug)]
pub struct RemoteBooking {
    load: Arc<RankLoad>,
    /// Blocks with a hash.
    blocks: Option<Prefix>,
    values: LoadValues,
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
    pub(super) fn set_named(&self, blocks: u32) {
        self.named.store(blocks, Ordering::Relaxed);
    }

    pub(super) fn figures(&self) -> RemoteFigures {
        RemoteFigures {
            active_requests: self.requests(),
            active_prefill_tokens: self.prefill_tokens(),
            decode_blocks: self.blocks(),
        }
    }

    fn change(&self, from: LoadValues, to: LoadValues) {
        // Wraps: additions and releases of different bookings interleave, and their sum is exact.
        self.prefill_tokens.fetch_add(to.prefill_tokens.wrapping_sub(from.prefill_tokens), Ordering::Relaxed);
        self.unnamed_millis.fetch_add(to.unnamed_millis.wrapping_sub(from.unnamed_millis), Ordering::Relaxed);
    }
}

impl RemoteBooking {
    /// Books the load of another gateway's booking. `blocks`: blocks that count once however many of the
    /// other gateways' bookings have them.
    pub(crate) fn new(load: Arc<RankLoad>, blocks: Option<Prefix>, values: LoadValues) -> Self {
        let remote = load.position.remote_to_change();
        remote.requests.fetch_add(1, Ordering::Relaxed);
        remote.change(LoadValues::default(), values);
        if let Some(prefix) = &blocks {
            load.change_blocks(prefix, |blocks| blocks.add_remote(prefix));
        }
        Self { load, blocks, values }
    }

    /// Replaces the values.
    pub fn update(&mut self, values: LoadValues) {
        let before = std::mem::replace(&mut self.values, values);
        self.load.position.remote_to_change().change(before, values);
    }

    /// Returns whether the booking counts on this rank.
    #[must_use]
    pub fn is_on(&self, load: &RankLoad) -> bool {
        std::ptr::eq(&*self.load, load)
    }
}

impl Drop for RemoteBooking {
    fn drop(&mut self) {
        let remote = self.load.position.remote_to_change();
        remote.change(self.values, LoadValues::default());
        let left = remote.requests.fetch_sub(1, Ordering::Relaxed).saturating_sub(1);
        if let Some(prefix) = self.blocks.take() {
            match left {
                // What wrong hashes left behind ends here.
                0 => self.load.forget_remote_blocks(),
                _ => self.load.change_blocks(&prefix, |blocks| blocks.release_remote(&prefix)),
            }
        }
    }
}
