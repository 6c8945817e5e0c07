//! The block table: which slots hold a block, with a count of the records that say so. One writer; lookups read it without a
//! lock, but for blocks that several slots hold.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::RwLock;

use super::{
    bytes::{difference, fit, heap, room},
    cells::{Cells, Owner},
};
use crate::id::BlockHash;

/// A power of two. Shards grow one at a time: old and new cells together are little beside the rest.
const SHARDS: usize = 256;

/// What lookups see of the table.
#[derive(Debug)]
pub(super) struct Shards(Box<[Shard]>);

#[derive(Debug, Default)]
struct Shard {
    cells: ArcSwap<Cells>,
    /// Changes together with the cells that tell of it.
    several: RwLock<Several>,
}

/// The holders of blocks that have several.
#[derive(Debug, Default)]
struct Several {
    lists: Vec<Vec<Holder>>,
    /// Places in `lists` that are free.
    free: Vec<u32>,
    /// Bytes that the lists themselves take.
    inner: usize,
}

/// A slot that holds a block, and how many records say so. Most blocks have one holder, and are kept in these 8 bytes; a
/// `count` of 0 says that there are several, and `slot` is their place in [`Several::lists`].
#[derive(Clone, Copy, Debug)]
struct Holder {
    slot: u32,
    count: u32,
}

impl Holder {
    fn packed(self) -> u64 {
        u64::from(self.count) << 32 | u64::from(self.slot)
    }

    fn of(packed: u64) -> Self {
        Self { slot: (packed & 0xffff_ffff) as u32, count: (packed >> 32) as u32 }
    }
}

/// What one change did to the table.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Change {
    pub(super) blocks: i64,
    pub(super) bytes: i64,
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

fn place_of(block: BlockHash) -> usize {
    // The cells use the lowest bits.
    (block.0 >> 40) as usize % SHARDS
}

impl Shards {
    /// Calls `each` with every slot that holds the block.
    pub(super) fn holders(&self, block: BlockHash, mut each: impl FnMut(u32)) {
        let Some(shard) = self.0.get(place_of(block)) else { return };
        let find = || shard.cells.load().find(block.0).map(Holder::of);
        match find() {
            None => {}
            Some(one) if one.count > 0 => each(one.slot),
            Some(_) => {
                let several = shard.several.read();
                // Again: meanwhile its list may have become another block's.
                match find() {
                    None => {}
                    Some(one) if one.count > 0 => each(one.slot),
                    Some(list) => several.of(list.slot).iter().for_each(|holder| each(holder.slot)),
                }
            }
        }
    }

    /// Whether `slot` holds the block.
    pub(super) fn holds(&self, block: BlockHash, slot: u32) -> bool {
        let mut held = false;
        self.holders(block, |holder| held |= holder == slot);
        held
    }
}

/// The table as its one writer has it.
#[derive(Debug)]
pub(super) struct Table {
    owners: Vec<Owner>,
    shards: Arc<Shards>,
}

impl Table {
    pub(super) fn new(shards: Arc<Shards>) -> Self {
        Self { owners: (0..SHARDS).map(|_| Owner::default()).collect(), shards }
    }

    /// Asks for blocks' cells before they are needed: to wait for many at once takes as long as for one.
    pub(super) fn touch<'a>(&self, blocks: impl IntoIterator<Item = &'a BlockHash>) {
        let owner = |block: &BlockHash| self.owners.get(place_of(*block)).map_or(0, |one| one.touch(block.0));
        std::hint::black_box(blocks.into_iter().map(owner).fold(0, u64::wrapping_add));
    }

    /// One more record says that `slot` holds the block.
    pub(super) fn add(&mut self, block: BlockHash, slot: u32) -> Change {
        let place = place_of(block);
        let (Some(owner), Some(shard)) = (self.owners.get_mut(place), self.shards.0.get(place)) else {
            return Change::default();
        };
        let new = Holder { slot, count: 1 };
        let Some(holder) = owner.get(block.0).map(Holder::of) else {
            let before = owner.bytes();
            if owner.set(block.0, new.packed()) {
                shard.cells.store(owner.cells().clone());
            }
            return Change { blocks: 1, bytes: difference(owner.bytes(), before) };
        };
        if holder.count > 0 && holder.slot == slot {
            owner.set(block.0, Holder { slot, count: holder.count.saturating_add(1) }.packed());
            return Change::default();
        }
        let mut several = shard.several.write();
        let before = several.bytes();
        if holder.count > 0 {
            let list = several.begin(vec![holder, new]);
            owner.set(block.0, Holder { slot: list, count: 0 }.packed());
        } else {
            several.join(holder.slot, new);
        }
        Change { blocks: 0, bytes: difference(several.bytes(), before) }
    }

    /// One record less says so.
    pub(super) fn release(&mut self, block: BlockHash, slot: u32) -> Change {
        let place = place_of(block);
        let (Some(owner), Some(shard)) = (self.owners.get_mut(place), self.shards.0.get(place)) else {
            return Change::default();
        };
        let Some(holder) = owner.get(block.0).map(Holder::of) else { return Change::default() };
        if holder.count == 0 {
            let mut several = shard.several.write();
            let before = several.bytes();
            if let Some(last) = several.leave(holder.slot, slot) {
                owner.set(block.0, last.packed());
            }
            return Change { blocks: 0, bytes: difference(several.bytes(), before) };
        }
        if holder.slot != slot {
            return Change::default();
        }
        if holder.count > 1 {
            owner.set(block.0, Holder { slot, count: holder.count - 1 }.packed());
            return Change::default();
        }
        let before = owner.bytes();
        if owner.remove(block.0) {
            shard.cells.store(owner.cells().clone());
        }
        Change { blocks: -1, bytes: difference(owner.bytes(), before) }
    }
}

impl Several {
    fn of(&self, list: u32) -> &[Holder] {
        self.lists.get(list as usize).map_or(&[], Vec::as_slice)
    }

    /// Bytes that all of it takes.
    fn bytes(&self) -> usize {
        self.inner
            + heap(self.lists.capacity() * size_of::<Vec<Holder>>())
            + heap(self.free.capacity() * size_of::<u32>())
    }

    fn begin(&mut self, both: Vec<Holder>) -> u32 {
        self.inner += heap(both.capacity() * size_of::<Holder>());
        let place = self.free.pop().unwrap_or_else(|| {
            room(&mut self.lists, 1);
            self.lists.push(Vec::new());
            u32::try_from(self.lists.len() - 1).unwrap_or(u32::MAX)
        });
        if let Some(list) = self.lists.get_mut(place as usize) {
            *list = both;
        }
        place
    }

    fn join(&mut self, list: u32, new: Holder) {
        let Some(holders) = self.lists.get_mut(list as usize) else { return };
        if let Some(holder) = holders.iter_mut().find(|holder| holder.slot == new.slot) {
            holder.count = holder.count.saturating_add(1);
            return;
        }
        let before = holders.capacity();
        room(holders, 1);
        holders.push(new);
        self.inner += heap(holders.capacity() * size_of::<Holder>()) - heap(before * size_of::<Holder>());
    }

    /// One record less. The other holder when only one is left: then the list is no more.
    fn leave(&mut self, list: u32, slot: u32) -> Option<Holder> {
        let holders = self.lists.get_mut(list as usize)?;
        let at = holders.iter().position(|holder| holder.slot == slot)?;
        if let Some(one) = holders.get_mut(at).filter(|one| one.count > 1) {
            one.count -= 1;
            return None;
        }
        let before = holders.capacity();
        holders.swap_remove(at);
        let last = if let [last] = holders.as_slice() { Some(*last) } else { None };
        if last.is_some() {
            *holders = Vec::new();
        } else {
            fit(holders);
        }
        self.inner += heap(holders.capacity() * size_of::<Holder>());
        self.inner -= heap(before * size_of::<Holder>());
        if last.is_some() {
            self.free.push(list);
            if self.free.len() == self.lists.len() {
                *self = Self::default();
            }
        }
        last
    }
}
