//! Finds the blocks of one engine by the engine's own hashes.

use super::{
    lockfree_map::{MapWriter, map_bytes},
    memory::{difference, heap},
};

/// Number of parts of a large table. Only one part is rebuilt at a time, which keeps the peak of memory low.
const PARTS: usize = 64;
/// Blocks above which a table is divided into parts.
const MAX_UNDIVIDED: usize = 65_536;

/// Position of a block: its run, and its index in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) run: u32,
    pub(super) at: u32,
}

/// The positions by engine hash.
#[derive(Debug, Default)]
pub(super) struct BlockPositions {
    parts: Vec<MapWriter>,
    held: usize,
    bytes: usize,
}

/// Spreads engine hashes, which may be plain numbers. The function is a bijection: no two hashes become one.
fn mix(engine: u64) -> u64 {
    let mixed = (engine ^ 0x2545_f491_4f6c_dd1d).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 32)
}

impl BlockPositions {
    /// Loads a block's cell into the cache. The result has no meaning.
    pub(super) fn prefetch(&self, engine: u64) -> u64 {
        let hash = mix(engine);
        self.part(hash).map_or(0, |part| part.prefetch(hash))
    }

    pub(super) fn find(&self, engine: u64) -> Option<Position> {
        let hash = mix(engine);
        let value = self.part(hash)?.get(hash)?;
        Some(Position { run: (value >> 32) as u32, at: (value & 0xffff_ffff) as u32 })
    }

    /// Adds a block. Returns false if its hash is known.
    pub(super) fn insert_new(&mut self, engine: u64, position: Position) -> bool {
        if self.parts.is_empty() || (self.parts.len() == 1 && self.held >= MAX_UNDIVIDED) {
            self.divide();
        }
        let (hash, value) = (mix(engine), u64::from(position.run) << 32 | u64::from(position.at));
        let new = self.change(hash, |part| part.insert(hash, value));
        self.held += usize::from(new.is_some());
        new.is_some()
    }

    pub(super) fn remove(&mut self, engine: u64) {
        let hash = mix(engine);
        self.change(hash, |part| Some(part.remove(hash)));
        self.held = self.held.saturating_sub(1);
        if self.held == 0 {
            *self = Self::default();
        }
    }

    /// Returns the bytes that the table takes on the heap.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn divide(&mut self) {
        let old = std::mem::take(&mut self.parts);
        let parts = if old.is_empty() { 1 } else { PARTS };
        self.parts = (0..parts).map(|_| MapWriter::default()).collect();
        self.bytes = heap(self.parts.capacity() * size_of::<MapWriter>());
        for (hash, value) in old.iter().flat_map(MapWriter::entries) {
            self.change(hash, |part| part.insert(hash, value));
        }
    }

    /// Changes the part of a hash. Nothing reads the parts concurrently, so a rebuilt one need not be
    /// published.
    fn change(&mut self, hash: u64, change: impl FnOnce(&mut MapWriter) -> Option<bool>) -> Option<bool> {
        let number = self.part_of(hash);
        let part = self.parts.get_mut(number)?;
        let cells = part.cells();
        let rebuilt = change(part)?;
        if rebuilt {
            let before = map_bytes(cells);
            self.bytes = self.bytes.saturating_add_signed(difference(part.bytes(), before) as isize);
        }
        Some(rebuilt)
    }

    fn part_of(&self, hash: u64) -> usize {
        // The map itself uses the lowest bits.
        (hash >> 40) as usize % self.parts.len().max(1)
    }

    fn part(&self, hash: u64) -> Option<&MapWriter> {
        self.parts.get(self.part_of(hash))
    }
}
