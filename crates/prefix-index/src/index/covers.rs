//! Ranges of a segment's blocks that a holder has (*covers*). A holder's covers of one segment neither
//! overlap nor touch.

use super::{
    segments::Cover,
    trail::{Stretch, Trail},
    tree::{Spot, TreeWriter},
};
use crate::{
    id::BlockHash,
    sync::atomic::{
        AtomicU64,
        Ordering::{Relaxed, Release},
    },
};

impl TreeWriter {
    /// Notes that a holder has the blocks of a stretch. A block that it has already counts once more.
    pub(super) fn cover(&mut self, stretch: &Stretch, holder: u32) {
        let (from, to) = (stretch.at, stretch.at + stretch.count);
        self.count_repeated(stretch.slot, holder, from, to);
        self.cover_once(stretch.slot, Cover { holder, from, to });
    }

    /// Notes that a holder has blocks, however often.
    pub(super) fn cover_once(&mut self, slot: u32, new: Cover) {
        let Some(node) = self.nodes.get(slot as usize) else { return };
        let (mut whole, mut free, mut first, mut joined) = (new, None, None, 0);
        for word in node.segment.cover_words() {
            match unpack(word) {
                None => free = free.or(Some(word)),
                Some(old) if old.holder == new.holder && old.from <= new.to && old.to >= new.from => {
                    whole = Cover { from: whole.from.min(old.from), to: whole.to.max(old.to), ..whole };
                    first = first.or(Some(word));
                    joined += 1;
                }
                Some(_) => {}
            }
        }
        match first.or(free) {
            Some(word) => word.store(whole.pack(), Release),
            None => return self.add_cover(slot, whole),
        }
        let Some(first) = first.filter(|_| joined > 1) else { return };
        // It grew over others of the holder.
        for word in node.segment.cover_words().iter().filter(|word| !std::ptr::eq(*word, first)) {
            let within =
                |old: &Cover| old.holder == new.holder && old.from >= whole.from && old.to <= whole.to;
            if unpack(word).is_some_and(|old| within(&old)) {
                word.store(0, Release);
            }
        }
    }

    /// Adds a cover where there is no space for it.
    fn add_cover(&mut self, slot: u32, new: Cover) {
        let Some(node) = self.nodes.get(slot as usize) else { return };
        let (len, capacity) = (node.segment.len(), node.segment.capacity());
        let covers = node.segment.cover_words().len();
        self.renew(slot, 0..len, capacity, 1 + covers / 2);
        let Some(node) = self.nodes.get(slot as usize) else { return };
        if let Some(word) = node.segment.cover_words().iter().find(|word| unpack(word).is_none()) {
            word.store(new.pack(), Release);
        }
    }

    /// Notes that a holder does not have some hashes of a run any more. Blocks that it had more than once
    /// count once less.
    pub(super) fn uncover(
        &mut self,
        trail: &mut Trail,
        hashes: &[BlockHash],
        range: std::ops::Range<usize>,
        holder: u32,
    ) {
        let mut end = range.end;
        // Deepest first, so that a holder never has a block without its prefix.
        while let Some(last) = end.checked_sub(1).filter(|last| *last >= range.start) {
            let Some(Spot { slot, at }) = self.locate(trail, hashes, last) else {
                end = last;
                continue;
            };
            end = range.start.max(last - at.min(last));
            let from = at - (last - end);
            self.uncover_segment(slot, Cover { holder, from, to: at + 1 });
        }
    }

    fn uncover_segment(&mut self, slot: u32, gone: Cover) {
        let mut to = gone.to;
        if !self.repeated.is_empty() {
            for at in (gone.from..gone.to).rev() {
                if self.take_repeated(slot, gone.holder, at) {
                    self.uncover_once(slot, Cover { from: at + 1, to, ..gone });
                    to = at;
                }
            }
        }
        self.uncover_once(slot, Cover { to, ..gone });
        self.trim(slot);
    }

    /// Removes blocks from a holder's covers.
    pub(super) fn uncover_once(&mut self, slot: u32, gone: Cover) {
        let Some(node) = self.nodes.get(slot as usize).filter(|_| gone.from < gone.to) else { return };
        let mut behind = None;
        for word in node.segment.cover_words() {
            let Some(old) = unpack(word).filter(|old| old.holder == gone.holder) else { continue };
            if old.from >= gone.to || old.to <= gone.from {
                continue;
            }
            let left = Cover { to: gone.from, ..old };
            let right = Cover { from: gone.to, ..old };
            if left.from < left.to {
                word.store(left.pack(), Release);
                behind = (right.from < right.to).then_some(right).or(behind);
            } else if right.from < right.to {
                word.store(right.pack(), Release);
            } else {
                word.store(0, Release);
            }
        }
        if let Some(behind) = behind {
            self.cover_once(slot, behind);
        }
    }

    /// Counts the blocks that a holder has already.
    fn count_repeated(&mut self, slot: u32, holder: u32, from: usize, to: usize) {
        let Some(node) = self.nodes.get(slot as usize) else { return };
        let known = node.segment.covers().filter(|cover| cover.holder == holder);
        for cover in known.filter_map(|cover| cover.clipped(from..to)) {
            for hash in node.segment.hashes(cover.from..cover.to) {
                *self.repeated.entry((holder, hash)).or_default() += 1;
            }
        }
    }

    /// Takes one from the count of a block that a holder has more than once. Returns false if it has it once.
    fn take_repeated(&mut self, slot: u32, holder: u32, at: usize) -> bool {
        let hash = self.nodes.get(slot as usize).and_then(|node| node.segment.hash(at));
        let Some(key) = hash.map(|hash| (holder, hash)) else { return false };
        let Some(count) = self.repeated.get_mut(&key) else { return false };
        *count -= 1;
        if *count == 0 {
            self.repeated.remove(&key);
            if self.repeated.is_empty() {
                self.repeated = std::collections::HashMap::new();
            }
        }
        true
    }
}

fn unpack(word: &AtomicU64) -> Option<Cover> {
    // Only this thread writes covers.
    Cover::unpack(word.load(Relaxed))
}
