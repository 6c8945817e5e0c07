//! Where the blocks of one engine are, by the engine's hashes.

use super::{
    bytes::{difference, heap},
    cells::Owner,
};

/// Parts of a large table: one is written anew at a time, so that old and new cells together stay small.
const PARTS: usize = 64;
/// Blocks that one part may hold alone.
const ALONE: usize = 8_192;

/// Where a block is: in which run, and where in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) run: u32,
    pub(super) at: u32,
}

/// The table.
#[derive(Debug, Default)]
pub(super) struct Places {
    parts: Vec<Owner>,
    held: usize,
    bytes: usize,
}

/// Engines' hashes may be plain numbers. No two become one.
fn mixed(engine: u64) -> u64 {
    let mixed = (engine ^ 0x2545_f491_4f6c_dd1d).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 32)
}

impl Places {
    /// Asks for a block's place before it is needed.
    pub(super) fn touch(&self, engine: u64) -> u64 {
        let hash = mixed(engine);
        self.part(hash).map_or(0, |part| part.touch(hash))
    }

    pub(super) fn find(&self, engine: u64) -> Option<Place> {
        let hash = mixed(engine);
        let value = self.part(hash)?.get(hash)?;
        Some(Place { run: (value >> 32) as u32, at: (value & 0xffff_ffff) as u32 })
    }

    pub(super) fn insert(&mut self, engine: u64, place: Place) {
        if self.parts.is_empty() || (self.parts.len() == 1 && self.held >= ALONE) {
            self.divide();
        }
        self.held += 1;
        self.set(mixed(engine), u64::from(place.run) << 32 | u64::from(place.at));
    }

    pub(super) fn remove(&mut self, engine: u64) {
        let hash = mixed(engine);
        let number = self.number(hash);
        let Some(part) = self.parts.get_mut(number) else { return };
        let before = part.bytes();
        part.remove(hash);
        self.bytes = self.bytes.saturating_add_signed(difference(part.bytes(), before) as isize);
        self.held -= 1;
        if self.held == 0 {
            *self = Self::default();
        }
    }

    /// Bytes that the table takes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn divide(&mut self) {
        let old = std::mem::take(&mut self.parts);
        let parts = if old.is_empty() { 1 } else { PARTS };
        self.parts = (0..parts).map(|_| Owner::default()).collect();
        self.bytes = heap(self.parts.capacity() * size_of::<Owner>());
        old.iter().flat_map(Owner::entries).for_each(|(hash, value)| self.set(hash, value));
    }

    fn set(&mut self, hash: u64, value: u64) {
        let number = self.number(hash);
        let Some(part) = self.parts.get_mut(number) else { return };
        let before = part.bytes();
        part.set(hash, value);
        self.bytes = self.bytes.saturating_add_signed(difference(part.bytes(), before) as isize);
    }

    fn number(&self, hash: u64) -> usize {
        // The part itself uses the lowest bits.
        (hash >> 40) as usize % self.parts.len().max(1)
    }

    fn part(&self, hash: u64) -> Option<&Owner> {
        self.parts.get(self.number(hash))
    }
}
