//! Gates: where a match may end. The cache groups of a hybrid model beside the one that the index follows
//! list their blocks under holders of their own. A match ends where every group has the blocks that it needs
//! to continue.

use super::{Candidate, segments::Segment};
use crate::events::GroupKind;

/// Blocks of the index that a cache group needs to continue from the end of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GateRule {
    /// So many blocks up to the end, or all of the prefix if that is shorter.
    pub(super) need: u32,
    /// The prefix ends at a multiple of this.
    pub(super) unit: u32,
}

/// A cache group of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gate {
    pub(super) candidate: Candidate,
    /// The holder whose match it limits: the candidate's device.
    pub(super) limits: u32,
    /// The holder that lists the group's blocks.
    pub(super) holder: u32,
    pub(super) rule: GateRule,
}

/// Entries of the gates for one prompt. Buffers that the next lookup reuses.
#[derive(Debug, Default)]
pub(super) struct Listed {
    /// Gate, and its blocks `from..to` of the prompt.
    ranges: Vec<(u32, u32, u32)>,
    /// End of the ranges that are not known to be too short, by gate.
    open: Vec<usize>,
}

impl Listed {
    pub(super) fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Adds the gates' entries for a segment whose first `matching` blocks follow `before` blocks of the
    /// prompt.
    pub(super) fn add(&mut self, gates: &[Gate], before: usize, matching: usize, segment: &Segment) {
        for cover in segment.covers() {
            let Ok(gate) = gates.binary_search_by_key(&cover.holder, |gate| gate.holder) else { continue };
            let (from, to) = (before + cover.from, before + cover.to.min(matching));
            if from < to {
                let number = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
                self.ranges.push((number(gate), number(from), number(to)));
            }
        }
    }

    /// Shortens the matches. `ends` has the ends of all holders' matches.
    pub(super) fn limit(&mut self, gates: &[Gate], ends: &mut [u32]) {
        self.ranges.sort_unstable();
        self.ranges.dedup_by(|next, last| {
            let touches = next.0 == last.0 && next.1 <= last.2;
            if touches {
                last.2 = last.2.max(next.2);
            }
            touches
        });
        self.open.clear();
        let behind = |gate: usize| self.ranges.partition_point(|range| range.0 as usize <= gate);
        self.open.extend((0..gates.len()).map(behind));
        // Each gate may shorten the match for the others. Ranges that are too short for one end are too short
        // for every earlier one, so each is looked at once.
        loop {
            let mut shorter = false;
            for (number, gate) in gates.iter().enumerate() {
                let Some(end) = ends.get_mut(gate.limits as usize).filter(|end| **end > 0) else { continue };
                let Some(open) = self.open.get_mut(number) else { continue };
                let limit = gate.rule.end(number, &self.ranges, open, *end);
                shorter |= limit < *end;
                *end = limit;
            }
            if !shorter {
                return;
            }
        }
    }
}

impl GateRule {
    /// Returns what a group with blocks of `size` tokens needs; none if that is not known. The index has
    /// blocks of `ours` tokens.
    pub(super) fn of(kind: GroupKind, size: usize, ours: usize) -> Option<Self> {
        let whole = size > 0 && size.is_multiple_of(ours.max(1));
        let unit = u32::try_from(size / ours.max(1)).unwrap_or(u32::MAX);
        match kind {
            GroupKind::State => Some(Self { need: 1, unit: 1 }),
            // The next token sees the window, which includes itself.
            GroupKind::Window(tokens) if whole => {
                let blocks = (tokens as usize).saturating_sub(1).div_ceil(size).max(1);
                let need = u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(unit);
                Some(Self { need, unit })
            }
            GroupKind::Full if whole => Some(Self { need: u32::MAX, unit }),
            GroupKind::Window(_) | GroupKind::Full | GroupKind::Other => None,
        }
    }

    /// Returns the last end up to `end` from which the group can continue.
    fn end(self, gate: usize, ranges: &[(u32, u32, u32)], open: &mut usize, end: u32) -> u32 {
        while let Some((of, from, to)) = open.checked_sub(1).and_then(|last| ranges.get(last)).copied() {
            if of as usize != gate {
                break;
            }
            let reach = to.min(end);
            let reach = reach - reach % self.unit.max(1);
            if reach > from && (from == 0 || reach - from >= self.need) {
                return reach;
            }
            *open -= 1;
        }
        0
    }
}
