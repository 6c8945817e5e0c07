//! The candidates of a model's leg in one snapshot, with what decisions read of all of them in columns.

use std::{
    ops::Deref,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

mod groups;
mod ids;

use groups::Groups;
pub use ids::CandidateIds;
use prefix_index::CandidateRows;

use crate::{
    booking::RankLoad,
    columns::{CHUNK, Chunk, RankView},
    id::{BlockHash, DpRank, ModelName, WorkerId},
    spec::WorkerSpec,
    worker::Candidate,
};

/// The candidates of a leg. A *row* is a position among them.
#[derive(Debug)]
pub struct Pool {
    candidates: Vec<Candidate>,
    /// Tells this pool from all others; 0 for the empty one.
    serial: u64,
    spans: Vec<Span>,
    ids: Arc<CandidateIds>,
    /// The rows, sorted by candidate.
    by_id: Vec<((WorkerId, DpRank), u32)>,
    groups: Groups,
    /// The shortest of the contexts that are known, tokens.
    shortest_context: u32,
}

/// Rows whose positions are neighbours in one chunk.
#[derive(Debug)]
struct Span {
    /// Row of the first.
    first: usize,
    chunk: Arc<Chunk>,
    at: usize,
    len: usize,
}

static EMPTY: LazyLock<Pool> = LazyLock::new(|| Pool { serial: 0, ..Pool::new(Vec::new()) });

static NEXT_SERIAL: AtomicU64 = AtomicU64::new(1);

impl Pool {
    /// Returns a pool without candidates.
    #[must_use]
    pub fn empty() -> &'static Self {
        &EMPTY
    }

    /// Creates the pool of a model's candidates, in their order.
    pub(crate) fn of(model: &ModelName, candidates: Vec<Candidate>) -> Self {
        let lengths = candidates.iter().filter_map(|candidate| candidate.worker.context_length(model));
        Self { shortest_context: lengths.min().unwrap_or(u32::MAX), ..Self::new(candidates) }
    }

    /// Returns the shortest context, tokens, as far as they are known.
    #[must_use]
    pub fn shortest_context(&self) -> u32 {
        self.shortest_context
    }

    /// Creates the pool of these candidates, in their order.
    #[must_use]
    pub fn new(candidates: Vec<Candidate>) -> Self {
        let mut spans: Vec<Span> = Vec::new();
        for (row, candidate) in candidates.iter().enumerate() {
            let position = candidate.load().position();
            match spans.last_mut() {
                Some(last) if last.goes_on_with(candidate.load()) => last.len += 1,
                _ => spans.push(Span {
                    first: row,
                    chunk: position.chunk().clone(),
                    at: position.at(),
                    len: 1,
                }),
            }
        }
        let mut by_id: Vec<_> =
            candidates.iter().map(|candidate| (candidate.worker_id(), candidate.rank)).zip(0..).collect();
        by_id.sort_unstable();
        Self {
            serial: NEXT_SERIAL.fetch_add(1, Ordering::Relaxed),
            spans,
            ids: Arc::new(
                candidates.iter().map(|candidate| (candidate.worker_id(), candidate.rank)).collect(),
            ),
            by_id,
            groups: Groups::of(&candidates),
            shortest_context: u32::MAX,
            candidates,
        }
    }

    /// Returns the candidates by row.
    #[must_use]
    pub fn ids(&self) -> &Arc<CandidateIds> {
        &self.ids
    }

    /// Returns the row of a candidate.
    #[must_use]
    pub fn row_of(&self, worker: WorkerId, rank: DpRank) -> Option<u32> {
        let at = self.by_id.binary_search_by_key(&(worker, rank), |(candidate, _)| *candidate).ok()?;
        self.by_id.get(at).map(|(_, row)| *row)
    }

    /// Returns the rows of a worker's candidates, in any order.
    pub fn rows_of(&self, worker: WorkerId) -> impl Iterator<Item = u32> + '_ {
        let from = self.by_id.partition_point(|((id, _), _)| *id < worker);
        let from = self.by_id.get(from..).unwrap_or_default();
        from.iter().take_while(move |((id, _), _)| *id == worker).map(|(_, row)| *row)
    }

    /// Returns one description of each group of candidates whose descriptions are equal for every decision.
    pub fn groups(&self) -> impl Iterator<Item = &WorkerSpec> {
        let first = self.groups.first_rows.iter().filter_map(|row| self.candidates.get(*row as usize));
        first.map(|candidate| candidate.worker.spec())
    }

    /// Returns the number of groups.
    #[must_use]
    pub fn group_count(&self) -> usize {
        self.groups.first_rows.len()
    }

    /// Returns the group of each row: a position in [`Pool::groups`].
    #[must_use]
    pub fn group_of_rows(&self) -> &[u32] {
        &self.groups.of_row
    }

    /// Returns a number that no other pool has; 0: the pool is empty.
    #[must_use]
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// Returns the candidates for lookups in the prefix index.
    #[inline]
    #[must_use]
    pub fn rows(&self) -> CandidateRows<'_> {
        CandidateRows { serial: self.serial, by_id: &self.by_id }
    }

    /// Returns whether every candidate is eligible whatever its load.
    #[must_use]
    pub fn all_surely_eligible(&self) -> bool {
        self.spans.iter().all(|span| span.bits(span.chunk.eligible()) == span.all())
    }

    /// Calls `each` with every row in its order, and whether it is eligible whatever its load. If not, it
    /// still may be.
    pub fn for_each_eligibility(&self, mut each: impl FnMut(u32, bool)) {
        for span in &self.spans {
            let eligible = span.bits(span.chunk.eligible());
            (0..span.len).for_each(|step| each(span.row(step), eligible & (1 << step) != 0));
        }
    }

    /// Like [`Pool::for_each_eligibility`], with the load.
    pub fn for_each_eligible_load(&self, mut each: impl FnMut(u32, bool, RankView<'_>)) {
        for span in &self.spans {
            let eligible = span.bits(span.chunk.eligible());
            let views = span.chunk.views(span.at, span.len).enumerate();
            views.for_each(|(step, view)| each(span.row(step), eligible & (1 << step) != 0, view));
        }
    }

    /// Calls `each` with the load of all rows, in their order, and the next of `cells` each.
    pub fn for_all<T>(&self, cells: impl IntoIterator<Item = T>, mut each: impl FnMut(T, RankView<'_>)) {
        let mut cells = cells.into_iter();
        for span in &self.spans {
            // The views come first: `zip` asks them before it takes a cell.
            span.chunk.views(span.at, span.len).zip(&mut cells).for_each(|(view, cell)| each(cell, view));
        }
    }

    /// Returns the load of the rows that may have changed since `seen` was written by this pool, of all rows
    /// if it is empty: the first row, and the loads from there on.
    pub fn changed(
        &self,
        seen: &mut Vec<u64>,
    ) -> impl Iterator<Item = (usize, impl Iterator<Item = RankView<'_>>)> {
        // No number of changes reaches it.
        seen.resize(self.spans.len(), u64::MAX);
        self.spans.iter().zip(seen).filter_map(|(span, seen)| {
            let changes = span.chunk.changes();
            let changed = std::mem::replace(seen, changes) != changes;
            changed.then(|| (span.first, span.chunk.views(span.at, span.len)))
        })
    }

    /// Calls `each` with the load of each of `rows`, which rise.
    pub fn for_each(&self, rows: &[u32], mut each: impl FnMut(u32, RankView<'_>)) {
        self.for_each_position(rows, |row, span, step| each(row, span.chunk.view(span.at + step)));
    }

    /// Calls `each` with those of `rows`, which rise, that may book a prompt that begins with this block. No
    /// other of them does.
    pub fn for_each_booking(&self, rows: &[u32], first: BlockHash, mut each: impl FnMut(u32)) {
        if rows.len() < self.candidates.len() {
            return self.for_each_position(rows, |row, span, step| {
                if span.bits(span.chunk.may_book(first)) & (1 << step) != 0 {
                    each(row);
                }
            });
        }
        for span in &self.spans {
            let mut books = span.bits(span.chunk.may_book(first));
            while books != 0 {
                each(span.row(books.trailing_zeros() as usize));
                books &= books - 1;
            }
        }
    }

    fn for_each_position(&self, rows: &[u32], mut each: impl FnMut(u32, &Span, usize)) {
        let mut spans = self.spans.as_slice();
        for row in rows {
            while let [span, rest @ ..] = spans {
                let step = (*row as usize).wrapping_sub(span.first);
                if step < span.len {
                    each(*row, span, step);
                    break;
                }
                spans = rest;
            }
        }
    }
}

impl Span {
    fn goes_on_with(&self, load: &RankLoad) -> bool {
        let position = load.position();
        Arc::ptr_eq(&self.chunk, position.chunk()) && position.at() == self.at + self.len
    }

    /// Returns the bits of this span's ranks, the first one lowest.
    fn bits(&self, word: u64) -> u64 {
        (word >> self.at) & self.all()
    }

    /// Returns a bit for each rank.
    fn all(&self) -> u64 {
        u64::MAX >> (CHUNK - self.len)
    }

    fn row(&self, step: usize) -> u32 {
        u32::try_from(self.first + step).unwrap_or(u32::MAX)
    }
}

impl Default for Pool {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

impl Deref for Pool {
    type Target = [Candidate];

    fn deref(&self) -> &Self::Target {
        &self.candidates
    }
}

impl<'a> IntoIterator for &'a Pool {
    type Item = &'a Candidate;
    type IntoIter = std::slice::Iter<'a, Candidate>;

    fn into_iter(self) -> Self::IntoIter {
        self.candidates.iter()
    }
}

#[cfg(test)]
mod tests;
