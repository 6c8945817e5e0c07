//! Directory of *holders*. A holder is a small number that stands for a candidate and for the source of its
//! blocks: events of one tier, or recorded decisions.
//!
//! Lookups read a published, immutable directory. A worker that joins costs one copy of it.
//!
//! A number may pass from one candidate to another while a lookup runs. The writer publishes the new
//! directory before it adds any block of the new candidate. A lookup that reads the directory before and
//! after therefore knows which holders to ignore.

use super::{
    Candidate,
    gates::{Gate, GateRule},
};
use crate::events::Tier;

/// Index of the holder of recorded decisions, after those of the tiers.
pub(super) const RECORDED: usize = 3;

/// A candidate's holders on device, host and disk, and that of its recorded decisions.
pub(super) type Holders = [Option<u32>; 4];

/// Assigns holders to one candidate.
pub(super) trait AssignHolders {
    /// Returns the holder of a tier.
    fn of_tier(&mut self, tier: Tier) -> Option<u32>;

    /// Sets how many of our blocks the engine reuses at once in a lower tier.
    fn at_once(&mut self, tier: Tier, blocks: u32);

    /// Adds a gate. Returns its holder; none before the device has one.
    fn gate(&mut self, rule: GateRule) -> Option<u32>;

    /// Removes a gate, which lists nothing any more.
    fn end_gate(&mut self, gate: u32);
}

/// The directory.
#[derive(Clone, Debug, Default)]
pub(super) struct HolderDirectory {
    /// The holders of each candidate, sorted by candidate.
    pub(super) candidates: Vec<(Candidate, Holders)>,
    /// Candidates that have a holder on host or disk.
    pub(super) lower: Vec<(Candidate, Holders)>,
    /// The gates, sorted by holder.
    pub(super) gates: Vec<Gate>,
    /// Upper bound of all holders.
    pub(super) holders: usize,
    /// Number of changes so far.
    version: u64,
    /// Version in which the candidate got its holder, by holder.
    since: Vec<u64>,
    /// Number of blocks that the engine reuses at once, by holder.
    at_once: Vec<u32>,
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
    /// Gives a candidate a holder, or takes it away. `kind` is the index in [`Holders`], `holders` the new
    /// upper bound of all holders.
    pub(super) fn set(&mut self, candidate: Candidate, kind: usize, holder: Option<u32>, holders: usize) {
        self.note_change(holder, holders);
        let found = self.candidates.binary_search_by_key(&candidate, |(other, _)| *other);
        let known = found.ok().and_then(|at| self.candidates.get(at));
        let mut all = known.map_or(Holders::default(), |(_, holders)| *holders);
        if let Some(of_kind) = all.get_mut(kind) {
            *of_kind = holder;
        }
        put(&mut self.candidates, candidate, all);
        let [_, host, disk, _] = all;
        put(&mut self.lower, candidate, if host.or(disk).is_some() { all } else { Holders::default() });
    }

    /// Adds a gate. `holders` is the new upper bound of all holders.
    pub(super) fn add_gate(&mut self, gate: Gate, holders: usize) {
        self.note_change(Some(gate.holder), holders);
        let at = self.gates.partition_point(|other| other.holder < gate.holder);
        self.gates.insert(at, gate);
    }

    /// Removes gates by their holders.
    pub(super) fn end_gates(&mut self, ended: &[u32], holders: usize) {
        self.note_change(None, holders);
        self.gates.retain(|gate| !ended.contains(&gate.holder));
    }

    fn note_change(&mut self, assigned: Option<u32>, holders: usize) {
        self.holders = holders;
        self.version += 1;
        self.since.resize(holders, 0);
        self.at_once.resize(holders, 1);
        let Some(assigned) = assigned else { return };
        if let Some(since) = self.since.get_mut(assigned as usize) {
            *since = self.version;
        }
        self.set_at_once(assigned, 1);
    }

    /// Returns how many blocks the engine of a holder reuses at once.
    pub(super) fn at_once(&self, holder: u32) -> u32 {
        self.at_once.get(holder as usize).copied().unwrap_or(1)
    }

    pub(super) fn set_at_once(&mut self, holder: u32, blocks: u32) {
        if let Some(at_once) = self.at_once.get_mut(holder as usize) {
            *at_once = blocks.max(1);
        }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the holders that got their candidate after `version`.
    pub(super) fn assigned_after(&self, version: u64) -> impl Iterator<Item = usize> {
        let later = self.since.iter().enumerate().filter(move |(_, since)| **since > version);
        later.map(|(holder, _)| holder)
    }
}

/// Inserts, replaces or removes an entry of a sorted list. A candidate without holders has no entry.
fn put(list: &mut Vec<(Candidate, Holders)>, candidate: Candidate, holders: Holders) {
    let present = holders != Holders::default();
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
