//! Blocks of an engine that do not end where ours do: pages of one token, for example.
//!
//! Our block is *complete* in a tier while the engine stores every block there that overlaps it. Only then
//! does the block table name the tier's holder for it.
//!
//! ```text
//! engine's blocks   |  0  |  1  |  2  |  3  |  4  |      3 tokens each
//! our blocks        |   0   |   1   |   2   |   3 ..     4 tokens each: 1 needs the engine's 1 and 2
//! ```
//!
//! A run holds our blocks that end in it. The first of them may begin in runs before it.

#![expect(clippy::indexing_slicing, reason = "tiers are 0, 1 and 2")]

use super::{
    super::{block_positions::Position, memory::reserve, tree::TreeWriter},
    Runs,
    parts::Parts,
};
use crate::{
    hash::{BlockContent, extend_block},
    id::BlockHash,
};

/// A block to be added.
pub(in super::super) struct NewPart<'a> {
    pub(in super::super) engine: u64,
    pub(in super::super) tokens: &'a [u32],
    pub(in super::super) objects: &'a [u64],
    pub(in super::super) seed: u64,
    /// Number of blocks that follow, this one included.
    pub(in super::super) more: usize,
}

impl Runs {
    /// Returns the number of tokens at the end of a block for which one of our blocks is not full yet.
    pub(in super::super) fn open_tokens(&self, at: Option<Position>) -> usize {
        let parts = at.and_then(|at| Some((at, self.run(at)?.parts.as_ref()?)));
        parts.map_or(0, |(at, parts)| parts.open(at.at as usize + 1))
    }

    /// Adds a block whose end is not one of ours, or whose start is not.
    pub(in super::super) fn push_part(
        &mut self,
        parent: Option<Position>,
        block: &NewPart<'_>,
        ours: usize,
    ) -> Position {
        let size = block.tokens.len();
        let before = self.open_tokens(parent);
        let mut hashes = Vec::new();
        if before + size >= ours {
            self.hash_ended(parent, before, block, ours, &mut hashes);
        }
        let tail = parent.filter(|at| {
            let same = |parts: &Parts| parts.size == size && parts.ours == ours;
            self.run(*at).is_some_and(|run| run.parts.as_ref().is_some_and(|p| same(p)) && run.ends_at(at.at))
        });
        let number = tail.map_or_else(
            || {
                let parts = Parts { size, ours, before, ..Parts::default() };
                self.start_run(parent, block.seed, 0, Some(Box::new(parts)))
            },
            |at| at.run,
        );
        let index = self.change(number, |run| {
            let at = u32::try_from(run.blocks.len()).unwrap_or(u32::MAX);
            if let Some(parts) = &mut run.parts {
                reserve(&mut parts.tokens, block.more * size);
                parts.tokens.extend_from_slice(block.tokens);
                reserve(&mut parts.objects, block.objects.len());
                parts.objects.extend(block.objects.iter().map(|object| (at, *object)));
                reserve(&mut parts.listed, hashes.len());
                parts.listed.resize(parts.listed.len() + hashes.len(), 0);
            }
            run.blocks.reserve(block.more);
            run.extend(&[block.engine], &hashes, [0; 3]);
            at
        });
        let at = Position { run: number, at: index.unwrap_or(0) };
        self.insert_new(at.run, at.at as usize);
        at
    }

    /// Hashes our blocks that end in a new block: `before` tokens of the first one lie before it.
    fn hash_ended(
        &self,
        parent: Option<Position>,
        before: usize,
        block: &NewPart<'_>,
        ours: usize,
        hashes: &mut Vec<BlockHash>,
    ) {
        let (mut tokens, mut objects) = self.open_content(parent, before);
        tokens.extend_from_slice(block.tokens);
        objects.extend_from_slice(block.objects);
        objects.sort_unstable();
        objects.dedup();
        let mut chain = self.last_hash(parent);
        for (number, content) in tokens.chunks_exact(ours).enumerate() {
            // Objects of the blocks before reach into the first of our blocks only.
            let objects = if number == 0 { &objects[..] } else { block.objects };
            let hash = extend_block(chain, &BlockContent { tokens: content, objects }, block.seed);
            hashes.push(hash);
            chain = Some(hash);
        }
    }

    /// Returns the last `count` tokens up to the end of a block, and the objects in them.
    fn open_content(&self, at: Option<Position>, count: usize) -> (Vec<u32>, Vec<u64>) {
        let (mut reversed, mut objects) = (Vec::with_capacity(count), Vec::new());
        let mut next = at;
        while let Some(at) = next.filter(|_| reversed.len() < count) {
            let Some(run) = self.run(at) else { break };
            let Some(parts) = &run.parts else { break };
            let end = (at.at as usize + 1) * parts.size;
            let from = end.saturating_sub(count - reversed.len());
            reversed.extend(parts.tokens.get(from..end).unwrap_or_default().iter().rev());
            let blocks = from / parts.size.max(1)..=at.at as usize;
            let within = parts.objects.iter().filter(|(block, _)| blocks.contains(&(*block as usize)));
            objects.extend(within.map(|(_, object)| *object));
            next = run.parent;
        }
        reversed.reverse();
        (reversed, objects)
    }

    /// Lists our blocks that a newly stored block completes in a tier.
    pub(in super::super) fn list_completed(
        &mut self,
        tree: &mut TreeWriter,
        at: Position,
        tier: usize,
        holder: u32,
    ) {
        let Some(parts) = self.run(at).and_then(|run| run.parts.as_ref()) else { return };
        for ours in parts.overlapping(at.at as usize) {
            let is_new = self.listed_in(at, ours).is_some_and(|tiers| tiers & (1 << tier) == 0);
            if !is_new || !self.is_complete(at, ours, tier) {
                continue;
            }
            if self.set_listed(at, ours, tier, true) {
                self.cover(tree, at.run, ours..ours + 1, holder);
            }
        }
    }

    /// Takes our blocks that overlap a block out of a tier's list. Returns false if others cannot be reached:
    /// blocks that are stored in the tier and begin, in other runs, within one of ours that the block is part
    /// of.
    pub(in super::super) fn unlist(
        &mut self,
        tree: &mut TreeWriter,
        at: Position,
        tier: usize,
        holder: u32,
    ) -> bool {
        let Some(run) = self.run(at) else { return true };
        let Some(parts) = &run.parts else { return true };
        let overlapping = parts.overlapping(at.at as usize);
        let last = overlapping.end.saturating_sub(1);
        let reachable = (at.at as usize..run.blocks.len())
            .take_while(|block| parts.ended(block + 1) <= last)
            .all(|block| {
                let branch = u32::try_from(block).ok().and_then(|block| run.branch(block));
                branch.is_none_or(|branch| branch.stored[tier] == 0)
            });
        for ours in overlapping.rev() {
            if self.listed_in(at, ours).is_some_and(|tiers| tiers & (1 << tier) != 0)
                && self.set_listed(at, ours, tier, false)
            {
                self.uncover(tree, at.run, ours..ours + 1, holder);
            }
        }
        reachable
    }

    fn listed_in(&self, at: Position, ours: usize) -> Option<u8> {
        self.run(at)?.parts.as_ref()?.listed.get(ours).copied()
    }

    /// Returns whether one of our blocks ends in the run.
    fn set_listed(&mut self, at: Position, ours: usize, tier: usize, listed: bool) -> bool {
        let run = self.run_mut(at);
        let parts = run.and_then(|run| run.parts.as_mut());
        let Some(tiers) = parts.and_then(|parts| parts.listed.get_mut(ours)) else { return false };
        if listed {
            *tiers |= 1 << tier;
        } else {
            *tiers &= !(1 << tier);
        }
        true
    }

    /// Returns whether a tier stores every block that overlaps one of ours, which ends in the run of `at`.
    fn is_complete(&self, at: Position, ours: usize, tier: usize) -> bool {
        let Some(run) = self.run(at) else { return false };
        let Some(parts) = &run.parts else { return false };
        let (start, end) = (ours * parts.ours, (ours + 1) * parts.ours);
        let size = parts.size.max(1);
        let last = (end - 1).saturating_sub(parts.before) / size;
        let first = start.saturating_sub(parts.before) / size;
        if !(first..=last).all(|block| run.blocks.stored(block)[tier] > 0) {
            return false;
        }
        let mut missing = parts.before.saturating_sub(start);
        let mut next = run.parent;
        while missing > 0 {
            let Some(at) = next else { return false };
            if self.stored(at)[tier] == 0 {
                return false;
            }
            let size = self.run(at).and_then(|run| run.parts.as_ref()).map_or(missing, |parts| parts.size);
            missing = missing.saturating_sub(size.max(1));
            next = self.parent(at);
        }
        true
    }
}
