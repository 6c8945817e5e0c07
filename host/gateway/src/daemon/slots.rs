//! The slots of a gateway: from the configuration to specs, first generations, and the manager that keeps
//! them.

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use pointsman_policy_runtime::{
    Access, Capacity, CompileLimits, Limits, ManagerConfig, Part, PolicyDir, PolicyEngine, PolicyManager,
    Probation, Rank, SlotConfig, SlotName, SlotSpec,
};
use pointsman_routing::{NativeMode, Program, Slot, SlotEvent, SlotKind, SlotSet, Slots};
use pointsman_workers::ModelName;
use tokio::sync::mpsc;

use crate::config::{
    Problem,
    settings::{PolicyRuntime, Reloadable, Settings, Static},
};

/// How long the start and operators' reloads wait for files to compile.
const COMPILE_WAIT: Duration = Duration::from_secs(30);

/// Returns what every slot is to run, those for all models first.
pub(super) fn specs(settings: &Reloadable) -> Vec<(SlotName, SlotSpec)> {
    let salt = settings.routing.hash_salt.expose();
    let entry = |kind| settings.policies.slots.get(&kind).cloned().unwrap_or_default();
    let all = SlotKind::ALL.into_iter().map(|kind| ((kind, None), entry(kind).spec(kind, salt)));
    let own = settings.models.iter().flat_map(|(model, settings)| {
        let name = ModelName::new(model);
        settings.slots.iter().map(move |(kind, entry)| ((*kind, Some(name.clone())), entry.spec(*kind, salt)))
    });
    all.chain(own).collect()
}

/// Slots with their first content, and the directory that their files come from.
pub(super) struct OpenedSlots {
    dir: PolicyDir,
    slots: Vec<SlotConfig>,
    failures: mpsc::UnboundedReceiver<SlotEvent>,
    /// Slots whose built-in content is refused: they route natively.
    pub(super) problems: Vec<Problem>,
}

/// Makes the slots with their first content.
///
/// # Errors
/// The engine cannot be made, or the policy directory cannot be opened.
pub(super) fn open(
    settings: &Settings,
    compiler: Option<PathBuf>,
    cpus: usize,
) -> Result<OpenedSlots, Problem> {
    let Settings { fixed: Static { policies, .. }, reloadable } = settings;
    let specs = specs(reloadable);
    let capacity = Capacity::for_specs(cpus, specs.iter().map(|(_, spec)| spec));
    let engine = engine(policies, compiler, capacity)?;
    let trust = reloadable.policies.trust().map_err(|error| Problem::new("policies.trusted_keys", error))?;
    let dir = PolicyDir::open(&engine, policies.dir.clone(), trust);
    let mut dir = dir.map_err(|error| Problem::new("policies.dir", error.to_string()))?;
    let (events, failures) = mpsc::unbounded_channel();
    let (mut slots, mut problems) = (Vec::new(), Vec::new());
    for ((kind, model), spec) in specs {
        let access = Access::default();
        let native = || (Program::Native(NativeMode::Kv), None);
        let (program, initial) = match dir.initial(kind, &spec.active, &access) {
            Ok((program, initial)) => (program, Some(initial)),
            // Files may be added later. Until then the slot routes natively, and its status shows the reason.
            Err(refusal) if names_files(&spec) => {
                tracing::warn!(slot = %kind, kind = refusal.kind(), %refusal, "slot started without its policies");
                native()
            }
            Err(refusal) => {
                problems.push(Problem::new(slot_path(kind, model.as_ref()), refusal.to_string()));
                native()
            }
        };
        let slot = Arc::new(Slot::new(kind, model, program, events.clone()));
        slots.push(SlotConfig { slot, spec, access, initial });
    }
    Ok(OpenedSlots { dir, slots, failures, problems })
}

/// Returns the dotted path of a slot's entry.
pub(super) fn slot_path(kind: SlotKind, model: Option<&ModelName>) -> String {
    let section = model.map_or("policies".to_owned(), |model| format!("models.{model}"));
    format!("{section}.slots.{kind}")
}

impl OpenedSlots {
    /// Starts the manager that keeps the slots.
    ///
    /// # Errors
    /// The operating system starts no thread.
    pub(super) fn start(self, settings: &Settings) -> anyhow::Result<(Slots, PolicyManager)> {
        let Self { dir, slots, failures, problems: _ } = self;
        let policies = &settings.fixed.policies;
        let shared: Vec<Arc<Slot>> = slots.iter().map(|config| config.slot.clone()).collect();
        let manager = ManagerConfig {
            slots,
            probation: Probation {
                calls: policies.probation_calls,
                failure_share: policies.probation_failure_share,
            },
            debounce: policies.debounce,
            rescan: policies.rescan,
            compile_wait: COMPILE_WAIT,
        };
        let manager = PolicyManager::start(dir, manager, failures)?;
        let set = SlotSet::of(&shared).context("a slot of each kind")?;
        Ok((Slots::new(set, shared), manager))
    }
}

/// Makes the policy engine. With a `compiler`, files are compiled in a process of their own.
fn engine(
    policies: &PolicyRuntime,
    compiler: Option<PathBuf>,
    capacity: Capacity,
) -> Result<PolicyEngine, Problem> {
    let limits = Limits {
        deadline: policies.deadline,
        configure_deadline: policies.configure_deadline,
        observe_deadline: policies.observe_deadline,
        memory_bytes: policies.memory_bytes,
        ..Limits::default()
    };
    let compile = CompileLimits {
        memory_bytes: policies.compile_memory_bytes,
        cpu: policies.compile_cpu,
        timeout: policies.compile_timeout,
    };
    let engine = match (compiler, &policies.compile_cache) {
        (Some(program), cache) => {
            PolicyEngine::with_compiler_process(limits, capacity, cache.as_deref(), program, compile)
        }
        (None, Some(dir)) => PolicyEngine::with_cache(limits, capacity, dir.clone()),
        (None, None) => PolicyEngine::new(limits, capacity),
    };
    let path = if policies.compile_cache.is_some() { "policies.compile_cache" } else { "policies" };
    engine.map_err(|error| Problem::new(path, format!("cannot start the policy engine: {error:#}")))
}

/// Whether the active lane uses a file of the policy directory.
fn names_files(spec: &SlotSpec) -> bool {
    let is_file = |part: &Part| part.file.is_some();
    spec.active.filters.iter().any(is_file)
        || match &spec.active.rank {
            Some(Rank::Policy(part)) => is_file(part),
            Some(Rank::Scorers { scorers, .. }) => scorers.iter().any(|scorer| is_file(&scorer.part)),
            Some(Rank::Native(_)) | None => false,
        }
}
