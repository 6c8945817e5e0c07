//! Warm instances of one policy, one a shard. A call takes a shard nobody is in, and never waits for one.
//!
//! A policy that learns has one more, which observes and never decides: what it is told can only reach decisions through the
//! slot's state, and whatever becomes of it costs no request an instance.

use std::{
    cell::Cell,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use pointsman_routing::Failure;

use crate::{engine::PolicyEngine, instance::Instance};

/// Makes configured, touched instances; never called on a request's path.
pub(crate) type Build = dyn Fn() -> Result<Instance, String> + Send + Sync;

/// The instances.
pub(crate) struct Pool {
    /// Those that decide, and then the one that observes, when there is one.
    shards: Box<[Mutex<Option<Instance>>]>,
    deciding: usize,
    /// Has the code; empty only while it is dropped.
    build: Option<Box<Build>>,
    engine: PolicyEngine,
    calls_per_instance: u32,
    name: Arc<str>,
    myself: Weak<Pool>,
}

/// Calls that an instance serves however much memory it takes: a guest that is large from the start is not rebuilt all the time.
const LEAST_CALLS: u32 = 1_000;

/// Each thread has a shard of its own, so that threads do not meet.
static NEXT_HOME: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static HOME: Cell<usize> = Cell::new(NEXT_HOME.fetch_add(1, Ordering::Relaxed));
}

impl Pool {
    /// A pool with every shard filled.
    pub(crate) fn new(
        engine: &PolicyEngine,
        name: Arc<str>,
        learns: bool,
        build: Box<Build>,
    ) -> Result<Arc<Self>, String> {
        let deciding = engine.instances_per_policy();
        let mut shards = Vec::new();
        for _ in 0..deciding + usize::from(learns) {
            shards.push(Mutex::new(Some(build()?)));
        }
        Ok(Arc::new_cyclic(|myself| Self {
            shards: shards.into_boxed_slice(),
            deciding,
            build: Some(build),
            engine: engine.clone(),
            calls_per_instance: engine.limits().calls_per_instance,
            name,
            myself: myself.clone(),
        }))
    }

    /// Calls an instance. A failure of the guest costs the instance: the store is poisoned, dropped and rebuilt elsewhere.
    pub(crate) fn call<T>(
        &self,
        call: impl FnOnce(&mut Instance) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let _running = self.engine.running();
        let home = HOME.get();
        for step in 0..self.deciding {
            let place = (home + step) % self.deciding;
            let Some(mut shard) = self.shards.get(place).and_then(Mutex::try_lock) else { continue };
            let Some(instance) = shard.as_mut() else { continue };
            let outcome = call(instance);
            if self.is_spent(instance, &outcome) {
                self.replace(place, shard.take());
            }
            return outcome;
        }
        Err(Failure::NotReady)
    }

    /// Calls the instance that observes.
    pub(crate) fn observe(
        &self,
        call: impl FnOnce(&mut Instance) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let _running = self.engine.running();
        let shard = self.shards.get(self.deciding).and_then(Mutex::try_lock);
        let Some(mut shard) = shard else { return Err(Failure::NotReady) };
        let Some(instance) = shard.as_mut() else { return Err(Failure::NotReady) };
        let outcome = call(instance);
        if self.is_spent(instance, &outcome) {
            self.replace(self.deciding, shard.take());
        }
        outcome
    }

    fn is_spent<T>(&self, instance: &Instance, outcome: &Result<T, Failure>) -> bool {
        match outcome {
            Err(Failure::Trap(_) | Failure::Timeout | Failure::Memory) => true,
            _ => self.is_worn(instance),
        }
    }

    /// Instances when all are there.
    pub(crate) fn size(&self) -> usize {
        self.shards.len()
    }

    /// Linear memory of the largest instance that nobody is in, bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let shards = self.shards.iter().filter_map(Mutex::try_lock);
        shards.filter_map(|shard| shard.as_ref().map(Instance::memory_used)).max().unwrap_or(0)
    }

    /// Whether an instance has served long enough, or has taken so much memory that one of the next calls would fail by it.
    /// Garbage collectors let memory grow; a fresh instance in the background costs no call.
    fn is_worn(&self, instance: &Instance) -> bool {
        let full = instance.memory_used() > self.engine.limits().memory_bytes / 4 * 3;
        instance.calls >= self.calls_per_instance || (full && instance.calls >= LEAST_CALLS)
    }

    fn replace(&self, place: usize, spent: Option<Instance>) {
        let pool = self.myself.clone();
        self.engine.later(move || {
            drop(spent);
            // A policy that left its slot meanwhile needs no instance.
            let Some(pool) = pool.upgrade() else { return };
            match pool.build.as_ref().map(|build| build()) {
                Some(Ok(fresh)) => {
                    if let Some(shard) = pool.shards.get(place) {
                        *shard.lock() = Some(fresh);
                    }
                }
                None => {}
                Some(Err(error)) => {
                    tracing::warn!(policy = &*pool.name, %error, "an instance could not be rebuilt")
                }
            }
        });
    }
}

impl Drop for Pool {
    /// Whoever is the last to let go of a policy, a request among them, does not pay for it.
    fn drop(&mut self) {
        let (shards, build) = (std::mem::take(&mut self.shards), self.build.take());
        self.engine.later(move || drop((shards, build)));
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("policy", &self.name)
            .field("shards", &self.shards.len())
            .finish_non_exhaustive()
    }
}
