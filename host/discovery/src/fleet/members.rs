//! The workers that the fleet put into the registry.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use pointsman_workers::{Snapshot, WorkerId, WorkerSpec};
use tokio::time::Instant;

use super::Dismissed;
use crate::found::Found;

/// The workers by id.
#[derive(Debug, Default)]
pub(super) struct Members {
    by_id: HashMap<WorkerId, Member>,
}

#[derive(Debug)]
struct Member {
    source: usize,
    spec: WorkerSpec,
    /// Its last known identity.
    identity: Option<Arc<str>>,
    /// When the worker is removed although it has requests; `None` if it stays.
    leaves_at: Option<Instant>,
    /// Whether it gets no new request because it is not ready, and stays.
    is_set_aside: bool,
    /// Whether no source lists it.
    unlisted: bool,
}

/// Changes for the registry.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) joining: Vec<WorkerSpec>,
    /// Workers that left. One with the id of a joining worker was another worker.
    pub(super) gone: Vec<WorkerId>,
    /// Workers that begin to leave, are set aside, or stay after all.
    pub(super) leaving: Vec<(WorkerId, Leaving)>,
}

/// Whether a worker leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    No,
    /// It gets no new request, and its streams stay.
    SetAside,
    Yes,
}

impl Leaving {
    fn of(found: &Found) -> Self {
        match (found.leaving, found.unready) {
            (false, _) => Self::No,
            (true, true) => Self::SetAside,
            (true, false) => Self::Yes,
        }
    }
}

impl Members {
    pub(super) fn source_of(&self, id: WorkerId) -> Option<usize> {
        self.by_id.get(&id).filter(|member| !member.unlisted).map(|member| member.source)
    }

    pub(super) fn spec_of(&self, id: WorkerId) -> Option<&WorkerSpec> {
        self.by_id.get(&id).map(|member| &member.spec)
    }

    /// Returns the worker as one that an operator removes.
    pub(super) fn dismissed(&self, id: WorkerId) -> Option<Dismissed> {
        let member = self.by_id.get(&id)?;
        Some(Dismissed { spec: member.spec.clone(), identity: member.identity.clone() })
    }

    pub(super) fn owners(&self) -> impl Iterator<Item = (WorkerId, usize)> {
        self.by_id.iter().map(|(id, member)| (*id, member.source))
    }

    /// Forgets a worker.
    pub(super) fn remove(&mut self, id: WorkerId) {
        self.by_id.remove(&id);
    }

    /// Returns the number of workers that leave.
    pub(super) fn leaving(&self) -> usize {
        self.by_id.values().filter(|member| member.leaves_at.is_some() && !member.is_set_aside).count()
    }

    /// Follows the merged list. Workers of the sources in `drains` drain until `deadline` when they are not
    /// listed any more; others, and those that an operator removed, are gone at once.
    pub(super) fn follow(
        &mut self,
        listed: &[(usize, &Found)],
        dismissed: &HashMap<WorkerId, Dismissed>,
        drains: &HashSet<usize>,
        deadline: Instant,
    ) -> Changes {
        let mut changes = Changes::default();
        for &(source, found) in listed {
            self.list(source, found, deadline, &mut changes);
        }
        let ids: HashSet<WorkerId> = listed.iter().map(|(_, found)| found.spec.id).collect();
        self.by_id.retain(|id, member| {
            if ids.contains(id) {
                return true;
            }
            if dismissed.contains_key(id) || !drains.contains(&member.source) {
                changes.gone.push(*id);
                return false;
            }
            member.unlisted = true;
            let was_set_aside = std::mem::take(&mut member.is_set_aside);
            if member.leaves_at.is_none() || was_set_aside {
                member.leaves_at = Some(deadline);
                changes.leaving.push((*id, Leaving::Yes));
            }
            true
        });
        changes
    }

    fn list(&mut self, source: usize, found: &Found, deadline: Instant, changes: &mut Changes) {
        let (id, leaving) = (found.spec.id, Leaving::of(found));
        let is_set_aside = leaving == Leaving::SetAside;
        if self.by_id.get(&id).is_some_and(|member| found.is_another(member.identity.as_deref())) {
            self.by_id.remove(&id);
            changes.gone.push(id);
        }
        match self.by_id.get_mut(&id) {
            Some(member) if member.spec == found.spec => {
                member.identity = found.identity.clone().or(member.identity.take());
                member.source = source;
                member.unlisted = false;
                if found.leaving != member.leaves_at.is_some() || is_set_aside != member.is_set_aside {
                    changes.leaving.push((id, leaving));
                    member.leaves_at = found.leaving.then_some(deadline);
                }
                member.is_set_aside = is_set_aside;
            }
            _ => {
                let left = self.by_id.get(&id).is_some_and(|member| member.leaves_at.is_some());
                let leaves_at = found.leaving.then_some(deadline);
                let (spec, identity) = (found.spec.clone(), found.identity.clone());
                let member = Member { source, spec, identity, leaves_at, is_set_aside, unlisted: false };
                self.by_id.insert(id, member);
                changes.joining.push(found.spec.clone());
                if found.leaving || left {
                    changes.leaving.push((id, leaving));
                }
            }
        }
    }

    /// Forgets the unlisted workers whose requests have ended, or whose time is over, and returns them.
    pub(super) fn take_gone(&mut self, registered: &Snapshot, now: Instant) -> Vec<WorkerId> {
        let mut gone = Vec::new();
        self.by_id.retain(|id, member| {
            let Some(at) = member.leaves_at.filter(|_| member.unlisted) else { return true };
            let worker = registered.get(*id);
            let requests = worker.map_or(0, |worker| worker.own_requests());
            let handoffs = worker.map_or(0, |worker| worker.open_handoffs());
            let is_idle = requests + handoffs == 0;
            if !is_idle && now < at {
                return true;
            }
            if !is_idle {
                tracing::warn!(worker = %id, requests, handoffs, "worker removed before it was idle: its drain timed out");
            }
            if let Some(moves) = worker.and_then(|worker| worker.move_counts()) {
                let stayed: u32 = moves.stayed.values().sum();
                tracing::info!(worker = %id, moved = moves.moved, stayed, failed = moves.failed, "worker left");
            }
            gone.push(*id);
            false
        });
        gone
    }
}
