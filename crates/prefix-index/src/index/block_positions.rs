//! Finds the blocks of one engine by the engine's own hashes.
//!
//! A table of lines of 64 bytes, each with five cells. A cell has a *tag*, 32 bits of the mixed hash, and the
//! position of a block. The run of the block has its whole hash, with which the caller compares.
//!
//! A key lies in its home line, or after it if that was full. A line counts the keys that passed it, so a
//! search ends at the first line that no key passed. A removed key leaves nothing behind: a table whose
//! engine evicts as much as it stores is never rebuilt.

use super::{
    memory::{difference, heap},
    mixer::Mixer,
};

/// Number of parts of a large table. Only one part is rebuilt at a time, which keeps the peak of memory low.
const PARTS: usize = 64;
/// Blocks above which a table is divided into parts.
const MAX_UNDIVIDED: usize = 65_536;
/// Cells in a line.
const WIDTH: usize = 5;
/// Largest share of used cells.
const MAX_USED: (usize, usize) = (4, 5);
/// Tag of a cell without a block.
const EMPTY: u32 = 0;

/// Position of a block: its run, and its index in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) run: u32,
    pub(super) at: u32,
}

/// The positions by engine hash.
#[derive(Debug, Default)]
pub(super) struct BlockPositions {
    parts: Vec<Part>,
    held: usize,
    bytes: usize,
    mixer: Mixer,
}

/// Part of a table, rebuilt alone.
#[derive(Debug, Default)]
struct Part {
    lines: Box<[Line]>,
    held: usize,
}

#[derive(Clone, Debug, Default)]
#[repr(align(64))]
struct Line {
    tags: [u32; WIDTH],
    runs: [u32; WIDTH],
    ats: [u32; WIDTH],
    /// Number of used cells, which are the first ones, and number of keys that lie after this line because
    /// it was full, times `PASSED`.
    state: u32,
}

/// Step of [`Line::state`] for one key that passed the line.
const PASSED: u32 = 8;

/// Returns 32 bits of an engine hash, which may be a plain number.
fn tag_of(mixer: Mixer, engine: u64) -> u32 {
    (mixer.mix(engine) as u32).max(EMPTY + 1)
}

impl BlockPositions {
    /// Loads the lines of blocks into the cache. The result has no meaning.
    ///
    /// A loop of few instructions, so that the processor waits for many lines at once.
    pub(super) fn prefetch(&self, engine: &[u64]) -> u32 {
        let mixer = self.mixer;
        let tags = engine.iter().map(|hash| tag_of(mixer, *hash));
        if let [part] = &self.parts[..] {
            return tags.map(|tag| part.load(tag)).fold(0, u32::wrapping_add);
        }
        tags.map(|tag| self.part(tag).map_or(0, |part| part.load(tag))).fold(0, u32::wrapping_add)
    }

    /// Finds a block. `is` returns whether the block at a position has this hash.
    pub(super) fn find(&self, engine: u64, is: impl Fn(Position) -> bool) -> Option<Position> {
        let tag = tag_of(self.mixer, engine);
        self.part(tag)?.find(tag, is).map(|(_, _, position)| position)
    }

    /// Adds a block. Returns false if its hash is known.
    pub(super) fn insert_new(
        &mut self,
        engine: u64,
        position: Position,
        is: impl Fn(Position) -> bool,
    ) -> bool {
        if self.parts.is_empty() || (self.parts.len() == 1 && self.held >= MAX_UNDIVIDED) {
            self.divide();
        }
        let new = self.add(tag_of(self.mixer, engine), position, is);
        self.held += usize::from(new);
        new
    }

    /// Makes space for blocks that will be added, so that the table grows once for all of them. It grows to
    /// twice its blocks at most, because they may be known.
    pub(super) fn reserve(&mut self, more: usize) {
        let held = self.held + more.min(self.held);
        if self.parts.len() == 1 && held <= MAX_UNDIVIDED {
            self.change(EMPTY, |part| {
                if held * MAX_USED.1 > part.lines.len() * WIDTH * MAX_USED.0 {
                    part.rebuild(held);
                }
                true
            });
        }
    }

    /// Removes the block at a position.
    pub(super) fn remove(&mut self, engine: u64, position: Position) {
        let tag = tag_of(self.mixer, engine);
        let removed = self.change(tag, |part| part.remove(tag, position));
        self.held -= usize::from(removed);
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
        self.parts = (0..parts).map(|_| Part::default()).collect();
        self.bytes = heap(self.parts.capacity() * size_of::<Part>());
        for (tag, position) in old.iter().flat_map(Part::keys) {
            self.add(tag, position, |_| false);
        }
    }

    fn add(&mut self, tag: u32, position: Position, is: impl Fn(Position) -> bool) -> bool {
        self.change(tag, |part| part.insert(tag, position, is))
    }

    fn change(&mut self, tag: u32, change: impl FnOnce(&mut Part) -> bool) -> bool {
        let number = self.part_of(tag);
        let Some(part) = self.parts.get_mut(number) else { return false };
        let lines = part.lines.len();
        let changed = change(part);
        if part.lines.len() != lines {
            let grown = difference(bytes_of(part.lines.len()), bytes_of(lines));
            self.bytes = self.bytes.saturating_add_signed(grown as isize);
        }
        changed
    }

    /// Returns the number of a key's part. The highest bits choose the line.
    fn part_of(&self, tag: u32) -> usize {
        // There are 0, 1 or 64 parts.
        tag as usize & self.parts.len().saturating_sub(1)
    }

    fn part(&self, tag: u32) -> Option<&Part> {
        self.parts.get(self.part_of(tag))
    }
}

impl Part {
    /// Reads from a key's line.
    fn load(&self, tag: u32) -> u32 {
        self.lines.get(self.home(tag)).map_or(0, |line| line.state)
    }

    /// Returns the line of a key, its cell in the line, and its position.
    fn find(&self, tag: u32, is: impl Fn(Position) -> bool) -> Option<(usize, usize, Position)> {
        let mut number = self.home(tag);
        for _ in 0..self.lines.len() {
            let line = self.lines.get(number)?;
            let mut cells = line.cells_of(tag);
            while cells != 0 {
                let cell = cells.trailing_zeros() as usize;
                if let Some(position) = line.position(cell).filter(|position| is(*position)) {
                    return Some((number, cell, position));
                }
                cells &= cells - 1;
            }
            if line.state < PASSED {
                return None;
            }
            number = self.after(number);
        }
        None
    }

    /// Adds a key. Returns false if it is known.
    fn insert(&mut self, tag: u32, position: Position, is: impl Fn(Position) -> bool) -> bool {
        let full = (self.held + 1) * MAX_USED.1 > self.lines.len() * WIDTH * MAX_USED.0;
        let home = self.home(tag);
        if let Some(line) = self.lines.get_mut(home).filter(|_| !full)
            && line.state < PASSED
            && line.cells_of(tag) == 0
            && line.push(tag, position)
        {
            self.held += 1;
            return true;
        }
        if self.find(tag, is).is_some() {
            return false;
        }
        if full {
            self.rebuild(self.held + 1);
        }
        self.put(tag, position);
        self.held += 1;
        true
    }

    fn put(&mut self, tag: u32, position: Position) {
        let mut number = self.home(tag);
        for _ in 0..self.lines.len() {
            let Some(line) = self.lines.get_mut(number) else { return };
            if line.push(tag, position) {
                return;
            }
            line.state += PASSED;
            number = self.after(number);
        }
    }

    fn remove(&mut self, tag: u32, position: Position) -> bool {
        let Some((found, cell, _)) = self.find(tag, |other| other == position) else { return false };
        let mut number = self.home(tag);
        while number != found {
            if let Some(line) = self.lines.get_mut(number) {
                line.state -= PASSED;
            }
            number = self.after(number);
        }
        if let Some(line) = self.lines.get_mut(found) {
            line.swap_remove(cell);
        }
        self.held -= 1;
        if self.held == 0 || (self.held * 4 < self.lines.len() * WIDTH && self.lines.len() > 2) {
            self.rebuild(self.held);
        }
        true
    }

    /// Moves all keys to a table with twice as many cells as `held` keys need.
    fn rebuild(&mut self, held: usize) {
        let lines = vec![Line::default(); (held * 2).div_ceil(WIDTH)];
        let old = std::mem::replace(&mut self.lines, lines.into_boxed_slice());
        for (tag, position) in old.iter().flat_map(Line::keys) {
            self.put(tag, position);
        }
    }

    fn keys(&self) -> impl Iterator<Item = (u32, Position)> {
        self.lines.iter().flat_map(Line::keys)
    }

    /// Returns the first line of a key. Keys keep their order when the number of lines changes, so a rebuild
    /// reads and writes from the first line to the last.
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.lines.len() as u64) >> 32) as usize
    }

    fn after(&self, number: usize) -> usize {
        if number + 1 < self.lines.len() { number + 1 } else { 0 }
    }
}

impl Line {
    /// Returns the cells with a tag, one bit each.
    fn cells_of(&self, tag: u32) -> u32 {
        (0..).zip(&self.tags).fold(0, |cells, (cell, found)| cells | u32::from(*found == tag) << cell)
    }

    fn used(&self) -> usize {
        (self.state % PASSED) as usize
    }

    fn position(&self, cell: usize) -> Option<Position> {
        Some(Position { run: *self.runs.get(cell)?, at: *self.ats.get(cell)? })
    }

    fn keys(&self) -> impl Iterator<Item = (u32, Position)> {
        let positions = self.runs.iter().zip(&self.ats).map(|(run, at)| Position { run: *run, at: *at });
        self.tags.iter().copied().zip(positions).take(self.used())
    }

    /// Adds a key. Returns false if the line is full.
    fn push(&mut self, tag: u32, position: Position) -> bool {
        let free = self.used();
        let added = self.set(free, tag, position);
        self.state += u32::from(added);
        added
    }

    /// Removes a key. The last one takes its cell.
    fn swap_remove(&mut self, cell: usize) {
        let last = self.used().saturating_sub(1);
        if let (Some(tag), Some(position)) = (self.tags.get(last).copied(), self.position(last)) {
            self.set(cell, tag, position);
            self.set(last, EMPTY, Position { run: 0, at: 0 });
            self.state -= 1;
        }
    }

    fn set(&mut self, cell: usize, tag: u32, position: Position) -> bool {
        let of_cell = (self.tags.get_mut(cell), self.runs.get_mut(cell), self.ats.get_mut(cell));
        let (Some(of_tag), Some(run), Some(at)) = of_cell else { return false };
        (*of_tag, *run, *at) = (tag, position.run, position.at);
        true
    }
}

/// Returns the bytes that this number of lines takes on the heap.
fn bytes_of(lines: usize) -> usize {
    match lines {
        0 => 0,
        // An aligned allocation may waste up to one line.
        lines => heap(lines * size_of::<Line>()) + align_of::<Line>(),
    }
}

#[cfg(test)]
mod tests;
