//! The candidates of a pool, in columns that records of decisions keep after the pool is gone.

use crate::id::{DpRank, WorkerId};

/// Worker ids and ranks, by row.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CandidateIds {
    low: Vec<u32>,
    high: Vec<u32>,
    ranks: Vec<u32>,
}

impl CandidateIds {
    /// Words of each candidate.
    pub const WIDTH: usize = 3;

    /// Returns the number of candidates.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Returns whether there is no candidate.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Returns the candidate of a row.
    #[must_use]
    pub fn get(&self, row: usize) -> Option<(WorkerId, DpRank)> {
        let id = u64::from(*self.high.get(row)?) << 32 | u64::from(*self.low.get(row)?);
        Some((WorkerId(id), DpRank(*self.ranks.get(row)?)))
    }

    /// Returns the lower halves of the worker ids, the upper halves, and the ranks.
    #[must_use]
    pub fn columns(&self) -> [&[u32]; Self::WIDTH] {
        [&self.low, &self.high, &self.ranks]
    }

    /// Returns the candidates whose columns follow one another in `words`.
    #[must_use]
    pub fn of_words(words: &[u32]) -> Self {
        let (low, rest) = words.split_at(words.len() / Self::WIDTH);
        let (high, ranks) = rest.split_at(rest.len() / 2);
        Self { low: low.to_vec(), high: high.to_vec(), ranks: ranks.to_vec() }
    }
}

impl FromIterator<(WorkerId, DpRank)> for CandidateIds {
    fn from_iter<T: IntoIterator<Item = (WorkerId, DpRank)>>(candidates: T) -> Self {
        let mut ids = Self::default();
        for (WorkerId(id), DpRank(rank)) in candidates {
            ids.low.push(id as u32);
            ids.high.push((id >> 32) as u32);
            ids.ranks.push(rank);
        }
        ids
    }
}
