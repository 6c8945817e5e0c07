//! Lookup: how many blocks of a prefix each candidate holds. Bisects over the prefix for all candidates at
//! once.

use std::sync::Arc;

use super::{
    holders::{Candidate, HolderDirectory, TierHolders},
    shards::Shards,
    shared::Shared,
};
use crate::{
    id::{BlockHash, DpRank, WorkerId},
    sync::atomic::Ordering,
};

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
    /// By holder: number of blocks of the prefix. Holders on lower tiers count from where the tier above
    /// ends.
    depths: Vec<u32>,
    /// Holders of the first block.
    group: Vec<u32>,
    /// By holder: its index in `group`. Stale for holders that are not in the group.
    group_index: Vec<u32>,
    tasks: Vec<Task>,
    /// Depth at which most holders of the last lookup ended, and their number. Prompts often share a system
    /// prompt only, so the next lookup tries this depth early.
    usual_depth: (usize, usize),
}

/// One interval of the bisection: all of `group[start..end]` hold block `low`, and none of them holds block
/// `high`.
#[derive(Clone, Copy, Debug)]
struct Task {
    low: usize,
    high: usize,
    start: usize,
    end: usize,
}

impl Task {
    /// Returns the block to look up next.
    fn middle(&self, blocks: usize, usual_depth: usize) -> usize {
        // Prompts are often cached completely or up to their last block.
        if self.low == 0 && self.high == blocks {
            return blocks - 1;
        }
        // Otherwise try the usual depth of the last lookup: first the block before it, then the block behind
        // it.
        let between = |at: &usize| self.low < *at && *at < self.high;
        let guess = if self.low + 1 == usual_depth { usual_depth } else { usual_depth.saturating_sub(1) };
        Some(guess).filter(between).unwrap_or(self.low.midpoint(self.high))
    }
}

/// Reads the result of a lookup for one candidate after the other. Quick when they come in rising order.
#[derive(Debug)]
pub struct OverlapReader<'a> {
    overlaps: &'a Overlaps,
    /// Where the next candidate is likely to stand in the directory.
    at: usize,
}

impl OverlapReader<'_> {
    /// Returns the blocks that a candidate holds.
    pub fn get(&mut self, worker: WorkerId, rank: DpRank) -> Matched {
        // Nobody holds the first block.
        if self.overlaps.depths.is_empty() {
            return Matched::default();
        }
        let Some(holders) = self.holders((worker, rank)) else { return Matched::default() };
        let [device, host, disk] =
            holders.map(|holder| holder.map_or(0, |holder| self.overlaps.depth(holder)));
        Matched { device, host, disk }
    }

    fn holders(&mut self, wanted: Candidate) -> Option<TierHolders> {
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

    /// Whether a candidate, if it had a holder, would stand where this reader is, and does not.
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

    /// Returns a reader of what many candidates hold.
    #[must_use]
    pub fn reader(&self) -> OverlapReader<'_> {
        OverlapReader { overlaps: self, at: 0 }
    }

    pub(super) fn find(&mut self, shared: &Shared, blocks: &[BlockHash]) {
        let before = shared.directory.load().version();
        self.find_depths(shared, blocks);
        let directory = shared.directory.load();
        if directory.version() == before {
            return;
        }
        // Ignore holders that were reassigned while the lookup ran.
        for holder in directory.assigned_after(before) {
            if let Some(depth) = self.depths.get_mut(holder) {
                *depth = 0;
            }
        }
        self.directory = directory.clone();
    }

    fn find_depths(&mut self, shared: &Shared, blocks: &[BlockHash]) {
        self.depths.clear();
        self.group.clear();
        let Some(first) = blocks.first() else { return };
        let shards = &shared.shards;
        shards.for_each_holder(*first, |holder| self.group.push(holder));
        // Load the directory after the holders: a holder is published before its first block is added.
        let directory = shared.directory.load();
        if !Arc::ptr_eq(&directory, &self.directory) {
            self.directory = directory.clone();
        }
        if self.group.is_empty() && self.directory.lower.is_empty() {
            return;
        }
        self.depths.resize(self.directory.holders, 0);
        self.group_index.resize(self.directory.holders, 0);
        self.bisect(shards, blocks);
        self.check_gaps(shards, blocks);
        self.find_lower_tiers(shards, blocks);
    }

    fn bisect(&mut self, shards: &Shards, blocks: &[BlockHash]) {
        for (at, holder) in (0..).zip(&self.group) {
            if let Some(index) = self.group_index.get_mut(*holder as usize) {
                *index = at;
            }
        }
        self.tasks.clear();
        let usual_depth = std::mem::take(&mut self.usual_depth).0;
        if !self.group.is_empty() {
            self.tasks.push(Task { low: 0, high: blocks.len(), start: 0, end: self.group.len() });
        }
        while let Some(task) = self.tasks.pop() {
            if task.high - task.low <= 1 {
                self.settle(task);
                continue;
            }
            let middle = task.middle(blocks.len(), usual_depth);
            let Some(block) = blocks.get(middle) else { continue };
            let split = self.partition(shards, *block, task.start, task.end);
            if split < task.end {
                self.tasks.push(Task { high: middle, start: split, ..task });
            }
            if split > task.start {
                self.tasks.push(Task { low: middle, end: split, ..task });
            }
        }
    }

    /// Moves the holders of a block to the front of `group[start..end]` and returns where the others begin.
    /// The cost is proportional to the block's own holders, which are few for a deep block even if many hold
    /// the first one.
    fn partition(&mut self, shards: &Shards, block: BlockHash, start: usize, end: usize) -> usize {
        let mut split = start;
        let (group, group_index) = (&mut self.group, &mut self.group_index);
        shards.for_each_holder(block, |holder| {
            let Some(at) = group_index.get(holder as usize).map(|at| *at as usize) else { return };
            if at < split || at >= end || group.get(at) != Some(&holder) {
                return;
            }
            group.swap(at, split);
            for at in [at, split] {
                if let Some(index) = group.get(at).and_then(|holder| group_index.get_mut(*holder as usize)) {
                    *index = u32::try_from(at).unwrap_or(u32::MAX);
                }
            }
            split += 1;
        });
        split
    }

    /// Stores the depth of a finished task: its holders hold exactly `low + 1` blocks.
    fn settle(&mut self, task: Task) {
        let holders = task.end - task.start;
        if holders > self.usual_depth.1 {
            self.usual_depth = (task.low + 1, holders);
        }
        let depth = u32::try_from(task.low + 1).unwrap_or(u32::MAX);
        for holder in self.group.get(task.start..task.end).unwrap_or_default() {
            if let Some(of_holder) = self.depths.get_mut(*holder as usize) {
                *of_holder = depth;
            }
        }
    }

    /// Counts block by block for holders with gaps, because bisection is only right for gapless prefixes.
    fn check_gaps(&mut self, shards: &Shards, blocks: &[BlockHash]) {
        for holder in &self.group {
            if self.directory.gaps(*holder).is_some_and(|gaps| gaps.load(Ordering::Acquire) > 0)
                && let Some(depth) = self.depths.get_mut(*holder as usize)
            {
                *depth = count_held(shards, blocks, 0, *holder).min(*depth);
            }
        }
    }

    /// Continues on host and disk where the tier above ends.
    fn find_lower_tiers(&mut self, shards: &Shards, blocks: &[BlockHash]) {
        for (_, [device, host, disk]) in &self.directory.lower {
            let mut from = device.map_or(0, |holder| self.depth(holder));
            for holder in [host, disk].into_iter().flatten() {
                let more = count_held(shards, blocks, from, *holder);
                from += more;
                if let Some(depth) = self.depths.get_mut(*holder as usize) {
                    *depth = more;
                }
            }
        }
    }

    fn depth(&self, holder: u32) -> u32 {
        self.depths.get(holder as usize).copied().unwrap_or(0)
    }
}

/// Returns how many blocks from `from` on a holder has without a gap.
fn count_held(shards: &Shards, blocks: &[BlockHash], from: u32, holder: u32) -> u32 {
    let rest = blocks.get(from as usize..).unwrap_or_default();
    let held = rest.iter().take_while(|block| shards.holds(**block, holder)).count();
    u32::try_from(held).unwrap_or(u32::MAX)
}
