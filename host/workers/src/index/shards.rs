//! The block table: which slots hold a block, with a count of the records that say so. Sharded, so that the writer and
//! lookups seldom meet, and each lock is held for one block.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasherDefault, Hasher},
};

use parking_lot::RwLock;

use crate::id::BlockHash;

/// A power of two.
const SHARDS: usize = 256;

/// Bytes a block is accounted with: key, holder and the table's slack.
pub(super) const BYTES_A_BLOCK: usize = 44;
/// Bytes each holder after the first is accounted with.
pub(super) const BYTES_A_HOLDER: usize = 12;

/// Block hashes are hashes already.
#[derive(Debug, Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, bytes: &[u8]) {
        // Not used for u64 keys; any mixing will do.
        self.0 = bytes.iter().fold(self.0, |hash, byte| hash.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type Table = HashMap<BlockHash, Holders, BuildHasherDefault<AsItIs>>;

/// Slots that hold a block, each with its count of records. Most blocks have one holder.
#[derive(Debug)]
enum Holders {
    One(u32, u32),
    #[expect(clippy::box_collection, reason = "the thin pointer keeps the common case at 16 bytes")]
    Many(Box<Vec<(u32, u32)>>),
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
        match shard.read().get(&block) {
            None => {}
            Some(Holders::One(slot, _)) => each(*slot),
            Some(Holders::Many(many)) => many.iter().for_each(|(slot, _)| each(*slot)),
        }
    }

    /// Whether `slot` holds the block.
    pub(super) fn holds(&self, block: BlockHash, slot: u32) -> bool {
        let Some(shard) = self.shard(block) else { return false };
        match shard.read().get(&block) {
            None => false,
            Some(Holders::One(holder, _)) => *holder == slot,
            Some(Holders::Many(many)) => many.iter().any(|(holder, _)| *holder == slot),
        }
    }

    /// One more record says that `slot` holds the block.
    pub(super) fn add(&self, block: BlockHash, slot: u32) -> Change {
        let Some(shard) = self.shard(block) else { return Change::default() };
        match shard.write().entry(block) {
            Entry::Vacant(vacant) => {
                vacant.insert(Holders::One(slot, 1));
                Change { blocks: 1, bytes: signed(BYTES_A_BLOCK) }
            }
            Entry::Occupied(mut occupied) => occupied.get_mut().add(slot),
        }
    }

    /// One record less says so.
    pub(super) fn release(&self, block: BlockHash, slot: u32) -> Change {
        let Some(shard) = self.shard(block) else { return Change::default() };
        let mut table = shard.write();
        let Some(holders) = table.get_mut(&block) else { return Change::default() };
        let (empty, change) = holders.release(slot);
        if empty {
            table.remove(&block);
            // A table that was once large gives its room back.
            if table.len() * 4 < table.capacity() && table.capacity() > 64 {
                table.shrink_to_fit();
            }
        }
        change
    }

    fn shard(&self, block: BlockHash) -> Option<&RwLock<Table>> {
        // The table itself uses the lowest and the highest bits.
        let place = (block.0 >> 40) as usize % SHARDS;
        self.0.get(place)
    }
}

impl Holders {
    fn add(&mut self, slot: u32) -> Change {
        match self {
            Self::One(holder, count) if *holder == slot => {
                *count += 1;
                Change::default()
            }
            Self::One(holder, count) => {
                *self = Self::Many(Box::new(vec![(*holder, *count), (slot, 1)]));
                Change { blocks: 0, bytes: signed(2 * BYTES_A_HOLDER) }
            }
            Self::Many(many) => match many.iter_mut().find(|(holder, _)| *holder == slot) {
                Some((_, count)) => {
                    *count += 1;
                    Change::default()
                }
                None => {
                    many.push((slot, 1));
                    Change { blocks: 0, bytes: signed(BYTES_A_HOLDER) }
                }
            },
        }
    }

    /// Whether nobody holds it any more, and what that changed.
    fn release(&mut self, slot: u32) -> (bool, Change) {
        match self {
            Self::One(holder, count) if *holder == slot => {
                *count -= 1;
                let gone = *count == 0;
                let change = if gone {
                    Change { blocks: -1, bytes: -signed(BYTES_A_BLOCK) }
                } else {
                    Change::default()
                };
                (gone, change)
            }
            Self::One(..) => (false, Change::default()),
            Self::Many(many) => {
                let Some(place) = many.iter().position(|(holder, _)| *holder == slot) else {
                    return (false, Change::default());
                };
                if let Some((_, count)) = many.get_mut(place) {
                    *count -= 1;
                    if *count > 0 {
                        return (false, Change::default());
                    }
                }
                many.swap_remove(place);
                match (many.len(), many.first().copied()) {
                    (1, Some((holder, count))) => {
                        *self = Self::One(holder, count);
                        (false, Change { blocks: 0, bytes: -signed(2 * BYTES_A_HOLDER) })
                    }
                    _ => (false, Change { blocks: 0, bytes: -signed(BYTES_A_HOLDER) }),
                }
            }
        }
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
