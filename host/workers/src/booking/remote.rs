//! Load that other gateways book on one rank. It counts beside the load that is booked here, and never in it:
//! wrong figures of another gateway end with its bookings. Blocks with a hash are in `rank_blocks`.

use std::sync::{Arc, atomic::Ordering};

use prefix_index::Prefix;

use super::{RankLoad, journal::LoadValues};
use crate::{columns::RemoteLoad, invariant::Invariant};

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

impl RemoteFigures {
    pub(super) fn of(remote: &RemoteLoad) -> Self {
        Self {
            active_requests: remote.requests(),
            active_prefill_tokens: remote.prefill_tokens(),
            decode_blocks: remote.blocks(),
        }
    }
}

/// Replaces the values of one booking.
fn change(remote: &RemoteLoad, from: LoadValues, to: LoadValues) {
    // Wraps: additions and releases of different bookings interleave, and their sum is exact.
    let tokens = to.prefill_tokens.wrapping_sub(from.prefill_tokens);
    remote.add(tokens, to.unnamed_millis.wrapping_sub(from.unnamed_millis));
}

impl RemoteBooking {
    /// Books the load of another gateway's booking. `blocks`: blocks that count once however many of the
    /// other gateways' bookings have them.
    pub(crate) fn new(load: Arc<RankLoad>, blocks: Option<Prefix>, values: LoadValues) -> Self {
        let remote = load.position.remote_to_change();
        remote.requests.fetch_add(1, Ordering::Relaxed);
        change(remote, LoadValues::default(), values);
        if let Some(prefix) = &blocks {
            load.change_blocks(prefix, |blocks| blocks.add_remote(prefix));
        }
        load.position.count_change();
        Self { load, blocks, values }
    }

    /// Replaces the values.
    pub fn update(&mut self, values: LoadValues) {
        let before = std::mem::replace(&mut self.values, values);
        change(self.load.position.remote_to_change(), before, values);
        self.load.position.count_change();
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
        change(remote, self.values, LoadValues::default());
        let before = remote.requests.fetch_sub(1, Ordering::Relaxed);
        Invariant::RemoteRequests.check(before > 0);
        let left = before.saturating_sub(1);
        if let Some(prefix) = self.blocks.take() {
            match left {
                // Blocks that wrong hashes left behind end here.
                0 => self.load.forget_remote_blocks(),
                _ => self.load.change_blocks(&prefix, |blocks| blocks.release_remote(&prefix)),
            }
        }
        self.load.position.count_change();
    }
}
