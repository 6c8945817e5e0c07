//! A component that is linked and type-checked against its world: makes instances.

use std::sync::Arc;

use pointsman_routing::World;
use wasmtime::{
    Module, Store,
    component::{Instance as Raw, InstancePre},
};

use super::{Instance, MAX_CONFIGURED_BYTES, Timers, failure, poll_once};
use crate::{
    access::Access,
    bindings::{
        decode_override as d, decode_override_async as da, filter as f, filter_async as fa, learner as o,
        learner_async as oa, scorer as s, scorer_async as sa, selector as l, selector_async as la,
    },
    engine::PolicyEngine,
    guest::{Guest, TimeLimit},
    guest_info::truncate,
    meter::Counted,
    refusal::Refusal,
};

/// A component whose exports are known.
#[derive(Clone)]
pub(crate) struct Linked {
    pre: InstancePre<Guest>,
    wasi: bool,
    world: Indices,
    learning: Option<Learns>,
    /// Modules that it shares with other policies: the engine has them while a policy does.
    _shared: Vec<Arc<Module>>,
}

#[derive(Clone)]
enum Indices {
    Filter(f::FilterIndices),
    Scorer(s::ScorerIndices),
    Selector(l::SelectorIndices),
    DecodeOverride(d::DecodeOverrideIndices),
    FilterAsync(fa::FilterIndices),
    ScorerAsync(sa::ScorerIndices),
    SelectorAsync(la::SelectorIndices),
    DecodeOverrideAsync(da::DecodeOverrideIndices),
}

#[derive(Clone)]
enum Learns {
    Sync(o::LearnerIndices),
    Async(oa::LearnerIndices),
}

pub(super) enum Exports {
    Filter(f::Filter),
    Scorer(s::Scorer),
    Selector(l::Selector),
    DecodeOverride(d::DecodeOverride),
    FilterAsync(fa::Filter),
    ScorerAsync(sa::Scorer),
    SelectorAsync(la::Selector),
    DecodeOverrideAsync(da::DecodeOverride),
}

/// The export `learning`, when it is there.
pub(super) enum Learner {
    Sync(o::Learner),
    Async(oa::Learner),
}

impl Linked {
    /// Finds every export of the world, and of `learning` when the component has it.
    pub(crate) fn new(
        world: World,
        wasi: bool,
        learns: bool,
        pre: InstancePre<Guest>,
        shared: Vec<Arc<Module>>,
    ) -> Result<Self, Refusal> {
        let found = (|| {
            let found = match (world, wasi) {
                (World::Filter, false) => Indices::Filter(f::FilterIndices::new(&pre)?),
                (World::Scorer, false) => Indices::Scorer(s::ScorerIndices::new(&pre)?),
                (World::Selector, false) => Indices::Selector(l::SelectorIndices::new(&pre)?),
                (World::DecodeOverride, false) => {
                    Indices::DecodeOverride(d::DecodeOverrideIndices::new(&pre)?)
                }
                (World::Filter, true) => Indices::FilterAsync(fa::FilterIndices::new(&pre)?),
                (World::Scorer, true) => Indices::ScorerAsync(sa::ScorerIndices::new(&pre)?),
                (World::Selector, true) => Indices::SelectorAsync(la::SelectorIndices::new(&pre)?),
                (World::DecodeOverride, true) => {
                    Indices::DecodeOverrideAsync(da::DecodeOverrideIndices::new(&pre)?)
                }
            };
            let learning = match (learns, wasi) {
                (false, _) => None,
                (true, false) => Some(Learns::Sync(o::LearnerIndices::new(&pre)?)),
                (true, true) => Some(Learns::Async(oa::LearnerIndices::new(&pre)?)),
            };
            Ok((found, learning))
        })();
        let (world, learning) =
            found.map_err(|error: wasmtime::Error| Refusal::Contract(format!("{error:#}")))?;
        Ok(Self { pre, wasi, world, learning, _shared: shared })
    }

    /// Returns whether it has the export `learning`.
    pub(crate) fn learns(&self) -> bool {
        self.learning.is_some()
    }

    /// A fresh instance, not yet configured.
    pub(crate) fn instantiate(
        &self,
        engine: &PolicyEngine,
        name: Arc<str>,
        access: &Access,
    ) -> Result<Instance, Refusal> {
        let limits = engine.limits();
        let counted = Counted::new(engine.meter());
        let guest = Guest::new(name, limits.memory_bytes, access, counted);
        let mut store = engine.store(guest);
        let limit = |time, key| TimeLimit { time, key };
        store.data_mut().allow(limit(limits.configure_deadline, "policies.configure_deadline"));
        store.set_epoch_deadline(1);
        store.set_hostcall_fuel(MAX_CONFIGURED_BYTES);
        let timers = engine.idle_runtime();
        let raw = self.raw(&timers, &mut store);
        let raw = raw.map_err(|error| Refusal::Instantiate(failure(&store, &error).to_string()))?;
        let (exports, learner) = self.exports(&raw, &mut store).map_err(|error| {
            Refusal::Contract(truncate(format!("the types of its exports differ: {}", error.root_cause())))
        })?;
        let deadlines = (
            limit(limits.deadline, "policies.deadline"),
            limit(limits.observe_deadline, "policies.observe_deadline"),
        );
        Ok(Instance { store, exports, learner, deadlines, timers, calls: 0, poisoned: false })
    }

    fn raw(&self, timers: &Timers, store: &mut Store<Guest>) -> wasmtime::Result<Raw> {
        if self.wasi {
            poll_once(timers, self.pre.instantiate_async(&mut *store))
        } else {
            self.pre.instantiate(&mut *store)
        }
    }

    /// Finds the exports in an instance, and checks their types.
    fn exports(&self, raw: &Raw, store: &mut Store<Guest>) -> wasmtime::Result<(Exports, Option<Learner>)> {
        let exports = match &self.world {
            Indices::Filter(found) => Exports::Filter(found.load(&mut *store, raw)?),
            Indices::Scorer(found) => Exports::Scorer(found.load(&mut *store, raw)?),
            Indices::Selector(found) => Exports::Selector(found.load(&mut *store, raw)?),
            Indices::DecodeOverride(found) => Exports::DecodeOverride(found.load(&mut *store, raw)?),
            Indices::FilterAsync(found) => Exports::FilterAsync(found.load(&mut *store, raw)?),
            Indices::ScorerAsync(found) => Exports::ScorerAsync(found.load(&mut *store, raw)?),
            Indices::SelectorAsync(found) => Exports::SelectorAsync(found.load(&mut *store, raw)?),
            Indices::DecodeOverrideAsync(found) => {
                Exports::DecodeOverrideAsync(found.load(&mut *store, raw)?)
            }
        };
        let learner = match &self.learning {
            None => None,
            Some(Learns::Sync(found)) => Some(Learner::Sync(found.load(&mut *store, raw)?)),
            Some(Learns::Async(found)) => Some(Learner::Async(found.load(&mut *store, raw)?)),
        };
        Ok((exports, learner))
    }
}
