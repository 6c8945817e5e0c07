//! Positions of a run's hashes in the tree.
//!
//! A run goes through one segment or several. Segments are split without telling the runs, so a trail may
//! lack the segments that its own were split into; the tree adds them when it meets them.

use super::memory::{heap, reserve};

/// Consecutive hashes of a list that lie in one segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    /// Index of the first one in the list.
    pub(super) from: usize,
    pub(super) slot: u32,
    /// Tells the segments apart that reuse a slot.
    pub(super) born: u32,
    /// Index of the first one in the segment.
    pub(super) at: usize,
    pub(super) count: usize,
}

/// The segments of a run's hashes, in order.
#[derive(Debug, Default)]
pub(super) struct Trail(Vec<Piece>);

/// A part of the trail. It ends where the next part begins.
#[derive(Clone, Copy, Debug)]
struct Piece {
    from: u32,
    at: u32,
    slot: u32,
    born: u32,
}

impl Trail {
    /// Returns the stretch that a hash was last known to lie in. Its count is 0.
    pub(super) fn piece(&self, at: usize) -> Option<Stretch> {
        let index = self.0.partition_point(|piece| piece.from as usize <= at).checked_sub(1)?;
        let Piece { from, at, slot, born } = *self.0.get(index)?;
        Some(Stretch { from: from as usize, slot, born, at: at as usize, count: 0 })
    }

    /// Adds a stretch, unless it continues the one before it in the same segment.
    pub(super) fn add(&mut self, new: Stretch) {
        let piece = Piece { from: new.from as u32, at: new.at as u32, slot: new.slot, born: new.born };
        let index = self.0.partition_point(|piece| (piece.from as usize) < new.from);
        if let Some(known) = self.0.get_mut(index).filter(|known| known.from == piece.from) {
            *known = piece;
            return;
        }
        let before = index.checked_sub(1).and_then(|before| self.0.get(before));
        let continues = |before: &Piece| {
            (before.slot, before.born) == (new.slot, new.born)
                && before.at as usize + new.from - before.from as usize == new.at
        };
        if !before.is_some_and(continues) {
            reserve(&mut self.0, 1);
            self.0.insert(index, piece);
        }
    }

    /// Forgets where hashes from `len` on lie.
    pub(super) fn truncate(&mut self, len: usize) {
        while self.0.last().is_some_and(|piece| piece.from as usize >= len) {
            self.0.pop();
        }
    }

    /// Returns the bytes that the trail takes on the heap.
    pub(super) fn bytes(&self) -> usize {
        heap(self.0.capacity() * size_of::<Piece>())
    }
}
