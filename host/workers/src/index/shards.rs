//! The block table: which slots hold a block, with a count of the records that say so. Sharded, so that the writer and
//! lookups seldom meet, and each lock is held for one block.

use std::collections::hash_map::Entry;

use parking_lot::RwLock;

use crate::{block_map::BlockMap, id::BlockHash};

/// A power of two.
const SHARDS: usize = 256;

/// Bytes a block is accounted with: key, holder and the table's slack.
pub(super) const BYTES_A_BLOCK: usize = 30;
/// Bytes each holder after the first is accounted with.
pub(super) const BYTES_A_HOLDER: usize = 12;

/// One shard.
#[derive(Debug, Default)]
struct Table {
    blocks: BlockMap<Holder>,
    /// The holders of blocks that have several.
    several: Vec<Vec<Holder>>,
    /// Places in `several` that are free.
    free: Vec<u32>,
}

/// A slot that holds a block, and how many records say so. Most blocks have one holder, and are kept in these 8 bytes; a
/// `count` of 0 says that there are several, and `slot` is their place in [`Table::several`].
#[derive(Clone, Copy, Debug)]
struct Holder {
    slot: u32,
    count: u32,
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

#[derive(Debug)]
pub(super) struct Shards(Box<[RwLock<Table>]>);

impl Default for Shards {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| RwLock::default()).collect())
    }
}

impl Shards {
    /// Calls `each` with every slot that holds the block.
    pub(super) fn holders(&self, block: BlockHash, mut each: impl FnMut(u32)) {
        let Some(shard) = self.shard(block) else { return };
        let table = shard.read();
        let Some(holder) = table.blocks.get(&block) else { return };
        table.all(holder).iter().for_each(|holder| each(holder.slot));
    }

    /// Whether `slot` holds the block.
    pub(super) fn holds(&self, block: BlockHash, slot: u32) -> bool {
        let Some(shard) = self.shard(block) else { return false };
        let table = shard.read();
        table.blocks.get(&block).is_some_and(|holder| table.all(holder).iter().any(|one| one.slot == slot))
    }

    /// One more record says that `slot` holds the block.
    pub(super) fn add(&self, block: BlockHash, slot: u32) -> Change {
        self.shard(block).map_or(Change::default(), |shard| shard.write().add(block, slot))
    }

    /// One record less says so.
    pub(super) fn release(&self, block: BlockHash, slot: u32) -> Change {
        self.shard(block).map_or(Change::default(), |shard| shard.write().release(block, slot))
    }

    fn shard(&self, block: BlockHash) -> Option<&RwLock<Table>> {
        // The table itself uses the lowest and the highest bits.
        let place = (block.0 >> 40) as usize % SHARDS;
        self.0.get(place)
    }
}

impl Table {
    fn all<'a>(&'a self, holder: &'a Holder) -> &'a [Holder] {
        if holder.count > 0 {
            return std::slice::from_ref(holder);
        }
        self.several.get(holder.slot as usize).map_or(&[], Vec::as_slice)
    }

    fn add(&mut self, block: BlockHash, slot: u32) -> Change {
        let new = Holder { slot, count: 1 };
        let holder = match self.blocks.entry(block) {
            Entry::Vacant(vacant) => {
                vacant.insert(new);
                return Change { blocks: 1, bytes: signed(BYTES_A_BLOCK) };
            }
            Entry::Occupied(occupied) => occupied.into_mut(),
        };
        if holder.count > 0 && holder.slot == slot {
            holder.count += 1;
            return Change::default();
        }
        if holder.count > 0 {
            let both = vec![*holder, new];
            let place = self.free.pop().unwrap_or_else(|| {
                self.several.push(Vec::new());
                u32::try_from(self.several.len() - 1).unwrap_or(u32::MAX)
            });
            if let Some(several) = self.several.get_mut(place as usize) {
                *several = both;
            }
            *holder = Holder { slot: place, count: 0 };
            return Change { blocks: 0, bytes: signed(4 * BYTES_A_HOLDER) };
        }
        let Some(several) = self.several.get_mut(holder.slot as usize) else { return Change::default() };
        if let Some(holder) = several.iter_mut().find(|holder| holder.slot == slot) {
            holder.count += 1;
            return Change::default();
        }
        several.push(new);
        Change { blocks: 0, bytes: signed(BYTES_A_HOLDER) }
    }

    fn release(&mut self, block: BlockHash, slot: u32) -> Change {
        let Some(holder) = self.blocks.get_mut(&block) else { return Change::default() };
        if holder.count == 0 {
            let place = holder.slot;
            let Some(several) = self.several.get_mut(place as usize) else { return Change::default() };
            let Some(at) = several.iter().position(|holder| holder.slot == slot) else {
                return Change::default();
            };
            if let Some(one) = several.get_mut(at).filter(|one| one.count > 1) {
                one.count -= 1;
                return Change::default();
            }
            several.swap_remove(at);
            let [last] = several.as_slice() else {
                return Change { blocks: 0, bytes: -signed(BYTES_A_HOLDER) };
            };
            *holder = *last;
            *several = Vec::new();
            self.free.push(place);
            return Change { blocks: 0, bytes: -signed(4 * BYTES_A_HOLDER) };
        }
        if holder.slot != slot {
            return Change::default();
        }
        holder.count -= 1;
        if holder.count > 0 {
            return Change::default();
        }
        self.blocks.remove(&block);
        // A table that was once large gives its room back.
        if self.blocks.len() * 4 < self.blocks.capacity() && self.blocks.capacity() > 64 {
            self.blocks.shrink_to_fit();
        }
        Change { blocks: -1, bytes: -signed(BYTES_A_BLOCK) }
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
