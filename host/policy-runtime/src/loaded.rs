//! Loads a policy, from bytes to warm instances: admission, compile, configure, probe, warm-up.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use pointsman_routing::{DecisionContext, Digest, Failure, Origin, PolicyInfo, Purpose, World, facts::Wants};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use crate::{
    access::{Access, Grant},
    admission,
    catch_panic::on_deep_stack,
    compiler_process::{Cancel, Compiled, Job},
    engine::PolicyEngine,
    guest_info::truncate,
    instance::{Instance, Linked},
    outline::Outline,
    pool::Pool,
    probe::{self, SampleCall},
    refusal::Refusal,
    split::split,
};

mod calls;

/// A policy with its warm instances.
#[derive(Debug)]
pub struct LoadedPolicy {
    info: PolicyInfo,
    pool: Arc<Pool>,
    cost: LoadCost,
}

/// Finds a policy again while its instances live, and keeps none of them alive.
#[derive(Debug)]
pub(crate) struct WeakPolicy {
    info: PolicyInfo,
    pool: Weak<Pool>,
    cost: LoadCost,
}

/// Time that loading a policy took.
#[derive(Clone, Copy, Debug)]
pub struct LoadCost {
    /// Time from bytes to linked machine code.
    pub compile: Duration,
    /// Time for one warm instance: instantiated, configured and called once.
    pub instance: Duration,
}

/// A policy that is admitted and compiled but not configured. Compiling takes almost all of the load time;
/// one compiled policy can be configured more than once.
pub struct CompiledPolicy {
    engine: PolicyEngine,
    linked: Linked,
    world: World,
    digest: Digest,
    took: Duration,
    access: Access,
    remembers: bool,
}

/// Admits, configures, probes and warms up a policy with a slot's default grants. Takes as long as a compile:
/// never call it while a request waits.
///
/// # Errors
/// [`Refusal`] of the step that failed.
pub fn load(
    engine: &PolicyEngine,
    bytes: &[u8],
    origin: Origin,
    settings: &str,
) -> Result<LoadedPolicy, Refusal> {
    compile(engine, bytes, &Access::default())?.configure(origin, settings)
}

/// Admits and compiles a policy with the grants of `access`, in this process.
///
/// # Errors
/// [`Refusal`] of the step that failed.
pub fn compile(engine: &PolicyEngine, bytes: &[u8], access: &Access) -> Result<CompiledPolicy, Refusal> {
    let begun = Instant::now();
    let work = || {
        let component = admission::component(bytes, engine.limits())?;
        let outline = admission::outline(&component)?;
        admission::check_grants(&outline, access)?;
        let parts = engine.shares_modules().then(|| split(&component)).flatten();
        let linked = match parts {
            Some(parts) => {
                admission::check_split(&parts)?;
                link_parts(engine, &parts.remainder, &parts.modules, &outline)?
            }
            None => admission::link(engine.engine(), engine.linker(outline.wasi), &component, &outline)?,
        };
        Ok((outline, linked))
    };
    let (outline, linked) = on_deep_stack(work).unwrap_or_else(panicked)?;
    Ok(CompiledPolicy::new(engine, bytes, access, &outline, linked, begun))
}

/// Like [`compile`], in a process of its own where the engine has a compiler process: for `bytes` that are
/// not trusted.
pub(crate) fn compile_apart(
    engine: &PolicyEngine,
    bytes: &[u8],
    access: &Access,
    cancel: &Cancel,
) -> Result<CompiledPolicy, Refusal> {
    let Some((process, target)) = engine.compiler_process() else { return compile(engine, bytes, access) };
    let begun = Instant::now();
    let job = Job { bytes, target, cancel, key: &|bytes| engine.cache_key(bytes) };
    let (outline, linked) =
        process.compile(&job, digest(bytes), |compiled| link_compiled(engine, bytes, access, compiled))?;
    Ok(CompiledPolicy::new(engine, bytes, access, &outline, linked, begun))
}

/// Like [`compile`], for a built-in policy. The compiler process takes the work where there is one: what a
/// compile touches of the program and of memory would stay resident in the daemon. The gateway has to start
/// where no process can be started, too: then this one compiles.
pub(crate) fn compile_built_in(
    engine: &PolicyEngine,
    bytes: &[u8],
    access: &Access,
    cancel: &Cancel,
) -> Result<CompiledPolicy, Refusal> {
    let Some((process, target)) = engine.compiler_process() else { return compile(engine, bytes, access) };
    let begun = Instant::now();
    let job = Job { bytes, target, cancel, key: &|bytes| engine.cache_key(bytes) };
    let compiled = process.compile_built_in(&job, |built| link_compiled(engine, bytes, access, built));
    match compiled {
        Ok((outline, linked)) => Ok(CompiledPolicy::new(engine, bytes, access, &outline, linked, begun)),
        Err(Refusal::CompilerDied(how) | Refusal::NotCompiled(how)) if !cancel.is_cancelled() => {
            tracing::warn!(how, "built-in policy is compiled in the daemon, whose compiler process failed");
            compile(engine, bytes, access)
        }
        Err(refusal) => Err(refusal),
    }
}

/// Takes the code of a file from the cache that the compiler process filled.
fn link_compiled(
    engine: &PolicyEngine,
    bytes: &[u8],
    access: &Access,
    Compiled { outline, component, modules }: Compiled,
) -> Result<(Outline, Linked), Refusal> {
    admission::check_grants(&outline, access)?;
    let component = component.as_deref().unwrap_or(bytes);
    // If the compiled code was removed meanwhile, this process compiles it: the other one could.
    let linked = on_deep_stack(|| match modules.as_slice() {
        [] => admission::link(engine.engine(), engine.linker(outline.wasi), component, &outline),
        modules => link_parts(engine, component, modules, &outline),
    });
    Ok((outline, linked.unwrap_or_else(panicked)?))
}

/// Links a component whose large modules were taken out with the modules.
fn link_parts(
    engine: &PolicyEngine,
    remainder: &[u8],
    modules: &[Vec<u8>],
    outline: &Outline,
) -> Result<Linked, Refusal> {
    let shared = modules.iter().map(|module| engine.shared_module(digest(module), module));
    let shared = shared.collect::<wasmtime::Result<Vec<_>>>();
    let shared = shared.map_err(|error| Refusal::Compile(truncate(format!("{error:#}"))))?;
    admission::link_parts(engine.engine(), engine.linker(outline.wasi), remainder, shared, outline)
}

fn panicked<T>(panic: String) -> Result<T, Refusal> {
    Err(Refusal::Compile(truncate(format!("the compiler panicked: {panic}"))))
}

impl CompiledPolicy {
    fn new(
        engine: &PolicyEngine,
        bytes: &[u8],
        access: &Access,
        outline: &Outline,
        linked: Linked,
        begun: Instant,
    ) -> Self {
        Self {
            engine: engine.clone(),
            linked,
            world: outline.world,
            digest: digest(bytes),
            took: begun.elapsed(),
            access: access.clone(),
            remembers: outline.needs.contains(&Grant::State),
        }
    }

    /// Returns the same code for another slot. Its grants have to be equal.
    pub(crate) fn with_access(&self, access: &Access) -> Self {
        Self { engine: self.engine.clone(), linked: self.linked.clone(), access: access.clone(), ..*self }
    }

    /// Returns the same code under the digest of the file whose settings it runs with.
    #[must_use]
    pub fn identified_by(self, digest: Digest) -> Self {
        Self { digest, ..self }
    }

    /// Configures, probes and warms up the policy.
    ///
    /// # Errors
    /// [`Refusal`] of the step that failed.
    pub fn configure(&self, origin: Origin, settings: &str) -> Result<LoadedPolicy, Refusal> {
        serve(self, &self.access, origin, settings)
    }

    /// Returns the policy's name. The label may be invalid: [`Self::configure`] checks it.
    ///
    /// # Errors
    /// [`Refusal`]: an instance could not be made, or it did not answer.
    pub(crate) fn name(&self) -> Result<String, Refusal> {
        let _running = self.engine.running();
        self.linked.instantiate(&self.engine, Arc::from("?"), &self.access)?.describe()
    }

    /// Makes one instance, and calls `describe` and `configure` once. Settings that the policy refuses are no
    /// failure.
    ///
    /// # Errors
    /// [`Refusal`]: the instance could not be made, or a call ended otherwise than with an answer.
    pub fn try_start(&self) -> Result<(), Refusal> {
        let _running = self.engine.running();
        let mut instance = self.linked.instantiate(&self.engine, Arc::from("?"), &self.access)?;
        instance.try_introduce("{}").map(drop)
    }

    /// Like [`Self::configure`], with an empty state in place of the slot's.
    ///
    /// # Errors
    /// [`Refusal`] of the step that failed.
    pub fn configure_with_empty_state(
        &self,
        origin: Origin,
        settings: &str,
    ) -> Result<LoadedPolicy, Refusal> {
        serve(self, &self.access.with_empty_state(), origin, settings)
    }
}

fn serve(
    compiled: &CompiledPolicy,
    access: &Access,
    origin: Origin,
    settings: &str,
) -> Result<LoadedPolicy, Refusal> {
    let CompiledPolicy { engine, linked, world, digest, took, remembers, .. } = compiled;
    let (linked, world) = (linked.clone(), *world);
    let _running = engine.running();
    let mut first = linked.instantiate(engine, Arc::from("?"), access)?;
    let about = first.introduce(settings)?;
    let wants = about.check()?;
    let name: Arc<str> = Arc::from(about.name);
    let info = PolicyInfo {
        name: name.clone(),
        version: Arc::from(about.version),
        digest: *digest,
        settings_digest: settings_digest(settings),
        world,
        origin,
        wants: wants.clone(),
        remembers: *remembers,
        learns: linked.learns(),
    };
    probe_instances(compiled, first, &wants, settings)?;
    let builder = {
        let (engine, name, settings) = (engine.clone(), name.clone(), settings.to_owned());
        let access = access.clone();
        move || {
            let _running = engine.running();
            let fresh = linked.instantiate(&engine, name.clone(), &access);
            let mut fresh = fresh.map_err(|refusal| refusal.to_string())?;
            fresh.introduce(&settings).map_err(|refusal| refusal.to_string())?;
            // The first call of a fresh instance faults its pages in: make it before the instance serves.
            probe::call(&mut fresh, world, &wants, 2).map_err(|failure| failure.to_string())?;
            fresh.serve();
            Ok(fresh)
        }
    };
    let begun = Instant::now();
    let pool = Pool::new(engine, name, info.learns, Box::new(builder)).map_err(Refusal::Instantiate)?;
    let instances = u32::try_from(pool.size()).unwrap_or(u32::MAX).max(1);
    let cost = LoadCost { compile: *took, instance: begun.elapsed() / instances };
    Ok(LoadedPolicy { info, pool, cost })
}

/// Returns the digest of the settings of a policy; `None` without any. Neither the order of keys nor blanks
/// change it.
fn settings_digest(settings: &str) -> Option<Digest> {
    let text = settings.trim();
    let sorted = serde_json::from_str(text).map(|mut json: serde_json::Value| {
        json.sort_all_objects();
        json.to_string()
    });
    let text = sorted.as_deref().unwrap_or(text);
    (!text.is_empty() && text != "{}").then(|| digest(text.as_bytes()))
}

impl LoadedPolicy {
    /// Time that loading took.
    #[must_use]
    pub fn cost(&self) -> LoadCost {
        self.cost
    }

    /// WebAssembly instructions of one call, where the engine counts them ([`PolicyEngine::counting`]).
    ///
    /// # Errors
    /// The call's failure.
    pub fn instructions(&self, sample: &SampleCall) -> Result<Option<u64>, Failure> {
        let (world, facts) = (self.info.world, sample.facts());
        let SampleCall { call, request, decode, candidates } = sample;
        let context = &mut DecisionContext::new(Purpose::Route);
        self.pool.call(|instance| {
            let before = instance.fuel();
            match world {
                World::Filter => instance.keep(context, call, &facts).map(drop),
                World::Scorer => instance.score(context, call, &facts).map(drop),
                World::Selector => instance.select(context, call, &facts).map(drop),
                World::DecodeOverride => {
                    instance.decide(context, call, request, decode, candidates).map(drop)
                }
            }?;
            Ok(before.zip(instance.fuel()).map(|(before, after)| before.saturating_sub(after)))
        })
    }

    pub(crate) fn downgrade(&self) -> WeakPolicy {
        WeakPolicy { info: self.info.clone(), pool: Arc::downgrade(&self.pool), cost: self.cost }
    }

    /// Linear memory of its largest instance now, bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.pool.memory_bytes()
    }
}

impl WeakPolicy {
    /// Returns the policy, with the same instances, as one that comes from `origin`.
    pub(crate) fn upgrade(&self, origin: &Origin) -> Option<LoadedPolicy> {
        let info = PolicyInfo { origin: origin.clone(), ..self.info.clone() };
        Some(LoadedPolicy { info, pool: self.pool.upgrade()?, cost: self.cost })
    }

    /// Returns whether its instances live.
    pub(crate) fn is_loaded(&self) -> bool {
        self.pool.strong_count() > 0
    }
}

impl std::fmt::Debug for CompiledPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompiledPolicy").field("digest", &self.digest).finish_non_exhaustive()
    }
}

/// SHA-256 of a file's bytes.
#[must_use]
pub fn digest(bytes: &[u8]) -> Digest {
    Digest(Sha256::digest(bytes).into())
}

/// Makes each probe call on two instances, and on the first one twice: the answers must be equal. Every call
/// finds the slot's state empty.
fn probe_instances(
    CompiledPolicy { engine, linked, world, access, .. }: &CompiledPolicy,
    mut first: Instance,
    wants: &Wants,
    settings: &str,
) -> Result<(), Refusal> {
    let mut second = linked.instantiate(engine, Arc::from("?"), access)?;
    second.introduce(settings)?;
    for rows in probe::ROWS {
        let call = |instance: &mut Instance| {
            probe::call(instance, *world, wants, rows).map_err(|failure| Refusal::Probe { rows, failure })
        };
        let answer = call(&mut first)?;
        if call(&mut first)? != answer || call(&mut second)? != answer {
            return Err(Refusal::NotDeterministic { rows });
        }
    }
    if linked.learns() {
        probe::observe(&mut second).map_err(Refusal::Observe)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
