//! Requests that lose their places in the full queue to others that come before them (L3.14).

use std::sync::{Arc, Weak, atomic::Ordering};

use fair_queue::{NO_TENANT, Need, Newcomer, Position};

use super::{
    AdmissionRequest, Inner, Place, Turn,
    rules::{LineId, class_of},
    worker_waits::Held,
};

impl Inner {
    /// Returns the requests that lost their places to a new one: mostly none, because there was room for it.
    /// `None`: there is no room.
    pub(super) fn find_or_make_room(
        &mut self,
        asks: &AdmissionRequest<'_>,
    ) -> Option<Vec<(Position<LineId>, Need)>> {
        let has_room = self.room_for(asks);
        if has_room(Held::default()) {
            return Some(Vec::new());
        }
        if self.rules.limit == 0 || asks.bytes > self.rules.bytes {
            return None;
        }
        let share = self.rules.share(asks.request.tenant_hash);
        let new = Newcomer {
            tenant: asks.request.tenant_hash.unwrap_or(NO_TENANT),
            weight: share.weight,
            priority: class_of(&self.rules, asks.request),
            size: asks.need(&self.rules).size,
        };
        // A request whose turn has come looks for a worker now.
        let may =
            |turn: &Weak<Turn>| turn.upgrade().is_some_and(|turn| !turn.has_come.load(Ordering::SeqCst));
        let mut without = Held::default();
        let suffices = |turn: &Weak<Turn>| {
            without.requests += 1;
            without.bytes += turn.upgrade().map_or(0, |turn| turn.bytes);
            has_room(without)
        };
        let last = self.order.make_room(asks.model, new, may, suffices)?;
        for turn in last.iter().filter_map(|(position, _)| self.release_place(position)) {
            turn.lost_place.store(true, Ordering::SeqCst);
            turn.notify.notify_one();
        }
        Some(last)
    }

    /// Releases a place, unless that was done before.
    pub(super) fn release_place(&mut self, position: &Position<LineId>) -> Option<Arc<Turn>> {
        let turn = self.order.remove(position)?.upgrade()?;
        self.bytes -= turn.bytes;
        self.tokens -= turn.tokens;
        Some(turn)
    }
}

impl Place {
    /// Returns whether another request has its place.
    pub(crate) fn is_lost(&self) -> bool {
        self.turn.lost_place.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests;
