//! The registry: all workers, published as immutable snapshots. Readers take no lock; changes are serialised.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

mod activation;
mod followed;
mod joining;
mod learned;
mod name_conflicts;
mod reread;
mod shared_addresses;

pub use activation::{Activation, ActivationState};
pub(crate) use followed::Followed;
use learned::Learned;
pub use name_conflicts::NameConflict;
use name_conflicts::{NameConflicts, warn_of_new};
use reread::Reread;
use shared_addresses::SharedAddresses;

use crate::{
    booking::Journal,
    columns::Columns,
    id::{Engine, Leg, ModelName, Role, WorkerId},
    pool::Pool,
    spec::WorkerSpec,
    worker::{Candidate, WarmUps, Worker},
};

/// Models without a worker that are remembered.
const MAX_LOST_MODELS: usize = 10_000;

/// A map that each request looks into. Engines and operators choose the keys, not clients, so a fast hash is
/// safe.
type FastMap<K, V> = HashMap<K, V, foldhash::fast::RandomState>;

/// All workers at one moment. A leg of a request uses one snapshot throughout.
#[derive(Debug, Default)]
pub struct Snapshot {
    version: u64,
    workers: Vec<Arc<Worker>>,
    /// Positions in `workers`.
    places: FastMap<WorkerId, usize>,
    pools: FastMap<ModelName, Pools>,
    /// Models that are adapters of another model of their worker, with that model.
    adapters: FastMap<ModelName, ModelName>,
    name_conflicts: NameConflicts,
    shared_addresses: SharedAddresses,
}

#[derive(Debug, Default)]
struct Pools {
    aggregated: Pool,
    prefill: Pool,
    decode: Pool,
    activation: Arc<Activation>,
}

/// The candidates of a model while its pools are built.
#[derive(Default)]
struct Legs {
    aggregated: Vec<Candidate>,
    prefill: Vec<Candidate>,
    decode: Vec<Candidate>,
}

/// The workers, and the publisher of their snapshots.
#[derive(Debug)]
pub struct Registry {
    current: ArcSwap<Snapshot>,
    /// Each worker with the models it serves, in the order of the current snapshot. Snapshots are built from
    /// this.
    members: Mutex<Vec<Member>>,
    /// By model. Entries of [`MAX_LOST_MODELS`] stay when workers leave, and go when their engines unload the
    /// model.
    activations: Mutex<HashMap<ModelName, Arc<Activation>>>,
    changed: watch::Sender<u64>,
    /// Journal of bookings for other gateways.
    journal: Option<Arc<Journal>>,
    /// Load of all ranks.
    columns: Columns,
    learned: Learned,
    reread: Mutex<Option<Reread>>,
    warm_ups: WarmUps,
}

#[derive(Debug, Clone)]
struct Member {
    worker: Arc<Worker>,
    /// The worker's description by the operator. The worker's own description also has what its engine
    /// reports.
    configured: WorkerSpec,
    models: Vec<ModelName>,
    /// Adapters that the engine lists, each with its model.
    adapters: Vec<(ModelName, ModelName)>,
    /// Models that the engine says are no adapters.
    base_models: Vec<ModelName>,
}

/// The models that an engine lists.
pub(crate) struct ListedModels {
    pub(crate) models: Vec<ModelName>,
    /// Those that the engine says are no adapters.
    pub(crate) base_models: Vec<ModelName>,
    /// Those that are adapters, each with its model.
    pub(crate) adapters: Vec<(ModelName, ModelName)>,
}

impl Default for Registry {
    fn default() -> Self {
        Self {
            current: ArcSwap::default(),
            members: Mutex::default(),
            activations: Mutex::default(),
            changed: watch::Sender::new(0),
            journal: None,
            columns: Columns::default(),
            learned: Learned::default(),
            reread: Mutex::default(),
            warm_ups: WarmUps::new(),
        }
    }
}

impl Registry {
    /// Creates an empty registry that notes the bookings of all workers in `journal`.
    #[must_use]
    pub fn with_journal(journal: Option<Arc<Journal>>) -> Self {
        Self { journal, ..Self::default() }
    }

    /// Returns the current snapshot. Never waits.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Removes a worker. Its bookings end with their requests.
    pub fn remove(&self, id: WorkerId) -> Option<Arc<Worker>> {
        let mut members = self.members.lock();
        let place = members.iter().position(|member| member.worker.id() == id)?;
        let gone = members.remove(place);
        self.publish(&members);
        Some(gone.worker)
    }

    /// Stores the models that a worker reports. Configured models take precedence. `is_changed`: their
    /// lengths did.
    pub(crate) fn learn_models(&self, id: WorkerId, listed: ListedModels, is_changed: bool) {
        let ListedModels { models, base_models, mut adapters } = listed;
        // A name that the engine lists as both is that of its model.
        let own: HashSet<&ModelName> = base_models.iter().collect();
        adapters.retain(|(adapter, _)| !own.contains(adapter));
        let mut members = self.members.lock();
        let Some(member) = self.member(id, &mut members) else { return };
        let is_configured = !member.worker.spec().models.is_empty();
        let is_same = |member: &Member| (&member.base_models, &member.adapters) == (&base_models, &adapters);
        if !is_changed && (is_configured || member.models == models) && is_same(member) {
            return;
        }
        if !is_configured {
            let listed: HashSet<&ModelName> = models.iter().collect();
            let unloaded = member.models.iter().filter(|model| !listed.contains(model));
            let activations = self.activations.lock();
            unloaded.filter_map(|model| activations.get(model)).for_each(|model| model.set_unloaded(true));
            member.models = models;
        }
        (member.adapters, member.base_models) = (adapters, base_models);
        self.publish_learned(&members);
    }

    /// Publishes, for ever, the engines' reports that could not be published at once.
    pub(crate) async fn publish_late(&self) {
        loop {
            tokio::time::sleep_until(self.learned.due().await).await;
            let members = self.members.lock();
            if self.learned.is_waiting() {
                self.publish(&members);
            }
        }
    }

    fn member<'a>(&self, id: WorkerId, members: &'a mut [Member]) -> Option<&'a mut Member> {
        members.get_mut(self.current.load().place(id)?)
    }

    /// Publishes an engine's report, now or together with those of others within the next moment. A snapshot
    /// of many workers takes time, and all of them may join at once.
    fn publish_learned(&self, members: &[Member]) {
        if self.learned.may_publish() {
            self.publish(members);
        }
    }

    /// Returns whether all workers of `model` left, and none of their engines unloaded it before.
    #[must_use]
    pub fn has_lost(&self, model: &ModelName) -> bool {
        let activations = self.activations.lock();
        !self.current.load().serves(model) && activations.get(model).is_some_and(|it| !it.is_unloaded())
    }

    /// Returns a receiver of the snapshot version, which changes with every snapshot.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn publish(&self, members: &[Member]) {
        let started = Instant::now();
        let version = self.current.load().version + 1;
        let mut snapshot = Snapshot { version, ..Snapshot::default() };
        let mut by_model = HashMap::new();
        snapshot.name_conflicts = NameConflicts::among(members);
        snapshot.shared_addresses = SharedAddresses::among(members);
        for member in members {
            snapshot.add(member, &mut by_model);
        }
        warn_of_new(&snapshot.name_conflicts, &self.current.load().name_conflicts);
        snapshot.shared_addresses.warn_of_new(&self.current.load().shared_addresses);
        let mut activations = self.activations.lock();
        let pools = |(model, legs): (ModelName, Legs)| {
            let activation = activations.entry(model.clone()).or_default().clone();
            activation.set_unloaded(false);
            let Legs { aggregated, prefill, decode } = legs;
            let [aggregated, prefill, decode] =
                [aggregated, prefill, decode].map(|legs| Pool::of(&model, legs));
            (model, Pools { aggregated, prefill, decode, activation })
        };
        snapshot.pools = by_model.into_iter().map(pools).collect();
        // Engines may list ever new adapters, and workers may come and go with ever new models.
        let mut lost = 0;
        activations.retain(|model, it| {
            let serves = snapshot.pools.contains_key(model);
            lost += usize::from(!serves && !it.is_unloaded());
            serves || (!it.is_unloaded() && lost <= MAX_LOST_MODELS)
        });
        drop(activations);
        self.current.store(Arc::new(snapshot));
        self.changed.send_replace(version);
        self.learned.published(members.len(), started);
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
        self.workers.get(self.place(id)?)
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

    /// Returns whether a worker serves `model` as an adapter of another model.
    #[must_use]
    pub fn is_adapter(&self, model: &ModelName) -> bool {
        self.adapters.contains_key(model)
    }

    /// Returns the model that `model` is an adapter of.
    #[must_use]
    pub fn parent_of(&self, model: &ModelName) -> Option<&ModelName> {
        self.adapters.get(model)
    }

    /// Returns the names that workers list in different ways, the first of them.
    #[must_use]
    pub fn name_conflicts(&self) -> &[NameConflict] {
        self.name_conflicts.first()
    }

    /// Returns the adapter that `MODEL:ADAPTER` names for SGLang: before the first colon is the model.
    /// `None` unless only SGLang engines serve the adapter.
    #[must_use]
    pub fn adapter_named(&self, name: &ModelName) -> Option<&ModelName> {
        let (model, adapter) = name.as_str().split_once(':')?;
        let (adapter, parent) = self.adapters.get_key_value(&ModelName::new(adapter.trim()))?;
        (parent.as_str() == model.trim() && self.is_only_on(Engine::Sglang, adapter)).then_some(adapter)
    }

    /// Returns whether workers serve `model`, and all of them run this engine.
    #[must_use]
    pub fn is_only_on(&self, engine: Engine, model: &ModelName) -> bool {
        let Some(Pools { aggregated, prefill, decode, .. }) = self.pools.get(model) else { return false };
        let mut all = [aggregated, prefill, decode].into_iter().flat_map(|pool| pool.iter());
        all.all(|candidate| candidate.worker.spec().engine == engine)
    }

    /// Returns what `of` has for `model`, or else for the model that it is an adapter of.
    pub fn own_or_parent<'a, T>(
        &'a self,
        model: &'a ModelName,
        of: impl Fn(&'a ModelName) -> Option<T>,
    ) -> Option<T> {
        of(model).or_else(|| of(self.parent_of(model)?))
    }

    /// Returns the candidates whose role allows a leg. Candidates of the aggregated leg include decode
    /// workers that can prefill locally.
    #[must_use]
    pub fn pool(&self, model: &ModelName, leg: Leg) -> &Pool {
        let Some(pools) = self.pools.get(model) else { return Pool::empty() };
        match leg {
            Leg::Aggregated => &pools.aggregated,
            Leg::Prefill => &pools.prefill,
            Leg::Decode => &pools.decode,
        }
    }

    /// Returns the candidates of a model by the leg that their role allows: prefill, decode and aggregated.
    #[must_use]
    pub fn pools(&self, model: &ModelName) -> [&Pool; 3] {
        let pools = self.pools.get(model);
        pools.map_or([Pool::empty(); 3], |pools| [&pools.prefill, &pools.decode, &pools.aggregated])
    }

    /// Returns the availability of remote prefill for `model`.
    #[must_use]
    pub fn activation(&self, model: &ModelName) -> Option<&Activation> {
        self.pools.get(model).map(|pools| &*pools.activation)
    }

    /// Returns the position of a worker among all.
    fn place(&self, id: WorkerId) -> Option<usize> {
        self.places.get(&id).copied()
    }

    fn add(&mut self, member: &Member, by_model: &mut HashMap<ModelName, Legs>) {
        let worker = &member.worker;
        self.places.insert(worker.id(), self.workers.len());
        self.workers.push(worker.clone());
        let mut models: BTreeSet<&ModelName> = member.models.iter().collect();
        for (adapter, parent) in &member.adapters {
            if self.name_conflicts.is_base_model(adapter) {
                models.remove(adapter);
                continue;
            }
            let known = self.adapters.entry(adapter.clone()).or_insert_with(|| parent.clone());
            // The order of the workers does not matter.
            if *parent < *known {
                *known = parent.clone();
            }
        }
        for model in models {
            let pools = by_model.entry(model.clone()).or_default();
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
mod tests;
