//! Lookup: how many blocks of a prefix each candidate holds. Walks once over the segments of the prefix,
//! for all candidates, and once more for each lower tier.

use std::sync::Arc;

use super::{
    Candidate,
    gates::Listed,
    holder_rows::{CandidateRows, HolderRows, NO_ROW},
    holders::{HolderDirectory, Holders},
    segments::Segment,
    shared::Shared,
};
use crate::id::{BlockHash, DpRank, WorkerId};

/// Cached prefix blocks of one candidate by tier. Recorded decisions count for the device only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Matched {
    /// Blocks on the device.
    pub device: u32,
    /// Further blocks in host memory.
    pub host: u32,
    /// Further blocks on disk.
    pub disk: u32,
}

/// Result of a lookup, and buffers that the next lookup reuses.
#[derive(Debug, Default)]
pub struct Overlaps {
    /// The candidates that the holders stood for.
    directory: Arc<HolderDirectory>,
    /// Depth at which the holder's blocks of the prefix end, by holder. Blocks of a lower tier begin where
    /// the tier above ends. Empty if no holder has the first block.
    ends: Vec<u32>,
    /// Buffer for one lower tier.
    tier_ends: Vec<u32>,
    /// Buffer for the gates.
    listed: Listed,
    rows: HolderRows,
}

/// Reads the result of a lookup for one candidate after the other. Quick when they come in rising order.
#[derive(Debug)]
pub struct OverlapReader<'a> {
    overlaps: &'a Overlaps,
    /// Likely index of the next candidate in the directory.
    at: usize,
}

impl OverlapReader<'_> {
    /// Returns the blocks that a candidate holds.
    pub fn get(&mut self, worker: WorkerId, rank: DpRank) -> Matched {
        if self.overlaps.ends.is_empty() {
            return Matched::default();
        }
        let Some(holders) = self.holders((worker, rank)) else { return Matched::default() };
        self.overlaps.matched(&holders)
    }

    fn holders(&mut self, wanted: Candidate) -> Option<Holders> {
        let all = &self.overlaps.directory.candidates;
        let here = all.get(self.at);
        let found = match here.map(|(candidate, _)| candidate.cmp(&wanted)) {
            Some(std::cmp::Ordering::Equal) => Ok(self.at),
            _ if self.stands_between(wanted) => Err(self.at),
            _ => all.binary_search_by_key(&wanted, |(candidate, _)| *candidate),
        };
        self.at = found.map_or_else(|next| next, |at| at + 1);
        all.get(found.ok()?).map(|(_, holders)| *holders)
    }

    /// Returns whether a candidate, if it had a holder, would stand where this reader is, and does not.
    fn stands_between(&self, wanted: Candidate) -> bool {
        let all = &self.overlaps.directory.candidates;
        let above = all.get(self.at).is_none_or(|(next, _)| *next > wanted);
        let last = self.at.checked_sub(1).and_then(|last| all.get(last));
        above && last.is_none_or(|(last, _)| *last < wanted)
    }
}

impl Overlaps {
    /// Returns the blocks that a candidate holds.
    #[must_use]
    pub fn get(&self, worker: WorkerId, rank: DpRank) -> Matched {
        self.reader().get(worker, rank)
    }

    /// Returns a reader of the blocks of many candidates.
    #[must_use]
    pub fn reader(&self) -> OverlapReader<'_> {
        OverlapReader { overlaps: self, at: 0 }
    }

    /// Calls `each` with every candidate of a list that holds any block: its row, and what it holds. Costs
    /// one step for each holder, and not one for each candidate, unless the list or the directory changed.
    pub fn for_each_holder(&mut self, list: CandidateRows<'_>, mut each: impl FnMut(u32, Matched)) {
        if self.ends.is_empty() {
            return;
        }
        self.rows.follow(&self.directory, list);
        for (row, end) in self.rows.single.iter().zip(&self.ends) {
            if *end > 0 && *row != NO_ROW {
                each(*row, Matched { device: *end, ..Matched::default() });
            }
        }
        for (row, holders) in &self.rows.several {
            let matched = self.matched(holders);
            if matched != Matched::default() {
                each(*row, matched);
            }
        }
    }

    /// Returns the blocks that the candidate with these holders holds.
    fn matched(&self, holders: &Holders) -> Matched {
        let (device, host_end) = (self.device_end(holders), self.host_end(holders));
        let [_, _, disk, _] = *holders;
        let disk_end = disk.map_or(host_end, |holder| self.whole_end(holder).max(host_end));
        Matched { device, host: host_end - device, disk: disk_end - host_end }
    }

    pub(super) fn find(&mut self, shared: &Shared, blocks: &[BlockHash]) {
        self.ends.clear();
        // Load the directory before the covers, and again after them.
        let before = shared.directory.load();
        let version = before.version();
        if !Arc::ptr_eq(&before, &self.directory) {
            self.directory = before.clone();
        }
        drop(before);
        self.walk(shared, blocks);
        let after = shared.directory.load();
        if after.version() == version {
            return;
        }
        // Ignore holders that were reassigned while the lookup ran, and the limits that they set.
        for holder in after.assigned_after(version) {
            if let Some(end) = self.ends.get_mut(holder) {
                *end = 0;
            }
            let gates = self.directory.gates.iter().filter(|gate| gate.holder as usize == holder);
            for gate in gates {
                if let Some(end) = self.ends.get_mut(gate.limits as usize) {
                    *end = 0;
                }
            }
        }
        self.directory = after.clone();
    }

    fn walk(&mut self, shared: &Shared, blocks: &[BlockHash]) {
        let (holders, lower) = (self.directory.holders, !self.directory.lower.is_empty());
        let ends = &mut self.ends;
        shared.tree.walk(blocks, |before, matching, segment| {
            if before == 0 {
                ends.resize(holders, 0);
            }
            extend(ends, before, matching, segment) || lower
        });
        if !self.directory.gates.is_empty() {
            self.limit(shared, blocks);
        }
        if self.ends.is_empty() || !lower {
            return;
        }
        for tier in [1, 2] {
            self.walk_tier(shared, blocks, tier);
        }
    }

    /// Shortens the matches of candidates whose engines have several cache groups.
    fn limit(&mut self, shared: &Shared, blocks: &[BlockHash]) {
        let gates = &self.directory.gates;
        let matches = gates.iter().filter_map(|gate| self.ends.get(gate.limits as usize));
        let Some(longest) = matches.copied().max().filter(|longest| *longest > 0) else { return };
        let listed = &mut self.listed;
        listed.clear();
        shared.tree.walk(blocks, |before, matching, segment| {
            listed.add(gates, before, matching, segment);
            before + matching < longest as usize
        });
        listed.limit(gates, &mut self.ends);
    }

    /// Finds where the holders of a lower tier end. They begin where the tier above ends.
    fn walk_tier(&mut self, shared: &Shared, blocks: &[BlockHash], tier: usize) {
        let holder = |holders: &Holders| holders.get(tier).copied().flatten().map(|holder| holder as usize);
        let mut ends = std::mem::take(&mut self.tier_ends);
        ends.clear();
        // Other holders have no blocks there.
        ends.resize(self.ends.len(), u32::MAX);
        for (_, holders) in &self.directory.lower {
            let above = if tier == 1 { self.device_end(holders) } else { self.host_end(holders) };
            if let Some(end) = holder(holders).and_then(|holder| ends.get_mut(holder)) {
                *end = above;
            }
        }
        shared.tree.walk(blocks, |before, matching, segment| {
            extend(&mut ends, before, matching, segment);
            true
        });
        for (_, holders) in &self.directory.lower {
            let Some(holder) = holder(holders) else { continue };
            if let (Some(end), Some(found)) = (self.ends.get_mut(holder), ends.get(holder)) {
                *end = *found;
            }
        }
        self.tier_ends = ends;
    }

    fn end(&self, holder: u32) -> u32 {
        self.ends.get(holder as usize).copied().unwrap_or(0)
    }

    /// Returns where the whole chunks of a lower tier end.
    fn whole_end(&self, holder: u32) -> u32 {
        let end = self.end(holder);
        end - end % self.directory.at_once(holder).max(1)
    }

    /// Returns where the device of a candidate ends: by events or by recorded decisions.
    fn device_end(&self, holders: &Holders) -> u32 {
        let end = |holder: Option<u32>| holder.map_or(0, |holder| self.end(holder));
        let [device, _, _, recorded] = *holders;
        end(device).max(end(recorded))
    }

    fn host_end(&self, holders: &Holders) -> u32 {
        let (device, [_, host, ..]) = (self.device_end(holders), *holders);
        host.map_or(device, |holder| self.whole_end(holder).max(device))
    }
}

/// Moves the ends of the holders whose match continues in a segment: `matching` blocks of it follow `before`
/// blocks of the prefix. Returns whether any holder has all of these.
fn extend(ends: &mut [u32], before: usize, matching: usize, segment: &Segment) -> bool {
    let mut whole = false;
    for cover in segment.covers() {
        let Some(end) = ends.get_mut(cover.holder as usize) else { continue };
        let (from, to) = (before + cover.from, before + cover.to.min(matching));
        if (from..to).contains(&(*end as usize)) {
            *end = u32::try_from(to).unwrap_or(u32::MAX);
        }
        whole |= *end as usize == before + matching;
    }
    whole
}
