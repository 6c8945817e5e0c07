//! Finds the present positions of a trail's hashes in the tree.

use super::{
    trail::{Stretch, Trail},
    tree::{Spot, TreeWriter},
};
use crate::id::BlockHash;

impl TreeWriter {
    /// Returns where a hash of a trail lies; none if it left the tree.
    pub(super) fn locate(&self, trail: &mut Trail, hashes: &[BlockHash], at: usize) -> Option<Spot> {
        let mut piece = trail.piece(at)?;
        loop {
            let node = self.nodes.get(piece.slot as usize).filter(|node| node.born == piece.born)?;
            let (here, len) = (piece.at + at - piece.from, node.segment.len());
            if here < len {
                let same = node.segment.hash(here).as_ref() == hashes.get(at);
                return same.then_some(Spot { slot: piece.slot, at: here });
            }
            // The segment was split: continue with the one that follows.
            if piece.at >= len {
                let slot = node.rest?;
                piece = Stretch { slot, born: self.born(slot), at: piece.at - len, ..piece };
                trail.add(piece);
                continue;
            }
            let from = piece.from + len - piece.at;
            let depth = node.depth + len;
            let slot = self.head(*hashes.get(from)?).filter(|slot| self.depth(*slot) == depth)?;
            piece = Stretch { from, slot, born: self.born(slot), at: 0, count: 0 };
            trail.add(piece);
        }
    }
}
