//! Directory of *holders*: the small numbers that stand for a candidate and a tier in the block table.
//!
//! Lookups read a published, immutable directory. A worker that joins costs one copy of it.
//!
//! A number may pass from one candidate to another while a lookup runs. The writer publishes the new
//! directory before it adds any block of the new candidate. A lookup that reads the directory before and
//! after therefore knows which holders to ignore.

use std::sync::Arc;

use crate::{
    events::Tier,
    id::{DpRank, WorkerId},
    sync::atomic::AtomicU32,
};

/// A worker and one of its ranks.
pub(super) type Candidate = (WorkerId, DpRank);

/// Holders whose gap counters share an allocation. Small for the model checker, which creates them in every
/// execution.
const CHUNK: usize = if cfg!(loom) { 2 } else { 256 };

/// A candidate's holders on device, host and disk.
pub(super) type TierHolders = [Option<u32>; 3];

/// The directory.
#[derive(Clone, Debug, Default)]
pub(super) struct HolderDirectory {
    /// The holders of each candidate, sorted by candidate.
    pub(super) candidates: Vec<(Candidate, TierHolders)>,
    /// Those candidates that have a holder on host or disk.
    pub(super) lower: Vec<(Candidate, TierHolders)>,
    /// Upper bound of all holders.
    pub(super) holders: usize,
    /// Number of changes so far.
    version: u64,
    /// By holder: the version in which its candidate got it.
    since: Vec<u64>,
    /// Gap counters by holder, in chunks. All versions share them: a holder's next candidate has the same
    /// counter.
    gaps: Vec<Arc<[AtomicU32]>>,
}

/// Counts the blocks of a holder that follow a block it does not hold. While the count is not zero, bisection
/// may find too many blocks.
#[derive(Clone, Debug)]
pub(super) struct GapCounter {
    chunk: Arc<[AtomicU32]>,
    at: usize,
}

impl GapCounter {
    pub(super) fn count(&self) -> Option<&AtomicU32> {
        self.chunk.get(self.at)
    }
}

/// Returns the index of a tier in arrays by tier.
pub(super) fn tier_index(tier: Tier) -> usize {
    match tier {
        Tier::Device => 0,
        Tier::Host => 1,
        Tier::Disk => 2,
    }
}

impl HolderDirectory {
    /// Gives a candidate's tier a holder, or takes it away. `holders` is the new upper bound of all holders.
    pub(super) fn set(&mut self, candidate: Candidate, tier: Tier, holder: Option<u32>, holders: usize) {
        self.holders = holders;
        self.version += 1;
        self.since.resize(holders, 0);
        if let Some(since) = holder.and_then(|holder| self.since.get_mut(holder as usize)) {
            *since = self.version;
        }
        while self.gaps.len() * CHUNK < holders {
            self.gaps.push((0..CHUNK).map(|_| AtomicU32::new(0)).collect());
        }
        let found = self.candidates.binary_search_by_key(&candidate, |(other, _)| *other);
        let known = found.ok().and_then(|at| self.candidates.get(at));
        let mut all = known.map_or(TierHolders::default(), |(_, holders)| *holders);
        if let Some(of_tier) = all.get_mut(tier_index(tier)) {
            *of_tier = holder;
        }
        put(&mut self.candidates, candidate, all);
        let [_, host, disk] = all;
        put(&mut self.lower, candidate, if host.or(disk).is_some() { all } else { TierHolders::default() });
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the holders that got their candidate after `version`.
    pub(super) fn assigned_after(&self, version: u64) -> impl Iterator<Item = usize> {
        let later = self.since.iter().enumerate().filter(move |(_, since)| **since > version);
        later.map(|(holder, _)| holder)
    }

    /// Returns the gap counter of a holder, to be kept.
    pub(super) fn gap_counter(&self, holder: u32) -> Option<GapCounter> {
        let holder = holder as usize;
        Some(GapCounter { chunk: self.gaps.get(holder / CHUNK)?.clone(), at: holder % CHUNK })
    }

    /// Returns the gap count of a holder, without touching the counter's reference count.
    pub(super) fn gaps(&self, holder: u32) -> Option<&AtomicU32> {
        self.gaps.get(holder as usize / CHUNK)?.get(holder as usize % CHUNK)
    }
}

/// Inserts, replaces or removes an entry of a sorted list. A candidate without holders has no entry.
fn put(list: &mut Vec<(Candidate, TierHolders)>, candidate: Candidate, holders: TierHolders) {
    let present = holders != TierHolders::default();
    match list.binary_search_by_key(&candidate, |(other, _)| *other) {
        Ok(at) if present => {
            if let Some(entry) = list.get_mut(at) {
                entry.1 = holders;
            }
        }
        Ok(at) => drop(list.remove(at)),
        Err(at) if present => list.insert(at, (candidate, holders)),
        Err(_) => {}
    }
}
