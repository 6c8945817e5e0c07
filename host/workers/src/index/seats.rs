//! Who has which slots, and what each is known by: guesses, an engine's own word, or both in turn.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
};

use super::{
    Candidate, Shared,
    names::{Names, place},
    source::{Source, TierSlot},
};
use crate::{
    events::Tier,
    id::{DpRank, WorkerId},
};

/// A candidate.
#[derive(Debug, Default)]
pub(super) struct Seat {
    /// By tier.
    pub(super) slots: [Option<TierSlot>; 3],
    /// The engine's own word is there.
    pub(super) live: bool,
    /// What it says.
    pub(super) source: Option<Source>,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Seats {
    shared: Arc<Shared>,
    seats: BTreeMap<Candidate, Seat>,
    /// By slot: whose it is, and its records alive.
    owners: Vec<Option<(Candidate, u32)>>,
    /// Slots below the last that nobody has.
    free: BTreeSet<u32>,
}

impl Seats {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, seats: BTreeMap::new(), owners: Vec::new(), free: BTreeSet::new() }
    }

    pub(super) fn get(&self, candidate: Candidate) -> Option<&Seat> {
        self.seats.get(&candidate)
    }

    pub(super) fn get_mut(&mut self, candidate: Candidate) -> Option<&mut Seat> {
        self.seats.get_mut(&candidate)
    }

    /// The seat of a candidate, which may be new.
    pub(super) fn seat(&mut self, candidate: Candidate) -> &mut Seat {
        self.seats.entry(candidate).or_default()
    }

    /// A worker's candidates.
    pub(super) fn of(&self, worker: WorkerId) -> Vec<Candidate> {
        let all = (worker, DpRank(0))..=(worker, DpRank(u32::MAX));
        self.seats.range(all).map(|(candidate, _)| *candidate).collect()
    }

    /// The slot of a candidate's tier; a new one has its name before anything is said of it.
    pub(super) fn slot(&mut self, candidate: Candidate, tier: Tier) -> Option<TierSlot> {
        let known =
            self.seats.get(&candidate).and_then(|seat| seat.slots.get(place(tier)).cloned().flatten());
        if known.is_some() {
            return known;
        }
        let slot = self.free.pop_first().unwrap_or_else(|| {
            self.owners.push(None);
            u32::try_from(self.owners.len() - 1).unwrap_or(u32::MAX)
        });
        if let Some(owner) = self.owners.get_mut(slot as usize) {
            *owner = Some((candidate, 0));
        }
        self.publish(candidate, tier, Some(slot));
        let slot = TierSlot { slot, holes: self.shared.names.load().holes(slot)? };
        if let Some(of) = self.seat(candidate).slots.get_mut(place(tier)) {
            *of = Some(slot.clone());
        }
        Some(slot)
    }

    /// Counts a slot's records.
    pub(super) fn count(&mut self, slot: u32, by: i32) {
        let Some(Some((candidate, records))) = self.owners.get_mut(slot as usize) else { return };
        *records = records.saturating_add_signed(by);
        if *records == 0 {
            let candidate = *candidate;
            self.free(candidate);
        }
    }

    /// Records of a slot.
    pub(super) fn records(&self, slot: u32) -> u32 {
        self.owners.get(slot as usize).copied().flatten().map_or(0, |(_, records)| records)
    }

    /// Gives back the slots of a candidate of which nothing is known, and its seat: decisions may be recorded after their
    /// worker left, and nobody takes it out again.
    pub(super) fn free(&mut self, candidate: Candidate) {
        let Some(seat) = self.seats.get(&candidate) else { return };
        if seat.source.is_some() {
            return;
        }
        let slots = seat.slots.clone();
        for (tier, slot) in [Tier::Device, Tier::Host, Tier::Disk].into_iter().zip(slots) {
            let Some(slot) = slot.filter(|slot| self.records(slot.slot) == 0) else { continue };
            if let Some(of) = self.seat(candidate).slots.get_mut(place(tier)) {
                *of = None;
            }
            self.give_back(slot.slot);
            self.publish(candidate, tier, None);
        }
        if self.seats.get(&candidate).is_some_and(|seat| !seat.live && seat.slots.iter().all(Option::is_none))
        {
            self.seats.remove(&candidate);
        }
    }

    fn give_back(&mut self, slot: u32) {
        if let Some(owner) = self.owners.get_mut(slot as usize) {
            *owner = None;
        }
        self.free.insert(slot);
        while let Some(None) = self.owners.last() {
            self.owners.pop();
            self.free.remove(&u32::try_from(self.owners.len()).unwrap_or(u32::MAX));
        }
    }

    fn publish(&self, candidate: Candidate, tier: Tier, slot: Option<u32>) {
        let mut names = Names::clone(&self.shared.names.load());
        names.set(candidate, tier, slot, self.owners.len());
        self.shared.names.store(Arc::new(names));
        let slots = self.owners.len() - self.free.len();
        self.shared.counters.slots.store(slots as u64, Ordering::Relaxed);
    }
}
