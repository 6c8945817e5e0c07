//! The wasmtime engine, the thread that advances its epoch, and the maintenance thread.
//!
//! The epoch advances every millisecond while a guest runs. At each tick the guest's CPU time is compared
//! with its limit (see `guest`). The maintenance thread rebuilds and drops stores, so that no request pays
//! for another one's trap.

use std::{
    path::PathBuf,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use wasmtime::{
    Cache, CacheConfig, Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, Store,
    component::Linker,
};

use crate::{
    capacity::Capacity,
    guest::Guest,
    meter::{Meter, Usage},
    ticker::{Running, Ticker},
};

/// Limits of one guest.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Largest file, bytes.
    pub file_bytes: usize,
    /// Most linear memory of an instance, bytes.
    pub memory_bytes: usize,
    /// CPU time of a call. Time in which its thread was descheduled does not count.
    pub deadline: Duration,
    /// CPU time of instantiation, `describe` and `configure` together.
    pub configure_deadline: Duration,
    /// CPU time of a batch of outcomes. No request waits for it.
    pub observe_deadline: Duration,
    /// Calls after which a fresh instance replaces an instance.
    pub calls_per_instance: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            file_bytes: 32 * 1024 * 1024,
            memory_bytes: 16 * 1024 * 1024,
            deadline: Duration::from_millis(2),
            configure_deadline: Duration::from_millis(50),
            observe_deadline: Duration::from_millis(20),
            calls_per_instance: 1_000_000,
        }
    }
}

/// The engine that compiles and runs policies. Clones share it.
#[derive(Clone)]
pub struct PolicyEngine {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    plain: Linker<Guest>,
    wasi: Linker<Guest>,
    limits: Limits,
    capacity: Capacity,
    cache: Option<Cache>,
    meter: Arc<Meter>,
    ticker: Arc<Ticker>,
    chores: mpsc::Sender<Chore>,
    counts_instructions: bool,
}

/// Work for the maintenance thread.
type Chore = Box<dyn FnOnce() + Send>;

impl PolicyEngine {
    /// Builds the engine and starts its two threads, which end when the last clone is dropped.
    ///
    /// # Errors
    /// wasmtime rejects the configuration, or the operating system starts no thread.
    pub fn new(limits: Limits, capacity: Capacity) -> wasmtime::Result<Self> {
        Self::build(limits, capacity, None, false)
    }

    /// As [`PolicyEngine::new`], for guests that count the WebAssembly instructions they run. Counting makes
    /// them slower.
    ///
    /// # Errors
    /// As [`PolicyEngine::new`].
    pub fn counting(limits: Limits, capacity: Capacity) -> wasmtime::Result<Self> {
        Self::build(limits, capacity, None, true)
    }

    /// As [`PolicyEngine::new`], and keeps compiled policies in `dir` between starts. Anybody who can write
    /// there can run code in this process: only the daemon may have write access.
    ///
    /// # Errors
    /// As [`PolicyEngine::new`], or the directory cannot be used.
    pub fn with_cache(limits: Limits, capacity: Capacity, dir: PathBuf) -> wasmtime::Result<Self> {
        let mut config = CacheConfig::new();
        // wasmtime requires an absolute path.
        config.with_directory(std::path::absolute(dir)?);
        Self::build(limits, capacity, Some(Cache::new(config)?), false)
    }

    fn build(
        limits: Limits,
        capacity: Capacity,
        cache: Option<Cache>,
        counts_instructions: bool,
    ) -> wasmtime::Result<Self> {
        let engine = pooling_or_on_demand(limits, capacity, |config| {
            config.cache(cache.clone()).consume_fuel(counts_instructions);
        })?;
        let mut plain = Linker::new(&engine);
        Guest::link_host(&mut plain)?;
        let mut wasi = Linker::new(&engine);
        Guest::link_host(&mut wasi)?;
        wasmtime_wasi::p2::add_to_linker_async(&mut wasi)?;
        let weak = engine.weak();
        let ticker = Arc::new(Ticker::default());
        let clock = ticker.clone();
        thread::Builder::new().name("pointsman-epoch".to_owned()).spawn(move || {
            clock.run(|| weak.upgrade().map(|engine| engine.increment_epoch()).is_some());
        })?;
        let (chores, work) = mpsc::channel::<Chore>();
        thread::Builder::new().name("pointsman-chores".to_owned()).spawn(move || {
            while let Ok(chore) = work.recv() {
                chore();
            }
        })?;
        Ok(Self {
            inner: Arc::new(Inner {
                engine,
                plain,
                wasi,
                limits,
                capacity,
                cache,
                meter: Arc::default(),
                ticker,
                chores,
                counts_instructions,
            }),
        })
    }

    /// Limits of every guest.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// Number of instances that a policy keeps warm for requests.
    pub(crate) fn instances_per_policy(&self) -> usize {
        self.inner.capacity.instances_per_policy()
    }

    /// Instances, memory and cache hits of all policies together.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let cache = self.inner.cache.as_ref();
        let (hits, misses) = cache.map_or((0, 0), |cache| (cache.cache_hits(), cache.cache_misses()));
        let count = |count| u64::try_from(count).unwrap_or(u64::MAX);
        Usage { cache_hits: count(hits), cache_misses: count(misses), ..self.inner.meter.usage() }
    }

    pub(crate) fn meter(&self) -> &Arc<Meter> {
        &self.inner.meter
    }

    /// Keeps the epoch advancing while the guard lives. Without it no guest is stopped at its deadline.
    pub(crate) fn running(&self) -> Running<'_> {
        self.inner.ticker.running()
    }

    /// Makes a store that enforces the limits.
    pub(crate) fn store(&self, guest: Guest) -> Store<Guest> {
        let mut store = Store::new(&self.inner.engine, guest);
        store.limiter(|guest| guest);
        store.epoch_deadline_callback(|mut store| Ok(store.data_mut().at_tick()));
        if self.inner.counts_instructions {
            // This fails only in an engine that does not count.
            let _ = store.set_fuel(u64::MAX);
        }
        store
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    pub(crate) fn linker(&self, wasi: bool) -> &Linker<Guest> {
        if wasi { &self.inner.wasi } else { &self.inner.plain }
    }

    /// Runs `chore` on the maintenance thread.
    pub(crate) fn later(&self, chore: impl FnOnce() + Send + 'static) {
        let _ = self.inner.chores.send(Box::new(chore));
    }
}

impl std::fmt::Debug for PolicyEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PolicyEngine").field("limits", &self.inner.limits).finish_non_exhaustive()
    }
}

/// Builds the wasmtime engine. When the address space cannot be reserved (a container may limit it), memories
/// shrink first; an engine without a pool comes last.
fn pooling_or_on_demand(
    limits: Limits,
    capacity: Capacity,
    customize: impl Fn(&mut Config),
) -> wasmtime::Result<Engine> {
    let build = |mut config: Config| {
        customize(&mut config);
        Engine::new(&config)
    };
    if capacity.has_wide_memories() {
        match build(pooling(limits, capacity)) {
            Ok(engine) => return Ok(engine),
            Err(error) => {
                tracing::warn!(%error, "memories of 4 GiB do not fit; guests run with bounds checks");
            }
        }
    }
    let mut narrow = pooling(limits, capacity);
    narrow.memory_reservation(u64::try_from(limits.memory_bytes).unwrap_or(u64::MAX));
    match build(narrow) {
        Ok(engine) => Ok(engine),
        Err(error) => {
            tracing::warn!(%error, "instance pool does not fit; instances are made on demand");
            build(basic())
        }
    }
}

fn basic() -> Config {
    let mut config = Config::new();
    config.wasm_component_model(true);
    config.concurrency_support(false);
    config.epoch_interruption(true);
    // A compile runs on one thread of low priority: requests keep their cores.
    config.parallel_compilation(false);
    config
}

fn pooling(limits: Limits, capacity: Capacity) -> Config {
    let instances = u32::try_from(capacity.instances()).unwrap_or(u32::MAX);
    let mut pool = PoolingAllocationConfig::default();
    pool.total_component_instances(instances);
    // Componentizers add modules of their own to a policy's: adapters and shims, without memories.
    pool.total_core_instances(instances.saturating_mul(4));
    pool.total_memories(instances);
    pool.total_tables(instances.saturating_mul(4));
    pool.total_stacks(instances);
    // Every place that was ever used keeps memory, so free places are used again before new ones. By default
    // a hundred free places would stay reserved for the policies that had them, which do not come back.
    pool.max_unused_warm_slots(0);
    pool.max_memory_size(limits.memory_bytes);
    pool.linear_memory_keep_resident(64 * 1024);
    pool.table_keep_resident(4 * 1024);
    let mut config = basic();
    config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    config
}
