//! Columns of the values that decisions read of every candidate: the load of ranks, dense in memory.
//!
//! A rank has a *position* of a chunk as long as anything holds its load: its worker, a pool of a snapshot or
//! a booking. A position can therefore not pass to another rank while a booking of the first one lives. Ranks
//! that join together get neighbouring positions, and a [`crate::Pool`] reads them in a row.
//!
//! A booking writes one cell, half a cache line. Cells of equal facts side by side would be read as quickly,
//! and a booking would write a cache line of each.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering},
};

use parking_lot::Mutex;

use tokio::time::Instant;

use crate::{average::Average, id::BlockHash, invariant::Invariant};

mod engine;
mod remote_load;
mod view;

use engine::EngineCell;
pub use engine::EngineLoad;
pub(crate) use remote_load::RemoteLoad;

/// Positions of a chunk: one for each bit of a word.
pub(crate) const CHUNK: usize = 64;
/// Buckets of the first blocks of booked prompts.
const BUCKETS: usize = 2_048;

/// Tokens in a unit of [`Cell::program_units`], which a sum of all programs then cannot exceed.
pub(crate) const PROGRAM_UNIT: u32 = 16;

/// Load of one rank that is booked here, and the size of its KV cache.
#[derive(Debug, Default)]
#[repr(C, align(32))]
pub(crate) struct Cell {
    pub(crate) requests: AtomicU32,
    pub(crate) prefill_tokens: AtomicU32,
    /// Thousandths of blocks without a hash: partial prompt blocks, output blocks, blocks booked without
    /// reuse. Signed, because additions and releases of different bookings interleave.
    pub(crate) unnamed_millis: AtomicI64,
    /// Number of distinct blocks with a hash that are booked here.
    pub(crate) named: AtomicU32,
    /// Number of KV blocks and their size in tokens, configured or reported; 0 if unknown.
    pub(crate) total_blocks: AtomicU32,
    pub(crate) block_size: AtomicU32,
    /// KV of running agent programs, in units of [`PROGRAM_UNIT`] tokens.
    pub(crate) program_units: AtomicU32,
}

/// Moving averages of one rank.
#[derive(Debug, Default)]
pub(crate) struct Averages {
    pub(crate) ttft: Average,
    /// Microseconds for each 1,000 prompt tokens.
    pub(crate) prefill: Average,
    pub(crate) itl: Average,
    pub(crate) errors: Average,
}

/// The columns of 64 ranks.
#[derive(Debug)]
pub(crate) struct Chunk {
    cells: [Cell; CHUNK],
    remote: [RemoteLoad; CHUNK],
    averages: [Averages; CHUNK],
    engine: [EngineCell; CHUNK],
    created: Instant,
    /// Number of changes of `cells` and `remote`. A reader with a copy of the figures reads them again when
    /// it has risen. Most chunks of a large fleet do not change between two decisions.
    changes: AtomicU64,
    /// Ranks whose worker is eligible whatever the load (`Worker::tell_ranks`), one bit each.
    eligible: AtomicU64,
    /// Positions that no rank has.
    free: AtomicU64,
    /// Whether another gateway has ever booked a rank of the chunk. Decisions read `remote` only then.
    has_remote: AtomicBool,
    /// Ranks on which a prompt is booked, by the bucket of the prompt's first block. A bit may be set
    /// without such a prompt, but a rank without the bit books no prompt with this first block.
    first_blocks: OnceLock<Box<[AtomicU64]>>,
}

/// All chunks of a registry.
#[derive(Debug, Default)]
pub(crate) struct Columns(Mutex<Vec<Arc<Chunk>>>);

/// The place of one rank. Dropping it frees the place.
#[derive(Debug)]
pub(crate) struct Position {
    chunk: Arc<Chunk>,
    at: usize,
}

/// Columns of one rank.
#[derive(Clone, Copy, Debug)]
pub struct RankView<'a> {
    pub(crate) cell: &'a Cell,
    pub(crate) averages: &'a Averages,
    engine: &'a EngineCell,
    /// When the columns were created.
    created: Instant,
    /// `None` if other gateways book nothing.
    pub(crate) remote: Option<&'a RemoteLoad>,
}

impl Columns {
    /// Takes the first free positions, in their order.
    pub(crate) fn allocate(&self, ranks: usize) -> Vec<Position> {
        let mut chunks = self.0.lock();
        chunks.retain(|chunk| chunk.free.load(Ordering::Acquire) != u64::MAX);
        let mut taken = Vec::with_capacity(ranks);
        for chunk in chunks.iter() {
            taken.extend(chunk.allocate(ranks - taken.len()));
        }
        while taken.len() < ranks {
            let chunk = Arc::new(Chunk::new());
            taken.extend(chunk.allocate(ranks - taken.len()));
            chunks.push(chunk);
        }
        taken
    }
}

impl Chunk {
    fn new() -> Self {
        Self {
            cells: std::array::from_fn(|_| Cell::default()),
            remote: std::array::from_fn(|_| RemoteLoad::default()),
            averages: std::array::from_fn(|_| Averages::default()),
            engine: std::array::from_fn(|_| EngineCell::default()),
            created: Instant::now(),
            changes: AtomicU64::new(0),
            eligible: AtomicU64::new(0),
            free: AtomicU64::new(u64::MAX),
            has_remote: AtomicBool::new(false),
            first_blocks: OnceLock::new(),
        }
    }

    fn allocate(self: &Arc<Self>, most: usize) -> Vec<Position> {
        let mut taken = Vec::new();
        while taken.len() < most {
            // Only the owner of `Columns` takes, so a bit that is set stays set.
            let at = self.free.load(Ordering::Acquire).trailing_zeros() as usize;
            if at >= CHUNK {
                break;
            }
            self.free.fetch_and(!(1 << at), Ordering::AcqRel);
            taken.push(Position { chunk: self.clone(), at });
        }
        taken
    }

    /// Returns the number of changes of the load so far. Figures that are read afterwards have all of them.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns the ranks that are eligible whatever the load, one bit each.
    pub(crate) fn eligible(&self) -> u64 {
        self.eligible.load(Ordering::Acquire)
    }

    /// Returns the ranks that may book a prompt that begins with this block, one bit each.
    pub(crate) fn may_book(&self, first: BlockHash) -> u64 {
        let buckets = self.first_blocks.get();
        let word = buckets.and_then(|buckets| buckets.get(bucket(first)));
        word.map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Returns what the columns say of `len` ranks from `at` on.
    pub(crate) fn views(&self, at: usize, len: usize) -> impl Iterator<Item = RankView<'_>> {
        Invariant::LoadColumns.check(at + len <= CHUNK);
        let has_remote = self.has_remote.load(Ordering::Acquire);
        let cells = self.cells.get(at..at + len).unwrap_or_default();
        let averages = self.averages.get(at..at + len).unwrap_or_default();
        let engines = self.engine.get(at..at + len).unwrap_or_default();
        let remote = self.remote.get(at..at + len).unwrap_or_default();
        let rows = cells.iter().zip(averages).zip(engines).zip(remote);
        rows.map(move |(((cell, averages), engine), remote)| RankView {
            cell,
            averages,
            engine,
            created: self.created,
            remote: has_remote.then_some(remote),
        })
    }

    /// Returns what the columns say of one rank.
    pub(crate) fn view(&self, at: usize) -> RankView<'_> {
        let ([cell, ..], [averages, ..]) = (&self.cells, &self.averages);
        let ([engine, ..], [remote, ..]) = (&self.engine, &self.remote);
        let remote = self.remote.get(at).unwrap_or(remote);
        RankView {
            cell: self.cells.get(at).unwrap_or(cell),
            averages: self.averages.get(at).unwrap_or(averages),
            engine: self.engine.get(at).unwrap_or(engine),
            created: self.created,
            remote: self.has_remote.load(Ordering::Acquire).then_some(remote),
        }
    }
}

impl Position {
    pub(crate) fn view(&self) -> RankView<'_> {
        self.chunk.view(self.at)
    }

    pub(crate) fn cell(&self) -> &Cell {
        let [first, ..] = &self.chunk.cells;
        self.chunk.cells.get(self.at).unwrap_or(first)
    }

    /// Returns the load that other gateways book.
    pub(crate) fn remote(&self) -> &RemoteLoad {
        let [first, ..] = &self.chunk.remote;
        self.chunk.remote.get(self.at).unwrap_or(first)
    }

    /// Like [`Position::remote`], for a caller that changes the load: decisions read it from now on.
    pub(crate) fn remote_to_change(&self) -> &RemoteLoad {
        if !self.chunk.has_remote.load(Ordering::Relaxed) {
            self.chunk.has_remote.store(true, Ordering::Release);
        }
        self.remote()
    }

    /// Counts a change of the load that was made here. Copies of the load are out of date until then.
    pub(crate) fn count_change(&self) {
        self.chunk.changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn chunk(&self) -> &Arc<Chunk> {
        &self.chunk
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn is_eligible(&self) -> bool {
        self.chunk.eligible() & self.bit() != 0
    }

    pub(crate) fn set_eligible(&self, eligible: bool) {
        set(&self.chunk.eligible, self.bit(), eligible);
    }

    /// Sets whether the rank books a prompt that begins with a block of the bucket of `first`. The caller
    /// holds the lock of the rank's blocks.
    pub(crate) fn set_books(&self, first: BlockHash, books: bool) {
        let buckets =
            self.chunk.first_blocks.get_or_init(|| (0..BUCKETS).map(|_| AtomicU64::new(0)).collect());
        if let Some(word) = buckets.get(bucket(first)) {
            set(word, self.bit(), books);
        }
    }

    fn bit(&self) -> u64 {
        1 << self.at
    }
}

impl Drop for Position {
    fn drop(&mut self) {
        // All bookings have ended, so the load is already 0. The worker's own values are cleared here.
        let RankView { cell, averages, engine, .. } = self.view();
        cell.total_blocks.store(0, Ordering::Relaxed);
        cell.block_size.store(0, Ordering::Relaxed);
        averages.clear();
        engine.clear();
        self.set_eligible(false);
        self.chunk.free.fetch_or(self.bit(), Ordering::AcqRel);
    }
}

impl Averages {
    fn clear(&self) {
        let all = [&self.ttft, &self.prefill, &self.itl, &self.errors];
        all.into_iter().for_each(Average::clear);
    }
}

/// Sets or clears a bit. Writes nothing that is so already: other threads read the word all the time.
fn set(word: &AtomicU64, bit: u64, on: bool) {
    if (word.load(Ordering::Acquire) & bit != 0) == on {
        return;
    }
    if on {
        word.fetch_or(bit, Ordering::AcqRel);
    } else {
        word.fetch_and(!bit, Ordering::AcqRel);
    }
}

/// Returns the bucket of a block.
pub(crate) fn bucket(block: BlockHash) -> usize {
    // The modulus fits any usize.
    (block.0 % BUCKETS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(positions: &[Position]) -> Vec<usize> {
        positions.iter().map(Position::at).collect()
    }

    #[test]
    fn ranks_get_neighbouring_positions_and_chunks_without_ranks_are_dropped() {
        let columns = Columns::default();
        let chunks = || columns.0.lock().len();
        let first = columns.allocate(70);
        assert_eq!((places(&first), chunks()), ((0..64).chain(0..6).collect(), 2));
        let second = columns.allocate(2);
        assert_eq!(places(&second), [6, 7]);
        drop(first);
        assert_eq!(places(&columns.allocate(3)), [0, 1, 2], "the second chunk has the only ranks");
        assert_eq!(chunks(), 1);
    }

    #[test]
    fn a_position_is_empty_when_the_next_rank_gets_it() {
        let columns = Columns::default();
        let position = columns.allocate(1).remove(0);
        position.view().set_capacity(7, 16);
        position.view().averages.ttft.observe(5);
        position.set_eligible(true);
        drop(position);
        let position = columns.allocate(1).remove(0);
        let view = position.view();
        assert_eq!((view.total_blocks(), view.block_size(), view.ttft_ewma_us()), (None, None, 0));
        assert!(!position.is_eligible() && position.at() == 0);
    }
}
