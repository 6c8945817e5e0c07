//! The records of decisions that keep the blocks of a segment.
//!
//! Each record contains a whole prefix, and they end in the order in which they arrived. So a segment needs,
//! for each holder, only the records that reach farther than all later ones. When a record is withdrawn
//! before those that arrived earlier, the writer adds these again.

use std::cmp::Reverse;

use super::memory::{heap, reserve, shrink};

/// The records that keep the blocks of a segment, sorted by holder and then by reach.
#[derive(Debug, Default)]
pub(super) struct Recorded(Vec<Reach>);

/// Number of a segment's blocks that a record covers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    pub(super) holder: u32,
    pub(super) to: u32,
    /// Number of the record. Later ones have higher numbers.
    pub(super) record: u64,
}

impl Recorded {
    pub(super) fn bytes(&self) -> usize {
        heap(self.0.capacity() * size_of::<Reach>())
    }

    /// Returns the number of the segment's blocks that the records of a holder cover.
    pub(super) fn reach(&self, holder: u32) -> usize {
        let end = self.0.partition_point(|known| known.holder <= holder);
        let last = end.checked_sub(1).and_then(|last| self.0.get(last));
        last.filter(|known| known.holder == holder).map_or(0, |known| known.to as usize)
    }

    /// Adds a record, unless a later one keeps its blocks.
    pub(super) fn add(&mut self, new: Reach) {
        let order = |known: &Reach| (known.holder, Reverse(known.record));
        let start = self.0.partition_point(|known| order(known) < order(&new));
        let keeps =
            |known: &Reach| known.holder == new.holder && known.record >= new.record && known.to >= new.to;
        let around = [start.checked_sub(1), Some(start)].into_iter().flatten();
        if around.filter_map(|at| self.0.get(at)).any(keeps) {
            return;
        }
        let end = self.0.partition_point(|known| (known.holder, known.to) <= (new.holder, new.to));
        if start < end {
            // The new record keeps the blocks of these, and for longer.
            self.0.drain(start + 1..end);
            if let Some(known) = self.0.get_mut(start) {
                *known = new;
            }
        } else {
            reserve(&mut self.0, 1);
            self.0.insert(start, new);
        }
    }

    pub(super) fn end(&mut self, holder: u32, record: u64) {
        let start = self.0.partition_point(|known| known.holder < holder);
        let of_holder = self.0.iter().enumerate().skip(start).take_while(|(_, known)| known.holder == holder);
        let found = of_holder.into_iter().find(|(_, known)| known.record == record).map(|(at, _)| at);
        if let Some(at) = found {
            self.0.remove(at);
            shrink(&mut self.0);
        }
    }

    /// Divides the records where a segment is split. Returns the records of the second part.
    pub(super) fn split_off(&mut self, at: usize) -> Self {
        let at = u32::try_from(at).unwrap_or(u32::MAX);
        let beyond = self.0.iter().filter(|known| known.to > at);
        let rest = beyond.map(|known| Reach { to: known.to - at, ..*known }).collect();
        let all = std::mem::take(&mut self.0);
        for known in all {
            // Several records may now end at `at`. Keep one, with the number of the newest.
            let to = known.to.min(at);
            let same = |last: &&mut Reach| (last.holder, last.to) == (known.holder, to);
            match self.0.last_mut().filter(same) {
                Some(last) => last.record = last.record.max(known.record),
                None => self.0.push(Reach { to, ..known }),
            }
        }
        Self(rest)
    }
}
