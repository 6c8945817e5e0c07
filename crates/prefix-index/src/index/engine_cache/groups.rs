//! The cache groups of a hybrid model. Each group keeps other layers of the same blocks.
//!
//! The index follows one group that keeps every token: the first one of full attention or MLA. An engine can
//! continue from the end of a prefix only if its other groups can, too (vLLM 0.33,
//! `v1/core/kv_cache_coordinator.py`, `find_longest_cache_hit`). So the blocks of those are remembered by the
//! engine's hashes, which all groups share, and listed in the tree under a holder of their own: a *gate*.
//! Lookups shorten a match by the gates of its candidate.
//!
//! ```text
//! followed group      0 1 2 3 4 5 6 7      a match of 8 blocks
//! window of 2 blocks        3 4 5          can continue at the end of blocks 4 and 5
//! state                       4            can continue at the end of block 4: the answer is 5 blocks
//! ```

use std::collections::HashMap;

use super::{
    super::{
        block_positions::Position,
        gates::GateRule,
        holders::AssignHolders,
        memory::{difference, heap},
        tree::TreeWriter,
    },
    EngineCache, Parents, StoreEffect, tier_index,
};
use crate::events::{GroupKind, MAX_BLOCK_SIZE, Stored, Tier};

/// Maximum number of groups beside the followed one. Models have at most about ten groups.
const MAX_SIDES: usize = 32;
/// Blocks that a group may have beside those that the memory of the followed group allows for: events of one
/// step come in the order of the groups.
const MAX_AHEAD: usize = 16_384;
/// Bytes that a block of the followed group takes at least.
const MIN_BLOCK_BYTES: usize = 16;

/// The groups that one engine has reported.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// The group that the index follows. Group 0 if the engine does not report kinds of groups.
    followed: Option<u32>,
    /// An event named the kind of its group.
    kinds_told: bool,
    sides: Vec<Side>,
}

/// A group beside the followed one.
#[derive(Debug)]
struct Side {
    group: u32,
    kind: GroupKind,
    /// Tokens of its blocks.
    size: u32,
    /// Blocks that it needs to continue. Its blocks are not kept if that is not known.
    rule: Option<GateRule>,
    /// Blocks by the engine's hash.
    blocks: HashMap<u64, Held>,
    /// Lists its blocks in the tree, once one of them was also one of the followed group.
    gate: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// How often it is stored.
    count: u32,
    /// The gate lists it.
    listed: bool,
}

/// Role of an event's group in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupRole {
    Followed,
    Side(usize),
    Ignored,
}

impl EngineCache {
    /// Returns the bytes that the blocks take.
    pub(in super::super) fn bytes(&self) -> usize {
        self.runs.bytes() + self.groups.bytes()
    }

    /// Returns whether the engine names the kinds of its groups, and none of those so far can be followed.
    pub(in super::super) fn lacks_followed_group(&self) -> bool {
        self.groups.kinds_told && self.groups.followed.is_none()
    }

    /// Applies a store event of any group.
    pub(in super::super) fn stored(
        &mut self,
        tree: &mut TreeWriter,
        mut stored: Stored,
        block_size: usize,
        holders: &mut impl AssignHolders,
    ) -> StoreEffect {
        let before = self.bytes();
        self.names_adapters |= stored.lora.as_ref().is_some_and(|name| name.parse::<u64>().is_err());
        if self.groups.learn(&stored, block_size) {
            // Another group was followed until now.
            self.clear(tree);
        }
        let orphans = match self.groups.role(stored.group) {
            GroupRole::Ignored => 0,
            GroupRole::Side(number) => {
                // Reports of reused blocks also name those of a window or a state that the engine has freed.
                if stored.tier == Tier::Device && !stored.reused {
                    self.store_side(tree, number, &stored, holders);
                }
                0
            }
            GroupRole::Followed => {
                let gated = stored.tier == Tier::Device && !self.groups.sides.is_empty();
                let hashes = if gated { stored.hashes.clone() } else { Vec::new() };
                if stored.tier != Tier::Device && stored.has_tokens() {
                    // Offloaded chunks may be larger than the blocks of the device.
                    let size = (stored.block_size as usize).min(MAX_BLOCK_SIZE as usize);
                    let whole = size.is_multiple_of(block_size).then_some(size / block_size);
                    holders.at_once(stored.tier, u32::try_from(whole.unwrap_or(1).max(1)).unwrap_or(1));
                    // Each has a name of its own.
                    self.chunks[tier_index(stored.tier)] = 1;
                } else if stored.tier != Tier::Device {
                    self.name_blocks_of_chunks(&mut stored, block_size, holders);
                }
                let told_tokens = stored.told_tokens();
                let orphans = self.store(tree, stored, block_size, |tier| holders.of_tier(tier));
                // Events of offloaded blocks have no tokens: an earlier event had them.
                self.orphaned |= told_tokens && orphans > 0;
                for number in 0..self.groups.sides.len() {
                    self.list(tree, number, &hashes, holders);
                }
                orphans
            }
        };
        StoreEffect { bytes: difference(self.bytes(), before), orphans }
    }

    /// Applies a removal event of any group. Returns how the bytes changed.
    pub(in super::super) fn removed(
        &mut self,
        tree: &mut TreeWriter,
        hashes: &[u64],
        (tier, group): (Tier, Option<u32>),
        holders: &mut impl AssignHolders,
    ) -> i64 {
        let before = self.bytes();
        match self.groups.role(group) {
            GroupRole::Ignored => {}
            GroupRole::Side(number) => {
                if tier == Tier::Device {
                    self.remove_side(tree, number, hashes);
                }
            }
            GroupRole::Followed if self.groups.sides.is_empty() || tier != Tier::Device => {
                self.remove(tree, &self.removed_blocks(hashes, tier), tier);
            }
            GroupRole::Followed => {
                self.unlist_all(tree, hashes);
                self.remove(tree, hashes, tier);
                // Blocks that are stored more than once.
                for number in 0..self.groups.sides.len() {
                    self.list(tree, number, hashes, holders);
                }
            }
        }
        difference(self.bytes(), before)
    }

    /// Forgets which groups there are and how parents are named. The engine may come back with another model
    /// or version.
    pub(in super::super) fn forget_engine(&mut self) {
        (self.groups, self.parents) = (Groups::default(), Parents::default());
    }

    fn store_side(
        &mut self,
        tree: &mut TreeWriter,
        number: usize,
        stored: &Stored,
        holders: &mut impl AssignHolders,
    ) {
        let most = MAX_AHEAD + self.runs.bytes() / MIN_BLOCK_BYTES;
        let Some(side) = self.groups.sides.get_mut(number).filter(|side| side.rule.is_some()) else { return };
        // Blocks of another size say nothing about a window; a prefix that ends within a block has one.
        if side.kind != GroupKind::State && side.size != stored.block_size {
            return;
        }
        for hash in &stored.hashes {
            let held = side.blocks.entry(*hash).or_default();
            held.count = held.count.saturating_add(1);
        }
        if side.blocks.len() > most {
            return self.ignore(tree, number, holders);
        }
        self.list(tree, number, &stored.hashes, holders);
    }

    fn remove_side(&mut self, tree: &mut TreeWriter, number: usize, hashes: &[u64]) {
        let Some(side) = self.groups.sides.get_mut(number) else { return };
        let mut gone = Vec::new();
        for hash in hashes {
            let Some(held) = side.blocks.get_mut(hash) else { continue };
            held.count -= 1;
            if held.count == 0 {
                gone.push(*hash);
            }
        }
        self.forget_in(tree, number, &gone);
    }

    /// Forgets a block in all groups beside the followed one, to free memory.
    pub(super) fn evict_sides(&mut self, tree: &mut TreeWriter, hash: u64) {
        for number in 0..self.groups.sides.len() {
            self.forget_in(tree, number, &[hash]);
        }
    }

    fn forget_in(&mut self, tree: &mut TreeWriter, number: usize, hashes: &[u64]) {
        self.unlist(tree, number, hashes);
        let Some(side) = self.groups.sides.get_mut(number) else { return };
        for hash in hashes {
            side.blocks.remove(hash);
        }
        if side.blocks.capacity() > 64 && side.blocks.len() * 4 < side.blocks.capacity() {
            side.blocks.shrink_to_fit();
        }
    }

    /// Lists those blocks of a group that the followed one has, too.
    fn list(
        &mut self,
        tree: &mut TreeWriter,
        number: usize,
        hashes: &[u64],
        holders: &mut impl AssignHolders,
    ) {
        let Some(side) = self.groups.sides.get_mut(number) else { return };
        let Some(rule) = side.rule else { return };
        let mut ranges = Ranges::default();
        for hash in hashes {
            let Some(held) = side.blocks.get_mut(hash).filter(|held| !held.listed) else { continue };
            let at = self.runs.find(*hash).filter(|at| self.runs.stored(*at)[0] > 0);
            held.listed = at.is_some_and(|at| ranges.add(&self.runs, at, side.kind, rule));
        }
        if ranges.0.is_empty() {
            return;
        }
        side.gate = side.gate.or_else(|| holders.gate(rule));
        let Some(gate) = side.gate else { return };
        for (run, from, to) in ranges.merged() {
            self.runs.cover(tree, run, from..to, gate);
        }
    }

    /// Takes blocks out of the list of a group.
    fn unlist(&mut self, tree: &mut TreeWriter, number: usize, hashes: &[u64]) {
        let Some(side) = self.groups.sides.get_mut(number) else { return };
        let (Some(rule), Some(gate)) = (side.rule, side.gate) else { return };
        let mut ranges = Ranges::default();
        for hash in hashes {
            let Some(held) = side.blocks.get_mut(hash).filter(|held| held.listed) else { continue };
            held.listed = false;
            if let Some(at) = self.runs.find(*hash) {
                ranges.add(&self.runs, at, side.kind, rule);
            }
        }
        for (run, from, to) in ranges.merged().into_iter().rev() {
            self.runs.uncover(tree, run, from..to, gate);
        }
    }

    /// Takes blocks that leave the followed group out of all lists.
    fn unlist_all(&mut self, tree: &mut TreeWriter, hashes: &[u64]) {
        for number in 0..self.groups.sides.len() {
            self.unlist(tree, number, hashes);
        }
    }

    /// Removes the blocks of all groups beside the followed one.
    pub(super) fn clear_sides(&mut self, tree: &mut TreeWriter) {
        for number in 0..self.groups.sides.len() {
            self.clear_side(tree, number);
        }
    }

    fn clear_side(&mut self, tree: &mut TreeWriter, number: usize) {
        let Some(side) = self.groups.sides.get(number) else { return };
        let listed = side.blocks.iter().filter(|(_, held)| held.listed).map(|(hash, _)| *hash);
        let listed: Vec<u64> = listed.collect();
        self.unlist(tree, number, &listed);
        if let Some(side) = self.groups.sides.get_mut(number) {
            side.blocks = HashMap::new();
        }
    }

    /// Stops to take a group into account.
    fn ignore(&mut self, tree: &mut TreeWriter, number: usize, holders: &mut impl AssignHolders) {
        self.clear_side(tree, number);
        let Some(side) = self.groups.sides.get_mut(number) else { return };
        tracing::warn!(group = side.group, "kv events of a cache group have too many blocks: it is ignored");
        side.rule = None;
        if let Some(gate) = side.gate.take() {
            holders.end_gate(gate);
        }
    }
}

impl Groups {
    fn bytes(&self) -> usize {
        // A table has a byte of its own for each entry, and is at most 7/8 full.
        let entry = size_of::<(u64, Held)>() + 1;
        self.sides.iter().map(|side| heap(side.blocks.capacity() * entry * 8 / 7)).sum()
    }

    /// Learns of the group of a store event. Returns true if another one was followed before.
    fn learn(&mut self, stored: &Stored, block_size: usize) -> bool {
        let Some(kind) = stored.kind else { return false };
        let group = stored.group.unwrap_or(0);
        let first = !std::mem::replace(&mut self.kinds_told, true);
        let known = self.sides.iter().any(|side| side.group == group);
        if kind == GroupKind::Full && self.followed.is_none_or(|followed| group < followed) && !known {
            let changed = self.followed.replace(group).is_some();
            return changed || first && group != 0;
        }
        if self.followed != Some(group) && !known && self.sides.len() < MAX_SIDES {
            let (size, blocks) = (stored.block_size, HashMap::new());
            let rule = GateRule::of(kind, size as usize, block_size);
            self.sides.push(Side { group, kind, size, rule, blocks, gate: None });
        }
        first && self.followed.is_none()
    }

    fn role(&self, group: Option<u32>) -> GroupRole {
        let followed = if self.kinds_told { self.followed } else { Some(0) };
        // An event without a group is of an engine, or of an offload, that knows only one.
        if group.is_none_or(|group| followed == Some(group)) {
            return if followed.is_some() { GroupRole::Followed } else { GroupRole::Ignored };
        }
        let side = self.sides.iter().position(|side| Some(side.group) == group);
        side.map_or(GroupRole::Ignored, GroupRole::Side)
    }
}

/// Ranges of our hashes: run, start and end.
#[derive(Default)]
struct Ranges(Vec<(u32, usize, usize)>);

impl Ranges {
    /// Adds what a block of a group lists that ends where the block at `at` does. Returns false if that is
    /// not a whole number of blocks.
    fn add(&mut self, runs: &super::Runs, at: Position, kind: GroupKind, rule: GateRule) -> bool {
        let step = runs.step(at);
        if step == 0 {
            return false;
        }
        let end = (at.at as usize + 1) * step;
        if kind == GroupKind::State {
            self.0.push((at.run, end - 1, end));
            return true;
        }
        let blocks = rule.unit as usize / step;
        if blocks == 0 || !(rule.unit as usize).is_multiple_of(step) {
            return false;
        }
        let path = std::iter::successors(Some(at), |at| runs.parent(*at)).take(blocks);
        let path: Vec<Position> = path.collect();
        if path.len() < blocks || path.iter().any(|at| runs.step(*at) != step) {
            return false;
        }
        let ours = path.iter().map(|at| (at.run, at.at as usize * step, (at.at as usize + 1) * step));
        self.0.extend(ours);
        true
    }

    /// Returns the ranges in order, joined where they touch.
    fn merged(mut self) -> Vec<(u32, usize, usize)> {
        self.0.sort_unstable();
        self.0.dedup_by(|next, last| {
            let touches = next.0 == last.0 && next.1 == last.2;
            if touches {
                last.2 = next.2;
            }
            touches
        });
        self.0
    }
}
