//! The wasmtime engine, the thread that advances its epoch, and the maintenance thread.
//!
//! The epoch advances every millisecond while a guest runs. At each tick the guest's CPU time is compared
//! with its limit (see `guest`).

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use pointsman_routing::Digest;
use wasmtime::{
    Cache, CacheConfig, Config, Engine, InstanceAllocationStrategy, Module, PoolingAllocationConfig, Store,
    component::Linker,
};

use crate::{
    cache_key::cache_key,
    capacity::{CORE_INSTANCES_PER_POLICY, Capacity, MEMORIES_PER_POLICY, TABLES_PER_POLICY},
    chores::Chores,
    compiler_process::{CompileLimits, CompilerProcess, Target, code_dir},
    guest::Guest,
    meter::{Meter, Usage},
    shared_modules::SharedModules,
    ticker::{Running, Ticker},
};

/// Limits of one guest.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Largest file, bytes.
    pub file_bytes: usize,
    /// Maximum linear memory of an instance, bytes.
    pub memory_bytes: usize,
    /// CPU time of a call. Time in which its thread was descheduled does not count.
    pub deadline: Duration,
    /// CPU time of instantiation, `describe` and `configure` together.
    pub configure_deadline: Duration,
    /// CPU time of a batch of outcomes. No request waits for it.
    pub observe_deadline: Duration,
    /// Calls after which a fresh instance replaces an instance.
    pub calls_per_instance: u32,
    /// Whether the next call replaces a spent instance, which the background does otherwise. Then no answer
    /// depends on real time, and some calls take long: not for requests.
    pub rebuild_in_call: bool,
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
            rebuild_in_call: false,
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
    /// Address space of a memory, bytes. `None`: wasmtime's default.
    reservation: Option<u64>,
    compiler: Option<CompilerProcess>,
    meter: Arc<Meter>,
    ticker: Arc<Ticker>,
    chores: Chores,
    counts_instructions: bool,
    shared: SharedModules,
    /// Runtime on which WASI guests register timers. Nothing runs on it: a guest may not wait.
    idle: Option<tokio::runtime::Runtime>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Dropping a runtime within another one panics.
        self.idle.take().into_iter().for_each(tokio::runtime::Runtime::shutdown_background);
    }
}

impl PolicyEngine {
    /// Builds the engine and starts its two threads, which end when the last clone is dropped.
    ///
    /// # Errors
    /// wasmtime rejects the configuration, or the operating system starts no thread.
    pub fn new(limits: Limits, capacity: Capacity) -> wasmtime::Result<Self> {
        Self::build(limits, capacity, None, false)
    }

    /// Like [`PolicyEngine::new`], for guests that count the WebAssembly instructions they run. Counting
    /// makes them slower.
    ///
    /// # Errors
    /// Same as [`PolicyEngine::new`].
    pub fn counting(limits: Limits, capacity: Capacity) -> wasmtime::Result<Self> {
        Self::build(limits, capacity, None, true)
    }

    /// Like [`PolicyEngine::new`], but keeps compiled policies in `dir` between starts. Anybody who can write
    /// there can run code in this process: only the daemon may have write access.
    ///
    /// # Errors
    /// Same as [`PolicyEngine::new`], or the directory cannot be used.
    pub fn with_cache(limits: Limits, capacity: Capacity, dir: PathBuf) -> wasmtime::Result<Self> {
        Self::build(limits, capacity, Some(open_cache(&code_dir(&dir))?), false)
    }

    /// Like [`PolicyEngine::new`], for files that are not trusted: `program`, which has to be the daemon's
    /// binary, compiles each in a process of its own. Compiled policies are kept in `cache` between starts,
    /// as in [`PolicyEngine::with_cache`].
    ///
    /// # Errors
    /// Same as [`PolicyEngine::with_cache`].
    pub fn with_compiler_process(
        limits: Limits,
        capacity: Capacity,
        cache: Option<&Path>,
        program: PathBuf,
        compile: CompileLimits,
    ) -> wasmtime::Result<Self> {
        let compiler = match CompilerProcess::new(program, compile, cache) {
            Ok(compiler) => compiler,
            Err(error) if cache.is_none() => {
                tracing::warn!(
                    %error,
                    "no directory for compiled code; policies are compiled in the daemon: set compile_cache"
                );
                return Self::new(limits, capacity);
            }
            Err(error) => return Err(error.into()),
        };
        let opened = open_cache(&compiler.cache_dir())?;
        let mut engine = Self::build(limits, capacity, Some(opened), false)?;
        if let Some(inner) = Arc::get_mut(&mut engine.inner) {
            inner.compiler = Some(compiler);
        }
        Ok(engine)
    }

    fn build(
        limits: Limits,
        capacity: Capacity,
        cache: Option<Cache>,
        counts_instructions: bool,
    ) -> wasmtime::Result<Self> {
        let (engine, reservation) = pooling_or_on_demand(limits, capacity, |config| {
            config.cache(cache.clone()).consume_fuel(counts_instructions);
        })?;
        let (plain, wasi) = (linker(&engine, false)?, linker(&engine, true)?);
        let weak = engine.weak();
        let ticker = Arc::new(Ticker::default());
        let clock = ticker.clone();
        thread::Builder::new().name("pointsman-epoch".to_owned()).spawn(move || {
            clock.run(|| weak.upgrade().map(|engine| engine.increment_epoch()).is_some());
        })?;
        Ok(Self {
            inner: Arc::new(Inner {
                engine,
                plain,
                wasi,
                limits,
                capacity,
                cache,
                reservation,
                compiler: None,
                meter: Arc::default(),
                ticker,
                chores: Chores::start()?,
                counts_instructions,
                shared: SharedModules::default(),
                idle: Some(tokio::runtime::Builder::new_current_thread().enable_time().build()?),
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
        let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        let (mut hits, mut misses) = (count(hits), count(misses));
        if let Some(compiler) = &self.inner.compiler {
            // This engine finds the code that the process compiled, and counts it as a hit. It was a miss.
            let compiled = compiler.compiled();
            (hits, misses) = match compiler.keeps_cache() {
                true => (hits.saturating_sub(compiled), misses + compiled),
                false => (0, 0),
            };
        }
        Usage { cache_hits: hits, cache_misses: misses, ..self.inner.meter.usage() }
    }

    /// Returns the process that compiles files, and what it has to know of this engine. `None`: this one.
    pub(crate) fn compiler_process(&self) -> Option<(&CompilerProcess, Target)> {
        let Inner { limits, reservation, .. } = &*self.inner;
        let target = Target {
            file_bytes: limits.file_bytes,
            memory_bytes: limits.memory_bytes,
            reservation: *reservation,
        };
        self.inner.compiler.as_ref().map(|compiler| (compiler, target))
    }

    /// Returns whether large modules are compiled apart from the policies that contain them.
    pub(crate) fn shares_modules(&self) -> bool {
        self.inner.cache.is_some()
    }

    /// Returns the name of the cache's entry for the code of a component or module.
    pub(crate) fn cache_key(&self, bytes: &[u8]) -> String {
        cache_key(&self.inner.engine, bytes)
    }

    /// Returns a module that policies share, by the digest of its bytes.
    pub(crate) fn shared_module(&self, digest: Digest, bytes: &[u8]) -> wasmtime::Result<Arc<Module>> {
        self.inner.shared.module(&self.inner.engine, digest, bytes)
    }

    /// Returns the runtime that WASI guests register timers with, where the calling thread has none.
    pub(crate) fn idle_runtime(&self) -> Option<tokio::runtime::Handle> {
        self.inner.idle.as_ref().map(|idle| idle.handle().clone())
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
        Guest::limit(&mut store);
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
        self.inner.chores.push(Duration::ZERO, Box::new(chore));
    }

    /// Like [`PolicyEngine::later`], but not before `delay` has passed.
    pub(crate) fn after(&self, delay: Duration, chore: impl FnOnce() + Send + 'static) {
        self.inner.chores.push(delay, Box::new(chore));
    }
}

/// An engine that compiles for the engine of another process, and makes no instances.
pub(crate) struct CompileOnly {
    engine: Engine,
}

impl CompileOnly {
    /// Makes an engine whose code the other engine finds in the cache at `dir`: the settings that affect code
    /// are the same.
    pub(crate) fn new(reservation: Option<u64>, dir: &Path) -> wasmtime::Result<Self> {
        let mut config = basic();
        config.cache(Some(open_cache(dir)?)).consume_fuel(false);
        if let Some(reservation) = reservation {
            config.memory_reservation(reservation);
        }
        Ok(Self { engine: Engine::new(&config)? })
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn linker(&self, wasi: bool) -> wasmtime::Result<Linker<Guest>> {
        linker(&self.engine, wasi)
    }
}

/// Opens wasmtime's cache in `dir`.
fn open_cache(dir: &Path) -> wasmtime::Result<Cache> {
    let mut config = CacheConfig::new();
    // wasmtime requires an absolute path.
    config.with_directory(std::path::absolute(dir)?);
    Cache::new(config)
}

fn linker(engine: &Engine, wasi: bool) -> wasmtime::Result<Linker<Guest>> {
    let mut linker = Linker::new(engine);
    Guest::link_host(&mut linker)?;
    if wasi {
        wasmtime_wasi::p2::add_to_linker_async(&mut linker)?;
    }
    Ok(linker)
}

impl std::fmt::Debug for PolicyEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PolicyEngine").field("limits", &self.inner.limits).finish_non_exhaustive()
    }
}

/// Builds the wasmtime engine, and returns the address space that it reserves for a memory when that is not
/// the default. When the address space cannot be reserved (a container may limit it), memories shrink first;
/// an engine without a pool comes last.
fn pooling_or_on_demand(
    limits: Limits,
    capacity: Capacity,
    customize: impl Fn(&mut Config),
) -> wasmtime::Result<(Engine, Option<u64>)> {
    let build = |mut config: Config| {
        customize(&mut config);
        Engine::new(&config)
    };
    if capacity.has_wide_memories() {
        match build(pooling(limits, capacity)) {
            Ok(engine) => return Ok((engine, None)),
            Err(error) => {
                tracing::warn!(%error, "memories of 4 GiB do not fit; guests run with bounds checks");
            }
        }
    }
    let mut narrow = pooling(limits, capacity);
    let reservation = u64::try_from(limits.memory_bytes).unwrap_or(u64::MAX);
    narrow.memory_reservation(reservation);
    match build(narrow) {
        Ok(engine) => Ok((engine, Some(reservation))),
        Err(error) => {
            tracing::warn!(%error, "instance pool does not fit; instances are made on demand");
            Ok((build(basic())?, None))
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
    // As many as every policy may have at most, so that one policy takes nothing from another.
    pool.total_core_instances(instances.saturating_mul(CORE_INSTANCES_PER_POLICY));
    pool.total_memories(instances.saturating_mul(MEMORIES_PER_POLICY));
    pool.total_tables(instances.saturating_mul(TABLES_PER_POLICY));
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
