//! Warm instances of one policy, one per shard. A call takes a free shard and never waits for one.
//!
//! A policy that learns has one more instance, which observes and never decides. Observations reach decisions
//! only through the slot's state, and a failed observation takes no instance away from requests.

use std::{
    cell::Cell,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use pointsman_routing::Failure;

use crate::{engine::PolicyEngine, instance::Instance};

/// Makes configured instances that served one call; never called while a request waits, unless
/// [`Limits::rebuild_in_call`](crate::Limits) is set.
pub(crate) type Build = dyn Fn() -> Result<Instance, String> + Send + Sync;

/// The warm instances of one policy.
pub(crate) struct Pool {
    /// The instances that decide, then the one that observes, when there is one.
    shards: Box<[Mutex<Option<Instance>>]>,
    deciding: usize,
    /// Owns the compiled code; `None` only while the pool is dropped.
    build: Option<Box<Build>>,
    engine: PolicyEngine,
    calls_per_instance: u32,
    /// Instances that could not be made in calls, since the last one that could.
    failed_builds: AtomicU32,
    name: Arc<str>,
    weak_self: Weak<Pool>,
}

/// Calls that an instance serves at least, also with much memory in use: a guest that is large from the start
/// is not rebuilt all the time.
const MIN_CALLS: u32 = 1_000;

/// Pause before an instance that could not be made is tried again; each further one is twice as long.
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// Longest such pause.
const MAX_RETRY: Duration = Duration::from_secs(10);

/// Instances in a row that calls try to make in vain. Then they stop trying: each further attempt may use the
/// whole configure deadline.
const MAX_FAILED_BUILDS: u32 = 10;

/// Log line about such an instance.
const NOT_REBUILT: &str = "policy instance could not be rebuilt";

/// Spreads the threads over the shards, so that they rarely contend.
static NEXT_FIRST_SHARD: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static FIRST_SHARD: Cell<usize> = Cell::new(NEXT_FIRST_SHARD.fetch_add(1, Ordering::Relaxed));
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
        Ok(Arc::new_cyclic(|weak_self| Self {
            shards: shards.into_boxed_slice(),
            deciding,
            build: Some(build),
            engine: engine.clone(),
            calls_per_instance: engine.limits().calls_per_instance,
            failed_builds: AtomicU32::new(0),
            name,
            weak_self: weak_self.clone(),
        }))
    }

    /// Calls an instance. A failure of the guest poisons its store: the instance is dropped and rebuilt on
    /// the background thread, or in the next call ([`Limits::rebuild_in_call`](crate::Limits)).
    pub(crate) fn call<T>(
        &self,
        call: impl FnOnce(&mut Instance) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let _running = self.engine.running();
        let first = FIRST_SHARD.get();
        for step in 0..self.deciding {
            let position = (first + step) % self.deciding;
            let Some(mut shard) = self.lock(position) else { continue };
            let Some(instance) = shard.as_mut() else { continue };
            let outcome = call(instance);
            if instance.poisoned || self.is_worn(instance) {
                self.replace(position, shard.take());
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
        let Some(mut shard) = self.lock(self.deciding) else { return Err(Failure::NotReady) };
        let Some(instance) = shard.as_mut() else { return Err(Failure::NotReady) };
        let outcome = call(instance);
        if instance.poisoned || self.is_worn(instance) {
            self.replace(self.deciding, shard.take());
        }
        outcome
    }

    /// Locks a shard that no other call uses.
    fn lock(&self, position: usize) -> Option<MutexGuard<'_, Option<Instance>>> {
        let mut shard = self.shards.get(position)?.try_lock()?;
        if shard.is_none() && self.engine.limits().rebuild_in_call {
            *shard = self.build_in_call();
        }
        Some(shard)
    }

    /// Makes an instance, unless too many in a row could not be made.
    fn build_in_call(&self) -> Option<Instance> {
        if self.failed_builds.load(Ordering::Relaxed) >= MAX_FAILED_BUILDS {
            return None;
        }
        match self.build.as_ref()?() {
            Ok(fresh) => {
                self.failed_builds.store(0, Ordering::Relaxed);
                Some(fresh)
            }
            Err(error) => {
                let policy = &*self.name;
                let failures = self.failed_builds.fetch_add(1, Ordering::Relaxed) + 1;
                if failures < MAX_FAILED_BUILDS {
                    tracing::warn!(policy, %error, "{NOT_REBUILT}");
                } else {
                    tracing::error!(policy, %error, failures, "spent policy instances are not replaced any more");
                }
                None
            }
        }
    }

    /// Number of instances when none is being rebuilt.
    pub(crate) fn size(&self) -> usize {
        self.shards.len()
    }

    /// Linear memory of the largest idle instance, bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let shards = self.shards.iter().filter_map(Mutex::try_lock);
        shards.filter_map(|shard| shard.as_ref().map(Instance::memory_used)).max().unwrap_or(0)
    }

    /// Returns whether an instance has served its calls, or uses so much memory that one of the next calls
    /// would fail. Garbage collectors let memory grow; rebuilding in the background costs no call.
    fn is_worn(&self, instance: &Instance) -> bool {
        let full = instance.memory_used() > self.engine.limits().memory_bytes / 4 * 3;
        instance.calls >= self.calls_per_instance || (full && instance.calls >= MIN_CALLS)
    }

    fn replace(&self, position: usize, spent: Option<Instance>) {
        if self.engine.limits().rebuild_in_call {
            return;
        }
        let pool = self.weak_self.clone();
        self.engine.later(move || {
            drop(spent);
            rebuild(&pool, position, FIRST_RETRY);
        });
    }
}

/// Fills a shard, and tries again later, with growing pauses, when no instance can be made: other policies
/// may use all memory now and less later.
fn rebuild(pool: &Weak<Pool>, position: usize, retry: Duration) {
    // A policy that was replaced in the meantime needs no instance.
    let Some(pool) = pool.upgrade() else { return };
    match pool.build.as_ref().map(|build| build()) {
        Some(Ok(fresh)) => {
            if let Some(shard) = pool.shards.get(position) {
                *shard.lock() = Some(fresh);
            }
        }
        None => {}
        Some(Err(error)) => {
            tracing::warn!(
                policy = &*pool.name,
                %error,
                retry_ms = retry.as_millis(),
                "{NOT_REBUILT}"
            );
            let again = Arc::downgrade(&pool);
            pool.engine.after(retry, move || rebuild(&again, position, (retry * 2).min(MAX_RETRY)));
        }
    }
}

impl Drop for Pool {
    /// Frees the instances on the background thread, because the last owner may be a request.
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
