//! Load of a worker that several gateways book.

use prefix_index::Prefix;

use super::Worker;
use crate::{
    booking::{LoadValues, RankLoad, RemoteBooking},
    id::DpRank,
};

impl Worker {
    /// Returns the number of requests that are booked here on all ranks.
    #[must_use]
    pub fn own_requests(&self) -> u32 {
        self.ranks.iter().map(|rank| rank.own_requests()).sum()
    }

    /// Books the load of another gateway on a rank. `blocks`: blocks that count once however many of the
    /// other gateways' bookings have them. `None` if the worker has no such rank.
    #[must_use]
    pub fn book_remote(
        &self,
        rank: DpRank,
        blocks: Option<Prefix>,
        values: LoadValues,
    ) -> Option<RemoteBooking> {
        Some(RemoteBooking::new(self.ranks.get(rank.0 as usize)?.clone(), blocks, values))
    }

    /// Returns the load of a rank.
    #[must_use]
    pub fn load(&self, rank: DpRank) -> Option<&RankLoad> {
        Some(self.ranks.get(rank.0 as usize)?)
    }
}
