//! The one wasmtime engine, its ticker and its maintenance thread.
//!
//! Guests are looked at by epochs, one tick a millisecond while any of them runs, and stopped by the CPU time they took
//! (see `guest`). Stores are rebuilt and dropped by the maintenance thread: a request that met a trap pays for neither.

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
    guest::Guest,
    meter::{Meter, Usage},
    ticker::{Running, Ticker},
};

/// Instances that all policies together may have.
const INSTANCES: u32 = 1_000;

/// What a guest may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Largest file, bytes.
    pub file_bytes: usize,
    /// Most linear memory of an instance, bytes.
    pub memory_bytes: usize,
    /// CPU time a call may take. Its thread may be descheduled meanwhile: that is not the guest's doing.
    pub deadline: Duration,
    /// CPU time that instantiation, `describe` and `configure` may take together.
    pub configure_deadline: Duration,
    /// CPU time that a batch of outcomes may take. No request waits for it.
    pub observe_deadline: Duration,
    /// Calls after which an instance is replaced by a fresh one.
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

/// The engine. Cheap to clone.
#[derive(Clone)]
pub struct PolicyEngine {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    plain: Linker<Guest>,
    wasi: Linker<Guest>,
    limits: Limits,
    cache: Option<Cache>,
    meter: Arc<Meter>,
    ticker: Arc<Ticker>,
    chores: mpsc::Sender<Chore>,
    counts: bool,
}

/// Work for the maintenance thread.
type Chore = Box<dyn FnOnce() + Send>;

impl PolicyEngine {
    /// Builds the engine and starts its two threads, which end when the last clone is dropped.
    ///
    /// # Errors
    /// wasmtime's words, or the operating system gives no thread.
    pub fn new(limits: Limits) -> wasmtime::Result<Self> {
        Self::build(limits, None, false)
    }

    /// As [`PolicyEngine::new`], with guests that count the WebAssembly instructions they run, and are slower by it.
    ///
    /// # Errors
    /// As [`PolicyEngine::new`].
    pub fn counting(limits: Limits) -> wasmtime::Result<Self> {
        Self::build(limits, None, true)
    }

    /// As [`PolicyEngine::new`], with compiled policies kept in `dir` from one start to the next. Who may write there may
    /// run code in this process: the folder is the daemon's own.
    ///
    /// # Errors
    /// As [`PolicyEngine::new`]; or the folder cannot be used.
    pub fn with_cache(limits: Limits, dir: PathBuf) -> wasmtime::Result<Self> {
        let mut config = CacheConfig::new();
        // wasmtime wants the folder by its whole name.
        config.with_directory(std::path::absolute(dir)?);
        Self::build(limits, Some(Cache::new(config)?), false)
    }

    fn build(limits: Limits, cache: Option<Cache>, counts: bool) -> wasmtime::Result<Self> {
        let config = |pool| {
            let mut config = config(pool);
            config.cache(cache.clone()).consume_fuel(counts);
            config
        };
        let engine = match Engine::new(&config(Some(pool(limits)))) {
            Ok(engine) => engine,
            Err(error) => {
                tracing::warn!(%error, "no room for pooled instances; policies are instantiated on demand");
                Engine::new(&config(None))?
            }
        };
        let mut plain = Linker::new(&engine);
        Guest::link_ours(&mut plain)?;
        let mut wasi = Linker::new(&engine);
        Guest::link_ours(&mut wasi)?;
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
                cache,
                meter: Arc::default(),
                ticker,
                chores,
                counts,
            }),
        })
    }

    /// What guests may use.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// What policies take now.
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

    /// Held while guests run: they are stopped only as long as the clock ticks.
    pub(crate) fn running(&self) -> Running<'_> {
        self.inner.ticker.running()
    }

    /// A store within the limits.
    pub(crate) fn store(&self, guest: Guest) -> Store<Guest> {
        let mut store = Store::new(&self.inner.engine, guest);
        store.limiter(|guest| guest);
        store.epoch_deadline_callback(|mut store| Ok(store.data_mut().at_tick()));
        if self.inner.counts {
            // It fails only where nothing is counted.
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

    /// Has something done by the maintenance thread.
    pub(crate) fn later(&self, chore: impl FnOnce() + Send + 'static) {
        let _ = self.inner.chores.send(Box::new(chore));
    }
}

impl std::fmt::Debug for PolicyEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PolicyEngine").field("limits", &self.inner.limits).finish_non_exhaustive()
    }
}

fn config(pool: Option<PoolingAllocationConfig>) -> Config {
    let mut config = Config::new();
    config.wasm_component_model(true);
    config.concurrency_support(false);
    config.epoch_interruption(true);
    // A compile runs on one thread of low priority: requests keep their cores.
    config.parallel_compilation(false);
    if let Some(pool) = pool {
        config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    }
    config
}

fn pool(limits: Limits) -> PoolingAllocationConfig {
    let mut pool = PoolingAllocationConfig::default();
    pool.total_component_instances(INSTANCES);
    pool.total_core_instances(INSTANCES * 4);
    pool.total_memories(INSTANCES);
    pool.total_tables(INSTANCES * 4);
    pool.total_stacks(INSTANCES);
    // Every slot that was ever used keeps the memory below: one that is free is used again before one that never was. By
    // default a hundred would be left to the policies that had them, which do not come back.
    pool.max_unused_warm_slots(0);
    pool.max_memory_size(limits.memory_bytes);
    pool.linear_memory_keep_resident(64 * 1024);
    pool.table_keep_resident(4 * 1024);
    pool
}
