//! The row in a list of each holder's candidate: found once, and again when the list or the directory
//! changed.

use std::{cmp::Ordering, sync::Arc};

use super::holders::{HolderDirectory, Holders, RECORDED};
use crate::id::{DpRank, WorkerId};

/// Stands for a holder whose candidate is not in the list, or has several holders.
pub(super) const NO_ROW: u32 = u32::MAX;

/// A list of candidates. A *row* is a position in it.
#[derive(Clone, Copy, Debug)]
pub struct CandidateRows<'a> {
    /// Tells this list from all others that lookups into the same [`Overlaps`](super::Overlaps) are asked
    /// about; 0 for an empty one.
    pub serial: u64,
    /// The candidates and their rows, sorted by candidate.
    pub by_id: &'a [((WorkerId, DpRank), u32)],
}

/// The rows of one list by the holders of one directory.
#[derive(Debug, Default)]
pub(super) struct HolderRows {
    directory: Arc<HolderDirectory>,
    serial: u64,
    /// Row of the holder's candidate, if the candidate has no other holder and this one is of the device.
    pub(super) single: Vec<u32>,
    /// The candidates with several holders, or with one of a lower tier.
    pub(super) several: Vec<(u32, Holders)>,
}

impl HolderRows {
    /// Makes these the rows of `list` by the holders of `directory`.
    pub(super) fn follow(&mut self, directory: &Arc<HolderDirectory>, list: CandidateRows<'_>) {
        if self.serial == list.serial && Arc::ptr_eq(&self.directory, directory) {
            return;
        }
        self.directory = directory.clone();
        self.serial = list.serial;
        self.single.clear();
        self.single.resize(directory.holders, NO_ROW);
        self.several.clear();
        // Both lists are sorted by candidate.
        let mut rows = list.by_id;
        for (candidate, holders) in &directory.candidates {
            while let [(first, row), rest @ ..] = rows {
                match first.cmp(candidate) {
                    Ordering::Less => rows = rest,
                    Ordering::Equal => {
                        self.add(*row, holders);
                        break;
                    }
                    Ordering::Greater => break,
                }
            }
        }
    }

    fn add(&mut self, row: u32, holders: &Holders) {
        let mut known = (0..).zip(holders).filter_map(|(kind, holder)| Some((kind, (*holder)?)));
        match (known.next(), known.next()) {
            (Some((kind, holder)), None) if kind == 0 || kind == RECORDED => {
                if let Some(single) = self.single.get_mut(holder as usize) {
                    *single = row;
                }
            }
            _ => self.several.push((row, *holders)),
        }
    }
}
