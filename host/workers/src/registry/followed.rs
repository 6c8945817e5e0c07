//! Follows the workers of a registry, for code that starts and stops something for each worker.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use tokio_util::sync::CancellationToken;

use super::Snapshot;
use crate::{id::WorkerId, worker::Worker};

/// The workers of the last snapshot, each with the token that ends what runs for it.
#[derive(Debug, Default)]
pub(crate) struct Followed(HashMap<WorkerId, (Arc<Worker>, CancellationToken)>);

impl Followed {
    /// Follows a snapshot. Cancels the tokens of workers that left or were replaced, and calls `left`; then
    /// calls `joined` with each new worker and its token, a child of `stop`. What runs for a worker goes on
    /// for the one that takes its place if `serves` says so of the old and the new one.
    pub(crate) fn follow(
        &mut self,
        snapshot: &Snapshot,
        stop: &CancellationToken,
        serves: impl Fn(&Worker, &Worker) -> bool,
        mut left: impl FnMut(WorkerId),
        mut joined: impl FnMut(&Arc<Worker>, &CancellationToken),
    ) {
        self.0.retain(|id, (worker, token)| {
            let stays = snapshot.get(*id).is_some_and(|present| {
                if !Arc::ptr_eq(present, worker) && serves(worker, present) {
                    worker.clone_from(present);
                }
                Arc::ptr_eq(present, worker)
            });
            if !stays {
                token.cancel();
                left(*id);
            }
            stays
        });
        for worker in snapshot.workers() {
            if let Entry::Vacant(vacant) = self.0.entry(worker.id()) {
                let (_, token) = vacant.insert((worker.clone(), stop.child_token()));
                joined(worker, token);
            }
        }
    }
}
