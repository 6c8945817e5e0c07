//! The registry: all workers, published as immutable snapshots. Readers take no lock; changes are serialised.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{
    id::{Leg, ModelName, Role, WorkerId},
    spec::WorkerSpec,
    worker::{Candidate, Worker},
};

/// All workers at one moment. A leg of a request uses one snapshot throughout.
#[derive(Debug, Default)]
pub struct Snapshot {
    version: u64,
    workers: Vec<Arc<Worker>>,
    by_id: HashMap<WorkerId, Arc<Worker>>,
    pools: HashMap<ModelName, Pools>,
}

#[derive(Debug, Default)]
struct Pools {
    aggregated: Vec<Candidate>,
    prefill: Vec<Candidate>,
    decode: Vec<Candidate>,
    activation: Arc<Activation>,
}

/// Availability of remote prefill for a model (B2). It outlives workers and snapshots.
#[derive(Debug, Default)]
pub struct Activation(AtomicU8);

/// The states of a model's remote prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationState {
    /// No prefill worker was ever ready.
    Pending,
    /// Prefill and decode workers are up.
    Active,
    /// They were up before, and are not now.
    Unavailable,
}

impl Activation {
    /// Returns the state after the last observation.
    #[must_use]
    pub fn state(&self) -> ActivationState {
        match self.0.load(Ordering::Relaxed) {
            0 => ActivationState::Pending,
            1 => ActivationState::Active,
            _ => ActivationState::Unavailable,
        }
    }

    /// Updates the state by whether both pools are up. Returns the new state if it changed.
    pub fn observe(&self, up: bool) -> Option<ActivationState> {
        let before = self.state();
        let after = match (up, before) {
            (true, _) => ActivationState::Active,
            (false, ActivationState::Pending) => ActivationState::Pending,
            (false, _) => ActivationState::Unavailable,
        };
        if after == before {
            return None;
        }
        self.0.store(if up { 1 } else { 2 }, Ordering::Relaxed);
        Some(after)
    }
}

impl ActivationState {
    /// Returns the stable label in metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Active => "active",
            Self::Unavailable => "unavailable",
        }
    }
}

/// The workers, and the publisher of their snapshots.
#[derive(Debug)]
pub struct Registry {
    current: ArcSwap<Snapshot>,
    /// Each worker with the models it serves. Snapshots are built from this.
    members: Mutex<Vec<Member>>,
    /// By model. Entries stay when workers leave.
    activations: Mutex<HashMap<ModelName, Arc<Activation>>>,
    changed: watch::Sender<u64>,
}

#[derive(Debug, Clone)]
struct Member {
    worker: Arc<Worker>,
    /// As the operator described the worker. The worker's own description also has what its engine reports.
    configured: WorkerSpec,
    models: Vec<ModelName>,
}

impl Default for Registry {
    fn default() -> Self {
        Self {
            current: ArcSwap::default(),
            members: Mutex::default(),
            activations: Mutex::default(),
            changed: watch::Sender::new(0),
        }
    }
}

impl Registry {
    /// Returns the current snapshot. Never waits.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Adds a worker, or replaces the one with the same id. A worker with an equal description is kept, with
    /// its health and bookings.
    pub fn upsert(&self, spec: WorkerSpec) -> Arc<Worker> {
        let mut members = self.members.lock();
        if let Some(present) = members.iter().find(|member| member.configured == spec) {
            return present.worker.clone();
        }
        let models = spec.models.clone();
        let worker = Arc::new(Worker::new(spec.clone()));
        members.retain(|member| member.worker.id() != worker.id());
        members.push(Member { worker: worker.clone(), configured: spec, models });
        self.publish(&members);
        worker
    }

    /// Replaces a worker by one with the description that its engine completed. The new one starts without
    /// bookings and is probed from the beginning.
    pub(crate) fn complete(&self, worker: &Arc<Worker>, spec: WorkerSpec) {
        let mut members = self.members.lock();
        let Some(member) = members.iter_mut().find(|member| Arc::ptr_eq(&member.worker, worker)) else {
            return;
        };
        let completed = Worker::new(spec);
        completed.set_draining(worker.draining());
        member.worker = Arc::new(completed);
        self.publish(&members);
    }

    /// Removes a worker. Its bookings end with their requests.
    pub fn remove(&self, id: WorkerId) -> Option<Arc<Worker>> {
        let mut members = self.members.lock();
        let place = members.iter().position(|member| member.worker.id() == id)?;
        let gone = members.remove(place);
        self.publish(&members);
        Some(gone.worker)
    }

    /// Stores the models that a worker reports. Configured models take precedence.
    pub(crate) fn learn_models(&self, id: WorkerId, models: Vec<ModelName>) {
        let mut members = self.members.lock();
        let Some(member) = members.iter_mut().find(|member| member.worker.id() == id) else { return };
        if member.worker.spec().models.is_empty() && member.models != models {
            member.models = models;
            self.publish(&members);
        }
    }

    /// Returns a receiver of the snapshot version, which changes with every snapshot.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn publish(&self, members: &[Member]) {
        let version = self.current.load().version + 1;
        let mut snapshot = Snapshot { version, ..Snapshot::default() };
        for member in members {
            snapshot.add(member);
        }
        let mut activations = self.activations.lock();
        for (model, pools) in &mut snapshot.pools {
            pools.activation = activations.entry(model.clone()).or_default().clone();
        }
        drop(activations);
        self.current.store(Arc::new(snapshot));
        self.changed.send_replace(version);
    }
}

impl Snapshot {
    /// Returns the version, which rises with every change of the registry.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns all workers in the order in which they joined.
    #[must_use]
    pub fn workers(&self) -> &[Arc<Worker>] {
        &self.workers
    }

    /// Returns the worker with this id.
    #[must_use]
    pub fn get(&self, id: WorkerId) -> Option<&Arc<Worker>> {
        self.by_id.get(&id)
    }

    /// Returns the models that are served by at least one worker, sorted.
    #[must_use]
    pub fn models(&self) -> BTreeSet<&ModelName> {
        self.pools.keys().collect()
    }

    /// Returns whether any worker serves `model`.
    #[must_use]
    pub fn serves(&self, model: &ModelName) -> bool {
        self.pools.contains_key(model)
    }

    /// Returns the candidates whose role allows a leg. Those of the aggregated leg include decode workers
    /// that can prefill locally.
    #[must_use]
    pub fn pool(&self, model: &ModelName, leg: Leg) -> &[Candidate] {
        let Some(pools) = self.pools.get(model) else { return &[] };
        match leg {
            Leg::Aggregated => &pools.aggregated,
            Leg::Prefill => &pools.prefill,
            Leg::Decode => &pools.decode,
        }
    }

    /// Returns the availability of remote prefill for `model`.
    #[must_use]
    pub fn activation(&self, model: &ModelName) -> Option<&Activation> {
        self.pools.get(model).map(|pools| &*pools.activation)
    }

    fn add(&mut self, member: &Member) {
        let worker = &member.worker;
        self.workers.push(worker.clone());
        self.by_id.insert(worker.id(), worker.clone());
        for model in &member.models {
            let pools = self.pools.entry(model.clone()).or_default();
            let candidates = worker.candidates();
            match worker.spec().role {
                Role::Prefill => pools.prefill.extend(candidates),
                Role::Aggregated => pools.aggregated.extend(candidates),
                Role::Decode if worker.spec().local_prefill => {
                    pools.aggregated.extend(candidates.iter().cloned());
                    pools.decode.extend(candidates);
                }
                Role::Decode => pools.decode.extend(candidates),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::{Health, Ineligible};

    fn spec(flag: &str) -> WorkerSpec {
        WorkerSpec::parse_flag(flag).unwrap()
    }

    fn ids(pool: &[Candidate]) -> Vec<(u64, u32)> {
        pool.iter().map(|candidate| (candidate.worker.id().0, candidate.rank.0)).collect()
    }

    #[test]
    fn pools_follow_roles_ranks_and_local_prefill() {
        let registry = Registry::default();
        registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://a:1,model=m"));
        registry.upsert(spec("id=2,role=decode,engine=vllm,url=http://a:2,model=m,dp_size=2"));
        registry.upsert(spec("id=3,role=decode,engine=sglang,url=http://a:3,model=m"));
        registry.upsert(spec("id=4,role=aggregated,engine=openai,url=http://a:4,model=m"));
        let (snapshot, model) = (registry.snapshot(), ModelName::new("m"));
        assert_eq!(ids(snapshot.pool(&model, Leg::Prefill)), [(1, 0)]);
        assert_eq!(ids(snapshot.pool(&model, Leg::Decode)), [(2, 0), (2, 1), (3, 0)]);
        // B1.3
        assert_eq!(ids(snapshot.pool(&model, Leg::Aggregated)), [(2, 0), (2, 1), (4, 0)]);
        assert!(snapshot.pool(&ModelName::new("other"), Leg::Decode).is_empty());
    }

    #[test]
    fn b2_activation_is_idempotent_and_survives_workers_that_leave_and_rejoin_elsewhere() {
        let registry = Registry::default();
        let model = ModelName::new("m");
        let add = |url: &str| {
            registry.upsert(spec(&format!("role=prefill,engine=vllm,model=m,url=http://{url}"))).id()
        };
        let first = add("a:1");
        let observe = |up| registry.snapshot().activation(&model).unwrap().observe(up);
        // B2.1: pending
        assert_eq!(observe(false), None, "pending until both pools were up once");
        assert_eq!((observe(true), observe(true)), (Some(ActivationState::Active), None));
        // B2.1, B2.2
        assert_eq!((observe(false), observe(false)), (Some(ActivationState::Unavailable), None));
        registry.remove(first);
        assert!(registry.snapshot().activation(&model).is_none());
        add("b:1");
        let state = registry.snapshot().activation(&model).unwrap().state();
        assert_eq!(state, ActivationState::Unavailable);
        assert_eq!(observe(true), Some(ActivationState::Active));
    }

    #[test]
    fn a_worker_with_an_equal_description_keeps_its_health_and_bookings() {
        let registry = Registry::default();
        let worker = registry.upsert(spec("role=decode,engine=vllm,model=m,url=http://a:1"));
        let version = registry.snapshot().version();
        let again = registry.upsert(spec("role=decode,engine=vllm,model=m,url=http://a:1"));
        assert!(Arc::ptr_eq(&worker, &again) && registry.snapshot().version() == version);
    }

    #[test]
    fn invariant_2_a_pinned_snapshot_does_not_see_later_changes() {
        let registry = Registry::default();
        registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://a:1,model=m"));
        let before = registry.snapshot();
        registry.remove(WorkerId(1));
        assert_eq!(before.workers().len(), 1);
        assert!(registry.snapshot().workers().is_empty());
    }

    #[test]
    fn b2_a_worker_rejoining_under_another_address_is_found() {
        let registry = Registry::default();
        registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://a:1,model=m"));
        registry.remove(WorkerId(1));
        registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://b:9,model=m"));
        let snapshot = registry.snapshot();
        // B2.4
        assert_eq!(
            snapshot.get(WorkerId(1)).map(|worker| worker.spec().url.to_string()),
            Some("http://b:9".into())
        );
    }

    #[test]
    fn b5_a_worker_is_eligible_only_after_its_facts_were_read() {
        let registry = Registry::default();
        let worker = registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://a:1"));
        // B5.1
        assert_eq!(worker.ineligible(), Some(Ineligible::NotReady));
        registry.learn_models(WorkerId(1), vec![ModelName::new("learnt")]);
        worker.set_health(Health::Healthy);
        assert_eq!(worker.ineligible(), None);
        assert!(registry.snapshot().serves(&ModelName::new("learnt")));
    }
}
