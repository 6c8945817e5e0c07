//! Sessions that were bound or closed here, and at other gateways.

use std::sync::mpsc::Receiver;

use pointsman_orchestration::SessionChange;
use pointsman_workers::{Registry, WorkerKey};
use tokio::time::Instant;

use super::Exchange;
use crate::bindings::NamedSession;

/// Maximum number of changes in one batch; the others follow in the next one.
const MAX_CHANGES: usize = 16_384;

/// Which bindings a snapshot has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SentBindings {
    #[default]
    None,
    /// Those that were made here, for the others: the connection is new.
    Own,
    /// Also those of other gateways, if it is up to this gateway to send these: another one asked.
    Known,
}

impl Exchange {
    /// Takes the registered workers over.
    pub(super) fn set_workers(&mut self, now: Instant) {
        self.peers.set_workers(&self.registry.snapshot());
        let placed = self.bindings.place(|worker| self.peers.worker_id(worker), now);
        placed.into_iter().for_each(|change| self.sessions.apply(change));
    }

    /// Takes the changes that were made here since the last call.
    pub(super) fn take_own_changes(&mut self, now: Instant) -> Vec<NamedSession> {
        let changes = take_changes(&self.session_changes, &self.registry);
        for named in &changes {
            self.bindings.note(*named, true, now);
        }
        changes
    }

    /// Applies a change of another gateway. A binding to a worker that is unknown here is kept aside.
    pub(super) fn apply_change(&mut self, (change, worker): NamedSession, now: Instant) {
        let candidate = worker.and_then(|(worker, rank)| Some((self.peers.worker_id(worker)?, rank)));
        let is_placed = worker.is_none() || candidate.is_some();
        if self.bindings.note((change, worker), is_placed, now) && is_placed {
            self.sessions.apply(SessionChange { candidate, ..change });
        }
    }

    /// Returns the bindings of a snapshot.
    pub(super) fn bindings_to_send(&self, which: SentBindings, now: Instant) -> Vec<NamedSession> {
        match which {
            SentBindings::None => Vec::new(),
            SentBindings::Known if self.peers.sends_all_bindings() => self.bindings.held(None, now),
            SentBindings::Own | SentBindings::Known => self.bindings.held(Some(self.writer), now),
        }
    }
}

/// Takes the changes since the last call, with the names of their workers. A worker that left is not named.
fn take_changes(changes: &Receiver<SessionChange>, registry: &Registry) -> Vec<NamedSession> {
    let mut taken: Vec<SessionChange> = Vec::new();
    while taken.len() < MAX_CHANGES {
        let Ok(change) = changes.try_recv() else { break };
        taken.push(change);
    }
    if taken.is_empty() {
        return Vec::new();
    }
    let snapshot = registry.snapshot();
    let named = taken.into_iter().filter_map(|change| {
        let Some((worker, rank)) = change.candidate else { return Some((change, None)) };
        Some((change, Some((WorkerKey::of(snapshot.get(worker)?.spec()), rank))))
    });
    named.collect()
}
