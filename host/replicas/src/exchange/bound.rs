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
    /// Those that were made here: the connection is new, or messages of this gateway were lost.
    Own,
    /// Also those of other gateways, if it is up to this gateway to send these: a gateway joined.
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
        let is_newest = self.bindings.note((change, worker), is_placed, now);
        // An older one to the same worker tells how long a request of another gateway needs it.
        let stays = worker.is_some_and(|worker| self.bindings.is_on(change.key, worker));
        if is_placed && (is_newest || stays) {
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

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use pointsman_orchestration::{BindingKey, Sessions, Stamp};
    use pointsman_workers::{DpRank, Journal, Leg, WorkerId};
    use prefix_index::{IndexConfig, PrefixIndex};

    use super::*;
    use crate::{
        config::{Credentials, ReplicasConfig},
        peers::Effect,
        shared_states::SharedStates,
    };

    fn exchange() -> Exchange {
        let second = Duration::from_secs(1);
        let config = ReplicasConfig {
            servers: Vec::new(),
            fleet: "f".to_owned(),
            name: "me".to_owned(),
            block_size: 16,
            interval: second,
            snapshot_interval: second,
            lease: second,
            credentials: Credentials::None,
            tls: None,
        };
        let (sessions, changes) = Sessions::shared(1);
        let index = Arc::new(PrefixIndex::synchronous(IndexConfig::default()));
        let (sessions, states) = (Arc::new(sessions), SharedStates::new([]));
        let tables = (Arc::default(), index);
        Exchange::new(config, Journal::new(1), (sessions, changes), states, 5, tables, Arc::default())
    }

    #[test]
    fn q6_bindings_of_all_are_sent_to_gateways_that_join_and_not_for_each_lost_message() {
        let (mut exchange, now) = (exchange(), Instant::now());
        let worker = Some((WorkerKey { id: WorkerId(1), url: 1 }, DpRank(0)));
        for (session, writer) in [(1, exchange.writer), (2, 9)] {
            let (key, stamp) = (BindingKey::Session(session, Leg::Decode), Stamp { at_us: 1, writer });
            let ttl = Duration::from_secs(60);
            exchange.apply_change((SessionChange { key, candidate: None, ttl, stamp }, worker), now);
        }
        let mut sent = |asked: &[bool]| {
            asked.iter().for_each(|all| exchange.on_effect(Effect::Asked { all: *all }, now));
            let which = std::mem::take(&mut exchange.times.bindings_due);
            exchange.bindings_to_send(which, now).len()
        };
        // Q6.6: one that lost messages of this gateway gets the bindings of this one
        assert_eq!((sent(&[false]), sent(&[true]), sent(&[true, false]), sent(&[])), (1, 2, 2, 0));
    }
}
