//! Places that requests took from others and left without being served.

use std::collections::{HashMap, VecDeque, hash_map::Entry};

use super::{MAX_DISPLACED, Ranks};

/// Largest number of places that are kept for each request that may lose its own. One tenant stays below it,
/// so that none makes the queue forget what it took.
const MAX_LEFT: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Taken {
    /// Places that waiting requests took, by the tickets of these requests.
    holders: HashMap<u64, Vec<Taking>>,
    /// Those that were left, oldest first, and the tenants that took them.
    left: VecDeque<(u64, Taking)>,
    /// Size of those of each tenant.
    sizes: HashMap<u64, u64>,
}

/// A place that was taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taking {
    /// Ticket of the request that had it.
    pub(super) ticket: u64,
    pub(super) size: u64,
}

impl Taken {
    pub(super) fn hold(&mut self, ticket: u64, places: Vec<Taking>) {
        self.holders.insert(ticket, places);
    }

    /// Forgets what a request took: it was served, or has lost its own place. Returns whether it took some.
    pub(super) fn forget(&mut self, ticket: u64) -> bool {
        self.holders.remove(&ticket).is_some()
    }

    /// Keeps what a request took that leaves without being served.
    pub(super) fn leave(&mut self, tenant: u64, ticket: u64, ranks: &mut Ranks) {
        for place in self.holders.remove(&ticket).into_iter().flatten() {
            *self.sizes.entry(tenant).or_insert(0) += place.size;
            ranks.insert(rank(place));
            self.left.push_back((tenant, place));
        }
        while self.left.len() > MAX_LEFT * ranks.len().saturating_sub(self.left.len()) + MAX_DISPLACED {
            self.forget_oldest(ranks);
        }
    }

    pub(super) fn forget_oldest(&mut self, ranks: &mut Ranks) {
        let Some((tenant, place)) = self.left.pop_front() else { return };
        ranks.remove(rank(place));
        if let Entry::Occupied(mut size) = self.sizes.entry(tenant) {
            *size.get_mut() -= place.size;
            if *size.get() == 0 {
                size.remove();
            }
        }
    }

    /// Size of what a tenant's requests took and left.
    pub(super) fn size(&self, tenant: u64) -> u64 {
        self.sizes.get(&tenant).copied().unwrap_or(0)
    }
}

/// Such a place counts as one of the highest priority: no request has it to lose.
fn rank(place: Taking) -> (i64, u64) {
    (i64::MAX, place.ticket)
}
