//! Records of decisions in the tree.

use super::{reach::Reach, segments::Cover, tree::TreeWriter};
use crate::id::BlockHash;

impl TreeWriter {
    /// Adds the record of a decision, or again that of an earlier one. Returns how many of its blocks other
    /// records of the holder covered before.
    pub(super) fn record(&mut self, holder: u32, blocks: &[BlockHash], record: u64) -> usize {
        let mut covered = 0;
        let mut stretches = std::mem::take(&mut self.stretches);
        self.place(None, blocks, holder, &mut stretches);
        for stretch in &stretches {
            let Some(node) = self.nodes.get_mut(stretch.slot as usize) else { continue };
            let (to, known) = (stretch.at + stretch.count, node.recorded.reach(holder));
            self.inner -= node.recorded.bytes();
            node.recorded.add(Reach { holder, to: u32::try_from(to).unwrap_or(u32::MAX), record });
            self.inner += node.recorded.bytes();
            if covered == stretch.from {
                covered += known.min(to).saturating_sub(stretch.at);
            }
            if to > known {
                self.cover_once(stretch.slot, Cover { holder, from: 0, to });
            }
        }
        stretches.clear();
        self.stretches = stretches;
        covered
    }

    /// Removes a record. `restore` adds again what it kept from being listed, before any block is uncovered:
    /// lookups always see these blocks.
    pub(super) fn end_record(
        &mut self,
        holder: u32,
        blocks: &[BlockHash],
        record: u64,
        restore: impl FnOnce(&mut Self),
    ) {
        let mut slots = std::mem::take(&mut self.passed);
        let (mut here, mut rest) = (None, blocks);
        while let Ok(Some(slot)) = self.follow(here, rest) {
            let common = self.common(slot, 0, rest);
            if let Some(node) = self.nodes.get_mut(slot as usize) {
                slots.push((slot, node.recorded.reach(holder)));
                self.inner -= node.recorded.bytes();
                node.recorded.end(holder, record);
                self.inner += node.recorded.bytes();
            }
            if common == 0 || common < self.len(slot) {
                break;
            }
            (here, rest) = (Some((slot, common)), rest.get(common..).unwrap_or_default());
        }
        restore(self);
        while let Some((slot, before)) = slots.pop() {
            let Some(node) = self.nodes.get_mut(slot as usize) else { continue };
            let left = node.recorded.reach(holder);
            if left < before {
                self.uncover_once(slot, Cover { holder, from: left, to: before });
                self.trim(slot);
            }
        }
        self.passed = slots;
    }
}
