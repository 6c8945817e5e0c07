//! The single writer of the tree of prefixes: adds and removes what holders have.
//!
//! A segment keeps its slot while it has blocks. Where prompts part within a segment, its end becomes a
//! segment of its own; segments are not joined again. Blocks that no holder has leave the tree as soon as no
//! block follows them.
//!
//! Two chains of hashes that share a hash under different parents would contradict what a hash means. Only a
//! collision or a faulty peer can do that: the later one ends in the tree before that hash.

use std::{collections::HashMap, sync::Arc};

use super::{
    invariants::Invariant,
    lockfree_map::MapWriter,
    memory::{heap, reserve},
    reach::Recorded,
    segments::{Cover, MAX_BLOCKS, SHARDS, Segment, Slots, Tree, shard_of},
    trail::Stretch,
};
use crate::id::BlockHash;

/// Twentieths added to the counted bytes. By decisions alone, resident memory is below the counted.
const FRAGMENTATION_TWENTIETHS: usize = 9;

/// A block of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) slot: u32,
    pub(super) at: usize,
}

#[derive(Debug, Default)]
pub(super) struct TreeWriter {
    shared: Arc<Tree>,
    heads: Vec<MapWriter>,
    slots: Slots,
    pub(super) nodes: Vec<Node>,
    /// Unused indexes of `nodes`.
    free: Vec<u32>,
    /// Number of segments created so far, wrapping.
    births: u32,
    /// Number of blocks of a holder's engine with one of our hashes, beyond the one that the cover counts. An
    /// engine may have several blocks with the same tokens.
    pub(super) repeated: HashMap<(u32, BlockHash), u32>,
    empty: Arc<Segment>,
    blocks: usize,
    /// Heap bytes of segments, their records, and the heads.
    pub(super) inner: usize,
    /// Buffers of one change, kept for the next: a recorded decision allocates nothing.
    pub(super) stretches: Vec<Stretch>,
    pub(super) passed: Vec<(u32, usize)>,
}

/// State of a segment for the writer. Its slot is the index.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) segment: Arc<Segment>,
    /// The segment before this one, or one that it was split from.
    parent: Option<u32>,
    /// Segment that was split off last.
    pub(super) rest: Option<u32>,
    /// Number of blocks before the first one.
    pub(super) depth: usize,
    /// Number of segments that follow.
    children: u32,
    /// Tells the segments apart that reuse a slot.
    pub(super) born: u32,
    /// Largest length that lookups may have seen: words before it must not change.
    shown: usize,
    pub(super) recorded: Recorded,
}

impl TreeWriter {
    pub(super) fn new(shared: Arc<Tree>) -> Self {
        let heads = (0..SHARDS).map(|_| MapWriter::default()).collect();
        Self { shared, heads, ..Self::default() }
    }

    /// Returns the number of blocks in the tree.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the bytes that the tree takes, with an allowance for fragmentation.
    pub(super) fn bytes(&self) -> usize {
        let counted = self.inner
            + self.slots.bytes()
            + heap(self.nodes.capacity() * size_of::<Node>())
            + heap(self.free.capacity() * size_of::<u32>())
            + heap(self.repeated.capacity() * 2 * size_of::<((u32, BlockHash), u32)>());
        counted + counted / 20 * FRAGMENTATION_TWENTIETHS
    }

    /// Walks from a block along `hashes`, and adds those that are missing. Appends where they lie to `out`.
    /// `holder` will cover them. Returns how many hashes have a place.
    pub(super) fn place(
        &mut self,
        after: Option<Spot>,
        hashes: &[BlockHash],
        holder: u32,
        out: &mut Vec<Stretch>,
    ) -> usize {
        let mut here = after.map(|spot| (spot.slot, spot.at + 1));
        let mut placed = 0;
        while let Some(rest) = hashes.get(placed..).filter(|rest| !rest.is_empty()) {
            let next = match here {
                Some((slot, at)) if at < self.len(slot) => Some((slot, at)),
                _ => match self.follow(here, rest) {
                    Ok(child) => child.map(|slot| (slot, 0)),
                    Err(Taken) => return placed,
                },
            };
            let (slot, at, count) = match next {
                Some((slot, at)) => (slot, at, self.common(slot, at, rest)),
                None => self.grow(here, rest, holder),
            };
            if count == 0 {
                // The prompt parts from the segment here.
                if !self.split(slot, at) {
                    return placed;
                }
            } else {
                let (from, born) = (placed, self.born(slot));
                out.push(Stretch { from, slot, born, at, count });
            }
            placed += count;
            here = Some((slot, at + count));
        }
        placed
    }

    /// Returns the segment that follows the end of another one, or starts prompts, and begins with these
    /// hashes.
    pub(super) fn follow(
        &self,
        here: Option<(u32, usize)>,
        hashes: &[BlockHash],
    ) -> Result<Option<u32>, Taken> {
        let Some(found) = hashes.first().and_then(|head| self.head(*head)) else { return Ok(None) };
        let depth = here.map_or(0, |(slot, at)| self.depth(slot) + at);
        let fits = self.depth(found) == depth && self.parent(found) == here.map(|(slot, _)| slot);
        if fits { Ok(Some(found)) } else { Err(Taken) }
    }

    /// Appends hashes to a segment that only `holder` covers, or starts a segment. Returns where they begin,
    /// and how many there are.
    fn grow(&mut self, here: Option<(u32, usize)>, hashes: &[BlockHash], holder: u32) -> (u32, usize, usize) {
        if let Some((slot, at)) = here
            && let Some(node) = self.nodes.get(slot as usize)
            && node.children == 0
            && at < MAX_BLOCKS
            && node.segment.covers().all(|cover| cover.holder == holder)
        {
            let more = hashes.get(..MAX_BLOCKS - at).unwrap_or(hashes);
            self.append(slot, more);
            return (slot, at, more.len());
        }
        let first = hashes.get(..MAX_BLOCKS).unwrap_or(hashes);
        let depth = here.map_or(0, |(slot, at)| self.depth(slot) + at);
        let segment = Segment::new(first.iter().copied(), first.len(), &[], 1);
        let slot = self.insert(segment, here.map(|(slot, _)| slot), depth);
        self.blocks += first.len();
        if let Some(parent) = here.and_then(|(slot, _)| self.nodes.get_mut(slot as usize)) {
            parent.children += 1;
        }
        (slot, 0, first.len())
    }

    fn append(&mut self, slot: u32, hashes: &[BlockHash]) {
        let Some(node) = self.nodes.get_mut(slot as usize) else { return };
        let len = node.segment.len();
        let new = len + hashes.len();
        // Lookups may still read hashes that were trimmed.
        if node.shown > len || new > node.segment.capacity() {
            let capacity = new.max(len + len / 4).min(MAX_BLOCKS);
            self.renew(slot, 0..len, capacity, 0);
        }
        let Some(node) = self.nodes.get_mut(slot as usize) else { return };
        node.segment.append(hashes);
        self.shared.broken.check(Invariant::SegmentLength, node.segment.len() == new);
        node.shown = new;
        self.blocks += hashes.len();
    }

    /// Publishes a segment in a free slot, and then its head.
    fn insert(&mut self, segment: Segment, parent: Option<u32>, depth: usize) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            let slot = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
            reserve(&mut self.nodes, 1);
            self.nodes.push(Node::vacant(self.empty.clone()));
            if self.slots.reserve(slot, &self.empty) {
                self.shared.publish_slots(self.slots.clone());
            }
            slot
        });
        self.births = self.births.wrapping_add(1);
        self.inner += segment.bytes();
        let (head, shown, segment) = (segment.hash(0), segment.len(), Arc::new(segment));
        self.slots.store(slot, segment.clone());
        if let Some(node) = self.nodes.get_mut(slot as usize) {
            let vacant = Node::vacant(self.empty.clone());
            *node = Node { segment, parent, depth, shown, born: self.births, ..vacant };
        }
        if let Some(head) = head {
            self.change_head(head, |map| map.set(head.0, u64::from(slot)));
        }
        slot
    }

    /// Makes the blocks of a segment from `at` on a segment of its own. Returns false if the hash there is
    /// the head of another one.
    fn split(&mut self, slot: u32, at: usize) -> bool {
        let Some(node) = self.nodes.get(slot as usize) else { return false };
        let (segment, children, rest) = (node.segment.clone(), node.children, node.rest);
        if segment.hash(at).is_none_or(|head| self.head(head).is_some()) {
            return false;
        }
        let len = segment.len();
        let covers: Vec<Cover> = segment.covers().filter_map(|cover| cover.within(at..len)).collect();
        let new = Segment::new(segment.hashes(at..len), len - at, &covers, 0);
        let depth = self.depth(slot) + at;
        let end = self.insert(new, Some(slot), depth);
        let recorded = self.nodes.get_mut(slot as usize).map(|node| {
            (node.children, node.rest) = (1, Some(end));
            self.inner -= node.recorded.bytes();
            let of_end = node.recorded.split_off(at);
            self.inner += node.recorded.bytes() + of_end.bytes();
            of_end
        });
        if let (Some(node), Some(recorded)) = (self.nodes.get_mut(end as usize), recorded) {
            (node.children, node.rest, node.recorded) = (children, rest, recorded);
        }
        self.renew(slot, 0..at, at, 0);
        true
    }

    /// Replaces a segment by a copy of some of its first blocks, with space for more.
    pub(super) fn renew(
        &mut self,
        slot: u32,
        blocks: std::ops::Range<usize>,
        capacity: usize,
        spare_covers: usize,
    ) {
        let Some(node) = self.nodes.get_mut(slot as usize) else { return };
        let old = &node.segment;
        let covers: Vec<Cover> = old.covers().filter_map(|cover| cover.within(blocks.clone())).collect();
        node.shown = blocks.len();
        let new = Arc::new(Segment::new(old.hashes(blocks), capacity, &covers, spare_covers));
        self.inner += new.bytes();
        self.inner -= old.bytes();
        self.slots.store(slot, new.clone());
        node.segment = new;
    }

    /// Removes the blocks at the end of a segment that no holder has. Then removes those of the segments
    /// before it, if no block follows them any more.
    pub(super) fn trim(&mut self, slot: u32) {
        let mut next = Some(slot);
        while let Some(slot) = next.take() {
            let Some(node) = self.nodes.get_mut(slot as usize).filter(|node| node.children == 0) else {
                return;
            };
            let (len, held) = (node.segment.len(), node.segment.covers().map(|cover| cover.to).max());
            let left = held.unwrap_or(0);
            self.shared.broken.check(Invariant::SegmentLength, left <= len);
            self.blocks -= len.saturating_sub(left);
            if left == 0 {
                next = self.remove(slot);
            } else if left < len {
                node.segment.set_len(left);
                if node.segment.capacity() > left + left / 4 + 4 {
                    self.renew(slot, 0..left, left, 0);
                }
            }
        }
        if self.free.len() == self.nodes.len() {
            self.reset();
        }
    }

    /// Removes a segment. Returns the one before it.
    fn remove(&mut self, slot: u32) -> Option<u32> {
        let parent = self.parent(slot);
        let node = self.nodes.get_mut(slot as usize)?;
        let node = std::mem::replace(node, Node::vacant(self.empty.clone()));
        if let Some(head) = node.segment.hash(0) {
            self.change_head(head, |map| map.remove(head.0));
        }
        self.slots.store(slot, self.empty.clone());
        self.inner -= node.segment.bytes() + node.recorded.bytes();
        reserve(&mut self.free, 1);
        self.free.push(slot);
        let parent = parent?;
        if let Some(node) = self.nodes.get_mut(parent as usize) {
            self.shared.broken.check(Invariant::SegmentChildren, node.children > 0);
            node.children = node.children.saturating_sub(1);
        }
        Some(parent)
    }

    /// Frees what an empty tree still takes.
    fn reset(&mut self) {
        (self.nodes, self.free, self.slots) = (Vec::new(), Vec::new(), Slots::default());
        self.repeated = HashMap::new();
        self.shared.publish_slots(Slots::default());
    }

    /// Returns how many hashes equal the segment's from `at` on.
    pub(super) fn common(&self, slot: u32, at: usize, hashes: &[BlockHash]) -> usize {
        let Some(node) = self.nodes.get(slot as usize) else { return 0 };
        let here = node.segment.hashes(at..node.segment.len());
        here.zip(hashes).take_while(|(here, hash)| here == *hash).count()
    }

    fn change_head(&mut self, head: BlockHash, change: impl FnOnce(&mut MapWriter) -> bool) {
        let shard = shard_of(head);
        let Some(map) = self.heads.get_mut(shard) else { return };
        let before = map.bytes();
        if change(map) {
            self.shared.publish_heads(shard, map.map().clone());
        }
        self.inner += map.bytes();
        self.inner -= before;
    }

    pub(super) fn head(&self, head: BlockHash) -> Option<u32> {
        self.heads.get(shard_of(head))?.get(head.0).map(|slot| slot as u32)
    }

    pub(super) fn len(&self, slot: u32) -> usize {
        self.node(slot).map_or(0, |node| node.segment.len())
    }

    pub(super) fn depth(&self, slot: u32) -> usize {
        self.node(slot).map_or(0, |node| node.depth)
    }

    pub(super) fn born(&self, slot: u32) -> u32 {
        self.node(slot).map_or(0, |node| node.born)
    }

    /// Returns a segment that another part of the index names.
    fn node(&self, slot: u32) -> Option<&Node> {
        let node = self.nodes.get(slot as usize);
        self.check(Invariant::SegmentExists, node.is_some());
        node
    }

    /// Counts a rule as broken unless it holds.
    pub(super) fn check(&self, invariant: Invariant, holds: bool) {
        self.shared.broken.check(invariant, holds);
    }

    /// Returns the segment before this one.
    fn parent(&self, slot: u32) -> Option<u32> {
        let node = self.nodes.get(slot as usize)?;
        let mut parent = node.parent?;
        // The parent may have been split since.
        while self.depth(parent) + self.len(parent) < node.depth {
            parent = self.nodes.get(parent as usize)?.rest?;
        }
        Some(parent)
    }
}

/// A hash is already known under another parent.
pub(super) struct Taken;

impl Node {
    fn vacant(empty: Arc<Segment>) -> Self {
        Self {
            segment: empty,
            parent: None,
            rest: None,
            depth: 0,
            children: 0,
            born: 0,
            shown: 0,
            recorded: Recorded::default(),
        }
    }
}

#[cfg(test)]
mod tests;
