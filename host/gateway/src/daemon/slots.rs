//! The slots of a gateway: from the configuration to specs, first generations, and the manager that keeps
//! them.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use pointsman_embedded_policies::{FORMULA, FORMULA_FILTER, NAMES};
use pointsman_policy_runtime::{
    Access, Capacity, CompileLimits, FORMULA_SUFFIX, FormulaComponents, Limits, ManagerConfig, PartRefusal,
    PolicyDir, PolicyEngine, PolicyManager, Probation, RefusalRecord, SlotConfig, SlotName, SlotSpec,
};
use pointsman_routing::{Lane, NativeMode, Program, Slot, SlotEvent, SlotKind, SlotSet, Slots};
use pointsman_workers::ModelName;
use tokio::sync::mpsc;

use crate::config::{Policies, Problem, SlotEntry, settings::Settings};

/// How long the start and operators' reloads wait for files to compile.
const COMPILE_WAIT: Duration = Duration::from_secs(30);

/// Returns what every slot is to run, those for all models first.
pub(super) fn specs(settings: &Settings) -> Vec<(SlotName, SlotSpec)> {
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
    /// Programs of canaries and shadows that the configuration names.
    trials: Vec<Program>,
    failures: mpsc::UnboundedReceiver<SlotEvent>,
    /// Policies of the configuration that no lane can run. The daemon does not start with it.
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
    let policies = &settings.policies;
    let specs = specs(settings);
    let capacity = Capacity::for_specs(cpus, specs.iter().map(|(_, spec)| spec));
    let engine = engine(policies, compiler, capacity)?;
    let trust = settings.policies.trust().map_err(|error| Problem::new("policies.trusted_keys", error))?;
    let dir = PolicyDir::open(&engine, policies.dir.clone(), trust);
    let dir = dir.map_err(|error| Problem::new("policies.dir", error.to_string()))?;
    let dir = dir.with_formulas(FormulaComponents { selector: FORMULA, filter: FORMULA_FILTER });
    let dir = dir.with_built_in_names(NAMES);
    let (events, failures) = mpsc::unbounded_channel();
    let mut opened =
        OpenedSlots { dir, slots: Vec::new(), trials: Vec::new(), failures, problems: Vec::new() };
    for ((kind, model), spec) in specs {
        opened.add(kind, model, spec, &events);
    }
    Ok(opened)
}

/// Returns the dotted path of a lane's entry.
fn lane_path(kind: SlotKind, model: Option<&str>, lane: Lane) -> String {
    let section = model.map_or("policies".to_owned(), |model| format!("models.{model}"));
    match lane {
        Lane::Active => format!("{section}.slots.{kind}"),
        lane => format!("{section}.slots.{kind}.{lane}"),
    }
}

/// Returns the problem of a policy: at the directory when it is a lane's own file, else at the lane's entry.
pub(super) fn refused(refusal: &RefusalRecord) -> Problem {
    let path = if is_own_file(refusal) {
        "policies.dir".to_owned()
    } else {
        lane_path(refusal.slot, refusal.model.as_deref(), refusal.lane)
    };
    Problem::new(path, format!("the policy `{}` is refused: {}", refusal.file, refusal.message))
}

/// Returns the problems of slots' own files that refuse the settings which the configuration gives them. The
/// slots serve without the files of their trials.
pub(super) fn refused_settings(manager: &PolicyManager, settings: &Settings) -> Vec<Problem> {
    let status = manager.status();
    let given = |refusal: &RefusalRecord| {
        let slots = refusal.model.as_ref().map_or(Some(&settings.policies.slots), |model| {
            settings.models.get(model).map(|model| &model.slots)
        });
        let entry = slots.and_then(|slots| slots.get(&refusal.slot));
        refusal.lane == Lane::Active && entry.is_some_and(|entry| !entry.settings.is_empty())
    };
    let refusals = status.slots.iter().flat_map(|slot| &slot.refusals);
    let wrong =
        refusals.filter(|refusal| is_own_file(refusal) && refusal.kind == "configure" && given(refusal));
    wrong.map(refused).collect()
}

/// Returns the settings that no policy gets, because the lane's own file is not there.
pub(super) fn waiting_settings(settings: &Settings) -> Vec<Problem> {
    let Some(dir) = &settings.policies.dir else { return Vec::new() };
    let all = settings.policies.slots.iter().map(|(kind, entry)| (None, *kind, entry));
    let own = settings.models.iter().flat_map(|(model, entry)| {
        entry.slots.iter().map(move |(kind, entry)| (Some(model.as_str()), *kind, entry))
    });
    let waits = |(model, kind, entry): (Option<&str>, SlotKind, &SlotEntry)| {
        let file = Path::new(model.unwrap_or_default()).join(format!("{kind}.wasm"));
        if !entry.settings_need_file() || dir.join(&file).exists() {
            return None;
        }
        let message = format!(
            "no policy gets them before `{}` is in `policies.dir`: the slot's own policy runs without settings",
            file.display()
        );
        Some(Problem::new(format!("{}.settings", lane_path(kind, model, Lane::Active)), message))
    };
    all.chain(own).filter_map(waits).collect()
}

fn is_own_file(refusal: &RefusalRecord) -> bool {
    let is_file = refusal.file.ends_with(".wasm") || refusal.file.ends_with(FORMULA_SUFFIX);
    is_file && !refusal.file.starts_with("parts/")
}

impl OpenedSlots {
    /// Makes a slot with its first content, and loads the policies of its canary and shadow.
    fn add(
        &mut self,
        kind: SlotKind,
        model: Option<ModelName>,
        spec: SlotSpec,
        events: &mpsc::UnboundedSender<SlotEvent>,
    ) {
        let access = Access::default();
        let mut native = (Program::Native(NativeMode::Kv), None);
        for (lane, content) in
            [(Lane::Active, &spec.active), (Lane::Canary, &spec.canary), (Lane::Shadow, &spec.shadow)]
        {
            match self.dir.initial(kind, content, &access) {
                Ok(Some((program, initial))) if lane == Lane::Active => native = (program, Some(initial)),
                Ok(trial) => self.trials.extend(trial.map(|(program, _)| program)),
                Err(refusals) => {
                    let path = lane_path(kind, model.as_ref().map(ModelName::as_str), lane);
                    let problem = |refused: &PartRefusal| {
                        let PartRefusal { part, refusal } = refused;
                        let message = format!("the policy `{}` is refused: {refusal}", part.display());
                        Problem::new(path.clone(), message)
                    };
                    self.problems.extend(refusals.iter().map(problem));
                }
            }
        }
        let (program, initial) = native;
        let slot = Arc::new(Slot::new(kind, model, program, events.clone()));
        self.slots.push(SlotConfig { slot, spec, access, initial });
    }

    /// Starts the manager that keeps the slots.
    ///
    /// # Errors
    /// The operating system starts no thread.
    pub(super) fn start(self, settings: &Settings) -> anyhow::Result<(Slots, PolicyManager)> {
        // The manager's first scan finds the programs of trials loaded.
        let Self { dir, slots, trials: _trials, failures, problems: _ } = self;
        let policies = &settings.policies;
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
    policies: &Policies,
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
        // The process may wait for others, on a busy machine for long.
        timeout: (10 * policies.compile_cpu).max(Duration::from_mins(10)),
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
