//! Workers that join, and those that take the place of another with the same id.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use super::{Member, Registry};
use crate::{id::WorkerId, spec::WorkerSpec, worker::Worker};

impl Registry {
    /// Adds a worker, or replaces the one with the same id. A worker with an equal description is kept. One
    /// with another description of the same engine takes over its health, bookings and drain.
    pub fn upsert(&self, spec: WorkerSpec) -> Arc<Worker> {
        let mut members = self.members.lock();
        let place = members.iter().position(|member| member.configured.id == spec.id);
        if let Some(present) = place.and_then(|place| members.get(place))
            && present.configured == spec
        {
            return present.worker.clone();
        }
        let before = place.map(|place| members.remove(place));
        let member = self.join(spec, before.as_ref());
        let worker = member.worker.clone();
        members.push(member);
        self.publish(&members);
        worker
    }

    /// Adds or replaces workers as [`Registry::upsert`] does, and removes others, with one new snapshot. One
    /// that is `gone` and joins is another worker: it takes nothing over, even with an equal description.
    pub fn apply(&self, joining: Vec<WorkerSpec>, gone: &[WorkerId]) {
        let mut members = self.members.lock();
        let present: HashMap<WorkerId, &WorkerSpec> =
            members.iter().map(|member| (member.configured.id, &member.configured)).collect();
        let left: HashSet<&WorkerId> = gone.iter().collect();
        let is_new = |spec: &WorkerSpec| left.contains(&spec.id) || present.get(&spec.id) != Some(&spec);
        let joining: Vec<WorkerSpec> = joining.into_iter().filter(is_new).collect();
        let replaced: HashSet<WorkerId> =
            joining.iter().map(|spec| spec.id).chain(gone.iter().copied()).collect();
        let mut before: HashMap<WorkerId, Member> =
            members.extract_if(.., |member| replaced.contains(&member.configured.id)).map(by_id).collect();
        if before.is_empty() && joining.is_empty() {
            return;
        }
        gone.iter().for_each(|id| _ = before.remove(id));
        members.extend(joining.into_iter().map(|spec| {
            let before = before.get(&spec.id);
            self.join(spec, before)
        }));
        self.publish(&members);
    }

    /// Returns the member that joins. `before`: the one that it replaces.
    fn join(&self, spec: WorkerSpec, before: Option<&Member>) -> Member {
        let Some(before) = before.filter(|before| before.worker.has_engine_of(&spec)) else {
            let (worker, models) = (Arc::new(self.worker(spec.clone())), spec.models.clone());
            return Member { worker, configured: spec, models, adapters: vec![], base_models: vec![] };
        };
        let worker = before.worker.described_as(spec.clone(), &self.columns, self.journal.as_ref());
        let models = if spec.models.is_empty() { &before.models } else { &spec.models };
        Member {
            worker: Arc::new(worker),
            models: models.clone(),
            adapters: before.adapters.clone(),
            base_models: before.base_models.clone(),
            configured: spec,
        }
    }

    /// Replaces a worker by one with the description that its engine completed. The new one takes over its
    /// bookings and its drain, and is probed from the beginning.
    pub(crate) fn complete(&self, worker: &Arc<Worker>, spec: WorkerSpec) {
        let mut members = self.members.lock();
        let Some(member) = self.member(worker.id(), &mut members) else { return };
        if !Arc::ptr_eq(&member.worker, worker) {
            return;
        }
        let completed = worker.completed_as(spec, true, &self.columns, self.journal.as_ref());
        completed.note_new_process();
        member.worker = Arc::new(completed);
        self.publish_learned(&members);
    }

    fn worker(&self, spec: WorkerSpec) -> Worker {
        Worker::noted(spec, &self.columns, self.journal.as_ref(), self.warm_ups.clone())
    }
}

fn by_id(member: Member) -> (WorkerId, Member) {
    (member.configured.id, member)
}
