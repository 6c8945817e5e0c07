//! The slots of a gateway: from the configuration to specs, first generations, and the manager that keeps
//! them.

use std::sync::Arc;

use anyhow::Context as _;
use pointsman_policy_runtime::{
    Access, Capacity, Limits, ManagerConfig, Part, PolicyDir, PolicyEngine, PolicyManager, Probation, Rank,
    SlotConfig, SlotName, SlotSpec,
};
use pointsman_routing::{NativeMode, Program, Slot, SlotKind, SlotSet, Slots};
use pointsman_workers::ModelName;
use tokio::sync::mpsc;

use crate::config::settings::{Reloadable, Settings, Static};

/// Returns what every slot is to run, those for all models first.
pub(super) fn specs(settings: &Reloadable) -> Vec<(SlotName, SlotSpec)> {
    let entry = |kind| settings.policies.slots.get(&kind).cloned().unwrap_or_default();
    let all = SlotKind::ALL.into_iter().map(|kind| ((kind, None), entry(kind).spec(kind)));
    let own = settings.models.iter().flat_map(|(model, settings)| {
        let name = ModelName::new(model);
        settings.slots.iter().map(move |(kind, entry)| ((*kind, Some(name.clone())), entry.spec(*kind)))
    });
    all.chain(own).collect()
}

/// Makes the slots with their first content, and the manager that keeps them.
///
/// # Errors
/// A built-in policy refuses its settings, or the policy directory does not exist.
pub(super) fn build(settings: &Settings, cpus: usize) -> anyhow::Result<(Slots, PolicyManager)> {
    let Settings { fixed: Static { policies, .. }, reloadable } = settings;
    let limits = Limits {
        deadline: policies.deadline,
        configure_deadline: policies.configure_deadline,
        observe_deadline: policies.observe_deadline,
        memory_bytes: policies.memory_bytes,
        ..Limits::default()
    };
    let specs = specs(reloadable);
    let capacity = Capacity::for_specs(cpus, specs.iter().map(|(_, spec)| spec));
    let engine = match &policies.compile_cache {
        Some(dir) => PolicyEngine::with_cache(limits, capacity, dir.clone()),
        None => PolicyEngine::new(limits, capacity),
    };
    let engine = engine.map_err(|error| anyhow::anyhow!("the policy engine: {error:#}"))?;
    let trust = reloadable.policies.trust().map_err(anyhow::Error::msg)?;
    let mut dir = PolicyDir::open(&engine, policies.dir.clone(), trust)?;
    let (events, failures) = mpsc::unbounded_channel();
    let mut made = Vec::new();
    for ((kind, model), spec) in specs {
        let access = Access::default();
        let (program, initial) = match dir.initial(kind, &spec.active, &access) {
            Ok((program, initial)) => (program, Some(initial)),
            // Files may be added later. Until then the slot routes natively, and its status shows the reason.
            Err(refusal) if names_files(&spec) => {
                tracing::warn!(slot = %kind, kind = refusal.kind(), %refusal, "slot started without its policies");
                (Program::Native(NativeMode::Kv), None)
            }
            Err(refusal) => {
                let path = model.as_ref().map_or("policies".to_owned(), |model| format!("models.{model}"));
                return Err(refusal).with_context(|| format!("{path}.slots.{kind}"));
            }
        };
        let slot = Arc::new(Slot::new(kind, model, program, events.clone()));
        made.push(SlotConfig { slot, spec, access, initial });
    }
    let shared: Vec<Arc<Slot>> = made.iter().map(|config| config.slot.clone()).collect();
    let manager = ManagerConfig {
        slots: made,
        probation: Probation {
            calls: policies.probation_calls,
            failure_share: policies.probation_failure_share,
        },
        debounce: policies.debounce,
        rescan: policies.rescan,
    };
    let manager = PolicyManager::start(dir, manager, failures)?;
    let set = SlotSet::of(&shared).context("a slot of each kind")?;
    Ok((Slots::new(set, shared), manager))
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
