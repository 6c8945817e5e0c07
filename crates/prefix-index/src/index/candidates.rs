//! The writer's candidates: their holders, and the source of each (recorded decisions, or events of its
//! engine).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Candidate, Shared,
    engine_cache::EngineCache,
    gates::{Gate, GateRule},
    holders::{AssignHolders, HolderDirectory, Holders, tier_index},
};
use crate::{
    events::Tier,
    id::{DpRank, WorkerId},
    prefix::Prefix,
};

/// How long decisions are recorded, from the first one after an engine stored a block with an unknown parent.
/// An engine that had cached a prefix before its events were followed never reports that prefix again while
/// it is in use.
const INCOMPLETE: Duration = Duration::from_mins(10);

/// State of one candidate.
#[derive(Debug, Default)]
pub(super) struct CandidateState {
    pub(super) holders: Holders,
    /// The holders of its gates.
    gates: Vec<u32>,
    /// The engine's event feed is connected: decisions are not recorded.
    pub(super) live: bool,
    /// Content of the engine's cache according to its events.
    pub(super) cache: Option<EngineCache>,
    /// Until then, decisions are recorded besides the events, which lack blocks that the engine has.
    pub(super) incomplete_until: Option<Instant>,
}

impl CandidateState {
    /// Returns whether events report the candidate's blocks of a prompt, so that a decision at `at` is not
    /// recorded. Those of an adapter's prompt cannot be found if events do not name adapters.
    pub(super) fn is_followed(&mut self, prefix: &Prefix, at: Instant) -> bool {
        let Some(cache) = &mut self.cache else { return self.live && !prefix.is_of_adapter() };
        if cache.take_orphaned() {
            self.incomplete_until = Some(at + INCOMPLETE);
        }
        let is_complete = self.incomplete_until.is_none_or(|until| until <= at);
        let is_named = !prefix.is_of_adapter() || cache.names_adapters();
        self.live && is_complete && is_named && !cache.lacks_followed_group()
    }
}

/// All candidates of the index.
#[derive(Debug)]
pub(super) struct Candidates {
    shared: Arc<Shared>,
    states: BTreeMap<Candidate, CandidateState>,
    /// Candidates and their numbers of live records, by holder.
    assigned: Vec<Option<(Candidate, u32)>>,
    /// Unassigned holders below the last assigned one.
    free: BTreeSet<u32>,
}

impl Candidates {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, states: BTreeMap::new(), assigned: Vec::new(), free: BTreeSet::new() }
    }

    pub(super) fn get(&self, candidate: Candidate) -> Option<&CandidateState> {
        self.states.get(&candidate)
    }

    pub(super) fn get_mut(&mut self, candidate: Candidate) -> Option<&mut CandidateState> {
        self.states.get_mut(&candidate)
    }

    /// Returns the state of a candidate; creates it if it is new.
    pub(super) fn get_or_insert(&mut self, candidate: Candidate) -> &mut CandidateState {
        self.states.entry(candidate).or_default()
    }

    /// Returns the candidates of a worker.
    pub(super) fn of_worker(&self, worker: WorkerId) -> Vec<Candidate> {
        let all = (worker, DpRank(0))..=(worker, DpRank(u32::MAX));
        self.states.range(all).map(|(candidate, _)| *candidate).collect()
    }

    /// Returns a holder of a candidate. A new one is published before it has any block.
    pub(super) fn holder(&mut self, candidate: Candidate, kind: usize) -> Option<u32> {
        let known = self.states.get(&candidate).and_then(|state| state.holders.get(kind).copied().flatten());
        if known.is_some() {
            return known;
        }
        let holder = self.assign(candidate);
        self.publish(candidate, kind, Some(holder));
        if let Some(of_kind) = self.get_or_insert(candidate).holders.get_mut(kind) {
            *of_kind = Some(holder);
        }
        Some(holder)
    }

    fn assign(&mut self, candidate: Candidate) -> u32 {
        let holder = self.free.pop_first().unwrap_or_else(|| {
            self.assigned.push(None);
            u32::try_from(self.assigned.len() - 1).unwrap_or(u32::MAX)
        });
        if let Some(assigned) = self.assigned.get_mut(holder as usize) {
            *assigned = Some((candidate, 0));
        }
        holder
    }

    /// Adds a gate to a candidate. Returns its holder.
    fn add_gate(&mut self, candidate: Candidate, rule: GateRule) -> Option<u32> {
        let [device, ..] = self.states.get(&candidate)?.holders;
        let (limits, holder) = (device?, self.assign(candidate));
        self.change_directory(|directory, holders| {
            directory.add_gate(Gate { candidate, limits, holder, rule }, holders);
        });
        self.get_or_insert(candidate).gates.push(holder);
        Some(holder)
    }

    /// Removes the gates of a candidate, or one of them. They list nothing any more.
    pub(super) fn end_gates(&mut self, candidate: Candidate, only: Option<u32>) {
        let Some(state) = self.states.get_mut(&candidate).filter(|state| !state.gates.is_empty()) else {
            return;
        };
        let ended: Vec<u32> =
            state.gates.extract_if(.., |gate| only.is_none_or(|only| only == *gate)).collect();
        for holder in &ended {
            self.release(*holder);
        }
        self.change_directory(|directory, holders| directory.end_gates(&ended, holders));
    }

    /// Adds to the number of a holder's records. A candidate without records may lose its holders.
    pub(super) fn count_records(&mut self, holder: u32, by: i32) {
        let Some(Some((candidate, records))) = self.assigned.get_mut(holder as usize) else { return };
        *records = records.saturating_add_signed(by);
        if *records == 0 {
            let candidate = *candidate;
            self.release_unused(candidate);
        }
    }

    /// Returns the number of live records of a holder.
    pub(super) fn records(&self, holder: u32) -> u32 {
        self.assigned.get(holder as usize).copied().flatten().map_or(0, |(_, records)| records)
    }

    /// Releases the holders of a candidate without records or events, and then its state. Decisions may be
    /// recorded after their worker left; without this, nothing would ever remove the state that they create.
    pub(super) fn release_unused(&mut self, candidate: Candidate) {
        let Some(state) = self.states.get(&candidate) else { return };
        if state.cache.is_some() {
            return;
        }
        let holders = state.holders;
        self.end_gates(candidate, None);
        for (kind, holder) in holders.into_iter().enumerate() {
            let Some(holder) = holder.filter(|holder| self.records(*holder) == 0) else { continue };
            if let Some(of_kind) = self.get_or_insert(candidate).holders.get_mut(kind) {
                *of_kind = None;
            }
            self.release(holder);
            self.publish(candidate, kind, None);
        }
        let unused = |state: &CandidateState| !state.live && state.holders.iter().all(Option::is_none);
        if self.states.get(&candidate).is_some_and(unused) {
            self.states.remove(&candidate);
        }
    }

    fn release(&mut self, holder: u32) {
        if let Some(assigned) = self.assigned.get_mut(holder as usize) {
            *assigned = None;
        }
        self.free.insert(holder);
        while let Some(None) = self.assigned.last() {
            self.assigned.pop();
            self.free.remove(&u32::try_from(self.assigned.len()).unwrap_or(u32::MAX));
        }
    }

    fn publish(&self, candidate: Candidate, kind: usize, holder: Option<u32>) {
        self.change_directory(|directory, holders| directory.set(candidate, kind, holder, holders));
    }

    /// Publishes a changed directory. `change` also gets the upper bound of all holders.
    fn change_directory(&self, change: impl FnOnce(&mut HolderDirectory, usize)) {
        let mut directory = HolderDirectory::clone(&self.shared.directory.load());
        change(&mut directory, self.assigned.len());
        self.shared.directory.store(Arc::new(directory));
        let holders = self.assigned.len() - self.free.len();
        self.shared.counters.holders.store(holders as u64, Ordering::Relaxed);
    }
}

/// Assigns the holders of one of all candidates.
pub(super) struct HoldersOf<'a> {
    pub(super) candidates: &'a mut Candidates,
    pub(super) candidate: Candidate,
}

impl AssignHolders for HoldersOf<'_> {
    fn of_tier(&mut self, tier: Tier) -> Option<u32> {
        self.candidates.holder(self.candidate, tier_index(tier))
    }

    fn at_once(&mut self, tier: Tier, blocks: u32) {
        let Some(holder) = self.of_tier(tier) else { return };
        if self.candidates.shared.directory.load().at_once(holder) != blocks {
            self.candidates.change_directory(|directory, _| directory.set_at_once(holder, blocks));
        }
    }

    fn gate(&mut self, rule: GateRule) -> Option<u32> {
        self.candidates.add_gate(self.candidate, rule)
    }

    fn end_gate(&mut self, gate: u32) {
        self.candidates.end_gates(self.candidate, Some(gate));
    }
}
