//! A table from `u64` to `u64` that one thread writes while others read it without a lock. Keys are hashes already.
//!
//! A key lies in its home line (64 bytes, four cells) or behind it, with no empty cell between: a read is one cache miss as a
//! rule, and reads of several keys do not wait for each other. A cell is never moved; a table that is too full or too empty is
//! written anew, which readers meet when its owner publishes it.
//!
//! # What readers may rely on
//! Only the [`Owner`] writes, and there is one. A cell goes from empty to a key, from the key to gone, and from gone to the
//! next key or, when no key behind it needs it, to empty. While a key is held its cell stays, and no cell between its home and it
//! is empty. Every store is a release and every load of a reader an acquire, so whoever sees a store sees all before it.
//!
//! - The owner takes a cell by writing the value first and the key last; it leaves by writing the key only. So who sees a key sees
//!   its value or a later one of that cell, which may be another key's.
//! - `turns` rises after a key left and before any cell is taken for a new one, ahead of that value. A reader reads it first and
//!   last: who read a later key's value reads a later number at the end, and who began with that number did not meet
//!   the key that had left. So a value that is answered was the key's while the read went on, also when a key leaves, lends its
//!   cell to another and comes back.
//! - Who finds nothing needs no second look: a key that is held all the time is met.
//! - A table that was written anew is left as it was; its readers see the last moment before.
//!
//! `cargo xtask models` tries all of it, and these rules one by one broken.

use std::sync::{
    Arc,
    atomic::{
        AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use super::bytes::heap;

/// Nothing was ever here, or is behind here.
const EMPTY: u64 = 0;
/// The key left; others may lie behind.
const GONE: u64 = 1;

/// Cells in a line.
const WIDTH: usize = 4;

#[derive(Debug, Default)]
struct Cell {
    key: AtomicU64,
    value: AtomicU64,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Line([Cell; WIDTH]);

/// How often cells that keys had left were given to others. In a line of its own: a reader waits for it while it waits for its
/// cell, and for the table's address and length not at all.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Turns(AtomicU64);

/// The cells as readers see them.
#[derive(Debug, Default)]
pub(super) struct Cells {
    lines: Box<[Line]>,
    turns: Turns,
}

/// Where a key is, or could be put.
enum Sought {
    Held(usize),
    /// A cell to be taken, and whether a key was here before.
    Free(usize, bool),
    Full,
}

/// Two keys of 2^64 give way to a third.
fn key_of(hash: u64) -> u64 {
    hash.max(GONE + 1)
}

impl Cells {
    fn new(cells: usize) -> Self {
        let lines = (0..cells.div_ceil(WIDTH)).map(|_| Line::default()).collect();
        Self { lines, turns: Turns::default() }
    }

    /// The value of a key.
    pub(super) fn find(&self, hash: u64) -> Option<u64> {
        let key = key_of(hash);
        let (front, back) = self.lines.split_at(self.home(key));
        'again: loop {
            let turns = self.turns.0.load(Acquire);
            for cell in back.iter().chain(front).flat_map(|line| &line.0) {
                let there = cell.key.load(Acquire);
                if there == EMPTY {
                    return None;
                }
                if there == key {
                    let value = cell.value.load(Acquire);
                    if self.turns.0.load(Relaxed) == turns {
                        return Some(value);
                    }
                    // The cell may have become another key's meanwhile.
                    continue 'again;
                }
            }
            return None;
        }
    }

    /// The first line of a key; shards and parts are told apart by other bits.
    fn home(&self, key: u64) -> usize {
        (((key & 0xffff_ffff) * self.lines.len() as u64) >> 32) as usize
    }

    fn cell(&self, at: usize) -> Option<&Cell> {
        self.lines.get(at / WIDTH)?.0.get(at % WIDTH)
    }

    fn len(&self) -> usize {
        self.lines.len() * WIDTH
    }

    fn seek(&self, key: u64) -> Sought {
        let (home, len) = (self.home(key) * WIDTH, self.len());
        let mut free = None;
        for at in (home..len).chain(0..home) {
            match self.cell(at).map_or(EMPTY, |cell| cell.key.load(Relaxed)) {
                EMPTY => {
                    let (at, used) = free.map_or((at, false), |at| (at, true));
                    return Sought::Free(at, used);
                }
                GONE => free = free.or(Some(at)),
                there if there == key => return Sought::Held(at),
                _ => {}
            }
        }
        free.map_or(Sought::Full, |at| Sought::Free(at, true))
    }

    fn put(&self, at: usize, key: u64, value: u64) {
        if let Some(cell) = self.cell(at) {
            cell.value.store(value, Release);
            cell.key.store(key, Release);
        }
    }

    /// From here on readers that met a key which has left will notice.
    fn next_turn(&self) {
        self.turns.0.store(self.turns.0.load(Relaxed) + 1, Release);
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
        let held = self.lines.iter().flat_map(|line| &line.0);
        held.map(|cell| (cell.key.load(Relaxed), cell.value.load(Relaxed))).filter(|(key, _)| *key > GONE)
    }
}

/// The one writer's side of a table.
#[derive(Debug, Default)]
pub(super) struct Owner {
    cells: Arc<Cells>,
    /// Keys.
    held: usize,
    /// Cells that are not empty.
    used: usize,
    /// A key has left since the cells' last turn.
    left: bool,
}

impl Owner {
    /// Asks for a key's line before it is needed: the answer is of no use but for its having been read.
    pub(super) fn touch(&self, hash: u64) -> u64 {
        let key = key_of(hash);
        self.cells.lines.get(self.cells.home(key)).map_or(0, |line| line.0[0].key.load(Relaxed))
    }

    pub(super) fn get(&self, hash: u64) -> Option<u64> {
        self.cells.find(hash)
    }

    /// Gives a key a value. True: the cells were written anew, and readers have to be given them.
    pub(super) fn set(&mut self, hash: u64, value: u64) -> bool {
        let key = key_of(hash);
        let mut sought = self.cells.seek(key);
        let mut anew = false;
        // Four fifths at most.
        if !matches!(sought, Sought::Held(_)) && (self.used + 1) * 5 > self.cells.len() * 4 {
            self.write_anew(self.held + 1);
            (sought, anew) = (self.cells.seek(key), true);
        }
        match sought {
            Sought::Held(at) => self.cells.put(at, key, value),
            Sought::Free(at, used) => {
                if std::mem::take(&mut self.left) {
                    self.cells.next_turn();
                }
                self.cells.put(at, key, value);
                self.held += 1;
                self.used += usize::from(!used);
            }
            Sought::Full => {}
        }
        anew
    }

    /// Takes a key out. True: the cells were written anew, and readers have to be given them.
    pub(super) fn remove(&mut self, hash: u64) -> bool {
        let Sought::Held(at) = self.cells.seek(key_of(hash)) else { return false };
        self.cells.set_key(at, GONE);
        self.left = true;
        self.held -= 1;
        self.sweep(at);
        let sparse = self.held * 25 < self.cells.len() * 8 && self.cells.len() > 2 * WIDTH;
        if sparse || self.held == 0 {
            self.write_anew(self.held);
        }
        sparse || self.held == 0
    }

    /// Empties cells that no key needs to be passed.
    fn sweep(&mut self, mut at: usize) {
        let len = self.cells.len();
        let next = if at + 1 == len { 0 } else { at + 1 };
        if self.cells.key(next) != EMPTY {
            return;
        }
        while self.cells.key(at) == GONE {
            self.cells.set_key(at, EMPTY);
            self.used -= 1;
            at = at.checked_sub(1).unwrap_or(len - 1);
        }
    }

    /// With a quarter more room than `held` keys must have.
    fn write_anew(&mut self, held: usize) {
        let cells = Cells::new((held * 25).div_ceil(16));
        for (key, value) in self.cells.entries() {
            if let Sought::Free(at, _) = cells.seek(key) {
                cells.put(at, key, value);
            }
        }
        self.cells = Arc::new(cells);
        (self.used, self.left) = (self.held, false);
    }

    /// What readers read.
    pub(super) fn cells(&self) -> &Arc<Cells> {
        &self.cells
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (u64, u64)> {
        self.cells.entries()
    }

    /// Bytes that the cells take.
    pub(super) fn bytes(&self) -> usize {
        match self.cells.lines.len() {
            0 => 0,
            // What alignment may cost, too.
            lines => {
                let table = 2 * size_of::<usize>() + size_of::<Cells>();
                heap(lines * size_of::<Line>()) + heap(table) + 2 * align_of::<Line>()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn cells_hold_what_a_map_holds(steps in proptest::collection::vec((0_u64..200, 0_u8..3), 1..2_000)) {
            let (mut owner, mut model) = (Owner::default(), HashMap::new());
            for (number, (name, action)) in (0_u64..).zip(steps) {
                // Many share a home, and some are the two names that stand for none.
                let hash = if name < 2 { name * 5 } else { name.wrapping_mul(0x0001_0000_1000_0001) << 29 };
                if action == 0 {
                    owner.remove(hash);
                    model.remove(&hash);
                } else {
                    owner.set(hash, number);
                    model.insert(hash, number);
                }
                prop_assert_eq!(owner.get(hash), model.get(&hash).copied());
            }
            model.iter().for_each(|(hash, value)| assert_eq!(owner.get(*hash), Some(*value)));
            prop_assert_eq!(owner.entries().count(), model.len());
            model.keys().for_each(|hash| { owner.remove(*hash); });
            prop_assert_eq!((owner.held, owner.used, owner.bytes()), (0, 0, 0));
        }
    }

    /// Values tell their keys: a reader that found another key's would notice.
    #[test]
    fn readers_never_see_another_key_s_value() {
        use std::sync::atomic::AtomicBool;

        use tokio::time::{Duration, Instant};

        let (published, over) = (arc_swap::ArcSwap::<Cells>::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let reader = || {
                let mut found = 0_u64;
                while !over.load(Relaxed) {
                    for name in 1..400_u64 {
                        let hash = name.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                        if let Some(value) = published.load().find(hash) {
                            assert_eq!(value & 0xffff_ffff, name);
                            found += 1;
                        }
                    }
                }
                found
            };
            let readers = [scope.spawn(reader), scope.spawn(reader)];
            let (mut owner, mut state, begun) = (Owner::default(), 1_u64, Instant::now());
            while begun.elapsed() < Duration::from_millis(300) {
                for turn in 0..1_000_u64 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let name = 1 + (state >> 33) % 399;
                    let hash = name.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    let anew =
                        if turn % 3 == 0 { owner.remove(hash) } else { owner.set(hash, turn << 32 | name) };
                    if anew {
                        published.store(owner.cells().clone());
                    }
                }
            }
            over.store(true, Relaxed);
            assert!(readers.into_iter().all(|reader| reader.join().unwrap() > 0));
        });
    }
}
