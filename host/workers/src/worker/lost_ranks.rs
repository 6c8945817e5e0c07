//! Data-parallel ranks that an engine has lost. Its metrics keep them, and its bootstrap server may, too.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Worker;
use crate::id::DpRank;

/// A bit for each of the first 64 ranks.
#[derive(Debug, Default)]
pub(super) struct LostRanks(AtomicU64);

impl LostRanks {
    pub(super) fn has(&self, rank: DpRank) -> bool {
        self.0.load(Ordering::Acquire) & bit(rank) != 0
    }
}

impl Worker {
    /// Reports that the engine refused a rank. It is chosen only if no other one is left, until the facts are
    /// read again.
    pub fn note_lost_rank(&self, rank: DpRank) {
        let bit = bit(rank);
        if self.state.lost_ranks.0.fetch_or(bit, Ordering::AcqRel) & bit != bit {
            self.tell_ranks();
        }
    }

    pub(super) fn forget_lost_ranks(&self) {
        if self.state.lost_ranks.0.swap(0, Ordering::AcqRel) != 0 {
            self.tell_ranks();
        }
    }
}

fn bit(rank: DpRank) -> u64 {
    1_u64.checked_shl(rank.0).unwrap_or(0)
}
