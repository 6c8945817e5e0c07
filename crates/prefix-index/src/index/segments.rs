//! The tree of all known prefixes, as lookups see it.
//!
//! A *segment* is a sequence of our block hashes, each of which follows the one before, and the *cover* of
//! each holder: which of the blocks it holds. The first hash of a segment, its *head*, is in a map; so a
//! lookup needs one search for each segment of a prompt, not one for each block.
//!
//! ```text
//! heads      segments                        covers
//! h0   ->    h0 h1 h2 h3 h4                  holder 1: 0..5, holder 2: 0..5, holder 3: 0..2
//! h5   ->                    h5 h6           holder 1: 0..2
//! g5   ->                    g5 g6 g7 g8     holder 2: 0..4
//! ```
//!
//! # Why a lookup sees no state that never was Lookups take no lock and never wait. A hash identifies its
//! whole prefix, so a segment whose hash equals the prompt's is the right one, whatever the writer did in
//! between. The hashes of one [`Segment`] never change; the writer appends after them and then stores the
//! new length. A cover is one word. Everything else is a new `Segment` that replaces the old one. When the
//! writer splits a segment, it publishes the end and its head before it shortens the rest.

use std::sync::Arc;

use super::{invariants::BrokenInvariants, lockfree_map::LockfreeMap, memory::heap, mixer::Mixer};
use crate::{
    id::BlockHash,
    sync::{
        ArcSwap,
        atomic::{
            AtomicU32, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

/// Largest number of blocks of a segment. Bounds what one change copies.
pub(super) const MAX_BLOCKS: usize = if cfg!(loom) { 4 } else { 1_024 };
/// Number of shards of the heads, a power of two. Shards are rebuilt one at a time.
pub(super) const SHARDS: usize = if cfg!(loom) { 2 } else { 256 };
/// Slots in the first chunk. Each further chunk has twice as many.
const FIRST_CHUNK: usize = if cfg!(loom) { 2 } else { 64 };

/// The tree as lookups see it.
#[derive(Debug)]
pub(super) struct Tree {
    /// Slot of the segment, by its head.
    heads: Box<[ArcSwap<LockfreeMap>]>,
    slots: ArcSwap<Slots>,
    pub(super) broken: BrokenInvariants,
}

/// All segments by slot.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots(Vec<Arc<[ArcSwap<Segment>]>>);

/// A sequence of blocks and its covers.
#[derive(Debug, Default)]
pub(super) struct Segment {
    /// Space for `capacity` hashes, and then for covers. A cover of 0 is unused.
    words: Box<[AtomicU64]>,
    capacity: usize,
    len: AtomicU32,
}

/// The blocks `from..to` of a segment, held by a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cover {
    pub(super) holder: u32,
    pub(super) from: usize,
    pub(super) to: usize,
}

impl Cover {
    pub(super) fn pack(self) -> u64 {
        u64::from(self.holder) << 32 | (self.from as u64) << 16 | self.to as u64
    }

    pub(super) fn unpack(word: u64) -> Option<Self> {
        let (from, to) = ((word >> 16 & 0xffff) as usize, (word & 0xffff) as usize);
        (to > 0).then_some(Self { holder: (word >> 32) as u32, from, to })
    }

    /// Returns the part of the cover that lies in a range.
    pub(super) fn clipped(self, range: std::ops::Range<usize>) -> Option<Self> {
        let (from, to) = (self.from.max(range.start), self.to.min(range.end));
        (from < to).then_some(Self { from, to, ..self })
    }

    /// Returns the part of the cover that lies in a range, relative to the range's start.
    pub(super) fn within(self, range: std::ops::Range<usize>) -> Option<Self> {
        let start = range.start;
        self.clipped(range).map(|part| Self { from: part.from - start, to: part.to - start, ..part })
    }
}

impl Segment {
    /// Creates a segment with space for more hashes and covers than it is given.
    pub(super) fn new(
        hashes: impl ExactSizeIterator<Item = BlockHash>,
        capacity: usize,
        covers: &[Cover],
        spare_covers: usize,
    ) -> Self {
        let (len, capacity) = (hashes.len(), capacity.max(hashes.len()));
        let mut words = Vec::with_capacity(capacity + covers.len() + spare_covers);
        words.extend(hashes.map(|hash| AtomicU64::new(hash.0)));
        words.resize_with(capacity, AtomicU64::default);
        words.extend(covers.iter().map(|cover| AtomicU64::new(cover.pack())));
        words.resize_with(capacity + covers.len() + spare_covers, AtomicU64::default);
        let len = AtomicU32::new(word(len));
        Self { words: words.into_boxed_slice(), capacity, len }
    }

    pub(super) fn len(&self) -> usize {
        self.len.load(Acquire) as usize
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn hash(&self, at: usize) -> Option<BlockHash> {
        self.words.get(at).map(|word| BlockHash(word.load(Relaxed)))
    }

    pub(super) fn hashes(
        &self,
        range: std::ops::Range<usize>,
    ) -> impl ExactSizeIterator<Item = BlockHash> + '_ {
        self.words.get(range).unwrap_or_default().iter().map(|word| BlockHash(word.load(Relaxed)))
    }

    /// Returns the words of the covers.
    pub(super) fn cover_words(&self) -> &[AtomicU64] {
        self.words.get(self.capacity..).unwrap_or_default()
    }

    pub(super) fn covers(&self) -> impl Iterator<Item = Cover> + '_ {
        self.cover_words().iter().filter_map(|word| Cover::unpack(word.load(Acquire)))
    }

    /// Appends hashes for which there is space, and shows them to lookups.
    pub(super) fn append(&self, hashes: &[BlockHash]) {
        let len = self.len();
        let free = self.words.get(len..self.capacity).unwrap_or_default();
        free.iter().zip(hashes).for_each(|(word, hash)| word.store(hash.0, Relaxed));
        self.set_len(len + hashes.len().min(free.len()));
    }

    pub(super) fn set_len(&self, len: usize) {
        self.len.store(word(len), Release);
    }

    /// Returns the bytes that the segment takes on the heap.
    pub(super) fn bytes(&self) -> usize {
        heap(self.words.len() * size_of::<AtomicU64>()) + heap(2 * size_of::<usize>() + size_of::<Self>())
    }

    /// Returns how many blocks from the first on equal those of a prompt, and whether these are all blocks of
    /// the segment. A hash identifies its prefix, so this can bisect.
    fn matching(&self, blocks: &[BlockHash]) -> (usize, bool) {
        let len = self.len();
        let most = len.min(blocks.len());
        let equal = |at: usize| self.hash(at).is_some_and(|hash| blocks.get(at) == Some(&hash));
        if most == 0 || equal(most - 1) {
            return (most, most == len);
        }
        let (mut low, mut high) = (0, most - 1);
        while low < high {
            let middle = low.midpoint(high);
            if equal(middle) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        (low, false)
    }
}

/// Returns a segment's length as it is stored.
fn word(len: usize) -> u32 {
    debug_assert!(u32::try_from(len).is_ok(), "a segment of {len} blocks");
    u32::try_from(len).unwrap_or(0)
}

impl Default for Tree {
    fn default() -> Self {
        Self {
            heads: (0..SHARDS).map(|_| ArcSwap::default()).collect(),
            slots: ArcSwap::default(),
            broken: BrokenInvariants::default(),
        }
    }
}

/// Returns the shard of a head.
pub(super) fn shard_of(head: BlockHash) -> usize {
    // The map uses the lowest bits.
    (Mixer::default().mix(head.0) >> 40) as usize % SHARDS
}

impl Tree {
    /// Calls `each` with the segments of a prompt in order: number of blocks before the segment, number of
    /// its blocks that are the prompt's, and the segment. Ends early when `each` returns false.
    pub(super) fn walk(&self, blocks: &[BlockHash], mut each: impl FnMut(usize, usize, &Segment) -> bool) {
        let slots = self.slots.load();
        let mut before = 0;
        while let Some(head) = blocks.get(before) {
            let Some(found) = self.heads.get(shard_of(*head)).and_then(|map| map.load().find(head.0)) else {
                return;
            };
            // A slot of a later chunk was assigned after the slots were loaded.
            let late = (slots.get(found as u32).is_none()).then(|| self.slots.load());
            let slots = late.as_ref().unwrap_or(&slots);
            let Some(segment) = slots.get(found as u32).map(ArcSwap::load) else { return };
            let (matching, whole) = segment.matching(blocks.get(before..).unwrap_or_default());
            // The slot may have passed to another segment. Then the prompt's is gone.
            if matching == 0 || !each(before, matching, &segment) || !whole {
                return;
            }
            before += matching;
        }
    }

    pub(super) fn publish_heads(&self, shard: usize, map: Arc<LockfreeMap>) {
        if let Some(heads) = self.heads.get(shard) {
            heads.store(map);
        }
    }

    pub(super) fn publish_slots(&self, slots: Slots) {
        self.slots.store(Arc::new(slots));
    }
}

impl Slots {
    /// Returns the chunk of a slot, and the slot's place in it.
    fn place(slot: u32) -> (usize, usize) {
        let number = slot as usize / FIRST_CHUNK + 1;
        let chunk = number.ilog2() as usize;
        (chunk, slot as usize - ((1 << chunk) - 1) * FIRST_CHUNK)
    }

    fn get(&self, slot: u32) -> Option<&ArcSwap<Segment>> {
        let (chunk, at) = Self::place(slot);
        self.0.get(chunk)?.get(at)
    }

    pub(super) fn store(&self, slot: u32, segment: Arc<Segment>) {
        if let Some(slot) = self.get(slot) {
            slot.store(segment);
        }
    }

    /// Adds a chunk if there is none for `slot`. Returns whether it did.
    pub(super) fn reserve(&mut self, slot: u32, empty: &Arc<Segment>) -> bool {
        if self.get(slot).is_some() {
            return false;
        }
        let chunk = FIRST_CHUNK << self.0.len();
        self.0.push((0..chunk).map(|_| ArcSwap::new(empty.clone())).collect());
        true
    }

    /// Returns the bytes that the slots take on the heap.
    pub(super) fn bytes(&self) -> usize {
        let chunk = |chunk: &Arc<[ArcSwap<Segment>]>| {
            heap(2 * size_of::<usize>() + chunk.len() * size_of::<ArcSwap<Segment>>())
        };
        self.0.iter().map(chunk).sum()
    }
}
