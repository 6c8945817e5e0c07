//! Groups of candidates whose descriptions are equal for every decision. Conditions on the description are
//! evaluated once for each group. A fleet usually has a few.

use std::collections::HashMap;

use crate::worker::Candidate;

/// The groups of a pool's candidates.
#[derive(Debug)]
pub(super) struct Groups {
    /// Group of each row.
    pub(super) of_row: Vec<u32>,
    /// First row of each group.
    pub(super) first_rows: Vec<u32>,
}

impl Groups {
    pub(super) const EMPTY: Self = Self { of_row: Vec::new(), first_rows: Vec::new() };

    pub(super) fn of(candidates: &[Candidate]) -> Self {
        let mut groups = Self { of_row: Vec::with_capacity(candidates.len()), ..Self::EMPTY };
        let mut by_hash: HashMap<u64, u32> = HashMap::new();
        for (row, candidate) in (0_u32..).zip(candidates) {
            let known = by_hash.get(&candidate.worker.traits_hash()).copied();
            let group = known.filter(|group| groups.fits(*group, candidate, candidates));
            let group = group.unwrap_or_else(|| {
                let new = u32::try_from(groups.first_rows.len()).unwrap_or(u32::MAX);
                groups.first_rows.push(row);
                by_hash.insert(candidate.worker.traits_hash(), new);
                new
            });
            groups.of_row.push(group);
        }
        groups
    }

    /// Returns whether the candidate belongs to the group. Equal hashes alone do not prove it.
    fn fits(&self, group: u32, candidate: &Candidate, candidates: &[Candidate]) -> bool {
        let first = self.first_rows.get(group as usize).and_then(|row| candidates.get(*row as usize));
        first.is_some_and(|first| first.worker.spec().has_traits_of(candidate.worker.spec()))
    }
}
