//! A hash map from `u64` to `u64` that one thread writes while other threads read it without a lock.
//!
//! Keys are hashes, whose places a stranger cannot choose (`mixer.rs`). Open addressing: a key lies in its
//! home line (64 bytes, four cells) or in a later cell, with no empty cell in between. A lookup usually costs
//! one cache miss, and lookups of several keys overlap their misses. Cells never move. When the map is too
//! full or too sparse, its writer builds a new one and publishes it; readers of the old one see the content
//! from just before.
//!
//! # Why a reader never returns another key's value
//! A cell changes its key in three steps. Both writes are releases and both reads acquires, so a reader that
//! sees a store sees everything that was stored before it.
//!
//! ```text
//!                         remove A    insert B into the same cell
//!                         --------    -----------------------------
//! key          A      ->  TOMBSTONE   TOMBSTONE   TOMBSTONE   B
//! value        v1         v1          v1      ->  v2          v2
//! reuse_count  n          n       ->  n+1         n+1         n+1
//!                                     step 1      step 2      step 3
//! ```
//!
//! A reader loads `reuse_count`, then the key, then the value, then `reuse_count` again. If it saw key A and
//! value v2, it also sees step 1, because step 1 was stored before v2: the two counts differ, and it looks
//! again. If its first count was already n+1, it had seen A's removal as well and could not have found key A.
//!
//! A lookup that finds nothing needs no second look: the cell of a key stays the same while the key is held,
//! and no cell between its home and it is empty.
//!
//! `tests/models` checks these rules in every interleaving, and breaks each one to see the check fail.

use std::sync::Arc;

use super::{memory::heap, mixer::Mixer};
use crate::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// Key of a cell that ends every search: it is unused, and no key lies after it that has its home before it.
const EMPTY: u64 = 0;
/// Key of a cell whose key was removed while others may lie after it.
const TOMBSTONE: u64 = 1;

/// Cells in a line.
const WIDTH: usize = 4;
/// Largest share of used cells: a search for a key that is not there passes 5 cells at two thirds, 13 at four
/// fifths. The models need small maps that are not rebuilt.
const MAX_USED: (usize, usize) = if cfg!(loom) { (4, 5) } else { (2, 3) };

#[derive(Debug, Default)]
struct Cell {
    key: AtomicU64,
    value: AtomicU64,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Line([Cell; WIDTH]);

/// How often removed keys' cells became available to other keys. It has a cache line of its own, so that a
/// reader's miss on it overlaps the miss on the cell and does not delay reading the map's address and length.
#[derive(Debug, Default)]
#[repr(align(64))]
struct ReuseCount(AtomicU64);

/// The map as readers see it.
#[derive(Debug, Default)]
pub(super) struct LockfreeMap {
    lines: Box<[Line]>,
    mixer: Mixer,
    reuse_count: ReuseCount,
}

/// Result of a search by the writer.
enum Search {
    /// The key's cell.
    Held(usize),
    /// A cell that the key can take, and whether it is a tombstone.
    Free(usize, bool),
    Full,
}

/// The two hashes that mean "empty" and "tombstone" share a key with a third one, out of 2^64.
fn key_of(hash: u64) -> u64 {
    hash.max(TOMBSTONE + 1)
}

impl LockfreeMap {
    fn new(cells: usize, mixer: Mixer) -> Self {
        let lines = (0..cells.div_ceil(WIDTH)).map(|_| Line::default()).collect();
        Self { lines, mixer, reuse_count: ReuseCount::default() }
    }

    /// Returns the value of a key.
    pub(super) fn find(&self, hash: u64) -> Option<u64> {
        let key = key_of(hash);
        let (front, back) = self.lines.split_at(self.home(key));
        'again: loop {
            let reuse_count = self.reuse_count.0.load(Acquire);
            for cell in back.iter().chain(front).flat_map(|line| &line.0) {
                let found = cell.key.load(Acquire);
                if found == EMPTY {
                    return None;
                }
                if found == key {
                    let value = cell.value.load(Acquire);
                    if self.reuse_count.0.load(Relaxed) == reuse_count {
                        return Some(value);
                    }
                    // The cell may belong to another key by now.
                    continue 'again;
                }
            }
            return None;
        }
    }

    /// Returns the first line of a key. Shards and parts choose by other bits of the hash.
    fn home(&self, key: u64) -> usize {
        (((self.mixer.mix(key) & 0xffff_ffff) * self.lines.len() as u64) >> 32) as usize
    }

    fn cell(&self, at: usize) -> Option<&Cell> {
        self.lines.get(at / WIDTH)?.0.get(at % WIDTH)
    }

    fn len(&self) -> usize {
        self.lines.len() * WIDTH
    }

    fn search(&self, key: u64) -> Search {
        let home = self.home(key);
        let (front, back) = self.lines.split_at(home);
        let mut tombstone = None;
        let lines = (home..).zip(back).chain((0..).zip(front));
        for (line, cells) in lines {
            for (at, cell) in (line * WIDTH..).zip(&cells.0) {
                match cell.key.load(Relaxed) {
                    EMPTY => return tombstone.map_or(Search::Free(at, false), |at| Search::Free(at, true)),
                    TOMBSTONE => tombstone = tombstone.or(Some(at)),
                    found if found == key => return Search::Held(at),
                    _ => {}
                }
            }
        }
        tombstone.map_or(Search::Full, |at| Search::Free(at, true))
    }

    fn put(&self, at: usize, key: u64, value: u64) {
        if let Some(cell) = self.cell(at) {
            cell.value.store(value, Release);
            cell.key.store(key, Release);
        }
    }

    /// Makes readers look again if they found a key that has been removed since.
    fn count_reuse(&self) {
        self.reuse_count.0.store(self.reuse_count.0.load(Relaxed) + 1, Release);
    }

    fn key(&self, at: usize) -> u64 {
        self.cell(at).map_or(EMPTY, |cell| cell.key.load(Relaxed))
    }

    fn set_key(&self, at: usize, key: u64) {
        if let Some(cell) = self.cell(at) {
            cell.key.store(key, Release);
        }
    }

    fn entries(&self) -> impl Iterator<Item = (u64, u64)> {
        let cells = self.lines.iter().flat_map(|line| &line.0);
        cells
            .map(|cell| (cell.key.load(Relaxed), cell.value.load(Relaxed)))
            .filter(|(key, _)| *key > TOMBSTONE)
    }
}

/// The map's single writer.
#[derive(Debug, Default)]
pub(super) struct MapWriter {
    map: Arc<LockfreeMap>,
    /// Number of keys.
    held: usize,
    /// Number of cells with a key or a tombstone.
    used: usize,
    /// A key was removed since the last increment of the reuse count.
    removed: bool,
}

impl MapWriter {
    pub(super) fn get(&self, hash: u64) -> Option<u64> {
        self.map.find(hash)
    }

    /// Sets the value of a key. Returns true if the map was rebuilt and has to be published.
    pub(super) fn set(&mut self, hash: u64, value: u64) -> bool {
        let key = key_of(hash);
        match self.map.search(key) {
            Search::Held(at) => {
                self.map.put(at, key, value);
                false
            }
            free => self.add(key, value, free),
        }
    }

    /// Adds a key that is not held, where a search for it ended.
    fn add(&mut self, key: u64, value: u64, search: Search) -> bool {
        let rebuilt = (self.used + 1) * MAX_USED.1 > self.map.len() * MAX_USED.0;
        let search = if rebuilt {
            self.rebuild(self.held + 1);
            self.map.search(key)
        } else {
            search
        };
        if let Search::Free(at, tombstone) = search {
            if std::mem::take(&mut self.removed) {
                self.map.count_reuse();
            }
            self.map.put(at, key, value);
            self.held += 1;
            self.used += usize::from(!tombstone);
        }
        rebuilt
    }

    /// Removes a key. Returns true if the map was rebuilt and has to be published.
    pub(super) fn remove(&mut self, hash: u64) -> bool {
        let Search::Held(at) = self.map.search(key_of(hash)) else { return false };
        self.map.set_key(at, TOMBSTONE);
        self.removed = true;
        self.held -= 1;
        self.sweep(at);
        let sparse = self.held * 5 < self.map.len() && self.map.len() > 2 * WIDTH;
        if sparse || self.held == 0 {
            self.rebuild(self.held);
        }
        sparse || self.held == 0
    }

    /// Turns the tombstones that end at `at` into empty cells if no search has to pass them.
    fn sweep(&mut self, mut at: usize) {
        let len = self.map.len();
        let next = if at + 1 == len { 0 } else { at + 1 };
        if self.map.key(next) != EMPTY {
            return;
        }
        while self.map.key(at) == TOMBSTONE {
            self.map.set_key(at, EMPTY);
            self.used -= 1;
            at = at.checked_sub(1).unwrap_or(len - 1);
        }
    }

    /// Builds a new map with five cells for every two of `held` keys. The fullest map has three for two.
    fn rebuild(&mut self, held: usize) {
        let map = LockfreeMap::new((held * 5).div_ceil(2), self.map.mixer);
        for (key, value) in self.map.entries() {
            if let Search::Free(at, _) = map.search(key) {
                map.put(at, key, value);
            }
        }
        self.map = Arc::new(map);
        (self.used, self.removed) = (self.held, false);
    }

    /// Returns the map to publish to readers.
    pub(super) fn map(&self) -> &Arc<LockfreeMap> {
        &self.map
    }

    #[cfg(test)]
    pub(super) fn entries(&self) -> impl Iterator<Item = (u64, u64)> {
        self.map.entries()
    }

    /// Returns the bytes that the map takes on the heap.
    pub(super) fn bytes(&self) -> usize {
        match self.map.lines.len() {
            0 => 0,
            lines => {
                let header = 2 * size_of::<usize>() + size_of::<LockfreeMap>();
                // Each of the two aligned allocations may waste up to one line.
                heap(lines * size_of::<Line>()) + heap(header) + 2 * align_of::<Line>()
            }
        }
    }
}

#[cfg(test)]
mod tests;
