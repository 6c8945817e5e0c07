//! Sessions that were bound or closed here.

use std::sync::mpsc::Receiver;

use pointsman_orchestration::SessionChange;
use pointsman_workers::{Registry, WorkerKey};

use crate::outbox::NamedSession;

/// Maximum number of changes in one batch; the others follow in the next one.
const MAX_CHANGES: usize = 16_384;

/// Takes the changes since the last call, with the names of their workers. A worker that left is not named.
pub(super) fn take_changes(changes: &Receiver<SessionChange>, registry: &Registry) -> Vec<NamedSession> {
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
