//! Finds the worker that another gateway names.

use std::{collections::HashMap, sync::Arc};

use pointsman_workers::{Snapshot, Worker, WorkerId, WorkerKey};

/// The registered workers by their names.
#[derive(Debug, Default)]
pub(super) struct Placement {
    by_url: HashMap<u64, Arc<Worker>>,
    by_id: HashMap<WorkerId, Arc<Worker>>,
}

impl Placement {
    pub(super) fn of(snapshot: &Snapshot) -> Self {
        let workers = || snapshot.workers().iter();
        Self {
            by_url: workers().map(|worker| (WorkerKey::of(worker.spec()).url, worker.clone())).collect(),
            by_id: workers().map(|worker| (worker.id(), worker.clone())).collect(),
        }
    }

    /// Returns the worker with the same URL. Otherwise that with the same id: gateways may reach an engine at
    /// different addresses.
    pub(super) fn find(&self, key: WorkerKey) -> Option<&Arc<Worker>> {
        self.by_url.get(&key.url).or_else(|| self.by_id.get(&key.id))
    }
}
