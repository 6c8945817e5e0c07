//! Block table: the holders of each block, with the number of records that say so.
//!
//! One writer. Lookups take no lock for blocks with a single holder, and a shard's read lock for blocks with
//! several. The writer holds a shard's write lock for one change of one block.

use std::sync::Arc;

use super::{
    lockfree_map::{LockfreeMap, MapWriter},
    memory::{difference, heap, reserve, shrink},
};
use crate::{
    id::BlockHash,
    sync::{ArcSwap, RwLock},
};

/// Number of shards, a power of two. Shards are rebuilt one at a time, which keeps the peak of memory low.
/// Small for the model checker, which creates them in every execution.
const SHARDS: usize = if cfg!(loom) { 2 } else { 256 };

/// The table as lookups see it.
#[derive(Debug)]
pub(super) struct Shards(Box<[Shard]>);

#[derive(Debug, Default)]
struct Shard {
    /// By block hash: a packed [`Entry`].
    map: ArcSwap<LockfreeMap>,
    /// Locked while a map entry that refers to a list changes.
    lists: RwLock<HolderLists>,
}

/// Holders of the blocks that have several.
#[derive(Debug, Default)]
struct HolderLists {
    lists: Vec<Vec<Holding>>,
    /// Unused indexes of `lists`.
    free: Vec<u32>,
    /// Heap bytes of the inner lists.
    inner: usize,
}

/// A holder of a block, and the number of its records that contain the block.
#[derive(Clone, Copy, Debug)]
struct Holding {
    holder: u32,
    count: u32,
}

/// What the map knows of a block. Most blocks have one holder, which fits into the map's 8 bytes.
#[derive(Clone, Copy, Debug)]
enum Entry {
    One(Holding),
    /// Index into [`HolderLists::lists`]. Packed with a count of 0, which no holding has.
    List(u32),
}

impl Entry {
    fn pack(self) -> u64 {
        match self {
            Self::One(Holding { holder, count }) => u64::from(count) << 32 | u64::from(holder),
            Self::List(list) => u64::from(list),
        }
    }

    fn unpack(packed: u64) -> Self {
        let (count, low) = ((packed >> 32) as u32, (packed & 0xffff_ffff) as u32);
        if count > 0 { Self::One(Holding { holder: low, count }) } else { Self::List(low) }
    }
}

/// Effect of one change on the table's size.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Change {
    pub(super) blocks: i64,
    pub(super) bytes: i64,
}

impl std::ops::Add for Change {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl std::ops::AddAssign for Change {
    fn add_assign(&mut self, other: Self) {
        self.blocks += other.blocks;
        self.bytes += other.bytes;
    }
}

impl Default for Shards {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| Shard::default()).collect())
    }
}

fn shard_of(block: BlockHash) -> usize {
    // The map uses the lowest bits.
    (block.0 >> 40) as usize % SHARDS
}

impl Shards {
    /// Calls `each` with every holder of the block.
    pub(super) fn for_each_holder(&self, block: BlockHash, mut each: impl FnMut(u32)) {
        let Some(shard) = self.0.get(shard_of(block)) else { return };
        let find = || shard.map.load().find(block.0).map(Entry::unpack);
        match find() {
            None => {}
            Some(Entry::One(one)) => each(one.holder),
            Some(Entry::List(_)) => {
                let lists = shard.lists.read();
                // Look again under the lock: the list may belong to another block by now.
                match find() {
                    None => {}
                    Some(Entry::One(one)) => each(one.holder),
                    Some(Entry::List(list)) => lists.get(list).iter().for_each(|one| each(one.holder)),
                }
            }
        }
    }

    /// Returns whether `holder` has the block.
    pub(super) fn holds(&self, block: BlockHash, holder: u32) -> bool {
        let mut held = false;
        self.for_each_holder(block, |other| held |= other == holder);
        held
    }
}

/// The table's single writer.
#[derive(Debug)]
pub(super) struct TableWriter {
    maps: Vec<MapWriter>,
    shards: Arc<Shards>,
}

impl TableWriter {
    pub(super) fn new(shards: Arc<Shards>) -> Self {
        Self { maps: (0..SHARDS).map(|_| MapWriter::default()).collect(), shards }
    }

    /// Loads the cells of blocks into the cache, so that their cache misses overlap.
    pub(super) fn prefetch<'a>(&self, blocks: impl IntoIterator<Item = &'a BlockHash>) {
        let load = |block: &BlockHash| self.maps.get(shard_of(*block)).map_or(0, |map| map.prefetch(block.0));
        std::hint::black_box(blocks.into_iter().map(load).fold(0, u64::wrapping_add));
    }

    /// Adds one record of a holder to a block.
    pub(super) fn add(&mut self, block: BlockHash, holder: u32) -> Change {
        let at = shard_of(block);
        let (Some(map), Some(shard)) = (self.maps.get_mut(at), self.shards.0.get(at)) else {
            return Change::default();
        };
        let new = Holding { holder, count: 1 };
        let Some(entry) = map.get(block.0).map(Entry::unpack) else {
            let before = map.bytes();
            if map.set(block.0, Entry::One(new).pack()) {
                shard.map.store(map.map().clone());
            }
            return Change { blocks: 1, bytes: difference(map.bytes(), before) };
        };
        if let Entry::One(one) = entry
            && one.holder == holder
        {
            let count = one.count.saturating_add(1);
            map.set(block.0, Entry::One(Holding { holder, count }).pack());
            return Change::default();
        }
        let mut lists = shard.lists.write();
        let before = lists.bytes();
        match entry {
            Entry::One(one) => {
                let list = lists.create(vec![one, new]);
                map.set(block.0, Entry::List(list).pack());
            }
            Entry::List(list) => lists.add(list, new),
        }
        Change { blocks: 0, bytes: difference(lists.bytes(), before) }
    }

    /// Removes one record of a holder from a block.
    pub(super) fn release(&mut self, block: BlockHash, holder: u32) -> Change {
        let at = shard_of(block);
        let (Some(map), Some(shard)) = (self.maps.get_mut(at), self.shards.0.get(at)) else {
            return Change::default();
        };
        match map.get(block.0).map(Entry::unpack) {
            Some(Entry::List(list)) => {
                let mut lists = shard.lists.write();
                let before = lists.bytes();
                if let Some(last) = lists.release(list, holder) {
                    map.set(block.0, Entry::One(last).pack());
                }
                Change { blocks: 0, bytes: difference(lists.bytes(), before) }
            }
            Some(Entry::One(one)) if one.holder == holder && one.count > 1 => {
                map.set(block.0, Entry::One(Holding { holder, count: one.count - 1 }).pack());
                Change::default()
            }
            Some(Entry::One(one)) if one.holder == holder => {
                let before = map.bytes();
                if map.remove(block.0) {
                    shard.map.store(map.map().clone());
                }
                Change { blocks: -1, bytes: difference(map.bytes(), before) }
            }
            Some(Entry::One(_)) | None => Change::default(),
        }
    }
}

impl HolderLists {
    fn get(&self, list: u32) -> &[Holding] {
        self.lists.get(list as usize).map_or(&[], Vec::as_slice)
    }

    /// Returns the bytes that the lists take on the heap.
    fn bytes(&self) -> usize {
        self.inner
            + heap(self.lists.capacity() * size_of::<Vec<Holding>>())
            + heap(self.free.capacity() * size_of::<u32>())
    }

    fn create(&mut self, holdings: Vec<Holding>) -> u32 {
        self.inner += heap(holdings.capacity() * size_of::<Holding>());
        let at = self.free.pop().unwrap_or_else(|| {
            reserve(&mut self.lists, 1);
            self.lists.push(Vec::new());
            u32::try_from(self.lists.len() - 1).unwrap_or(u32::MAX)
        });
        if let Some(list) = self.lists.get_mut(at as usize) {
            *list = holdings;
        }
        at
    }

    fn add(&mut self, list: u32, new: Holding) {
        let Some(holdings) = self.lists.get_mut(list as usize) else { return };
        if let Some(holding) = holdings.iter_mut().find(|holding| holding.holder == new.holder) {
            holding.count = holding.count.saturating_add(1);
            return;
        }
        let before = holdings.capacity();
        reserve(holdings, 1);
        holdings.push(new);
        self.inner += heap(holdings.capacity() * size_of::<Holding>()) - heap(before * size_of::<Holding>());
    }

    /// Removes one record of a holder. If that leaves one holder, frees the list and returns that holder.
    fn release(&mut self, list: u32, holder: u32) -> Option<Holding> {
        let holdings = self.lists.get_mut(list as usize)?;
        let at = holdings.iter().position(|holding| holding.holder == holder)?;
        if let Some(holding) = holdings.get_mut(at).filter(|holding| holding.count > 1) {
            holding.count -= 1;
            return None;
        }
        let before = holdings.capacity();
        holdings.swap_remove(at);
        let last = if let [last] = holdings.as_slice() { Some(*last) } else { None };
        if last.is_some() {
            *holdings = Vec::new();
        } else {
            shrink(holdings);
        }
        self.inner += heap(holdings.capacity() * size_of::<Holding>());
        self.inner -= heap(before * size_of::<Holding>());
        if last.is_some() {
            self.free.push(list);
            if self.free.len() == self.lists.len() {
                *self = Self::default();
            }
        }
        last
    }
}
